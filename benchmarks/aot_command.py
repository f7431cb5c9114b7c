"""Compile the kernels ahead of time, without a GPU; print their registers, spills and
access widths.

python -m benchmarks aot                                       the table of sm_90, RMSNorm in bf16
python -m benchmarks aot sm_80,gfx942:gemma-bf16:128,4096      TARGETS:VARIANTS:SIZES, and more of them if wanted
python -m benchmarks aot sm_90:: --json                        every variant and size
"""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import product

from benchmarks.tables import columns
from hf_rmsnorm.cli.common import CliError, Result
from hf_rmsnorm.paths import did_you_mean

HEADS = ("target", "variant", "kernel", "N", "warps")
HEADS += ("registers", "spilled", "blocks", "shared", "widths")


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

    if aot.compiled.INTERPRETED:
        raise CliError(
            "triton was imported for its interpreter, which compiles nothing: run this in a process anew"
        )
    cases = [case for text in args.cases for case in parse_cases(text)]
    found = aot.examine_all(cases)
    rows = [HEADS]
    for c in found:
        widths = [f"{name}:{'/'.join(map(str, w))}" for name, w in c.widths.items()]
        figures = (c.hidden_size, c.warps, c.registers, c.spilled, c.blocks, c.shared)
        rows.append((c.target, c.variant, c.kernel, *figures, " ".join(widths)))
    data = {"triton": triton.__version__, "kernels": [asdict(c) for c in found]}
    return Result(data, "\n".join(columns(rows)))


def parse_cases(text: str) -> list[tuple[str, str, int]]:
    """(target, variant, hidden size) of each case that ``TARGETS:VARIANTS:SIZES``
    means.

    Raises:
        CliError: it names a target or variant that is none, or a size that is no
            number.
    """
    from benchmarks.aot import CHIPS, SIZES, VARIANTS, is_served

    def choose(part: str, known) -> list[str]:
        chosen = part.split(",") if part else list(known)
        if unknown := [c for c in chosen if c not in known]:
            like = did_you_mean(unknown[0], known)
            raise CliError(
                f"{text}: {', '.join(unknown)} is not one of {', '.join(known)}{like}"
            )
        return chosen

    targets, variants, sizes, *_ = [*text.split(":"), "", ""]
    try:
        sizes = list(map(int, sizes.split(","))) if sizes else SIZES
    except ValueError:
        raise CliError(
            f"{text}: {sizes} is no list of hidden sizes, as in 128,4096"
        ) from None
    cases = product(choose(targets, CHIPS), choose(variants, VARIANTS), sizes)
    return [case for case in cases if is_served(VARIANTS[case[1]], case[2])]
