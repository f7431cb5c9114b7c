"""The commands that measure norms, models and host costs in one run.

A command that needs a GPU says so at once; --device cpu leaves out the part that does,
and names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.compact import compact_json
from benchmarks.plot import draw, load_matplotlib, save_figure
from hf_rmsnorm.cli.common import (
    DTYPES,
    CliError,
    Result,
    add_device,
    interpret_on_cpu,
    pick_device,
)
from hf_rmsnorm.paths import did_you_mean

FORMAT = 1
COUNTS = "counts what a decoder layer dispatches and saves, and times nothing"
GPU_TOKENS, CPU_TOKENS = [1, 2048, 8192, 16384], [1, 4]


class Measurement:
    """A subcommand.

    Args:
        doc: its help.
        measure: of (arguments, shapes by name, device type, dtype) the part of the
            result that is its own.
        tokens: what ``--tokens`` means, or None where it has no such option.
        draws: on which devices there is something to draw.
        on_cpu: what ``--device cpu`` does, of what needs a GPU otherwise.
    """

    def __init__(
        self,
        doc: str,
        measure: Callable,
        tokens: str | None = None,
        draws: tuple[str, ...] = (),
        on_cpu: str = "",
    ):
        self.__doc__, self.measure, self.tokens, self.draws, self.on_cpu = (
            doc,
            measure,
            tokens,
            draws,
            on_cpu,
        )

    def add_arguments(self, parser) -> None:
        parser.add_argument(
            "--models",
            metavar="NAMES",
            help="shapes of these, comma-separated (default: all real)",
        )
        if self.tokens:
            parser.add_argument(
                "--tokens", type=_numbers, metavar="NS", help=self.tokens
            )
        parser.add_argument(
            "--dtype",
            choices=list(DTYPES),
            default="bf16",
            help="dtype of it all (default bf16)",
        )
        add_device(parser)
        parser.add_argument(
            "--out", metavar="FILE", type=Path, help="also write the JSON there"
        )
        if self.draws:
            parser.add_argument(
                "--plot",
                metavar="PNG",
                type=Path,
                help="also draw it (needs matplotlib)",
            )

    def run(self, args) -> Result:
        """Measure on the device that is asked for, which becomes the current one."""
        shapes = chosen_shapes(args.models)
        device = self._device(args)
        picture = getattr(args, "plot", None)
        if picture and device.type not in self.draws:
            raise CliError(
                f"{args.command} has nothing to draw on this device: host --plot draws host costs"
            )
        plt = load_matplotlib() if picture else None
        if args.command in ("kernels", "train"):
            # the others count launches and run no kernel there
            interpret_on_cpu(device)
        data = self._result(args, shapes, device)
        if plt is not None:
            _draw(plt, data, picture)
        if args.out:
            write_result(args.out, data)
        from benchmarks.tables import text

        return Result(data, text(data))

    def _device(self, args):
        device = pick_device(args.device)
        if self.on_cpu and args.device is None and device.type == "cpu":
            raise CliError(
                f"{args.command} needs a GPU, and torch sees none here: --device cpu {self.on_cpu}"
            )
        if device.type not in ("cpu", "cuda"):
            raise CliError(
                f"this measures on cuda devices and on the cpu, not on {device.type}: pass --device cpu"
            )
        return device

    def _result(self, args, shapes: dict, device) -> dict:
        import torch

        from benchmarks.environment import environment

        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dtype = getattr(torch, DTYPES[args.dtype])
        data = {
            "format": FORMAT,
            "bench": args.command,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **environment(cuda),
            "dtype": DTYPES[args.dtype],
        }
        torch.manual_seed(0)
        # Graphs are not captured on the default stream.
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
            return data | self.measure(args, shapes, device.type, dtype)


def chosen_shapes(names: str | None, default: dict | None = None) -> dict:
    """The shapes of a comma-separated list of names; without one `default`, or all of
    real models.

    Raises:
        CliError: a name is none of a shape.
    """
    from benchmarks.shapes import LAYERS, SHAPES, TINY

    if names is None:
        return default or SHAPES
    known = SHAPES | LAYERS | TINY
    for name in names.split(","):
        if name not in known:
            like = did_you_mean(name, known)
            raise CliError(
                f"no such shape: {name}; choose among {', '.join(known)}{like}"
            )
    return {name: known[name] for name in names.split(",")}


def write_result(file: Path, data: dict) -> None:
    """Write a result as JSON.

    Raises:
        CliError: the file cannot be written.
    """
    try:
        file.write_text(compact_json(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"cannot write {file}: {error.strerror}; pass another file with --out"
        ) from error


def _draw(plt, data: dict, picture: Path) -> None:
    if not data.get("cases", data.get("models")):
        raise CliError(f"nothing to draw: {'; '.join(data['not_measured'])}")
    save_figure(plt, draw(plt, data), picture)
    data["plot"] = str(picture)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{min(numbers)} is below 1")
    return numbers


def _kernels(args, shapes, device, dtype) -> dict:
    from benchmarks import kernels
    from benchmarks.timing import Stopwatch

    tokens = args.tokens or (GPU_TOKENS if device == "cuda" else CPU_TOKENS)
    return kernels.run(shapes, tokens, dtype, Stopwatch(device))


def _host(args, shapes, device, dtype) -> dict:
    from benchmarks import host

    return host.run(device, dtype) | {"layers": _layers(shapes)}


def _layers(shapes) -> dict:
    from benchmarks.counting import decoded_layer, saved_by_layer

    return {
        name: {
            variant: decoded_layer(shape, patch)
            | {"saved_bytes_per_token": saved_by_layer(shape, patch)}
            for variant, patch in (("unpatched", False), ("patched", True))
        }
        for name, shape in shapes.items()
    }


def _generate(args, shapes, device, dtype) -> dict:
    from benchmarks import models

    data = {
        "phase": "decode",
        "layers": _layers(shapes),
        "models": {},
        "not_measured": [],
    }
    if device == "cpu":
        data["not_measured"] = [
            "tokens per second before and after: a CPU runs the original forwards in both cases"
        ]
        return data
    sizes = dict(models.SIZES)
    if args.tokens:
        sizes["new_tokens"] = args.tokens[0]
    data["models"] = models.run(shapes, "decode", sizes, models.LAYERS, device, dtype)
    return data


def _train(args, shapes, device, dtype) -> dict:
    from benchmarks import training

    chosen = shapes if args.models else None
    rehearsal = device == "cpu"
    data: dict = {"not_measured": []}
    failures = training.run(device, data, rehearsal, dtype, chosen)
    data["not_measured"] += failures
    if rehearsal:
        data["not_measured"].append("speed, memory and losses: a CPU rehearses the run")
    return data


class Ratios:
    """What the launch path of the installed Triton costs the host; needs no GPU.

    Of a norm in inference and of a LLaMA layer for one token, beside the unpatched model,
    the launches themselves left out: the columns of scripts/versions.py.
    """

    def add_arguments(self, parser) -> None:
        """It has none besides the common ones."""

    def run(self, args) -> Result:
        from benchmarks import host

        reason = host.untimed()
        if reason is not None:
            raise CliError(reason)
        import triton

        data = {"triton": triton.__version__, **host.version_ratios()}
        lines = [f"Triton {triton.__version__}, the host's time without the launch:"]
        for name, words in (("norm", "a norm"), ("layer", "a LLaMA layer, one token")):
            figures = "{unpatched:.1f} -> {patched:.1f} us ({ratio:.2f})"
            lines.append(f"  {words}: {figures.format(**data[name])}")
        return Result(data, "\n".join(lines))


COMMANDS = {
    "ratios": Ratios(),
    "kernels": Measurement(
        """Norms of real models' shapes beside Hugging Face eager, F.rms_norm, torch.compile, Liger and Quack.

