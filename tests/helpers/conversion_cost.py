"""What a conversion costs: a script, so that a fresh process is measured.

``python conversion_cost.py memory FOLDER MEBIBYTES SHARDS`` converts a checkpoint of
zeros, stored sparsely, and prints as JSON the peak of the resident set (VmHWM) when
everything is imported and at the end, in bytes. ``python conversion_cost.py time FOLDER
MEBIBYTES SHARDS ROUNDS`` converts a checkpoint of random values and copies it with
safetensors, in turns, and prints the seconds of each.
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

from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy

HIDDEN = 1024
LINEARS = [("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)]


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
        for name, rows, columns in LINEARS:
            yield f"{number}.{layer}.{name}", (rows * HIDDEN, columns * HIDDEN)
            left -= rows * columns * HIDDEN**2
        layer += 1


def plan_for(names):
    writers = [name for name in names if name.endswith(("out", "down"))]
    centre = [Centre("wte", 1, HIDDEN), *(Centre(n, 0, HIDDEN) for n in writers)]
    return CentringPlan(centre=tuple(centre), copy=(Copy("head", "wte"),))


def make(folder, mebibytes, count, fill):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        header = {}
        at = 0
        for key, shape in shapes(number, mebibytes // count):
            end = at + 2 * shape[0] * shape[1]
            header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            weights[key] = name
            at = end
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            piece = torch.randn(1 << 20) * 0.02 + 0.01
            piece = piece.bfloat16()
            for _ in range(0, at if fill else 0, piece.nbytes):
                file.write(piece.view(torch.uint8).numpy())
            file.truncate(8 + len(text) + at)
    index = json.dumps({"metadata": {}, "weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(index)
    return plan_for(weights)


def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def memory(folder, mebibytes, count):
    plan = make(folder / "src", mebibytes, count, fill=False)
    before = peak()
    write_plan(plan, folder / "src", folder / "dst")
    largest = max(path.stat().st_size for path in (folder / "dst").iterdir())
    return {"before": before, "after": peak(), "largest_shard": largest}


def seconds(folder, mebibytes, count, rounds):
    plan = make(folder / "src", mebibytes, count, fill=True)

    def convert():
        write_plan(plan, folder / "src", folder / "dst")

    def copy():
        (folder / "dst").mkdir()
        for shard in (folder / "src").glob("*.safetensors"):
            path = folder / "dst" / shard.name
            save_file(load_file(shard), path)
            with open(path) as file:
                os.fsync(file.fileno())

    times = {"convert": [], "copy_to_disk": []}
    for _ in range(rounds):
        for name, run in (("convert", convert), ("copy_to_disk", copy)):
            os.sync()  # what the run before left to write is not on this one's bill
            # A virtual machine takes memory from its host page by page when it is first
            # touched: done for both alike.
            torch.ones(3 * mebibytes << 18, dtype=torch.float32)
            start = time.perf_counter()
            run()
            times[name].append(round(time.perf_counter() - start, 3))
            shutil.rmtree(folder / "dst")
    return times


if __name__ == "__main__":
    measure = {"memory": memory, "time": seconds}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]), *map(int, sys.argv[3:]))))
