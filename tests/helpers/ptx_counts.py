"""Counts what compiled kernels do for a row: ``python tests/helpers/ptx_counts.py``
prints it, a line a kernel.

Each count is of the PTX for sm_90 as the executor runs it: instructions of warps,
32-byte sectors of global memory that a warp's access touches, barriers that a program
meets, and exchanges between the lanes of a warp. They are counts, not times; the
assembler behind PTX makes fewer or more instructions of it.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from ptx import machine  # noqa: E402
from ptx.driver import NEEDED, run_kernels_on_cpu  # noqa: E402

UNITS = ("instructions", "sectors", "barriers", "shuffles")
BF16 = torch.bfloat16


class Counting(machine._Run):
    """A run that counts. A statement costs every warp that comes to it, whatever its
    guard.
    """

    counts: Counter = Counter()

    def _step(self, instruction):
        warps = self.count // 32
        if self.mask is not None:
            warps = int(self.mask.reshape(-1, 32).any(1).sum())
        self.counts["instructions"] += warps
        if instruction.act in ("barrier", "shuffle"):
            self.counts[instruction.act + "s"] += warps
        super()._step(instruction)

    def _touches(self, lanes, address):
        """Sectors of a warp's access: its lanes read or write 32 bytes at most, from a
        multiple of what they take.
        """
        places = np.stack([lanes // 32, address >> np.uint64(5)])
        self.counts["sectors"] += np.unique(places, axis=1).shape[1]

    def _ld(self, instruction, mask):
        self._of_global(instruction, mask)
        super()._ld(instruction, mask)

    def _st(self, instruction, mask):
        self._of_global(instruction, mask)
        super()._st(instruction, mask)

    def _of_global(self, instruction, mask):
        if instruction.numbers[0] == "global":
            offset = instruction.numbers[1]
            address = self._address(instruction.sources[0], mask, offset)
            self._touches(self._among(mask), address)

    def _copy(self, instruction, mask):
        read = self._some(instruction.sources[2], mask, "size") != 0
        source = self._address(instruction.sources[1], mask, instruction.numbers[1])
        self._touches(self._among(mask)[read], source[read])
        super()._copy(instruction, mask)


def of_launch(executor: machine.Machine, launch: tuple) -> Counter:
    """What all warps of a launch do, by unit; `launch` is one that the driver kept."""
    with (
        patch.object(machine, "_Run", Counting),
        patch.object(Counting, "counts", Counter()),
    ):
        executor.launch(*launch)
        return Counting.counts


def _back(made, leaves, dy):
    outputs = made()
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    gradients = []
    for y in outputs:
        gradients.append(dy if y.shape == dy.shape else torch.ones_like(y))
    torch.autograd.grad(outputs, leaves, gradients)


def _norms():
    """Name -> (rows, what runs the kernel): enough rows for each persistent program to
    take some.
    """
    from add_norm import fused_add_norm

    from hf_rmsnorm import NormSpec
    from hf_rmsnorm.ops import fused_norm

    rms = NormSpec(False, 1e-6, rounding="before_weight")
    layer = NormSpec(True, 1e-5, has_bias=True)
    # powers of two, and sizes between them
    for size in (128, 896, 1024, 2560, 4096, 5120, 8192, 12288):
        rows = max(32, 2**17 // size)
        x, residual, dy = (torch.randn(rows, size).to(BF16) for _ in range(3))
        w, b = (torch.randn(size).to(BF16).requires_grad_() for _ in range(2))
        x.requires_grad_()
        for name, leaves, made in (
            ("RMSNorm", (x, w), partial(fused_norm, x, w, None, rms)),
            ("LayerNorm", (x, w, b), partial(fused_norm, x, w, b, layer)),
            (
                "sum and RMSNorm",
                (x, w),
                partial(fused_add_norm, x, residual, w, None, rms),
            ),
        ):
            yield f"{name} {size}", rows, partial(_back, made, leaves, dy)


def _heads():
    from heads import fused_qk_norm

    from hf_rmsnorm import NormSpec

    q = torch.randn(2, 16, 16, 128).to(BF16)
    k = torch.randn(2, 16, 8, 128).to(BF16)
    q = q.transpose(1, 2).requires_grad_()
    k = k.transpose(1, 2).requires_grad_()
    tables = [torch.randn(2, 16, 128).to(BF16) for _ in range(2)]
    weights = [torch.randn(128).to(BF16).requires_grad_() for _ in range(2)]
    spec = NormSpec(False, 1e-6, rounding="before_weight")
    made = partial(fused_qk_norm, q, k, *weights, spec, *tables)
    run = partial(_back, made, (q, k, *weights), torch.ones(()))
    yield "q and k with rotary embedding 128", 2 * 16 * 24, run


def counted() -> dict:
    """{name of a case and of its kernel: what a row takes of each of `UNITS`}; of
    barriers and of sums, a program.
    """
    from triton.runtime import driver

    from hf_rmsnorm import use_backend

    torch.manual_seed(0)
    found = {}
    for name, rows, run in (*_norms(), *_heads()):
        driver.active.launches = []
        with use_backend("triton"):
            run()
        made = driver.active.launches
        driver.active.launches = None
        for launch in made:
            kernel, grid, *_ = launch
            all_warps = of_launch(driver.active.machine, launch)
            programs = int(np.prod(grid))
            share = rows
            if "reduce" in kernel.name:
                share = programs
            counts = {unit: all_warps[unit] / share for unit in UNITS}
            warps = programs * kernel.threads // 32
            counts["barriers"] = all_warps["barriers"] / warps
            key = f"{name} {kernel.name}"
            found[key] = {unit: round(value, 2) for unit, value in counts.items()}
    return found


if __name__ == "__main__":
    if not run_kernels_on_cpu():
        sys.exit(f"this needs {NEEDED}, and TRITON_INTERPRET unset")
    for name, counts in counted().items():
        print(
            f"{name:60}",
            "  ".join(f"{unit} {value:g}" for unit, value in counts.items()),
        )
