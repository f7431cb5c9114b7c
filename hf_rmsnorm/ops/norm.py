"""`rms_norm` and `layer_norm`: one call for eager, autograd, compiled, exported and
checkpointed code.

`run` is the entry of eager calls, with or without a residual sum: it starts kernels
directly. The registered operator of `operators` is the other entry, for whatever needs
an operator that it can see.
"""

from functools import lru_cache

import torch

from ..formula import NormSpec, Rounding
from ..reference import in_groups, reference_norm
from .backend import autocast_to_float32, autocasts_functional, resolve_backend
from .direct import (
    asks_by_parameters_alone,
    row_major,
    starts_kernels,
    under_transform,
)
from .forward import started
from .launches import Launches, launches_of, layout, memory_of
from .loading import load_sharding_rules
from .operators import norm_forward_op, spec_args

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
# a fifth of the question for a device
_autocast_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def run(
    launches: Launches,
    x,
    weight,
    bias,
    gate=None,
    residual=None,
    keep_output: bool = False,
):
    """The norm of x, or (h, the norm of h) of ``h = residual + x``, by a kernel that is
    started directly.

    Not while compiling.

    Args:
        launches: of the formula.
        keep_output: the backward shall read the output, not x, where `serves_as_input`.

    Returns:
        None if the kernels do not serve such tensors, or if a mode has to see
        operators: the caller then computes it.
    """
    if not starts_kernels(x):
        return None
    spec = launches.spec
    if (
        spec.functional
        and _autocast_anywhere()
        and autocasts_functional(spec, x.device.type)
    ):
        cast = _autocast(x, weight, bias, residual)
        if cast is None:
            return None
        x, weight, bias = cast
    graded = _is_grad_enabled() and _asks(x, weight, bias, gate, residual)
    if residual is not None and asks_by_parameters_alone(graded, x, residual):
        return None
    memory = memory_of((x, weight, bias, gate, residual))
    if memory is None:  # one is of a subclass
        return None
    key = (
        "graded" if graded else "forward", x.shape, x.stride(), x.dtype, x.device,
        weight if weight is None else layout(weight),
        bias if bias is None else layout(bias),
        gate if gate is None else layout(gate),
        residual if residual is None else layout(residual),
        memory,
    )  # fmt: skip
    operands = x, weight, bias, gate, None, None, residual
    return started(launches, key, operands, graded, keep_output)


def _autocast(x, weight, bias, residual) -> tuple | None:
    """(x, weight, bias) as a functional norm gets them under autocast; None if the norm
    and the sum have two dtypes.
    """
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    if residual is None:
        return x.float(), weight, bias
    if torch.float32 in (x.dtype, residual.dtype):
        return x, weight, bias
    return None


def _asks(x, weight, bias, gate, residual) -> bool:
    return (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (gate is not None and gate.requires_grad)
        or (residual is not None and residual.requires_grad)
    )


def fused_norm(
    x,
    weight,
    bias,
    spec: NormSpec,
    backend: str | None = None,
    gate=None,
    keep_output: bool = False,
):
    """Compute `spec` on x with the backend in force.

    Args:
        x: (..., hidden_size), any strides.
        weight, bias: (hidden_size,), or (heads, hidden_size) where x is (..., heads,
            hidden_size), or None, as the spec says.
        backend: what `resolve_backend` answered, if the caller has asked already.
        gate: x's shape, where the spec has one.
        keep_output: the kernels' backward shall read the output, not x, where
            `serves_as_input`.

    Returns:
        (..., hidden_size) in ``spec.output_dtype``, with the strides that the Hugging
        Face module's output has.
    """
    if backend is None:
        backend = resolve_backend(x, weight, bias, spec, gate)
    if spec.functional:
        x, weight, bias = autocast_to_float32(spec, x, weight, bias)
    compiling = _is_compiling()
    if backend != "triton" or (not compiling and under_transform()):
        return reference_norm(x, weight, bias, spec, gate)
    if spec.group_size is not None:
        x, weight, bias, gate = in_groups(spec.group_size, x, weight, bias, gate)
        return fused_norm(x, weight, bias, spec.ungrouped, backend, gate).flatten(-2)
    weight, bias = row_major(weight, bias)
    if not compiling:
        y = run(launches_of(spec), x, weight, bias, gate, None, keep_output)
        if y is not None:
            return y
    load_sharding_rules()
    stats = torch.is_grad_enabled() and _asks(x, weight, bias, gate, None)
    return norm_forward_op(x, weight, bias, gate, *spec_args(spec), stats)[0]


