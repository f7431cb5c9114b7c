"""Small checkpoint folders, and what a plan makes of them in memory: the reference for the streamed conversion."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_rmsnorm.conversion import ConversionError
from hf_rmsnorm.conversion.checkpoint import write
from hf_rmsnorm.conversion.checkpoint.expressions import planned_tensors
from hf_rmsnorm.conversion.checkpoint.layout import as_source
from hf_rmsnorm.conversion.checkpoint.values import open_values
from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy, Scale

CONFIG = {"model_type": "gpt2", "tie_word_embeddings": True, "rope": {"theta": 1e-05, "b": 2}, "architectures": ["X"]}


def write_checkpoint(folder, shards, *, metadata=None, config=None, total_parameters=False):
    """Save a list of state dicts as one file, or as shards with their index."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config, indent=2) + "\n")
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        sizes = [tensor for shard in shards for tensor in shard.values()]
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in sizes), "kept": "x"},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        if total_parameters:
            index["metadata"]["total_parameters"] = sum(t.numel() for t in sizes)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata=metadata)
    return folder


def trained(*shape, dtype=torch.float32, seed=0):
    """Values with a mean, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 + 0.03).to(dtype)


def numbers(*shape, seed, dtype):
    """Values with a mean that are the same with every PyTorch."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(1, count + 1, dtype=torch.int64) * 2654435761 + seed * 40503) % 16777213
    return (mixed.double() * (0.37 / 16777213) - 0.151).to(dtype).view(shape)


def tiny(dtype=torch.bfloat16, hidden=12, vocabulary=20):
    """Two shards with a little of everything: a writer of each orientation, a layer scale, what is not touched."""
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
        scale=(Scale("h.0.out.weight", 0, "h.0.scale"), Scale("h.0.out.bias", 0, "h.0.scale")),
        copy=(Copy("lm_head.weight", "wte.weight"),),
        config={"tie_word_embeddings": False, "rope": {"b": 3, "c": 4}, "hf_rmsnorm": {"version": 1}},
    )
    return [first, second], plan


def write_plan(plan, src, dst, *, metadata=None, allow_pickle=False, **how):
    """Write what a plan makes of a folder, without judging it."""
    with open_values(src, allow_pickle=allow_pickle) as values:
        layout = as_source(planned_tensors(plan, values, src), values, metadata)
        config = write.changed_config(values.checkpoint.config, plan.config) if plan.config else None
        return write.write_checkpoint(values, dst, layout, config, **how)


def load(folder):
    """Every tensor of a folder, read by the safetensors library."""
    tensors = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                tensors[key] = file.get_tensor(key)
    return tensors


def nearest(x, dtype):
    """Float64 values rounded once, ties to even: chosen among the neighbours of what a cast gives."""
    y = x.to(dtype)
    if dtype in (torch.float64, torch.float32):
        return y
    bits = torch.stack([y.view(torch.int16) + step for step in (0, -1, 1)])
    distance = (bits.view(dtype).double() - x).abs().nan_to_num(torch.inf, torch.inf)
    best = distance.amin(0)
    even = torch.where(distance == best, 1 + (bits & 1), 9)
    return bits.gather(0, even.argmin(0, keepdim=True))[0].view(dtype)


def in_memory(plan, tensors):
    """What `write_plan` shall write, from tensors that are all in memory."""
    result = dict(tensors) | {copy.key: tensors[copy.source] for copy in plan.copy}
    changed = {}
    for scale in plan.scale:
        x = changed.setdefault(scale.key, tensors[scale.key].double())
        shape = [-1 if axis == scale.axis else 1 for axis in range(x.ndim)]
        changed[scale.key] = x * tensors[scale.by].double().view(shape)
        result[scale.by] = torch.ones_like(tensors[scale.by])
    for centre in plan.centre:
        x = changed.setdefault(centre.key, result[centre.key].double()).clone()
        count = x.shape[centre.axis] // centre.block
        for index in range(count) if centre.blocks is None else centre.blocks:
            block = x.narrow(centre.axis, index * centre.block, centre.block)
            block -= block.mean(centre.axis, keepdim=True)
        changed[centre.key] = x
    for key, x in changed.items():
        result[key] = nearest(x.reshape(-1), result[key].dtype).view(x.shape)
    return result


def contents(folder):
    """SHA-256 of every file below a folder, by relative path; an empty folder counts as one."""
    found = {}
    for parent, folders, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            found[os.path.relpath(path, folder)] = hashlib.sha256(path.read_bytes()).hexdigest()
        if not folders and not names:
            found[os.path.relpath(parent, folder)] = "empty"
    return found


def assert_refused(plan, src, *words, **arguments):
    """One line with every word; nothing is written, and the source is as it was."""
    before = sorted(src.parent.rglob("*")), contents(src) if src.is_dir() else None
    with pytest.raises(ConversionError) as error:
        write_plan(plan, src, src.parent / "dst", **arguments)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert (sorted(src.parent.rglob("*")), contents(src) if src.is_dir() else None) == before
