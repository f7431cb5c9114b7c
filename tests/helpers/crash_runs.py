"""Kill conversions at named boundaries and run them again: a script, so that what is
forked has no threads.

``python crash_runs.py FOLDER`` prints a JSON line: what went wrong at each boundary.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from checkpoints import contents, tiny, write_checkpoint, write_plan

from hf_rmsnorm.conversion import ConversionError

SHARDS, PLAN = tiny(torch.bfloat16, hidden=96, vocabulary=3000)
MANY = "100KB"  # a shard; so there are several


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


def killed_within(tensors):
    """A progress function that dies once so many tensors are made."""
    return lambda made, *_: made == tensors and die()


# of a first run, and of what cleans up behind one that was killed
BOUNDARIES = {
    "as its folder appears": ("mkdir", 1, True),
    "as it is locked": ("mkdir", 3, True),
    "within the first shard": 1,
    "within a later shard": 6,
    "before DST appears": ("rename", 1, False),
    "after DST appears": ("rename", 1, True),
    "while it cleans up": ("rmdir", 1, False),
    "before the lock goes": ("unlink", 1, False),
    "after the lock went": ("unlink", 1, True),
}
CLEANING = {
    "as a file of a killed run is removed": ("unlink", 2, True),
    "as a folder of a killed run is removed": ("rmdir", 1, True),
}


def convert(src, dst, place=None):
    """Convert; with a place, be killed there."""
    progress = None
    if isinstance(place, int):
        progress = killed_within(place)
    elif place is not None:
        killed_at(*place)
    write_plan(PLAN, src, dst, progress=progress, max_shard_size=MANY)


def is_killed(work, *args):
    """Whether a child that does this is killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(*args)
            code = 0
        finally:
            os._exit(code)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def faults(src, dst, whole, places):
    """What went wrong where conversions are killed at places, one after another, and
    then done once more.
    """
    wrong = [
        f"not killed at {p}" for p in places if not is_killed(convert, src, dst, p)
    ]
    appeared = dst.exists()
    if appeared and contents(dst) != whole:
        wrong.append("DST was there and not whole")
    try:
        convert(src, dst)
    except ConversionError as error:
        if not (appeared and "exists already" in str(error)):
            wrong.append(str(error))
    if not dst.exists() or contents(dst) != whole:
        wrong.append("the result differs from an undisturbed one")
    shutil.rmtree(dst, ignore_errors=True)
    left = {path.name for path in dst.parent.iterdir()}
    for name in left - {"src", "whole"}:
        wrong.append(f"left: {name}")
        shutil.rmtree(dst.parent / name)
    return wrong


def main(folder):
    torch.set_num_threads(1)
    src = write_checkpoint(folder / "src", SHARDS, metadata={"format": "pt"})
    (src / "README.md").write_text("read me\n" * 1000)
    before = contents(src)
    convert(src, folder / "whole")
    whole = contents(folder / "whole")
    runs = {name: [place] for name, place in BOUNDARIES.items()}
    runs |= {name: [6, place] for name, place in CLEANING.items()}
    report = {}
    for name, places in runs.items():
        report[name] = faults(src, folder / "dst", whole, places)
    if contents(src) != before:
        report["afterwards"] = ["the source changed"]
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
