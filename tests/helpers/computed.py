"""A norm of any formula, and each kind of kernel, by the backend in force."""

import torch
from torch.compiler import is_compiling

from hf_rmsnorm.operands import of_norm
from hf_rmsnorm.ops import self_check
from hf_rmsnorm.ops.launches import forget_launches, launches_of
from hf_rmsnorm.ops.norm import run_by_operator_or_formula, run_norm, run_reference
from hf_rmsnorm.reference import in_groups


def compute_norm(x, weight, bias, spec, gate=None, keep_output=False):
    """`spec` of x: by a kernel, the operator, or the formula in plain torch.

    Args:
        keep_output: as of `Launches`.
    """
    if spec.group_size is not None:
        x, weight, bias, gate = in_groups(spec.group_size, x, weight, bias, gate)
        return compute_norm(x, weight, bias, spec.ungrouped, gate).flatten(-2)
    operands = of_norm(x, weight, bias, gate)
    y = None
    if not is_compiling():
        y = run_norm(launches_of(spec, keeps_output=keep_output), operands)
    if y is None:
        y = run_by_operator_or_formula(spec, operands)
    if y is None:
        y = run_reference(spec, operands)
    return y


def run_kind(kind, dtype):
    """The results and gradients of a kind of `self_check.KINDS` are computed, each by a
    first launch.
    """
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        t = torch.randn(shape, generator=generator)
        return t.to(dtype).requires_grad_()

    forget_launches()
    outputs = self_check.KINDS[kind](tensor)
    outputs = [t for t in outputs if t is not None and t.requires_grad]
    gradients = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    torch.autograd.backward(outputs, gradients)
