"""A norm of any formula, by the backend in force."""

from torch.compiler import is_compiling

from hf_rmsnorm.operands import of_norm
from hf_rmsnorm.ops.launches import launches_of
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
