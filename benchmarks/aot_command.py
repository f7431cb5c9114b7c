"""Compile the kernels ahead of time, without a GPU; print their registers, spills and
access widths.

python -m benchmarks aot                                       the table of sm_90, RMSNorm in bf16
python -m benchmarks aot sm_80,gfx942:gemma-bf16:128,4096      TARGETS:VARIANTS:SIZES, and more of them if wanted
python -m benchmarks aot sm_90:: --json                        every variant and size
"""

from __future__ import annotations

import os
from itertools import product

from benchmarks.tables import columns
from hf_rmsnorm.cli.common import CliError, Result

FIGURES = ("target", "variant", "kernel", "hidden_size", "warps")
FIGURES += ("registers", "spilled", "blocks", "shared")


def add_arguments(parser) -> None:
    parser.add_argument(
        "cases", nargs="*", metavar="TARGETS:VARIANTS:SIZES",
        default=["sm_90:llama-bf16"],
        help="each a comma-separated list, an empty one meaning all (default sm_90:llama-bf16)",
    )  # fmt: skip


def run(args) -> Result:
    # read when triton is imported: this process compiles
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    from benchmarks import aot

    cases = [case for text in args.cases for case in parse_cases(text)]
    found = aot.examine_all(cases)
    rows = [(*FIGURES, "widths")]
    for kernel in found:
        widths = kernel["widths"].items()
        words = [f"{name}:{'/'.join(map(str, sizes))}" for name, sizes in widths]
        rows.append((*(kernel[name] for name in FIGURES), " ".join(words)))
    data = {"triton": triton.__version__, "kernels": found}
    return Result(data, "\n".join(columns(rows)))


def parse_cases(text: str) -> list[tuple[str, str, int]]:
    """(target, variant, hidden size) of each case that ``TARGETS:VARIANTS:SIZES``
    means.
    """
    from benchmarks.aot import CHIPS, SIZES, VARIANTS, is_served

    def choose(part: str, known) -> list[str]:
        chosen = part.split(",") if part else list(known)
        for name in chosen:
            if name not in known:
                raise CliError(f"{name} is not one of {', '.join(known)}")
        return chosen

    targets, variants, sizes, *_ = [*text.split(":"), "", ""]
    sizes = map(int, sizes.split(",")) if sizes else SIZES
    cases = product(choose(targets, CHIPS), choose(variants, VARIANTS), sizes)
    return [case for case in cases if is_served(VARIANTS[case[1]], case[2])]
