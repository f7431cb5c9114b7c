"""What a conversion costs: a script, so that a fresh process is measured.

``python conversion_cost.py FOLDER MEBIBYTES SHARDS`` converts a checkpoint of
zeros, stored sparsely, and prints as JSON the peak of the resident set (VmHWM) when
everything is imported and at the end, in bytes.
"""

import json
import re
import struct
import sys
from pathlib import Path

from checkpoints import write_plan

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


def make(folder, mebibytes, count):
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
            file.truncate(8 + len(text) + at)
    index = json.dumps({"metadata": {}, "weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(index)
    return plan_for(weights)


def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def memory(folder, mebibytes, count):
    plan = make(folder / "src", mebibytes, count)
    before = peak()
    write_plan(plan, folder / "src", folder / "dst", max_shard_size="128MB")
    largest = max(path.stat().st_size for path in (folder / "dst").iterdir())
    return {"before": before, "after": peak(), "largest_shard": largest}


if __name__ == "__main__":
    folder, *sizes = sys.argv[1:]
    print(json.dumps(memory(Path(folder), *map(int, sizes))))
