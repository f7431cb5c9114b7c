"""The bytes of some conversions, as they have been from the first: equal plans and sources give equal bytes."""

import hashlib
import json

import pytest
import torch
from checkpoints import CONFIG, contents, write_checkpoint, write_plan

from hf_rmsnorm.conversion.checkpoint.expressions import (
    Centred,
    Filled,
    FoldedBias,
    Plus,
    Rows,
    Scaled,
    Stored,
    Transposed,
    computed,
)
from hf_rmsnorm.conversion.checkpoint.values import Values
from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy, Scale


def numbers(*shape, seed, dtype):
    """Values with a mean that are the same with every PyTorch."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(1, count + 1, dtype=torch.int64) * 2654435761 + seed * 40503) % 16777213
    return (mixed.double() * (0.37 / 16777213) - 0.151).to(dtype).view(shape)


def case(dtype):
    """Shards, and a plan with a writer of each orientation, blocks, a layer scale, a head to untie."""
    first = {
        "wte.weight": numbers(40, 24, seed=1, dtype=dtype),
        "h.0.mask": (torch.arange(16).view(1, 1, 4, 4) % 3 == 0).to(torch.uint8),
        "h.0.ln.weight": numbers(24, seed=2, dtype=torch.float32),
    }
    second = {
        "h.0.out.weight": numbers(24, 48, seed=3, dtype=dtype),
        "h.0.out.bias": numbers(24, seed=4, dtype=dtype),
        "h.0.scale": numbers(24, seed=5, dtype=dtype),
        "h.0.qkv.weight": numbers(24, 72, seed=6, dtype=dtype),
        "h.0.experts": numbers(3, 24, 10, seed=7, dtype=dtype),
        "h.0.tall": numbers(2400, 512, seed=8, dtype=dtype),
        "h.0.empty": torch.zeros(0, 3),
    }
    centre = (
        Centre("wte.weight", 1, 24),
        Centre("h.0.out.weight", 0, 24),
        Centre("h.0.out.bias", 0, 24),
        Centre("h.0.qkv.weight", 1, 24, (0, 2)),
        Centre("h.0.experts", 1, 12, (1,)),
        Centre("h.0.experts", 1, 6, (0,)),
        Centre("h.0.tall", 0, 2400),
    )
    scale = (Scale("h.0.out.weight", 0, "h.0.scale"), Scale("h.0.out.bias", 0, "h.0.scale"))
    config = {"tie_word_embeddings": False, "hf_rmsnorm": {"version": 1}}
    return [first, second], CentringPlan(centre, scale, (Copy("lm_head.weight", "wte.weight"),), config=config)


GOLDEN = {
    "bfloat16": {
        "model.safetensors.index.json": "287a4f7e2891db93",
        "model-00001-of-00002.safetensors": "000ca2374110fe2e",
        "model-00002-of-00002.safetensors": "44b0bd2a8a4e3f90",
        "config.json": "6dd3bad62cd46e40",
    },
    "float16": {
        "model.safetensors.index.json": "287a4f7e2891db93",
        "model-00001-of-00002.safetensors": "b5127d75f2347779",
        "model-00002-of-00002.safetensors": "422401e950d2e993",
        "config.json": "6dd3bad62cd46e40",
    },
    "float32": {
        "model.safetensors.index.json": "329652c2962e40aa",
        "model-00001-of-00002.safetensors": "c0ac8c8574e0b25e",
        "model-00002-of-00002.safetensors": "bc0ade3fd5fbf5a7",
        "config.json": "6dd3bad62cd46e40",
    },
    "source": "56b2fd2f123a11e9",
    "expressions": {
        "centred": "447e7c9d6161820a",
        "scaled": "46284426a7a623f4",
        "rows": "70b6733b8625c81f",
        "transposed": "721670a37aef95e7",
        "folded": "184899ef1e26809d",
        "folded alone": "d55008723e23c51c",
        "filled": "9be5114ade68d30e",
    },
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_files_of_a_plan(dtype, tmp_path):
    shards, plan = case(getattr(torch, dtype))
    write_plan(plan, write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"}), tmp_path / "dst")
    assert {name: digest[:16] for name, digest in contents(tmp_path / "dst").items()} == GOLDEN[dtype]


def test_an_untouched_header_keeps_its_bytes(tmp_path):
    """Also one with gaps in it, which no library writes."""
    shards, plan = case(torch.float32)
    src = write_checkpoint(tmp_path / "src", shards)
    path = sorted(src.glob("*.safetensors"))[1]
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + size]), indent=3).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header + data[8 + size :])
    write_plan(plan, src, tmp_path / "dst")
    assert (tmp_path / "dst" / path.name).read_bytes().startswith(header)


def test_metadata_keeps_its_order(tmp_path):
    """The library hands it over in an order that differs from process to process."""
    shards, plan = case(torch.float32)
    src = write_checkpoint(tmp_path / "src", shards[:1])
    path = src / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    kept = {name: name.upper() for name in ("format", "b", "a", "z", "y", "c")} | {"format": "pt"}
    text = json.dumps({"__metadata__": kept, **json.loads(data[8 : 8 + size])}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    write_plan(CentringPlan(copy=plan.copy), src, tmp_path / "dst", metadata={"new": "x"})
    header = (tmp_path / "dst" / path.name).read_bytes()[8:]
    assert header.startswith(json.dumps({"__metadata__": kept | {"new": "x"}}, separators=(",", ":")).encode()[:-1])


def test_the_tensors_of_expressions():
    tensors = {
        "w": numbers(12, 20, seed=1, dtype=torch.bfloat16),
        "v": numbers(20, seed=2, dtype=torch.bfloat16),
        "b": numbers(12, seed=3, dtype=torch.bfloat16),
    }
    w, v, b = (Stored(name) for name in "wvb")
    made = computed(
        {
            "centred": Centred(w, 0),
            "scaled": Scaled(Centred(w, 0), Plus(v, 1.0), 1),
            "rows": Rows(w, torch.tensor([3, 1, 2, 11, 0])),
            "transposed": Transposed(Centred(w, 1, 10, (1,))),
            "folded": FoldedBias(w, v, b),
            "folded alone": FoldedBias(Transposed(Transposed(w)), v),
            "filled": Filled(w, 1.0, 1),
        },
        Values(tensors),
    )
    digests = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in made.items()
    }
    assert digests == GOLDEN["expressions"]


def test_the_sources_are_what_the_digests_are_of():
    """Else the digests would tell of another PyTorch, and not of another writer."""
    shards, _ = case(torch.float32)
    assert CONFIG["model_type"] == "gpt2"
    assert hashlib.sha256(shards[1]["h.0.tall"].numpy().tobytes()).hexdigest()[:16] == GOLDEN["source"]
