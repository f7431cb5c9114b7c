"""From queries and keys to kernel launches."""

import torch

from ..formula import NormSpec
from . import launch
from .compiled import aligned_pointers
from .plan_qk import (
    KERNELS,
    QK_NORM_BACKWARD,
    QK_NORM_FORWARD,
    QK_REDUCE_PARTIALS,
    QKPlan,
    backward_plan,
    forward_plan,
)

__all__ = ["KERNELS", "forward_plan", "qk_norm_backward", "qk_norm_forward"]


def qk_norm_forward(q, k, parameters, cos, sin, spec: NormSpec, stats: bool, way: str = "", plan: QKPlan | None = None):
    """Launch the norms of q and k, and their rotary embedding; see `hf_rmsnorm.ops` for the public function.

    Args:
        q, k: (batch, heads, length, head_dim), columns of unit stride, of one dtype.
        parameters: the weights of q and of k, of one dtype, and their biases; each two are None, or both (head_dim,),
            or (heads, head_dim) for a weight of each head, or (heads * head_dim,) for one norm over all heads.
        cos, sin: (batch or 1, length, turned columns), of the same dtype and strides, or both None.
        stats: also return what the backward needs.
        way: as in `forward_plan`.
        plan: what `forward_plan` made of such tensors, if that has been called.

    Returns:
        (q', k', rstd, mean): rstd and mean are float32, one for each row of q and then of k, or None; mean is None
        for RMSNorm.
    """
    if plan is None:
        plan = forward_plan(q, k, parameters[:2], cos, spec, way)
    device, dtype = q.device, plan.dtype
    q_strides, k_strides = plan.strides
    yq = torch.empty_strided(q.shape, q_strides, dtype=dtype, device=device)
    yk = torch.empty_strided(k.shape, k_strides, dtype=dtype, device=device)
    rstd = torch.empty(plan.rows, dtype=torch.float32, device=device) if stats else None
    mean = torch.empty_like(rstd) if stats and plan.centered else None
    if plan.rows:
        bound = plan.launch
        aligned = bound.vectorised and aligned_pointers(q, k, *parameters, cos, sin)
        q_weight, k_weight, q_bias, k_bias = parameters
        args = bound.pack(
            bound.values[aligned], Q=q, K=k, WQ=q_weight, WK=k_weight, BQ=q_bias, BK=k_bias, COS=cos, SIN=sin, YQ=yq,
            YK=yk, RSTD=rstd, MEAN=mean, eps=spec.eps,
        )  # fmt: skip
        launch.start(QK_NORM_FORWARD, bound, args, device, aligned, stats)
    return yq, yk, rstd, mean


def qk_norm_backward(dq, dk, q, k, parameters, cos, sin, rstd, mean, spec: NormSpec, need: tuple[bool, ...]):
    """Launch the backward of q and k, then the sum of the partial gradients of their parameters.

    Args:
        dq, dk: gradients of q' and k', of any strides and read only; one may be None.
        need: whether gradients of q, k and the parameters are wanted.
        the rest: as in the forward, and what it returned.

    Returns:
        The six gradients, None where not wanted or where there is no gradient to take back; those of the parameters are
        deterministic, summed in float32.
    """
    device = q.device
    need = tuple(n and d is not None for n, d in zip(need, (dq, dk) * 3, strict=True))
    dq, dk = (torch.zeros_like(x) if d is None else d for d, x in ((dq, q), (dk, k)))
    dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
    plan = backward_plan(dq, dk, q, k, parameters[:2], cos, spec, need, launch.device_limits(device.type, device.index))
    dxq, dxk = (
        torch.empty_strided(t.shape, strides, dtype=plan.dtype, device=device) if need[0] or need[1] else None
        for t, strides in zip((q, k), plan.strides, strict=True)
    )
    found = [torch.empty_like(p) if n else None for p, n in zip(parameters, need[2:], strict=True)]
    if plan.rows:
        pairs = found[:2], found[2:]
        sums = [torch.empty(plan.partials, dtype=torch.float32, device=device) if any(need[at : at + 2]) else None
                for at in (2, 4)]  # fmt: skip
        bound, (q_weight, k_weight) = plan.launch, parameters[:2]
        aligned = bound.vectorised and aligned_pointers(dq, dk, q, k, q_weight, k_weight, cos, sin)
        args = bound.pack(
            bound.values[aligned], DYQ=dq, DYK=dk, Q=q, K=k, WQ=q_weight, WK=k_weight, COS=cos, SIN=sin, RSTD=rstd,
            MEAN=mean, DXQ=dxq, DXK=dxk, DW=sums[0], DB=sums[1], eps=spec.eps,
        )  # fmt: skip
        launch.start(QK_NORM_BACKWARD, bound, args, device, aligned)
        bound, aligned = plan.sum, plan.sum.vectorised
        for way, (partials, (of_q, of_k)) in enumerate(zip(sums, pairs, strict=True)):
            if partials is not None:
                args = bound.pack(bound.values[aligned], PARTIALS=partials, DWQ=of_q, DWK=of_k)
                launch.start(QK_REDUCE_PARTIALS, bound, args, device, aligned, way)
    else:
        found = [t if t is None else t.zero_() for t in found]
    return (dxq if need[0] else None), (dxk if need[1] else None), *found
