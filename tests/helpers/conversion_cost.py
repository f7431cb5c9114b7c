"""What a conversion costs: a script, so that a fresh process is measured.

``python conversion_cost.py memory FOLDER MEBIBYTES SHARDS`` converts a checkpoint of
zeros, stored sparsely, and prints as JSON the peak of the resident set (VmHWM) when
everything is imported and at the end, in bytes. ``python conversion_cost.py time FOLDER
MEBIBYTES SHARDS ROUNDS`` converts a checkpoint of random values and copies it with
safetensors, in turns, and prints the seconds of each. ``python conversion_cost.py plan
FOLDER LAYERS ROUNDS`` plans the conversion of a wide GPT-NeoX of random bfloat16
values, whose small model is small, and copies it with safetensors, in turns.
"""

import json
import os
import re
import shutil
import struct
import sys
import time
from pathlib import Path

import torch
from checkpoints import write_plan
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hf_rmsnorm import plan_conversion
from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy

HIDDEN = 1024


def shapes(number, mebibytes):
    """A shard as of a GPT-2 in bfloat16: an embedding in the first, then layers, 5/12
    of whose weights are writers.
    """
    left = (mebibytes << 20) // 2
    if number == 0:
        yield "wte", (32 << 10, HIDDEN)
        left -= 32 * HIDDEN << 10
    layer = 0
    while left > 0:
        for name, shape in {
            "qkv": (3, 1),
            "out": (1, 1),
            "up": (4, 1),
            "down": (1, 4),
        }.items():
            yield f"{number}.{layer}.{name}", (shape[0] * HIDDEN, shape[1] * HIDDEN)
            left -= shape[0] * shape[1] * HIDDEN**2
        layer += 1


def plan_for(names):
    centre = [Centre("wte", 1, HIDDEN)]
    centre += [
        Centre(name, 0, HIDDEN) for name in names if name.endswith(("out", "down"))
    ]
    return CentringPlan(centre=tuple(centre), copy=(Copy("head", "wte"),))


def make(folder, mebibytes, count, fill):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        header, at = {}, 0
        for key, shape in shapes(number, mebibytes // count):
            header[key] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [at, at := at + 2 * shape[0] * shape[1]],
            }
            weights[key] = name
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            if fill:
                piece = (
                    (torch.randn(1 << 20) * 0.02 + 0.01)
                    .bfloat16()
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
                for _ in range(0, at, len(piece)):
                    file.write(piece)
            file.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    return plan_for(weights)


def peak():
    return (
        int(
            re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)
        )
        << 10
    )


def memory(folder, mebibytes, count):
    plan = make(folder / "src", mebibytes, count, fill=False)
    before = peak()
    write_plan(plan, folder / "src", folder / "dst")
    largest = max(path.stat().st_size for path in (folder / "dst").iterdir())
    return {"before": before, "after": peak(), "largest_shard": largest}


def seconds(folder, mebibytes, count, rounds):
    plan = make(folder / "src", mebibytes, count, fill=True)
    shards = sorted((folder / "src").glob("*.safetensors"))
    times = {"convert": [], "copy": [], "copy_to_disk": []}

    def copy(to_disk):
        (folder / "copy").mkdir()
        for shard in shards:
            save_file(load_file(shard), folder / "copy" / shard.name)
            if to_disk:
                fd = os.open(folder / "copy" / shard.name, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    work = {
        "copy": lambda: copy(False),
        "convert": lambda: write_plan(plan, folder / "src", folder / "dst"),
        "copy_to_disk": lambda: copy(True),
    }
    for _ in range(rounds):
        for name, run in work.items():
            os.sync()  # what the run before left to write is not on this one's bill
            # A virtual machine takes memory from its host page by page when it is first
            # touched: done for both alike.
            torch.ones(3 * mebibytes << 18, dtype=torch.float32)
            start = time.perf_counter()
            run()
            times[name].append(round(time.perf_counter() - start, 3))
            for path in ("copy", "dst"):
                # one of the two is there
                shutil.rmtree(folder / path, ignore_errors=True)
    return times


def planning(folder, layers, rounds):
    config = GPTNeoXConfig(
        hidden_size=4096, intermediate_size=16384, num_attention_heads=32,
        num_hidden_layers=layers, dtype="bfloat16",
        architectures=["GPTNeoXForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder / "src")
    with torch.device("meta"):
        shapes = {
            name: t.shape for name, t in GPTNeoXForCausalLM(config).state_dict().items()
        }
    piece = (torch.randn(1 << 20) * 0.02 + 0.01).bfloat16()
    tensors = {
        name: piece.repeat(-(-shape.numel() // len(piece)))[: shape.numel()]
        for name, shape in shapes.items()
    }
    tensors = {name: tensor.view(shapes[name]) for name, tensor in tensors.items()}
    save_file(tensors, folder / "src" / "model.safetensors", {"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    times = {"plan": [], "copy_to_disk": [], "bytes": size}

    def copy():
        save_file(
            load_file(folder / "src" / "model.safetensors"), folder / "copy.safetensors"
        )
        with open(folder / "copy.safetensors", "rb") as file:
            os.fsync(file.fileno())

    for _ in range(rounds):
        for name, run in {
            "plan": lambda: plan_conversion(folder / "src"),
            "copy_to_disk": copy,
        }.items():
            os.sync()
            start = time.perf_counter()
            run()
            times[name].append(round(time.perf_counter() - start, 3))
        (folder / "copy.safetensors").unlink()
    return times


if __name__ == "__main__":
    measure = {"memory": memory, "time": seconds, "plan": planning}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]), *map(int, sys.argv[3:]))))
