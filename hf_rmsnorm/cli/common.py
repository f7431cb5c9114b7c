"""Shared by all subcommands: the result, errors, arguments, progress bars, plots."""

import argparse
import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES |= {name: name for name in DTYPES.values()}


class CliError(Exception):
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
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def say(text: str) -> None:
    """Print on stdout, unless the reader has closed it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `head` for example
        sys.stdout = None


def bar(args, *values, **options):
    """A progress bar on stderr, if that is a terminal."""
    from tqdm.auto import tqdm

    return tqdm(*values, disable=args.json or None, leave=False, **options)


@contextmanager
def steps(args, total: int):
    """A progress bar of so many steps; gives a function that takes the name of the next
    step.
    """
    with bar(args, total=total, initial=-1) as shown:
        yield lambda what: (shown.update(), shown.set_description(what))


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a local folder, a hub id, or demo:llama, demo:qwen3, demo:gpt2",
    )
    text = "run the model code that the checkpoint brings"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)


def add_verbose(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--verbose", action="store_true", help=f"print {what}")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        help="where to run, for example cuda:1 (default: the GPU if there is one)",
    )


def add_count(
    parser: argparse.ArgumentParser,
    option: str,
    default: int,
    what: str,
    least: int = 1,
) -> None:
    """Add an option that takes a whole number from `least` on."""

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
        help=f"{what} (default {default})",
    )


def pick_device(name: str | None):
    """The device called name, an accelerator's with its index; by default the current
    accelerator, or else the CPU.
    """
    import torch

    name = name or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    with suppress(RuntimeError, AssertionError):
        # a word that torch does not know, a device that it does not find
        if (device := torch.empty(0, device=name).device).type != "meta":
            return device
    raise CliError(
        f"there is no device {name!r} here: pass cpu, cuda or cuda:1, or leave --device out"
    )


def interpret_on_cpu(device) -> None:
    """Run the kernels in Triton's interpreter where device is the CPU.

    Triton reads the variable when it is imported, which transformers does when it loads
    a model.
    """
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def load_matplotlib(file):
    """matplotlib.pyplot, which draws into files; an error before any work if it could
    not write this one.
    """
    try:
        from matplotlib import backend_bases, pyplot
    except ImportError:
        raise CliError("--plot needs matplotlib: pip install matplotlib") from None
    pyplot.switch_backend("Agg")
    if (
        file.suffix.lower().lstrip(".")
        not in backend_bases.FigureCanvasBase.get_supported_filetypes()
    ):
        raise CliError(
            f"cannot write {file}: no kind of picture has that ending; pass a name that ends in .png"
        )
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CliError(
            f"cannot write {file}: there is no such folder, or no permission; pass another file with --plot"
        )
    return pyplot


def save_figure(plt, figure, file) -> None:
    """Write a figure where --plot says, and close it."""
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise CliError(
            f"cannot write {file}: {error.strerror}; pass another file with --plot"
        ) from error
    finally:
        plt.close(figure)
