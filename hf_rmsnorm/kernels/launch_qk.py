"""From queries and keys to kernel launches; what depends on shapes and strides alone is worked out once."""

from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec, promoted
from . import launch, qk, qk_backward
from .compiled import BoundKernel, Kernel, aligned_pointers
from .plan import formula_constants, remember
from .serves import require
from .sizes import BackwardConfig, TileConfig, backward_config, forward_config, reduce_config

QK_NORM_FORWARD = Kernel(qk.qk_norm_forward, ("Q", "K", "WQ", "WK", "COS", "SIN", "YQ", "YK", "RSTD", "MEAN", "eps"))
QK_NORM_BACKWARD = Kernel(
    qk_backward.qk_norm_backward,
    ("DYQ", "DYK", "Q", "K", "WQ", "WK", "COS", "SIN", "RSTD", "MEAN", "DXQ", "DXK", "DW", "eps"),
)
QK_REDUCE_PARTIALS = Kernel(qk_backward.qk_reduce_partials, ("PARTIALS", "DWQ", "DWK"))
KERNELS = (QK_NORM_FORWARD, QK_NORM_BACKWARD, QK_REDUCE_PARTIALS)
FORWARD_WARPS = 4  # of heads of 512 too: their two halves with their tables would spill in fewer
PROGRAMS_PER_SM = 4  # of the backward: what its registers leave room for


@dataclass(frozen=True)
class QKPlan:
    """One launch, with outputs of `strides` and `dtype`; a forward has a code without statistics and one with.

    A backward has the shape of its partial sums of the weights' gradients, and `sum`, which adds them up.
    """

    launch: BoundKernel
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    rows: int
    centered: bool
    partials: tuple[int, int] = (0, 0)
    sum: BoundKernel | None = None


def _output_strides(x: torch.Tensor, cos: torch.Tensor | None, row_major: bool) -> tuple[int, ...]:
    """The strides that eager's operators give a (batch, heads, length, head_dim) result."""
    with _disable_current_modes():
        memory_format = torch.contiguous_format if row_major else torch.preserve_format
        y = torch.empty_like(x, device="meta", memory_format=memory_format)
        if cos is not None:  # rotate_half ends in a concatenation, and so does a rotary embedding of fewer columns
            joined = torch.empty(x.shape, device="meta", dtype=x.dtype)
            whole = cos.shape[-1] == x.shape[-1]
            y = y * torch.empty_like(cos, device="meta").unsqueeze(1) + joined if whole else joined
        return y.stride()


