"""Kill conversions at named boundaries and finish them: a script, so that what is
forked has no threads.

``python crash_runs.py FOLDER`` prints a JSON line: for each boundary, what went wrong
and how many shards were resumed.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from checkpoints import contents, tiny, write_checkpoint, write_plan

SHARDS, PLAN = tiny(torch.bfloat16, hidden=96, vocabulary=3000)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(call, number, after):
    """Die at the call of that number of a function of `os`, before it does its work or
    after.
    """
    real = getattr(os, call)
    left = [number]

    def counted(*args, **options):
        left[0] -= 1
        if left[0] == 0 and not after:
            die()
        result = real(*args, **options)
        if left[0] == 0:
            die()
        return result

    setattr(os, call, counted)


def within_a_shard(tensors, done, total):
    if tensors == 5:
        die()


BOUNDARIES = {  # the journal is the first file that gets its name
    "before the journal": ("replace", 1, False),
    "after the journal": ("replace", 1, True),
    "before the first shard has its name": ("replace", 2, False),
    "between the shards": ("replace", 2, True),
    "within the second shard": None,
    "after the last shard": ("replace", 3, True),
    "before DST appears": ("rename", 1, False),
    "after DST appears": ("rename", 1, True),
    "while it cleans up": ("rmdir", 1, False),
}


def forked(work):
    """(wait status, number that `work` returned) of a child that does it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write, str(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], int(text or 0)


def faults(src, dst, whole, place):
    """(what went wrong, how many shards were resumed) where a conversion is killed at a
    place and then done again.
    """
    before = contents(src)
    staging = dst.with_name("dst.converting")

    def dying():
        if place is not None:
            killed_at(*place)
        write_plan(PLAN, src, dst, progress=None if place else within_a_shard)

    status, _ = forked(dying)
    wrong = ["it was not killed"]
    if os.WIFSIGNALED(status):
        wrong = []
    if dst.exists() and contents(dst) != whole:
        wrong.append("DST was there and not whole")
    resumed = 0
    if not dst.exists() or any(staging.iterdir()):
        status, resumed = forked(lambda: write_plan(PLAN, src, dst).resumed)
        if status:
            wrong.append("it did not resume")
        if staging.exists():
            wrong.append("the staging folder is left")
    if contents(src) != before:
        wrong.append("the source changed")
    if not dst.exists() or contents(dst) != whole:
        wrong.append("the result differs from an undisturbed one")
    for path in (dst, staging):
        shutil.rmtree(path, ignore_errors=True)
    return {"wrong": wrong, "resumed": resumed}


def main(folder):
    torch.set_num_threads(1)
    src = write_checkpoint(folder / "src", SHARDS, metadata={"format": "pt"})
    (src / "README.md").write_text("read me\n" * 1000)
    write_plan(PLAN, src, folder / "whole")
    whole = contents(folder / "whole")
    report = {}
    for name, place in BOUNDARIES.items():
        report[name] = faults(src, folder / "dst", whole, place)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
