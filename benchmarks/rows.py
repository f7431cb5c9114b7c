"""What compiled kernels take for a row, as the executor of PTX runs them: of every
kernel, and of one norm beside Liger's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from triton.runtime import driver

from benchmarks.layer_count import LIGER
from benchmarks.peers import (
    OURS,
    Case,
    calls_of,
    implementations,
    make_norms,
    make_set,
    other_libraries,
)
from benchmarks.ptx.counts import UNITS, of_launch
from benchmarks.ptx.driver import SMS
from hf_rmsnorm import use_backend

BF16 = torch.bfloat16
HIDDEN_SIZE = 4096
# in the backward, as 8448 rows on the 132 multiprocessors of an H100
ROWS_OF_A_PROGRAM = 64
KERNELS = {
    OURS: {"forward": "norm_forward", "backward": "norm_backward"},
    LIGER: {
        "forward": "_rms_norm_forward_kernel",
        "backward": "_rms_norm_backward_kernel",
    },
}
# powers of two, and sizes between them
SIZES = (128, 896, 1024, 2560, 4096, 5120, 8192, 12288)


def of_every_kernel() -> dict[str, dict[str, float]]:
    """{name of a case and of its kernel: what a row takes of each of `UNITS`}; of
    barriers and of sums, a program.
    """
    torch.manual_seed(0)
    found = {}
    for case in _cases():
        for launch in _launches_of(case, OURS):
            kernel, *_ = launch
            key = f"{case.kind} {case.shape[-1]} {kernel.name}"
            found[key] = _of_a_row_or_program(launch, case.rows)
    return found


def _cases() -> Iterator[Case]:
    for size in SIZES:
        # enough rows for each persistent program to take some
        rows = max(32, 2**17 // size)
        for kind in ("RMSNorm", "LayerNorm", "add + RMSNorm"):
            yield Case(kind, (rows, size))
    yield Case("q/k norm + rotary", (2, 16, 16, 8, 128))


def _launches_of(case: Case, name: str) -> list[tuple]:
    """The launches of a forward and backward, as (kernel, grid, bytes of shared memory,
    arguments).
    """
    libraries = other_libraries()[0] if name == LIGER else {}
    norms = make_norms(case, "cpu", BF16)
    made = implementations(case, norms, (), libraries, None)[name]
    both = calls_of(made, [make_set(case, "cpu", BF16)])["forward+backward"]
    driver.active.launches = []
    with use_backend("triton"):
        both[0]()
    launches, driver.active.launches = driver.active.launches, None
    return launches


def _of_a_row_or_program(launch: tuple, rows: int) -> dict[str, float]:
    kernel, grid, *_ = launch
    of_all_warps = of_launch(driver.active.machine, launch)
    programs = int(np.prod(grid))
    share = programs if "reduce" in kernel.name else rows
    counts = {unit: of_all_warps[unit] / share for unit in UNITS}
    warps = programs * kernel.threads // 32
    counts["barriers"] = of_all_warps["barriers"] / warps
    return {unit: round(value, 2) for unit, value in counts.items()}


def beside_liger(liger: bool) -> dict:
    """Instructions and sectors of an RMSNorm's row, by direction and implementation,
    without the kernel that adds up the weight's gradient.
    """
    torch.manual_seed(0)
    names = (OURS, LIGER) if liger else (OURS,)
    rows = {name: _of_a_row(name) for name in names}
    by_direction = {
        way: {name: rows[name][way] for name in rows} for way in ("forward", "backward")
    }
    return {"hidden_size": HIDDEN_SIZE, "dtype": "bfloat16", **by_direction}


def _of_a_row(name: str) -> dict[str, dict[str, float]]:
    programs = SMS if name == OURS else 1  # Liger asks a GPU alone how many it has
    rows = ROWS_OF_A_PROGRAM * programs
    launches = _launches_of(Case("RMSNorm", (rows, HIDDEN_SIZE)), name)
    by_kernel = {launch[0].name: launch for launch in launches}
    taken = {}
    for way, kernel in KERNELS[name].items():
        counts = of_launch(driver.active.machine, by_kernel[kernel])
        units = ("instructions", "sectors")
        taken[way] = {unit: round(counts[unit] / rows, 1) for unit in units}
    return taken
