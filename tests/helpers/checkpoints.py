"""Small checkpoint folders, and what a plan makes of their tensors in memory: the
reference for what is written.
"""

import hashlib
import json
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
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata=metadata)
        return folder
    weights = {}
    size = count = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, metadata=metadata)
        for key, tensor in shard.items():
            weights[key] = name
            size += tensor.nbytes
            count += tensor.numel()
    sizes = {"total_size": size, "total_parameters": count, "kept": "x"}
    (folder / INDEX).write_text(json.dumps({"metadata": sizes, "weight_map": weights}))
    return folder


def trained(*shape, dtype=torch.float32, seed=0):
    """Values with a mean, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * 0.1 + 0.03).to(dtype)


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


PROOF = ProofReport("Tiny", 0.0, 0.0, (0, 0))
MADE = {"source": "x", "converted_by": "y", "torch": "2", "transformers": "5"}


def write_plan(plan, src, dst, **how):
    """Convert a folder by a plan that is made by hand, as its tensors are of no model."""
    planned = PlannedCentring(MADE, plan, PROOF)
    return convert_checkpoint(src, dst, planned=planned, verify=False, **how).written


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
    result = dict(tensors)
    for copy in plan.copy:
        result[copy.key] = tensors[copy.source]
    for step in plan.centre:
        x = result[step.key].double().clone()
        blocks = step.blocks
        if blocks is None:
            blocks = range(x.shape[step.axis] // step.block)
        for index in blocks:
            block = x.narrow(step.axis, index * step.block, step.block)
            block -= block.mean(step.axis, keepdim=True)
        result[step.key] = x.to(result[step.key].dtype)
    return result


def assert_same(result, expected):
    """Equal tensors; float64 but for the last bits of a mean, as a sum of another order
    differs in them.
    """
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        error = 0.0
        if value.dtype == torch.float64:
            error = 1e-15
        torch.testing.assert_close(result[key], value, rtol=0, atol=error, msg=key)


def contents(folder):
    """SHA-256 of every file below a folder, by relative path; an empty folder counts as
    one.
    """
    digests = {}
    for path in Path(folder).rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file():
            digests[name] = hashlib.sha256(_in_order(path)).hexdigest()
        elif not any(path.iterdir()):
            digests[name] = "empty"
    return digests


def _in_order(path):
    """The bytes of a file; safetensors writes the notes of a header in any order."""
    data = path.read_bytes()
    if path.suffix != ".safetensors" or len(data) < 8:
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:end])
    except ValueError:
        return data
    return json.dumps(header, sort_keys=True).encode() + data[end:]


def assert_refused(plan, src, *words, **arguments):
    """The error, one line with every word; nothing is written, and the source is as it
    was.
    """
    before = contents(src.parent)
    with pytest.raises(ConversionError) as error:
        write_plan(plan, src, src.parent / "dst", **arguments)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert contents(src.parent) == before
    return text
