"""What the subcommands share: their result, their errors, their arguments."""

import argparse
import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES |= {name: name for name in DTYPES.values()}


class CliError(Exception):
    """What went wrong and what to do about it, in one line."""


@dataclass
class Table:
    """Rows of cells, the first for their names: a table of rich on a terminal, and elsewhere the text."""

    rows: list[tuple[str, ...]]
    text: object

    def __str__(self) -> str:
        return str(self.text)

    def __rich__(self):
        from rich import table

        drawn = table.Table(*(table.Column(name, overflow="fold") for name in self.rows[0]))
        for row in self.rows[1:]:
            drawn.add_row(*map(_coloured, row))
        return drawn


@dataclass
class Result:
    """What a subcommand hands to `main`: ``data`` for ``--json``, ``text`` otherwise, and the exit code."""

    data: dict
    text: str | list[str | Table]
    code: int = 0


def one_line(text: object, limit: int = 400) -> str:
    """The text with every run of white space as one space, cut at limit characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _coloured(block):
    from rich.text import Text

    if isinstance(block, str):
        block = Text(block)
        block.highlight_words(["PASS"], "bold green")
        block.highlight_words(["FAIL"], "bold red")
    return block


def say(*blocks: str | Table) -> None:
    """Print on stdout, as long as somebody reads it; tables and colours on a terminal, where rich is installed."""
    try:
        if sys.stdout.isatty() and find_spec("rich"):
            from rich.console import Console

            Console(soft_wrap=True, highlight=False).print(*map(_coloured, blocks), sep="\n")
        else:
            print(*blocks, sep="\n", flush=True)
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        sys.stdout = None


def bar(args, *given, **how):
    """A tqdm on stderr, where that is a terminal."""
    from tqdm.auto import tqdm

    return tqdm(*given, disable=args.json or None, leave=False, **how)


@contextmanager
def steps(args, total: int):
    """A function to say which of so many steps is next."""
    with bar(args, total=total, initial=-1) as shown:
        yield lambda what: (shown.update(), shown.set_description(what))


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a local folder, a hub id, or demo:llama, demo:qwen3, demo:gpt2")
    text = "run the model code that the checkpoint brings"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="where to run, as in cuda:1 (default: the accelerator if there is one)")


def add_count(parser: argparse.ArgumentParser, option: str, default: int, what: str, least: int = 1) -> None:
    """Add an option that takes a whole number from `least` on."""

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    parser.add_argument(option, type=count, default=default, metavar="N", help=f"{what} (default {default})")


def pick_device(name: str | None):
    """The device called name, an accelerator's with its index; by default the current accelerator, or else the CPU."""
    import torch

    name = name or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    with suppress(RuntimeError, AssertionError):  # a word that torch does not know, a device that it does not find
        if (device := torch.empty(0, device=name).device).type != "meta":
            return device
    raise CliError(f"there is no device {name!r} here: pass cpu, cuda or cuda:1, say, or leave --device out")


def interpret_on_cpu(device) -> None:
    """Have Triton's interpreter run the kernels where device is the CPU, unless triton is imported already: it reads
    the variable when it decorates a kernel. transformers imports it when it loads a model.
    """
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def load_matplotlib(file):
    """matplotlib.pyplot, drawing into files; refused before any work where it could not write this one."""
    try:
        from matplotlib import backend_bases, pyplot
    except ImportError:
        raise CliError("--plot needs matplotlib: pip install matplotlib") from None
    pyplot.switch_backend("Agg")
    if file.suffix.lower().lstrip(".") not in backend_bases.FigureCanvasBase.get_supported_filetypes():
        raise CliError(f"cannot write {file}: no kind of picture has that ending; pass a name that ends in .png")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CliError(f"cannot write {file}: there is no such folder, or no permission; pass another file with --plot")
    return pyplot


def save_figure(plt, figure, file) -> None:
    """Write a figure where --plot says, and close it."""
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}; pass another file with --plot") from error
    finally:
        plt.close(figure)
