"""Run a training script, unedited, with `HfRmsNormCallback` in every Trainer that it
makes.

    accelerate launch -m hf_rmsnorm.integrations.run [NAME=VALUE ...] SCRIPT.py ARGUMENTS
    accelerate launch -m hf_rmsnorm.integrations.run [NAME=VALUE ...] -m MODULE ARGUMENTS

python, or torchrun, does as well in place of accelerate launch. NAME=VALUE is an
argument of the callback:
"""

import os
import runpy
import sys
from importlib.util import find_spec

from transformers.trainer import DEFAULT_CALLBACKS

from .trainer import OPTIONS, EndingCallback

GLOBS = ("include", "exclude")
VALUES = dict.fromkeys(OPTIONS, "True or False")
VALUES |= dict.fromkeys(GLOBS, "globs with commas between")


def usage() -> str:
    width = max(map(len, VALUES))
    lines = [f"    {name:<{width}} = {values}" for name, values in VALUES.items()]
    return "\n".join([__doc__, *lines])


def parse(words: list[str]) -> tuple[dict, list[str]]:
    """(the callback's options, the rest) of a command line.

    Raises:
        ValueError: the command line has an error.
    """
    options = {}
    for at, word in enumerate(words):
        name, is_option, value = word.partition("=")
        if not (is_option and name.isidentifier()):
            return options, words[at:]
        if name in options:
            raise ValueError(
                f"{name} is there twice: put commas between globs, or leave one out"
            )
        flags = {"True": True, "False": False}
        options[name] = value.split(",") if name in GLOBS else flags.get(value, value)
    raise ValueError(
        "there is nothing to run: name SCRIPT.py or -m MODULE; --help says how to call this"
    )


def check_is_there(program: list[str]) -> None:
    """Raise ValueError where there is no such script or module."""
    what, is_there = f"file {program[0]}", os.path.isfile(program[0])
    if program[0] == "-m":
        name = "".join(program[1:2])
        what, is_there = f"module {name}", _has_module(name)
    if not is_there:
        raise ValueError(
            f"there is no {what}: name SCRIPT.py or -m MODULE, after NAME=VALUE"
        )


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def main() -> int:
    """Run the program of the process's own command line."""
    try:
        options, program = parse(sys.argv[1:])
        if program[0] in ("-h", "--help"):
            print(usage())
            return 0
        check_is_there(program)
        callback = EndingCallback(**options)
    except (TypeError, ValueError) as error:
        print(f"hf_rmsnorm.integrations.run: {error}", file=sys.stderr)
        return 2
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    name = sys.argv[0]
    DEFAULT_CALLBACKS.append(callback)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            # it was the current folder, for -m
            sys.path[0] = os.path.dirname(os.path.abspath(name))
            runpy.run_path(name, run_name="__main__")
    finally:
        DEFAULT_CALLBACKS.remove(callback)
        if not callback.has_seen_a_trainer:
            print(
                f"hf_rmsnorm: {name} made no Trainer here: call patch_model(model) in it",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    if code := main():  # as of a program that has ended, nothing is raised
        sys.exit(code)
