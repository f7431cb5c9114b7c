"""Instructions and sectors of memory that a norm's kernels take for a row: this
package's and Liger's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from ptx.driver import SMS
from ptx_counts import of_launch
from triton.runtime import driver

from benchmarks.layer_count import LIGER, OURS
from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.ops import fused_norm

HIDDEN_SIZE = 4096
# in the backward, as 8448 rows on the 132 multiprocessors of an H100
ROWS_OF_A_PROGRAM = 64
EPS = 1e-6
UNITS = ("instructions", "sectors")
KERNELS = {
    OURS: {"forward": "norm_forward", "backward": "norm_backward"},
    LIGER: {
        "forward": "_rms_norm_forward_kernel",
        "backward": "_rms_norm_backward_kernel",
    },
}


def count_rows(liger: bool) -> dict:
    """Counts for a row, by direction and implementation, without the kernel that adds
    up the weight's gradient.
    """
    torch.manual_seed(0)
    norms = {OURS: _ours}
    if liger:
        norms[LIGER] = _liger
    rows = {name: _of_a_row(name, norm) for name, norm in norms.items()}
    by_direction = {
        way: {name: rows[name][way] for name in rows} for way in ("forward", "backward")
    }
    return {"hidden_size": HIDDEN_SIZE, "dtype": "bfloat16", **by_direction}


def _ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return fused_norm(x, weight, None, NormSpec(False, EPS, rounding="before_weight"))


def _liger(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, EPS)


def _of_a_row(name: str, norm: Callable) -> dict[str, dict[str, float]]:
    programs = SMS if name == OURS else 1  # Liger asks a GPU alone how many it has
    rows = ROWS_OF_A_PROGRAM * programs
    x, dy = (torch.randn(rows, HIDDEN_SIZE).to(torch.bfloat16) for _ in range(2))
    weight = torch.rand(HIDDEN_SIZE).to(torch.bfloat16)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    driver.active.launches = []
    with use_backend("triton"):
        torch.autograd.grad(norm(x, weight), leaves, dy)
    launches, driver.active.launches = driver.active.launches, None
    by_kernel = {launch[0].name: launch for launch in launches}
    taken = {}
    for way, kernel in KERNELS[name].items():
        counts = of_launch(driver.active.machine, by_kernel[kernel])
        taken[way] = {unit: round(counts[unit] / rows, 1) for unit in UNITS}
    return taken
