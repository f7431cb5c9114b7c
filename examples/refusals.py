"""What the examples make of wrong arguments, unreadable files and full disks: one line,
and the exit code 2.
"""

import argparse
import contextlib
import itertools
import math
import os
import sys
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hf_rmsnorm.demo import demo_path

# what from_pretrained raises
UNREADABLE = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)
# RuntimeError is torch.save's, for a full disk
UNWRITABLE = (OSError, RuntimeError, SafetensorError)


def stopper(script):
    def stop(message):
        print(
            f"{script}: {' '.join(str(message).split())}", file=sys.stderr, flush=True
        )
        raise SystemExit(2)

    return stop


class Parser(argparse.ArgumentParser):
    def __init__(self, stop, description):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.error = stop


def at_least(least, kind=int, most=math.inf):
    """A finite number of arguments: `least` and more, less than `most`."""

    def number(text):
        if not least <= kind(text) < most:
            raise ValueError
        return kind(text)

    limit = "" if most == math.inf else f", less than {most}"
    # argparse: "invalid number, at least 1: value: '0'"
    number.__name__ = f"number, at least {least}{limit}:"
    return number


def model_source(model):
    """What `from_pretrained` takes: the folder of demo:llama and the like, else a
    folder or a hub id as it is.
    """
    try:
        return (
            str(demo_path(model.removeprefix("demo:")))
            if model.startswith("demo:")
            else model
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


SEED = at_least(0, most=2**31)  # numpy takes twice that, and a step adds its number


def read_text(stop, path, name):
    """A file of UTF-8 text; `name` is what the message calls it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        stop(f"cannot read {name}: {error}; it has to be a file of UTF-8 text")


def fresh_folder(name):
    """The first of `name`, `name`-2, `name`-3 and so on that is not there."""
    names = itertools.chain(
        [name], (f"{name}-{number}" for number in itertools.count(2))
    )
    return Path(next(each for each in names if not os.path.lexists(each)))


def check_no_model(stop, folder):
    """Stop where an earlier run has written its model: one beside an adapter would load
    as one.
    """
    finished = sorted(folder.glob("*.safetensors"))
    if finished:
        stop(
            f"{folder} has {finished[0].name} of an earlier run: give another --output-dir"
        )


class NotWritten(Exception):
    """Something could not be written; the message says what and why."""


@contextlib.contextmanager
def one_line_endings(stop, interrupted):
    """Around the whole script: what cannot be written stops it, and Ctrl-C ends it by
    `interrupted`, exit code 130.
    """
    try:
        yield
    except NotWritten as error:
        stop(error)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr, flush=True)
        raise SystemExit(130) from None


@contextlib.contextmanager
def writing(path, cure="make room; the checkpoints written before are whole"):
    try:
        yield
    except UNWRITABLE as error:
        raise NotWritten(f"cannot write {path}: {error}; {cure}") from error


@contextlib.contextmanager
def output_folder(path, alone):
    """Make the folder, and try it before hours of training; where nothing was written
    it goes again.

    One process has it `alone`: a second run, which would mix its checkpoints with
    these, is refused.
    """
    lock = FileLock(path / ".lock")
    with writing(f"to --output-dir {path}", cure="give another one"):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        if alone:
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise OSError("another run is writing there now") from None
    try:
        yield
    finally:
        if alone:
            with contextlib.suppress(OSError):
                # on Windows, where it goes as it is released
                (path / ".lock").unlink()
            lock.release()
            with contextlib.suppress(OSError):  # there is something in it
                path.rmdir()
