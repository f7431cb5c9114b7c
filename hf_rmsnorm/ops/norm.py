"""`rms_norm` and `layer_norm`: one call for eager, autograd, compiled, exported and
checkpointed code.

`run_norm` is the entry of eager calls, with or without a residual sum: patched norms and layers
(`fused`) call it, and it goes to `launches.by_kernel`. The registered operator of
`operators` is the other entry, for whatever needs an operator that it can see.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ..formula import NormSpec, Rounding
from ..operands import (
    ONE_PLUS,
    Operands,
    Replaced,
    any_requires_grad,
    of_modulation,
    of_norm,
    present,
)
from ..reference import reference_norm
from .autograd import apply
from .backend import (
    autocast_anywhere,
    autocasts_functional,
    is_exported,
    operators_are_seen,
    starts_kernels,
    under_transform,
)
from .launches import TENSOR_TYPES, Launches, by_kernel, launches_of
from .limits import shapes_fit, why_not
from .norm_kinds import NormForwardKind
from .operators import load_sharding_rules, norm_forward_op, spec_args
from .settings import chosen

_TRAINING = NormForwardKind(stats=True)
_INFERENCE = NormForwardKind(stats=False)


def run_norm(launches: Launches, operands: Operands, replaced: Replaced | None = None):
    """The norm of x, or (h, the norm of h) of ``h = residual + multiplier * x``, by a
    kernel that is started directly.

    Not while compiling.

    Args:
        launches: of the formula.
        operands: `NormOperands`.
        replaced: as of `by_kernel`.

    Returns:
        None if the kernels do not serve such tensors or cannot be loaded, if another
        backend is chosen, or if operators have to be seen: the caller then computes it.
    """
    if not starts_kernels():
        return None
    spec = launches.spec
    if spec.functional and autocast_anywhere():
        operands = _autocast(spec, operands)
        if operands is None:
            return None
    if is_grad_enabled() and any_requires_grad(operands):
        x, weight, bias, gate, scale, shift, multiplier, residual = operands
        if residual is not None and not any_requires_grad((x, multiplier, residual)):
            # In one launch the sum would ask for gradients too.
            return None
        return by_kernel(launches, _TRAINING, operands, apply, replaced)
    made = by_kernel(launches, _INFERENCE, operands, None, replaced)
    if made is None:
        return None
    h, y, rstd, mean = made
    if h is None:
        return y
    return h, y


def run_by_operator_or_formula(
    spec: NormSpec, operands: Operands, suits: Callable | None = None
) -> Tensor | None:
    """The norm of x where `run_norm` started no kernel: by the plain formula, if that is
    chosen; by the registered operator, for compilers and subclasses of tensors.

    Args:
        suits: as of `Launches`.

    Returns:
        None where the code that is replaced is to compute it.

    Raises:
        RuntimeError: ``use_backend("triton")`` is in force and the kernels cannot serve
            the call.
    """
    x, weight, bias, gate, scale, shift, multiplier, residual = operands
    if suits is not None and not suits(x, weight, bias):
        return None
    if chosen.backend == "reference":
        if not shapes_fit(x, weight, bias, gate):
            return None
        return run_reference(spec, operands)
    insists = chosen.backend == "triton"
    sees_operator = _sees_operator(operands, insists)
    if not (sees_operator or insists):
        return None
    reason = why_not(spec, operands)
    if insists and reason and x.numel():  # no rows are no launch
        raise RuntimeError(f"use_backend('triton'): {reason}")
    if reason or not sees_operator:
        return None
    load_sharding_rules()
    if spec.functional:
        x, weight, bias, *_ = _autocast(spec, operands)
    stats = is_grad_enabled() and any_requires_grad((x, weight, bias, gate))
    return norm_forward_op(x, weight, bias, gate, *spec_args(spec), stats)[0]


def _sees_operator(operands: Operands, insists: bool) -> bool:
    """Whether a compiler, or a subclass of a tensor, is to see a norm as one operator."""
    if is_compiling():
        return insists or not is_exported()
    if under_transform():
        return False
    types = {type(t) for t in present(*operands)}
    return operators_are_seen() or not types.issubset(TENSOR_TYPES)


def run_reference(spec: NormSpec, operands: Operands) -> Tensor:
    """The norm of x by the formula in plain torch, under the autocast that is on."""
    x, weight, bias, gate, *_ = operands
    if spec.functional:
        x, weight, bias, *_ = _autocast(spec, operands)
    return reference_norm(x, weight, bias, spec, gate)


def _autocast(spec: NormSpec, operands: Operands) -> tuple | None:
    """The operands as a functional norm gets them under autocast; None if the norm and
    the sum have two dtypes.
    """
    x, weight, bias, *others, residual = operands
    if not autocasts_functional(spec, x.device.type):
        return operands
    if residual is None:
        x = x.float()
    elif torch.float32 not in (x.dtype, residual.dtype):
        return None
    if weight is not None:
        weight = weight.float()
    if bias is not None:
        bias = bias.float()
    return x, weight, bias, *others, residual


def _without_launch(spec: NormSpec, operands: Operands) -> Tensor:
    y = run_by_operator_or_formula(spec, operands)
    if y is None:
        y = run_reference(spec, operands)
    return y


def modulated_norm(
    spec: NormSpec,
    operands: Operands,
    modulation: str = ONE_PLUS,
    replaced: Replaced | None = None,
):
    """(h, ``norm(h) * (1 + scale) + shift``) of ``h = residual + multiplier * x``, bit
    for bit; None if not in one launch.

    As `AdaLayerNorm` of DiT (Peebles and Xie 2022) and of diffusers, whose operators
    round one by one.

    Args:
        operands: `NormOperands`, but that scale, shift and multiplier need only
            broadcast to x's shape. Without a residual h is None, and x is
            normalised.
        modulation: `ALONE` where the norm is multiplied by the scale itself, as Z-Image
            prepares it.
        replaced: as of `by_kernel`.
    """
    operands = _broadcast(operands)
    if operands is None:
        return None
    made = run_norm(launches_of(spec, modulation), operands, replaced)
    residual = operands[-1]
    if made is None or residual is not None:
        return made
    return None, made


def why_apart(spec: NormSpec, operands: Operands) -> str:
    """Why `modulated_norm` leaves such operands to the plain operators; "" where the
    reason is another.
    """
    if spec.gate is not None or spec.group_size is not None:
        return f"{spec} has a gate or groups"
    x, *_ = operands
    operands = _broadcast(operands)
    if operands is None:
        return f"scale, shift or gate do not broadcast to x, which is {tuple(x.shape)}"
    return why_not(spec, operands)


def _broadcast(operands: Operands) -> tuple | None:
    """The operands with a modulation of x's shape, which a kernel reads at the same
    addresses; small ones are copied for that. None where they do not broadcast.
    """
    x, weight, bias, _, *modulation, residual = operands
    layouts = {(t.shape, t.stride()) for t in modulation if t is not None}
    expanded = []
    for t in modulation:
        if t is not None:
            if len(layouts) > 1 and t.numel() != x.numel():
                t = t.contiguous()
            try:
                t = t.expand(x.shape)
            except RuntimeError:
                # the plain operators say what does not broadcast, or broadcast x
                return None
        expanded.append(t)
    return of_modulation(x, weight, bias, *expanded, residual)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019): x / sqrt(mean(x^2) +
    eps) * (weight_offset + weight).

    Args:
        x: (..., hidden_size) in float32, float16, bfloat16 or (in plain torch) float64;
            any strides.
        weight: (hidden_size,) of any such dtype, or None.
        eps: added to the mean square.
        bias: (hidden_size,) or None.
        weight_offset: 1.0 for `GemmaRMSNorm`.
        rounding: as in `NormSpec`; the default is that of `LlamaRMSNorm`.

    Returns:
        (..., hidden_size); dtype as `NormSpec.output_dtype` says.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: shapes or devices do not fit; eps is negative or not finite; or
            `NormSpec` does not take the other arguments, as an offset of no weight.

    Example:
        >>> import torch
        >>> from hf_rmsnorm import rms_norm
        >>> rms_norm(torch.tensor([3.0, -1.0, 4.0, -2.0]), torch.ones(4), eps=0.0)
        tensor([ 1.0954, -0.3651,  1.4606, -0.7303])
    """
    if weight is None and rounding == "before_weight":  # the default
        rounding = "once"
    return _compute(x, weight, bias, eps, weight_offset, rounding)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016), as `F.layer_norm`: autocast,
    dtypes and strides included.

    Args:
        x: (..., hidden_size), dtypes as in `rms_norm`.
        weight, bias: (hidden_size,) or None.
        eps: added to the variance.

    Returns:
        (..., hidden_size) in x's dtype (float32 under an accelerator's autocast),
        row-major.

    Raises:
        TypeError, ValueError: as `rms_norm`.
    """
    return _compute(x, weight, bias, eps, centered=True)


def _compute(x, weight, bias, eps, weight_offset=0.0, rounding="once", centered=False):
    if not isinstance(eps, (int, float)):
        raise ValueError(f"eps is {eps!r}: pass a finite float that is zero or more")
    _check(x, weight, bias)
    has_weight = weight is not None
    has_bias = bias is not None
    of_parameters = has_weight, has_bias, weight_offset, rounding
    functional = centered  # as F.layer_norm
    fields = centered, float(eps), *of_parameters, functional
    operands = of_norm(x, weight, bias)
    if is_compiling():
        return _without_launch(NormSpec(*fields), operands)
    launches = _launches(*fields)
    y = run_norm(launches, operands)
    if y is None:
        y = _without_launch(launches.spec, operands)
    return y


@lru_cache(256)
def _launches(*fields) -> Launches:
    return launches_of(NormSpec(*fields))


def _check(x, weight, bias) -> None:
    _check_floating("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: the last dimension must hold at least one element"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        _check_floating(name, parameter)
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, x {tuple(x.shape)}: pass ({x.shape[-1]},)"
            )
        if parameter.device != x.device:
            raise ValueError(
                f"{name} is on {parameter.device} and x on {x.device}: move one of them"
            )


def _check_floating(name: str, t) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {type(t).__name__}: pass a floating-point tensor")
    if not t.is_floating_point():
        raise TypeError(
            f"{name} is a tensor of {t.dtype}: pass a floating-point tensor, for example {name}.float()"
        )