def _named(q, k, weight, cos, spec: NormSpec, config: TileConfig, addresses: dict) -> dict:
    """What forward and backward bind alike; addresses: strides of (batch, heads, length, head_dim) tensors, or None."""
    batch, q_heads, length, head_dim = q.shape
    named = {
        "tokens": batch * length, "length": length, "q_heads": q_heads, "k_heads": k.shape[1],
        "N": head_dim, "R": 0 if cos is None else cos.shape[-1],
        "BLOCK": max(1, config.block // 2), "ROWS": config.rows,  # of a half of the columns
        "rotary_batch": cos.stride(0) if cos is not None and cos.shape[0] > 1 else 0,
        "rotary_position": cos.stride(1) if cos is not None and length > 1 else 0,
        **formula_constants(spec, weight),
    }  # fmt: skip
    for name, strides in addresses.items():
        of_batch, of_head, of_position, _ = strides or (0, 0, 0, 0)
        # Where there is one of a kind its stride is anybody's choice, and need not be a multiple of anything.
        named[f"{name}_batch"] = of_batch if batch > 1 else 0
        named[f"{name}_position"] = of_position if length > 1 else 0
        named[f"{name}_head"] = of_head if (k if "k" in name else q).shape[1] > 1 else 0
    return named


def _rows(x: torch.Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[2]


def forward_plan(q, k, weight, cos, spec: NormSpec) -> QKPlan:
    """The launch on tensors like these; none of their values is read.

    Raises:
        NotImplementedError: the kernels do not compute this formula.
    """
    dtypes = (q.device, q.dtype, *(None if t is None else t.dtype for t in (weight, cos)))
    table = None if cos is None else (cos.shape, cos.stride())
    like = q.shape, q.stride(), k.shape, k.stride(), table

    def make() -> QKPlan:
        require(spec, "queries and keys")
        config = forward_config(q.shape[-1])
        outputs = tuple(_output_strides(t, cos, spec.functional) for t in (q, k))
        dtype = spec.output_dtype(q.dtype, None if weight is None else weight.dtype)
        grid = (sum(-(-_rows(t) // config.rows) for t in (q, k)), 1, 1)
        addresses = {"q": q.stride(), "k": k.stride(), "yq": outputs[0], "yk": outputs[1]}
        named = _named(q, k, weight, cos, spec, config, addresses)
        return QKPlan(
            launch=QK_NORM_FORWARD.bind(grid, FORWARD_WARPS, named, (*dtypes, False), (*dtypes, True)), strides=outputs,
            dtype=dtype if cos is None else promoted(dtype, cos.dtype),
            rows=_rows(q) + _rows(k), centered=spec.centered,
        )  # fmt: skip

    return remember(("qk forward", like, dtypes, spec.but_eps), make)


def backward_plan(dq, dk, q, k, weight, cos, spec: NormSpec, need: tuple[bool, ...], limits) -> QKPlan:
    """As `forward_plan`, of what a backward is given. limits: as `plan.backward_plan`."""
    wanted = need[0] or need[1], need[2] or need[3]
    dtypes = (q.device, *(None if t is None else t.dtype for t in (q, weight, cos, dq, dk)), *wanted)
    table = None if cos is None else (cos.shape, cos.stride())
    like = q.shape, q.stride(), k.shape, k.stride(), dq.stride(), dk.stride(), table

    def make() -> QKPlan:
        require(spec, "queries and keys")
        sms, shared = limits
        head_dim = q.shape[-1]
        itemsize = max(t.element_size() for t in (q, cos, dq, dk) if t is not None)
        config = qk_backward_config(head_dim, spec.centered, itemsize, shared, cos is not None)
        outputs = tuple(_output_strides(t, None, False) for t in (q, k))
        tiles = [-(-_rows(t) // config.rows) for t in (q, k)]
        parts = min(sms * config.programs_per_sm, sum(tiles))  # in proportion to their tiles, at least one for each
        q_parts = min(max(1, round(parts * tiles[0] / max(1, sum(tiles)))), parts - 1) if tiles[1] else parts
        addresses = {"q": q.stride(), "k": k.stride(), "dxq": outputs[0], "dxk": outputs[1]}
        addresses |= {"dyq": dq.stride(), "dyk": dk.stride()}
        named = _named(q, k, weight, cos, spec, config, addresses) | {"q_parts": q_parts, "STAGES": config.stages}
        reduce = reduce_config(head_dim)
        of_sum = {"q_parts": q_parts, "parts": parts, "N": head_dim, "BLOCK": reduce.block, "ROWS": reduce.rows}
        grid = (-(-head_dim // reduce.block), 2, 1)
        return QKPlan(
            launch=QK_NORM_BACKWARD.bind((parts, 1, 1), config.num_warps, named, dtypes), strides=outputs,
            dtype=q.dtype, rows=_rows(q) + _rows(k), centered=spec.centered, partials=(parts, head_dim),
            sum=QK_REDUCE_PARTIALS.bind(grid, reduce.num_warps, of_sum, (*dtypes, need[2:])),
        )  # fmt: skip

    return remember(("qk backward", like, dtypes, need, spec.but_eps, limits), make)


def qk_backward_config(head_dim: int, centered: bool, itemsize: int, shared: int, rotary: bool) -> BackwardConfig:
    """The shape for rows of `head_dim`: four operands pass through shared memory if `rotary`, else two.

    Arguments as in `backward_config`. There are as many stages as let `PROGRAMS_PER_SM` programs fit at once.
    """
    config = backward_config(head_dim, centered, itemsize, shared)
    buffer = (4 if rotary else 2) * config.rows * config.block * itemsize
    stages = 1 + (shared // PROGRAMS_PER_SM - 1_024) // buffer
    return replace(config, stages=min(3, stages), programs_per_sm=PROGRAMS_PER_SM)


def qk_norm_forward(q, k, q_weight, k_weight, cos, sin, spec: NormSpec, stats: bool, plan: QKPlan | None = None):
    """Launch the norms of q and k, and their rotary embedding; see `hf_rmsnorm.ops` for the public function.

    Args:
        q, k: (batch, heads, length, head_dim), columns of unit stride, of one dtype.
        q_weight, k_weight: (head_dim,), of one dtype, or both None.
        cos, sin: (batch or 1, length, turned columns), of the same dtype and strides, or both None.
        stats: also return what the backward needs.
        plan: what `forward_plan` made of such tensors, if that has been called.

    Returns:
        (q', k', rstd, mean): rstd and mean are float32, one for each row of q and then of k, or None; mean is None
        for RMSNorm.
    """
    if plan is None:
        plan = forward_plan(q, k, q_weight, cos, spec)
    device, dtype = q.device, plan.dtype
    q_strides, k_strides = plan.strides
    yq = torch.empty_strided(q.shape, q_strides, dtype=dtype, device=device)
    yk = torch.empty_strided(k.shape, k_strides, dtype=dtype, device=device)
    rstd = torch.empty(plan.rows, dtype=torch.float32, device=device) if stats else None
    mean = torch.empty_like(rstd) if stats and plan.centered else None
    if plan.rows:
        bound = plan.launch
        aligned = bound.vectorised and aligned_pointers(q, k, q_weight, k_weight, cos, sin)
        args = bound.pack(
            bound.values[aligned], Q=q, K=k, WQ=q_weight, WK=k_weight, COS=cos, SIN=sin, YQ=yq, YK=yk, RSTD=rstd,
            MEAN=mean, eps=spec.eps,
        )  # fmt: skip
        QK_NORM_FORWARD(device, bound, args, aligned, stats)
    return yq, yk, rstd, mean


def qk_norm_backward(dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, mean, spec: NormSpec, need: tuple[bool, ...]):
    """Launch the backward of q and k, then the sum of the partial gradients of their weights.

    Args:
        dq, dk: gradients of q' and k', of any strides and read only; one may be None.
        need: whether gradients of q, k, q_weight and k_weight are wanted.
        the rest: as in the forward, and what it returned.

    Returns:
        The four gradients, None where not wanted or where there is no gradient to take back; those of the weights are
        deterministic, summed in float32.
    """
    device = q.device
    need = tuple(n and d is not None for n, d in zip(need, (dq, dk, dq, dk), strict=True))
    dq, dk = (torch.zeros_like(x) if d is None else d for d, x in ((dq, q), (dk, k)))
    dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
    plan = backward_plan(dq, dk, q, k, q_weight, cos, spec, need, launch.device_limits(device.type, device.index))
    dxq, dxk = (
        torch.empty_strided(t.shape, strides, dtype=plan.dtype, device=device) if need[0] or need[1] else None
        for t, strides in zip((q, k), plan.strides, strict=True)
    )
    dwq, dwk = (torch.empty_like(w) if n else None for w, n in zip((q_weight, k_weight), need[2:], strict=True))
    if plan.rows:
        partials = torch.empty(plan.partials, dtype=torch.float32, device=device) if need[2] or need[3] else None
        bound = plan.launch
        aligned = bound.vectorised and aligned_pointers(dq, dk, q, k, q_weight, k_weight, cos, sin)
        args = bound.pack(
            bound.values[aligned], DYQ=dq, DYK=dk, Q=q, K=k, WQ=q_weight, WK=k_weight, COS=cos, SIN=sin, RSTD=rstd,
            MEAN=mean, DXQ=dxq, DXK=dxk, DW=partials, eps=spec.eps,
        )  # fmt: skip
        QK_NORM_BACKWARD(device, bound, args, aligned)
        if partials is not None:
            bound, aligned = plan.sum, plan.sum.vectorised
            args = bound.pack(bound.values[aligned], PARTIALS=partials, DWQ=dwq, DWK=dwk)
            QK_REDUCE_PARTIALS(device, bound, args, aligned)
    else:
        dwq, dwk = (None if t is None else t.zero_() for t in (dwq, dwk))
    return (dxq if need[0] else None), (dxk if need[1] else None), dwq, dwk
