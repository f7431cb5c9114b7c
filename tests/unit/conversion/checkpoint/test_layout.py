"""Shards, headers and index of a result: the bytes that they have had from the first."""

import hashlib
import json

import pytest
import torch
from checkpoints import contents, numbers, write_checkpoint, write_plan

from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy, Scale


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


def test_the_sources_are_what_the_digests_are_of():
    """Else the digests would tell of another PyTorch, and not of another writer."""
    shards, _ = case(torch.float32)
    assert hashlib.sha256(shards[1]["h.0.tall"].numpy().tobytes()).hexdigest()[:16] == GOLDEN["source"]
