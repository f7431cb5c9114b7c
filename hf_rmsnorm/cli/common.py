"""Shared by all subcommands: the result, errors, arguments."""

import argparse
import os
import sys
import textwrap
from dataclasses import dataclass

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES |= {name: name for name in DTYPES.values()}
A_MINUTE = 60.0  # in seconds


class CliError(ValueError):
    """An error and its cure, in one line."""


@dataclass
class Result:
    """The result of a subcommand: ``data`` for ``--json``, ``text`` otherwise, and the
    exit code.
    """

    data: dict
    text: str
    code: int = 0


def one_line(text: object, limit: int = 400) -> str:
    """The text with every run of white space as one space, cut at limit characters."""
    return textwrap.shorten(str(text), limit, placeholder="...")


def say(text: str) -> None:
    """Print on stdout, unless the reader has closed it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `head` for example
        sys.stdout = None


def progress_bar(total: int, what: str, unit: str = "step"):
    """A bar of tqdm on stderr, with the time that remains; elsewhere than on a terminal
    a line for each minute of long work.
    """
    from tqdm import tqdm

    shows = {"mininterval": 0, "leave": False, "dynamic_ncols": True}
    if not sys.stderr.isatty():
        shows = {"mininterval": A_MINUTE, "delay": A_MINUTE}
    shows |= {"unit": unit, "unit_scale": unit == "B", "miniters": 1}
    return tqdm(total=total, desc=what, file=sys.stderr, **shows)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a local folder, a hub id, or demo:llama, demo:qwen3, demo:gpt2",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the model code that the checkpoint brings",
    )


def add_choice_of_norms(parser: argparse.ArgumentParser) -> None:
    """Add the options of `patch_model` that choose norms."""
    glob = {"metavar": "GLOB", "action": "append"}
    parser.add_argument("--include", **glob, help="patch only module paths that match")
    parser.add_argument("--exclude", **glob, help="skip module paths that match")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="leave a model unpatched if one of its norms would be skipped",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        help="where to run, for example cuda:1 (default: the GPU if there is one)",
    )


def add_count(
    parser: argparse.ArgumentParser,
    option: str,
    default: int | None,
    what: str,
    least: int = 1,
) -> None:
    """Add an option that takes a whole number from `least` on. None: `what` says what
    the default is.
    """
    if default is not None:
        what += f" (default {default})"

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    parser.add_argument(
        option,
        type=count,
        default=default,
        metavar="N",
        help=what,
    )


def pick_device(name: str | None):
    """The device called name, an accelerator's with its index; by default the current
    accelerator, or else the CPU.
    """
    import torch

    name = name or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        # a word that torch does not know, a device that it does not find
        raise CliError(
            f"there is no device {name!r} here: pass cpu, cuda or cuda:1, or leave "
            "--device out"
        ) from error


def interpret_on_cpu(device) -> None:
    """Run the kernels in Triton's interpreter where device is the CPU.

    Triton reads the variable when it is imported, which transformers does when it loads
    a model.
    """
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")
