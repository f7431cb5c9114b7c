"""Run PROGRAM, unedited, with every model patched that it loads.

PROGRAM is a command that pip installed, as lm_eval, a Python file, or -m MODULE. All
words behind it are its own. A model of Transformers or diffusers is patched if it comes
from from_pretrained or from_config, or is handed to a Trainer. Each has a line on
stderr. Below a launcher: accelerate launch -m hf_rmsnorm run PROGRAM.
"""

import os
import runpy
import shutil
import sys
import sysconfig
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import ModuleType

from .common import CliError, add_choice_of_norms

KINDS = "name a Python file, a command that pip installed, or -m MODULE"
# Programs that only start others, and how these are started with their models patched.
LAUNCHERS = {
    "accelerate": "accelerate launch -m hf_rmsnorm run PROGRAM",
    "torchrun": "torchrun -m hf_rmsnorm run PROGRAM",
    "deepspeed": "deepspeed --no_local_rank --module hf_rmsnorm run PROGRAM",
    "trl": "accelerate launch -m hf_rmsnorm run -m trl.scripts.sft, or .dpo",
}
LAUNCHERS["accelerate.commands.launch"] = LAUNCHERS["accelerate"]
LAUNCHERS["torch.distributed.run"] = LAUNCHERS["torchrun"]
NONE_PATCHED = (
    "no model was patched in this process; one that is made by its class, outside of a "
    "Trainer, needs patch_model(model)"
)
OPTIONS = ("include", "exclude", "strict", "fuse_residual", "memory_efficient")


def add_arguments(parser) -> None:
    parser.usage = "hf-rmsnorm run [OPTIONS] PROGRAM [ARGUMENTS]"
    parser.allow_abbrev = False  # `split` knows whole words
    add_choice_of_norms(parser)
    parser.add_argument(
        "--no-fuse-residual",
        dest="fuse_residual",
        action="store_false",
        default=None,
        help="compute each norm by itself, without sums and rotations",
    )
    parser.add_argument(
        "--memory-efficient",
        action="store_true",
        default=None,
        help="keep the output of each norm for the backward, in place of its input",
    )


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """(the options of this command, PROGRAM and its arguments), of the words behind
    ``run``.
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in ("--include", "--exclude") else 1
    return words[:at], words[at:]


def find(program: list[str]) -> str:
    """The path of the file of a program, or the name of its module.

    Raises:
        CliError: there is none, it is no Python, or it only starts others.
    """
    if not program:
        raise CliError(f"there is nothing to run: {KINDS}")
    is_module = program[0] == "-m"
    name = "".join(program[1:2]) if is_module else program[0]
    launcher = LAUNCHERS.get(name if is_module else os.path.basename(name))
    if launcher is not None:
        raise CliError(
            f"{name} starts other processes, in which nothing would be patched: {launcher}"
        )
    if not is_module:
        return _path_of(name)
    sys.path[0] = os.getcwd()  # as for Python's own -m
    with suppress(ImportError, ValueError):
        if find_spec(name) is not None:
            return name
    raise CliError(f"there is no module {name!r}: {KINDS}")


def _path_of(name: str) -> str:
    own_scripts = sysconfig.get_path("scripts")  # also where no PATH leads to them
    folders = os.pathsep.join([own_scripts, os.environ.get("PATH", os.defpath)])
    path = name if os.path.isfile(name) else shutil.which(name, path=folders)
    if path is None:
        raise CliError(f"there is no program {name!r}: {KINDS}")
    if not _is_python(path):
        raise CliError(f"{path} is no Python program: {KINDS}")
    return path


def _is_python(path: str) -> bool:
    """Whether a file is Python by its name, or by the interpreter that it asks for."""
    if path.endswith((".py", ".pyw")):
        return True
    with open(path, "rb") as file:
        first = file.readline()
        second = file.readline()
    # pip has a shell start an interpreter whose path is too long for the first line
    return first.startswith(b"#!") and (
        b"python" in first or second.startswith(b"'''exec'")
    )


def run(args) -> int:
    """Run ``args.program`` as Python runs it, its models patched; `find` has found it.
    Returns 0, or raises the program's exception.
    """
    from ..integrations.loading import every_model_patched, say

    options = {name: getattr(args, name) for name in OPTIONS}
    with every_model_patched(**options) as models:
        try:
            if args.program[0] == "-m":
                sys.argv = args.program[1:]
                runpy.run_module(args.found, run_name="__main__", alter_sys=True)
            else:
                sys.argv = [args.found, *args.program[1:]]
                _run_file(os.path.abspath(args.found))
        finally:
            if not models.any_patched:
                say(NONE_PATCHED)
    return 0


def _run_file(path: str) -> None:
    """Run a file as ``__main__``. `runpy.run_path` writes another sys.argv or __file__
    than Python does, and takes ``__main__`` away from threads that live longer.
    """
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = loader
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), vars(main))
