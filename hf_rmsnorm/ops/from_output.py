"""When a norm may save its output for the backward, in place of its input: the next
linear layer saves it anyway.

``xhat = (y - bias) / (weight_offset + weight)`` then replaces the normalised input,
with the rounding of y. So no scale may be so small that y has lost xhat, and no bias so
large that y is mostly bias. That is decided once, when a model is patched. A scale that
becomes zero later counts as one in the backward, where its xhat is zero.
"""

from torch import Tensor

from ..formula import NormSpec
from ..kernels.serves import unserved
from .direct import DIRECT_TYPES, present

LEAST_SCALE = 1e-3  # of the largest
SMALLEST_SCALE = 2.0**-14  # below it float16 keeps fewer bits of y than of xhat
# in fewer, dx may be the small difference of two numbers of which y gives one
LEAST_COLUMNS = 32
# times the scale: as large as the largest elements of a row, whose rounding there is in
# any case
MOST_BIAS = 4.0
# in more, the sums of dweight and dbias do not fit into registers
MOST_COLUMNS_WITH_BIAS = 8_192


def input_needed(weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> str:
    """Return why a norm with these parameters keeps its input; "" where its output
    serves. Synchronises with a GPU.
    """
    refusal = unserved(spec, "from the output")
    if refusal is not None:
        return refusal
    if weight is None:
        if bias is None:
            return ""
        return "it has a bias alone"
    if bias is not None and bias.shape[-1] > MOST_COLUMNS_WITH_BIAS:
        return f"it has a bias and more than {MOST_COLUMNS_WITH_BIAS:,} columns"
    for t in present(weight, bias):
        if not _has_values(t):
            return ""
    scale = (weight.detach().float() + spec.weight_offset).abs()
    least = scale.min().item()
    largest = scale.max().item()
    if not least >= max(LEAST_SCALE * largest, SMALLEST_SCALE):
        # so too where one is NaN
        return f"a weight is below {LEAST_SCALE:g} of the largest"
    if bias is None:
        return ""
    is_small = bias.detach().float().abs() <= MOST_BIAS * scale
    if not is_small.all():
        return f"a bias is above {MOST_BIAS:g} times its weight"
    return ""


def _has_values(t: Tensor) -> bool:
    """Whether a parameter's values can be read here: it is no shard, not on meta, and
    DeepSpeed has not taken it.
    """
    return type(t) in DIRECT_TYPES and not t.is_meta and t.numel() > 0


def serves_as_input(y: Tensor, x: Tensor, spec: NormSpec) -> bool:
    """Whether the backward can read y in the place of x: the same dtype, rows in the
    same order, and no short ones.
    """
    if y.dtype != x.dtype:
        return False
    if y.shape[-1] < LEAST_COLUMNS:
        return False
    return spec.functional or y.stride() == x.stride()
