"""Launches of the kernels on tensors as they are: worked out and called, without the
cache of `hf_rmsnorm.ops`.
"""

from hf_rmsnorm.kernels.launch import NormForward, Operands
from hf_rmsnorm.kernels.launch_backward import NormBackward
from hf_rmsnorm.kernels.launch_qk import QKBackward, QKForward
from hf_rmsnorm.ops.launches import key_of


def aligned(operands):
    return key_of((), operands)[-1]


def norm_forward(x, weight, bias, spec, stats, gate=None, residual=None):
    """(y, rstd, mean, h)."""
    operands = Operands(x, weight, bias, gate, residual=residual)
    launch = NormForward(spec, operands, aligned(operands), stats, True)
    h, y, rstd, mean = launch.launch(operands)
    return y, rstd, mean, h


def norm_backward(dy, x, weight, bias, rstd, mean, spec, *how):
    """(dx, dweight, dbias, dgate); `how`: which of them are needed, and if there are
    any, the gate, dh, and whether x is the norm's output.
    """
    need, gate, dh, from_output = (*how, None, None, False)[:4]
    need = (*need, False)[:4]
    read = dy, x, weight, bias, gate, dh
    operands = (*read, rstd, mean)
    launch = NormBackward(spec, operands, aligned(read), need, from_output)
    return launch.launch(operands)


def qk_norm_forward(operands, spec, stats=True):
    """(q', k', rstd) of q, k, their weights, cos and sin."""
    launch = QKForward(spec, operands, aligned(operands), stats)
    return launch.launch(operands)


def qk_norm_backward(dq, dk, operands, rstd, spec, need):
    """The gradients of q, k and their weights."""
    read = dq, dk, *operands
    launch = QKBackward(spec, (*read, rstd), aligned(read), need)
    return launch.launch((*read, rstd))
