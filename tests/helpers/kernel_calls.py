"""Launches of the kernels on tensors as they are: worked out and called, without the
cache of `hf_rmsnorm.ops`.
"""

import torch

from hf_rmsnorm.kernels.norm_launch import NormBackward, NormForward
from hf_rmsnorm.kernels.qk_launch import QKForward
from hf_rmsnorm.operands import NormOperands, NormResults, present


def aligned(operands):
    return all(t.data_ptr() % 16 == 0 for t in present(*operands))


def norm_forward(x, weight, bias, spec, stats, gate=None, residual=None):
    """`NormResults`."""
    operands = NormOperands(x, weight, bias, gate, None, None, None, residual)
    launch = NormForward(spec, operands, aligned(operands), stats)
    return NormResults(*launch.on(operands))


def norm_backward(dy, x, weight, bias, rstd, mean, spec, *how):
    """(dx, dweight, dbias, dgate); `how`: which of them are needed, and if there are
    any, the gate, dh, and whether x is the norm's output.
    """
    need, gate, dh, from_output = (*how, None, None, False)[:4]
    need = (*need, False, False)[:5]
    read = dy, x, weight, bias, gate, None, dh
    operands = (*read, rstd, mean)
    launch = NormBackward(spec, operands, aligned(read), need, from_output)
    *gradients, _ = launch.on(operands)
    return gradients


def qk_norm_forward(operands, spec, stats=True):
    """(q', k', rstd) of q, k, their weights, cos and sin."""
    results = [torch.empty_like(t, device="meta") for t in operands[:2]]
    launch = QKForward(operands, results, aligned(operands), spec=spec, stats=stats)
    return launch.on(operands)
