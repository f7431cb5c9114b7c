"""Kill conversions and finish them: a script, so that every process is forked from one that has PyTorch loaded.

``python crash_runs.py FOLDER POINTS SEED`` prints a JSON line: what went wrong (nothing, one hopes), and what was done.

A process is killed by SIGKILL at a system call drawn from those of an undisturbed run: before it, after it, or half way
through a write; or after a random time. With a power cut, what was not flushed to the disk is lost besides.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from checkpoints import contents, tiny, write_checkpoint, write_plan

from hf_rmsnorm.conversion.checkpoint import expressions

CALLS = ("write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "copyfile")


class Killer:
    """Counts the calls that change the disk, and kills its own process at one of them."""

    def __init__(self, roots, at=None, where="before", power_cut=False):
        self.roots, self.at, self.where, self.power_cut = roots, at, where, power_cut
        self.names, self.durable = [], set()
        for name in CALLS:
            module = shutil if name == "copyfile" else os
            setattr(module, name, self.counted(name, getattr(module, name)))

    def counted(self, name, real):
        def call(*args, **kwargs):
            self.names.append(name)
            fatal = len(self.names) == self.at
            if fatal and self.where == "half" and name == "write":
                real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                self.durable.discard(os.fstat(args[0]).st_ino)
            elif not fatal or self.where == "after":
                try:
                    result = real(*args, **kwargs)
                except OSError:
                    if not fatal:
                        raise
                if name in ("write", "fsync"):
                    (self.durable.discard if name == "write" else self.durable.add)(os.fstat(args[0]).st_ino)
                if not fatal:
                    return result
            self.die()

        return call

    def die(self):
        if self.power_cut:
            for root in self.roots:
                for path in Path(root).rglob("*"):
                    if path.is_file() and path.stat().st_ino not in self.durable:
                        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def forked(work, patience=None):
    """Run work in a child; kill it after so many seconds. The wait status, and what it printed if it failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.close(read)
            result = work()
            os.write(write, json.dumps(result).encode())
        except BaseException:
            os.write(write, json.dumps(traceback.format_exc()[-1500:]).encode())
            code = 1
        os._exit(code)
    os.close(write)
    if patience is not None:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], json.loads(text) if text else None


def main(folder, points, seed):
    draw = random.Random(seed)
    torch.set_num_threads(1)
    expressions.PIECE = 1 << 15  # more writes to be killed at
    shards, plan = tiny(torch.bfloat16, hidden=96, vocabulary=3000)
    src = write_checkpoint(folder / "src", shards, metadata={"format": "pt"})
    (src / "tokenizer.json").write_text("{}")
    (src / "README.md").write_text("read me\n" * 1000)
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling" / "config.json").write_text("{}")
    before = contents(src)
    dst, staging = folder / "dst", folder / "dst.converting"

    def convert():
        write_plan(plan, src, dst)

    def counting():
        killer = Killer([staging, dst])
        convert()
        return killer.names

    started = time.monotonic()
    status, calls = forked(counting)
    life = time.monotonic() - started
    assert status == 0, calls
    whole = contents(dst)
    shutil.rmtree(dst)
    wrong, killed, resumed, whole_at_kill = [], 0, 0, 0
    # Each part of the life gets its share of the points.
    places = [1 + int(len(calls) * (number + draw.random()) / points) for number in range(points)]
    for number, place in enumerate(places):
        mode = ("before", "after", "half", "time", "power cut")[number % 5]
        if mode == "time":
            place = round(life * draw.random(), 4)
            status, text = forked(convert, patience=place)
        else:
            where = draw.choice(("before", "after", "half")) if mode == "power cut" else mode
            if number == points - 1:  # never left to chance: DST has just appeared
                place, where = max(at for at, name in enumerate(calls, 1) if name == "rename"), "after"
            power_cut = mode == "power cut"

            def dying(place=place, where=where, power_cut=power_cut):
                Killer([staging, dst], place, where, power_cut)
                convert()

            status, text = forked(dying)
        name = f"point {number}, {mode} {place} {calls[place - 1] if mode != 'time' else ''}"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed += 1
        elif mode != "time" or status != 0:
            wrong.append(f"{name}: was not killed: {text}")
        visible = dst.exists()
        if visible and contents(dst) != whole:
            wrong.append(f"{name}: DST was there and not whole")
        whole_at_kill += visible
        if staging.exists() or not visible:
            resumed += (staging / "journal.json").exists()
            # Killed in its last step, the run leaves an empty folder, and the next one says that DST is there.
            done = visible and not any(staging.iterdir())
            status, text = forked(convert)
            if status != 0 and not done:
                wrong.append(f"{name}: did not resume: {text}")
            if staging.exists() and not done:
                wrong.append(f"{name}: the staging folder is left")
        if not dst.exists() or contents(dst) != whole:
            wrong.append(f"{name}: the result differs from an undisturbed one")
        if contents(src) != before:
            wrong.append(f"{name}: the source changed")
        for path in (dst, staging):
            shutil.rmtree(path, ignore_errors=True)  # either may be missing
    report = {"wrong": wrong, "killed": killed, "resumed": resumed, "whole_at_kill": whole_at_kill, "calls": len(calls)}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
