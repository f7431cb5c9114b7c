"""Small checkpoint folders, and what a plan makes of their tensors in memory: the
reference for what is written.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_rmsnorm.conversion import CentringPlan, ConversionError, convert_checkpoint
from hf_rmsnorm.conversion.plan import Centre, Copy
from hf_rmsnorm.conversion.proxy.prove import ProofReport
from hf_rmsnorm.conversion.targets.centred import PlannedCentring

CONFIG = {
    "model_type": "gpt2",
    "tie_word_embeddings": True,
    "rope": {"theta": 1e-05, "b": 2},
    "architectures": ["X"],
}
INDEX = "model.safetensors.index.json"
ADDED = {"README.md", "conversion_plan.json"}  # to what the source has


def write_checkpoint(folder, shards, *, metadata=None, config=None):
    """Save a list of state dicts as one file, or as shards with their index."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(CONFIG if config is None else config, indent=2) + "\n"
    )
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            for i in range(len(shards))
        ]
        weight_map = {
            key: name
            for name, shard in zip(names, shards, strict=True)
            for key in shard
        }
        tensors = [tensor for shard in shards for tensor in shard.values()]
        sizes = {
            "total_size": sum(t.nbytes for t in tensors),
            "total_parameters": sum(t.numel() for t in tensors),
        }
        index = {"metadata": {**sizes, "kept": "x"}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index))
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata=metadata)
    return folder


def trained(*shape, dtype=torch.float32, seed=0):
    """Values with a mean, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 + 0.03
    ).to(dtype)


def tiny(dtype=torch.bfloat16, hidden=12, vocabulary=20):
    """Two shards with a little of everything: a writer of each orientation, what is
    not touched.
    """
    first = {
        "wte.weight": trained(vocabulary, hidden, dtype=dtype, seed=1),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "h.0.ln.weight": trained(hidden, dtype=torch.float32, seed=2),
    }
    second = {
        "h.0.out.weight": trained(hidden, 2 * hidden, dtype=dtype, seed=3),
        "h.0.out.bias": trained(hidden, dtype=dtype, seed=4),
        "h.0.scale": trained(hidden, dtype=dtype, seed=5),
        "h.0.qkv.weight": trained(hidden, 3 * hidden, dtype=dtype, seed=6),
        "h.0.empty": torch.zeros(0, 3),
    }
    plan = CentringPlan(
        centre=(
            Centre("wte.weight", 1, hidden),
            Centre("h.0.out.weight", 0, hidden),
            Centre("h.0.out.bias", 0, hidden),
            Centre("h.0.qkv.weight", 1, hidden, (0, 2)),
        ),
        copy=(Copy("lm_head.weight", "wte.weight"),),
        config={
            "tie_word_embeddings": False,
            "hf_rmsnorm": {"version": 1},
        },
    )
    return [first, second], plan


def write_plan(plan, src, dst, **how):
    """Convert a folder by a plan that is made by hand, as its tensors are of no model."""
    planned = PlannedCentring(
        {"source": "x", "converted_by": "y", "torch": "2", "transformers": "5"},
        plan,
        PROOF,
    )
    return convert_checkpoint(src, dst, planned=planned, verify=False, **how).written


PROOF = ProofReport("Tiny", 0.0, 0.0, (0, 0), {})


def load(folder):
    """Every tensor of a folder, read by the safetensors library."""
    tensors = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                tensors[key] = file.get_tensor(key)
    return tensors


def in_memory(plan, tensors):
    """What `write_plan` shall write, from tensors that are all in memory."""
    result = dict(tensors) | {copy.key: tensors[copy.source] for copy in plan.copy}
    changed = {}
    for centre in plan.centre:
        x = changed.setdefault(centre.key, result[centre.key].double()).clone()
        count = x.shape[centre.axis] // centre.block
        for index in range(count) if centre.blocks is None else centre.blocks:
            block = x.narrow(centre.axis, index * centre.block, centre.block)
            block -= block.mean(centre.axis, keepdim=True)
        changed[centre.key] = x
    return result | {key: x.to(result[key].dtype) for key, x in changed.items()}


def assert_same(result, expected):
    """Equal tensors; float64 but for the last bits of a mean, as a sum of another order
    differs in them.
    """
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 1e-15 if value.dtype == torch.float64 else 0.0
        torch.testing.assert_close(
            result[key],
            value,
            rtol=0,
            atol=tolerance,
            msg=lambda text, key=key: f"{key}: {text}",
        )


def contents(folder):
    """SHA-256 of every file below a folder, by relative path; an empty folder counts as
    one.
    """
    digests = {}
    for parent, folders, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            digests[os.path.relpath(path, folder)] = hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
        if not folders and not names:
            digests[os.path.relpath(parent, folder)] = "empty"
    return digests


def assert_refused(plan, src, *words, **arguments):
    """One line with every word; nothing is written, and the source is as it was."""
    before = sorted(src.parent.rglob("*")), contents(src) if src.is_dir() else None
    with pytest.raises(ConversionError) as error:
        write_plan(plan, src, src.parent / "dst", **arguments)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert (
        sorted(src.parent.rglob("*")),
        contents(src) if src.is_dir() else None,
    ) == before
