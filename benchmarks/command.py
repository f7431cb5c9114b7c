"""How fast the norms of real models are here, beside Hugging Face eager, F.rms_norm, torch.compile, Liger and Quack.

kernels: norms, residual add + norm and q/k norms, each implementation first judged against float64, with a cold L2 and
the copy bandwidth of the same run. generate, train: tokens per second and step time of random 8-layer models before and
after the patch. host: what a call costs the host, and what a decoder layer dispatches and saves. Without a GPU, what
needs one is left out, and named.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

from hf_rmsnorm.cli.common import (
    DTYPES,
    CliError,
    Result,
    add_device,
    interpret_on_cpu,
    load_matplotlib,
    pick_device,
    save_figure,
)

FORMAT = 1
GPU_TOKENS, CPU_TOKENS = [1, 2048, 8192, 16384], [1, 4]


def add_arguments(parser) -> None:
    parser.add_argument("what", choices=["kernels", "generate", "train", "host"], help="what to measure")
    parser.add_argument("--models", metavar="NAMES", help="shapes of these models, comma-separated (default: all real)")
    parser.add_argument(
        "--tokens", type=_numbers, metavar="NS",
        help="kernels: numbers of tokens, comma-separated (default 1,2048,8192,16384; on a CPU 1,4); generate: new "
        "tokens (default 128); train: tokens of a step (default 4096)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="dtype of it all (default bf16)")
    add_device(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the JSON there")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="also draw bandwidth or host costs (needs matplotlib)")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{min(numbers)} is below 1")
    return numbers


def run(args) -> Result:
    from benchmarks.shapes import SHAPES, TINY

    every = SHAPES | TINY
    names = args.models.split(",") if args.models else list(SHAPES)
    if unknown := [name for name in names if name not in every]:
        raise CliError(f"no such shape: {', '.join(unknown)}; choose among {', '.join(every)}")
    shapes = {name: every[name] for name in names}
    device = pick_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise CliError(f"bench measures on cuda devices and on the cpu, not on {device.type}: pass --device cpu")
    cuda = device.type == "cuda"
    if args.plot and (args.what not in ("kernels", "host") or (args.what == "kernels" and not cuda)):
        raise CliError(f"bench {args.what} has nothing to draw on this device: bench host --plot draws host costs")
    plt = load_matplotlib() if args.plot else None
    if args.what == "kernels":
        interpret_on_cpu(device)  # the others count launches and run no kernel there

    import torch

    from benchmarks.environment import environment
    from benchmarks.tables import text

    if cuda:
        torch.cuda.set_device(device)
    dtype = getattr(torch, DTYPES[args.dtype])
    data = {
        "format": FORMAT,
        "bench": args.what,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **environment(cuda),
        "dtype": DTYPES[args.dtype],
    }
    torch.manual_seed(0)
    measure = {"kernels": _kernels, "host": _host, "generate": _models, "train": _models}[args.what]
    # Graphs are not captured on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
        data |= measure(args, shapes, device.type, dtype)
    if plt is not None:
        if not data["cases"]:
            raise CliError(f"nothing to draw: {'; '.join(data['not_measured'])}")
        from benchmarks.plot import draw

        save_figure(plt, draw(plt, data), args.plot)
        data["plot"] = str(args.plot)
    if args.out:
        try:
            args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CliError(f"cannot write {args.out}: {error.strerror}; pass another file with --out") from error
    return Result(data, text(data))


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
            variant: decoded_layer(shape, patch) | {"saved_bytes_per_token": saved_by_layer(shape, patch)}
            for variant, patch in (("unpatched", False), ("patched", True))
        }
        for name, shape in shapes.items()
    }


def _models(args, shapes, device, dtype) -> dict:
    from benchmarks import models

    phase = "decode" if args.what == "generate" else "train"
    data = {"phase": phase, "layers": _layers(shapes), "models": {}, "not_measured": []}
    if device == "cpu":
        what = "tokens per second" if phase == "decode" else "the time and peak memory of a step"
        data["not_measured"] = [f"{what} before and after: a CPU runs the original forwards in both cases"]
        return data
    sizes = dict(models.SIZES)
    if args.tokens:
        sizes |= {"new_tokens": args.tokens[0]} if phase == "decode" else {"batch": 1, "length": args.tokens[0]}
    data["models"] = models.run(shapes, phase, sizes, models.LAYERS, device, dtype)
    return data
