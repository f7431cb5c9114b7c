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
from collections.abc import Iterable
from importlib.util import find_spec
from typing import NamedTuple, get_args, get_origin

from transformers.trainer import DEFAULT_CALLBACKS

from ..patching.numerics import NUMERICS
from .trainer import PATCH_OPTIONS, EndingCallback

FLAG, GLOBS, WORD = "True or False", "globs with commas between", "a word"
HELP = "--help says how to call this"


class Wrong(Exception):
    """An error in the command line, in one line."""


class Program(NamedTuple):
    """The program to run: a script or a module, and its sys.argv."""

    name: str
    is_module: bool
    words: list[str]


def _say(text: str) -> None:
    print(f"hf_rmsnorm.integrations.run: {' '.join(text.split())}", file=sys.stderr)


def kinds() -> dict[str, str]:
    """Option -> the kind of its value, from the signature of `patch_model`."""
    found = {
        name: _kind(parameter.annotation) for name, parameter in PATCH_OPTIONS.items()
    }
    return found | {"recentre": FLAG, "train_as_rms": FLAG}


def _kind(annotation) -> str:
    types = get_args(annotation) or (annotation,)
    if bool in types:
        return FLAG
    if any(get_origin(each) is Iterable for each in types):
        return GLOBS
    return WORD


def usage() -> str:
    takes = kinds() | {"numerics": f"one of {', '.join(NUMERICS)}"}
    width = max(map(len, takes))
    return "\n".join(
        [
            __doc__,
            *(f"    {name:<{width}} = {values}" for name, values in takes.items()),
        ]
    )


def parse(words: list[str]) -> tuple[dict, Program]:
    """The options and the program of a command line.

    Raises:
        Wrong: the command line has an error.
    """
    words, options = list(words), {}
    while words and _is_option(words[0]):
        name, value = words.pop(0).split("=", 1)
        if name in options:
            raise Wrong(
                f"{name} is there twice: put commas between globs, or leave one out"
            )
        options[name] = _value(name, value)
    is_module = words[:1] == ["-m"]
    if is_module:
        words.pop(0)
    if not words:
        raise Wrong(f"there is nothing to run: name SCRIPT.py or -m MODULE; {HELP}")
    name = words[0]
    if name.startswith("-"):
        raise Wrong(
            f"{name} is no option: options are NAME=VALUE, without dashes; {HELP}"
        )
    program = Program(name, is_module, words)
    _check_is_there(program)
    return options, program


def _is_option(word: str) -> bool:
    return "=" in word and word.split("=", 1)[0].isidentifier()


def _value(name: str, text: str):
    kind = kinds().get(name, WORD)  # the callback refuses an unknown name
    if not text:
        raise Wrong(f"{name}= has no value: leave it out, or give it {kind}")
    if kind == FLAG:
        return {"True": True, "False": False}.get(text, text)
    return text.split(",") if kind == GLOBS else text


def _check_is_there(program: Program) -> None:
    name = program.name
    if not program.is_module:
        if not os.path.isfile(name):
            raise Wrong(
                f"there is no file {name}: name SCRIPT.py or -m MODULE, after NAME=VALUE"
            )
        return
    try:
        spec = find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        if is_package and find_spec(f"{name}.__main__") is None:
            raise Wrong(f"{name} is a package without __main__: name a module in it")
    except (ImportError, ValueError) as error:
        raise Wrong(f"cannot run -m {name}: {error}") from None
    if spec is None:
        raise Wrong(
            f"there is no module {name}: name SCRIPT.py or -m MODULE, after NAME=VALUE"
        )


def main() -> int:
    """Run the program of the process's own command line."""
    first = next((word for word in sys.argv[1:] if not _is_option(word)), "")
    if first in ("-h", "--help"):
        print(usage())
        return 0
    try:
        options, program = parse(sys.argv[1:])
        callback = EndingCallback(**options)
    except (Wrong, TypeError, ValueError) as error:
        _say(str(error))
        return 2
    sys.argv = program.words
    DEFAULT_CALLBACKS.append(callback)
    try:
        if program.is_module:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            # it was the current folder, for -m
            sys.path[0] = os.path.dirname(os.path.abspath(program.name))
            runpy.run_path(program.name, run_name="__main__")
    finally:
        DEFAULT_CALLBACKS.remove(callback)
        if not callback.has_seen_a_trainer:
            print(
                f"hf_rmsnorm: {program.name} made no Trainer here: call patch_model(model) in it",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    if code := main():  # as of a program that has ended, nothing is raised
        sys.exit(code)