RMSNorm, residual add + norm and q/k norms; each implementation is first judged against float64, then timed with a cold
L2 beside the copy bandwidth of the same run. With --device cpu they are judged in Triton's interpreter, and not
timed.""",
        _kernels,
        "numbers of tokens, comma-separated (default 1,2048,8192,16384; on a CPU 1,4)",
        ("cuda",),
        "judges the kernels in Triton's interpreter, which takes minutes and times nothing",
    ),
    "host": Measurement(
        """What a call costs the host, and what a decoder layer dispatches and saves; needs no GPU.""",
        _host,
        draws=("cpu", "cuda"),
    ),
    "generate": Measurement(
        """Tokens per second of random 8-layer models: unpatched, patched, with Liger's kernels, and with both.""",
        _generate,
        "new tokens (default 128)",
        on_cpu=COUNTS,
    ),
    "train": Measurement(
        """Training runs on this repository's text: unpatched, patched, with Liger's kernels, and with both.

A LLaMA and a Qwen3 of eight layers, bfloat16, AdamW, 240 steps of 8,192 tokens; the same weights and batches in each
run. Tokens per second, peak memory and the loss of each step. With --device cpu tiny models take four steps.""",
        _train,
        draws=("cpu", "cuda"),
        on_cpu="rehearses it with tiny models",
    ),
}
