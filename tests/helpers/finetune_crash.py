"""Kill runs of examples/finetune.py and let them go on: a script, so that each is forked from one with torch loaded.

``python finetune_crash.py FOLDER`` prints a JSON line: what went wrong (nothing, one hopes) and where runs were killed.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from places import EXAMPLES

sys.path.insert(0, str(EXAMPLES))

import finetune  # noqa: E402
import saving  # noqa: E402

STEPS = 4
FLAGS = ["--cpu", "--batch-size=2", "--block-size=32", f"--max-steps={STEPS}", "--backend=reference"]


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def before(real):
    return die


def after(real):
    def call(*args, **kwargs):
        real(*args, **kwargs)
        die()

    return call


def half(real):
    """A file of which only half is there."""

    def call(state, path):
        real(state, path)
        os.truncate(path, path.stat().st_size // 2)
        die()

    return call


def half_a_step(real):
    """Some parameters updated, the others not."""

    def call(self, *args, **kwargs):
        for group in self.optimizer.param_groups:
            group["params"] = group["params"][::2]
        real(self, *args, **kwargs)
        die()

    return call


# what is replaced -> which call of it is fatal, how, and the checkpoint that is left then
POINTS = [
    (Accelerator, "backward", 1, before, None),
    (Accelerator, "backward", 3, after, 2),
    (AcceleratedOptimizer, "step", 2, half_a_step, 1),
    (saving, "save_model", 1, after, None),
    (saving, "get_optimizer_state_dict", 3, before, 2),
    (torch, "save", 2, half, 1),
    (Path, "rename", 2, before, 1),
    (Path, "rename", 2, after, 2),
    (finetune, "save_model", 1, after, 4),  # of the result, behind the last step
    (finetune, "write_losses", 1, before, 4),
]


def dying(owner, name, fatal, how):
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(1)
        return (how(real) if len(calls) == fatal else real)(*args, **kwargs)

    setattr(owner, name, call)


def forked(work):
    """Run work in a child without its output; (wait status, the end of that output)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        try:
            work()
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
    os.close(write)
    with os.fdopen(read, errors="replace") as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], text


def result(folder):
    return json.loads((folder / "losses.json").read_text()), (folder / "model.safetensors").read_bytes()


def main(folder):
    torch.set_num_threads(1)
    status, text = forked(lambda: finetune.main([*FLAGS, "--output-dir", str(folder / "whole"), "--save-every=0"]))
    assert status == 0, text
    whole, wrong, killed = result(folder / "whole"), [], []
    for number, (owner, name, fatal, how, left) in enumerate(POINTS):
        point = f"{how.__name__} call {fatal} of {name}"
        run = [*FLAGS, "--output-dir", str(folder / str(number)), "--save-every=1", "--resume"]
        patch = ["--patch", "--no-patch"]

        def dies(owner=owner, name=name, fatal=fatal, how=how, run=run, flag=patch[number % 2]):
            dying(owner, name, fatal, how)
            finetune.main([*run, flag])

        status, text = forked(dies)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            wrong.append(f"{point}: was not killed: {text[-1500:]}")
            continue
        killed.append(point)
        with contextlib.suppress(FileNotFoundError):  # a run killed early has written nothing
            (folder / str(number) / "losses.json").unlink()
        status, text = forked(lambda run=run, flag=patch[1 - number % 2]: finetune.main([*run, flag]))
        went_on = f"checkpoint-{left}\n" in text if left else "Going on" not in text
        if status != 0 or not went_on:
            wrong.append(f"{point}: did not go on from {left}: {text[-1500:]}")
        elif result(folder / str(number)) != whole:
            wrong.append(f"{point}: ended elsewhere")
        names = {path.name for path in (folder / str(number)).iterdir()}
        checkpoints = {name for name in names if name.startswith("checkpoint")}
        if checkpoints != {f"checkpoint-{step}" for step in range(1, STEPS + 1)}:
            wrong.append(f"{point}: left {sorted(checkpoints)}")
    print(json.dumps({"wrong": wrong, "killed": killed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