def fused_add_norm(
    x, residual, weight, bias, spec: NormSpec, keep_output: bool = False
):
    """``h = residual + x`` and the norm of h, as a decoder layer computes them, in one
    launch if a kernel serves them.

    h is rounded to its dtype before it is normalised. So y has the bits that the norm's
    kernel alone computes from h. On a GPU this needs x and residual to start and step
    by multiples of 16 bytes, as a model's tensors do.

    The backward needs h, the parameters and (rows,) statistics. It adds the gradient of
    h to the norm's in the same launch and rounds once: x and residual share that
    gradient.

    Args:
        x: (..., hidden_size), any strides: the output of the attention or MLP.
        residual: the same shape, any strides; of x's dtype, or one of the two is
            float32, as under autocast.
        weight, bias: (hidden_size,) or None, as the spec says.

    Returns:
        (h, y): h as ``residual + x`` returns it, y in ``spec.output_dtype``, each with
        the strides it has in eager.
    """
    if not _is_compiling():
        launches = launches_of(spec)
        both = run(launches, x, weight, bias, None, residual, keep_output)
        if both is not None:
            return both
    h = residual + x
    return h, fused_norm(h, weight, bias, spec)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> torch.Tensor:
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
        ValueError: shapes or devices do not fit, or eps is negative or not finite.

    Example:
        >>> import torch
        >>> from hf_rmsnorm import rms_norm
        >>> rms_norm(torch.tensor([3.0, -1.0, 4.0, -2.0]), torch.ones(4), eps=0.0)
        tensor([ 1.0954, -0.3651,  1.4606, -0.7303])
    """
    if weight is None:
        weight_offset, rounding = 0.0, "once"
    return _compute(x, weight, bias, eps, weight_offset, rounding)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
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
    return _compute(x, weight, bias, eps, functional=True)


def _compute(
    x, weight, bias, eps, weight_offset=0.0, rounding="once", functional=False
):
    if not isinstance(eps, (int, float)):
        raise ValueError(f"eps is {eps!r}: pass a finite float that is zero or more")
    formula = (
        weight is not None,
        bias is not None,
        float(eps),
        weight_offset,
        rounding,
        functional,
    )
    _check(x, weight, bias)
    if _is_compiling():
        return fused_norm(x, weight, bias, _spec(*formula))
    launches = _launches(*formula)
    y = run(launches, x, weight, bias)
    if y is not None:
        return y
    return fused_norm(x, weight, bias, launches.spec)


def _spec(has_weight, has_bias, eps, weight_offset, rounding, functional) -> NormSpec:
    return NormSpec(
        centered=functional,
        eps=eps,
        has_weight=has_weight,
        has_bias=has_bias,
        weight_offset=weight_offset,
        rounding=rounding,
        functional=functional,
    )


@lru_cache(256)
def _launches(*formula) -> Launches:
    return launches_of(_spec(*formula))


def _check(x, weight, bias) -> None:
    _check_floating("x", x, ", for example x.float()")
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


def _check_floating(name: str, t, cure: str = "") -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(
            f"{name} is {type(t).__name__}: pass a floating-point tensor{cure}"
        )
    if not t.is_floating_point():
        raise TypeError(
            f"{name} is a tensor of {t.dtype}: pass a floating-point tensor{cure}"
        )
