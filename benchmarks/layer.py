"""Count what one decoder layer does: Hugging Face eager, Liger, this package, and both
together; needs no GPU.

Each layer has its published size and random bfloat16 weights. It runs on a CPU: 64
tokens, then one more behind them. Liger is applied by its own
`apply_liger_kernel_to_*(model=...)` with its defaults, so it fuses the MLP too;
together with this package without its norms and its rotary embedding. A torch operator
counts as one kernel, which reads its inputs once and writes its outputs once. Views and
allocations are free. A Triton kernel is compiled for an H100 (sm_90), and its PTX is
executed. Each byte that a launch reads counts once, and so does each that it writes.
Bytes moved are those of norms, residual sums and rotary embedding, over 64. Bytes kept
are the storages that autograd saves in the layer, without parameters and the tables of
the rotary embedding. Equal bits: the share of the elements of the layer's output, for
64 tokens, that equal those of eager on the same CPU. Instructions and sectors (32
bytes) are those of the PTX, for one row.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.compact import write_result
from benchmarks.layer_table import models_table, row_table
from benchmarks.ptx.driver import NEEDED, run_kernels_on_cpu
from benchmarks.shapes import SHAPES, TINY, ModelShape
from hf_rmsnorm.cli.common import CliError, Result, add_count
from hf_rmsnorm.cli.env import versions

TOKENS = 64
LIBRARIES = ("torch", "triton", "transformers", "liger-kernel")


def add_arguments(parser) -> None:
    add = parser.add_argument
    help = "these alone, comma-separated, and no norm by itself"
    add("--models", metavar="NAMES", help=help)
    add_count(parser, "--tokens", TOKENS, "of the prompt")
    add("--out", metavar="FILE", type=Path, help="also write the JSON there")


def run(args) -> Result:
    shapes = _chosen(args.models)
    start_executor()
    from benchmarks.layer_count import count_layer
    from benchmarks.rows import beside_liger

    used = versions(LIBRARIES)
    liger = used["liger-kernel"] is not None
    data = {"versions": used, "tokens": args.tokens, "models": {}}
    for name, shape in shapes.items():
        data["models"][name] = count_layer(shape, args.tokens, liger)
    if args.models is None:
        data["row"] = beside_liger(liger)
    if args.out:
        write_result(args.out, data)
    lines = models_table(data)
    if "row" in data:
        lines += ["", *row_table(data)]
    return Result(data, "\n".join(lines))


def _chosen(names: str | None) -> dict[str, ModelShape]:
    """The shapes of a comma-separated list of names; without one all of published
    models.
    """
    if names is None:
        return SHAPES
    known = SHAPES | TINY
    for name in names.split(","):
        if name not in known:
            raise CliError(f"no such shape: {name}; choose among {', '.join(known)}")
    return {name: known[name] for name in names.split(",")}


class Rows:
    """Count what each kernel takes for a row: instructions of warps, 32-byte sectors of
    memory, barriers, shuffles; needs no GPU.

    The kernels are compiled for an H100 (sm_90) and their PTX is executed.
    """

    def add_arguments(self, parser) -> None:
        """It has none besides the common ones."""

    def run(self, args) -> Result:
        start_executor()
        from benchmarks.rows import of_every_kernel

        found = of_every_kernel()
        lines = []
        for name, counts in found.items():
            figures = "  ".join(f"{unit} {value:g}" for unit, value in counts.items())
            lines.append(f"{name:60} {figures}")
        return Result(found, "\n".join(lines))


def start_executor() -> None:
    """From now on kernels on CPU tensors run from their PTX."""
    if "triton" in sys.modules:
        raise CliError(
            "triton is imported already, and may interpret kernels: run this in a process of its own"
        )
    os.environ.pop("TRITON_INTERPRET", None)
    if not run_kernels_on_cpu():
        raise CliError(f"this executes PTX, of {NEEDED}: pip install triton==3.9.0")
    from triton.runtime import driver

    # as Liger's rotary embedding and backward write
    driver.active.machine.lenient = True
