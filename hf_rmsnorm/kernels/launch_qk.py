"""From queries and keys to kernel launches; what depends on shapes and strides alone is worked out once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec
from . import launch, qk
from .plan import VECTOR, code_of, formula_key, kernel_rounding, remember
from .sizes import REDUCE, BackwardConfig, ForwardConfig, backward_config, forward_config

QK_NORM_FORWARD = launch.Kernel(qk.qk_norm_forward)
QK_NORM_BACKWARD = launch.Kernel(qk.qk_norm_backward)
QK_REDUCE_PARTIALS = launch.Kernel(qk.qk_reduce_partials)
PROGRAMS_PER_SM = 4  # of the backward: what its registers leave room for
KERNELS = (QK_NORM_FORWARD, QK_NORM_BACKWARD, QK_REDUCE_PARTIALS)


@dataclass(frozen=True)
class Plan:
    """One launch: `parts` programs for q and for k, outputs of `strides`; pairs are (unaligned, aligned) variants.

    `codes` are of a launch without statistics and with.
    """

    config: ForwardConfig | BackwardConfig
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    rows: int
    parts: tuple[int, int]
    grid: tuple[int, int, int]
    vectorised: bool
    arguments: tuple[tuple, tuple]
    constants: tuple[tuple, tuple]
    codes: tuple[tuple[int, int], tuple[int, int]]
    centered: bool


def _output_strides(x: torch.Tensor, cos: torch.Tensor | None, contiguous: bool) -> tuple[int, ...]:
    """The strides that eager's operators give a (batch, heads, length, head_dim) result."""
    with _disable_current_modes():
        memory_format = torch.contiguous_format if contiguous else torch.preserve_format
        y = torch.empty_like(x, device="meta", memory_format=memory_format)
        if cos is not None:  # rotate_half ends in a concatenation, and so does a rotary embedding of fewer columns
            joined = torch.empty(x.shape, device="meta", dtype=x.dtype)
            whole = cos.shape[-1] == x.shape[-1]
            y = y * torch.empty_like(cos, device="meta").unsqueeze(1) + joined if whole else joined
        return y.stride()


def _plan(config, operands, outputs, cos, spec: NormSpec, weight, parts, dtypes) -> Plan:
    """Addresses of `operands`, (q, k) or (dq, dk, q, k), then of outputs of the strides `outputs`."""
    q, k = operands[-2:]
    batch, q_heads, length, head_dim = q.shape
    heads = (q_heads, k.shape[1])
    numbers: list[int] = []
    for i, strides in enumerate((*(t.stride() for t in operands), *outputs)):
        of_batch, of_head, of_position, _ = strides
        # Where there is one of a kind its stride is anybody's choice, and need not be a multiple of anything.
        used = (batch > 1, length > 1, heads[i % 2] > 1)
        numbers += [s if u else 0 for s, u in zip((of_batch, of_position, of_head), used, strict=True)]
    numbers += (0, 0) if cos is None else (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1) if length > 1 else 0)
    formula = (spec.weight_offset, spec.rounds_offset, kernel_rounding(spec, weight), spec.eps_outside)
    turned = 0 if cos is None else cos.shape[-1]

    def constants(unit):
        shape = (head_dim, config.block, config.rows, unit, turned)
        if isinstance(config, ForwardConfig):
            return *shape, spec.centered, *formula
        return *shape, *formula, config.stages

    def arguments(unit):
        return batch * length, length, *heads, *(n // unit for n in numbers)

    pair = (constants(1), constants(VECTOR))
    return Plan(
        config=config,
        strides=outputs,
        rows=batch * length * sum(heads),
        parts=parts,
        grid=(sum(parts), 1, 1),
        vectorised=head_dim % VECTOR == 0 and all(n % VECTOR == 0 for n in numbers),
        arguments=(arguments(1), arguments(VECTOR)),
        constants=pair,
        codes=tuple(tuple(code_of(q.device, dtypes, stats, c) for stats in (False, True)) for c in pair),
        centered=spec.centered,
    )


def forward_plan(q, k, weight, cos, spec: NormSpec, contiguous: bool) -> Plan:
    """The launch on tensors like these; none of their values is read."""
    dtypes = (q.dtype, weight is None)
    table = None if cos is None else (cos.shape, cos.stride())
    like = q.device, q.shape, q.stride(), k.shape, k.stride(), table
    key = ("qk forward", like, dtypes, formula_key(spec), contiguous)

    def make() -> Plan:
        config = forward_config(q.shape[-1])
        outputs = tuple(_output_strides(t, cos, contiguous) for t in (q, k))
        parts = tuple(-(-(t.shape[0] * t.shape[1] * t.shape[2]) // config.rows) for t in (q, k))
        return _plan(config, (q, k), outputs, cos, spec, weight, parts, dtypes)

    return remember(key, make)


def backward_plan(dq, dk, q, k, weight, cos, spec: NormSpec, need: tuple[bool, ...], limits) -> Plan:
    dtypes = (q.dtype, weight is None, spec.centered, need[0] or need[1], need[2], need[3])
    table = None if cos is None else (cos.shape, cos.stride())
    strides = dq.stride(), dk.stride(), q.stride(), k.stride()
    key = ("qk backward", q.device, q.shape, k.shape, strides, table, dtypes, formula_key(spec), limits)

    def make() -> Plan:
        sms, shared = limits
        config = qk_backward_config(q.shape[-1], spec.centered, q.element_size(), shared, cos is not None)
        outputs = tuple(_output_strides(t, None, False) for t in (q, k))
        tiles = [-(-(t.shape[0] * t.shape[1] * t.shape[2]) // config.rows) for t in (q, k)]
        parts = _share(tiles, sms * config.programs_per_sm)
        return _plan(config, (dq, dk, q, k), outputs, cos, spec, weight, parts, dtypes)

    return remember(key, make)


def qk_backward_config(head_dim: int, centered: bool, itemsize: int, shared: int, turned: bool) -> BackwardConfig:
    """The shape for rows of `head_dim`: five operands pass through shared memory if they are `turned`, else two.

    Arguments as in `backward_config`. There are as many stages as let `PROGRAMS_PER_SM` programs fit at once.
    """
    config = backward_config(head_dim, centered, itemsize, shared)
    buffer = (5 if turned else 2) * config.rows * config.block * itemsize
    stages = 1 + (shared // PROGRAMS_PER_SM - 1_024) // buffer
    return replace(config, stages=min(3, stages), programs_per_sm=PROGRAMS_PER_SM)


def _share(tiles: list[int], programs: int) -> tuple[int, int]:
    """Split the persistent programs between q and k in proportion to their tiles, at least one for each."""
    if sum(tiles) <= programs:
        return tiles[0], tiles[1]
    q_parts = min(max(1, round(programs * tiles[0] / sum(tiles))), programs - 1)
    return q_parts, programs - q_parts


def qk_norm_forward(q, k, q_weight, k_weight, cos, sin, spec: NormSpec, stats: bool, contiguous: bool):
    """Launch the norms of q and k, and their rotary embedding; see `hf_rmsnorm.ops` for the public function.

    Args:
        q, k: (batch, heads, length, head_dim), columns of unit stride, of one dtype with the weights, cos and sin.
        q_weight, k_weight: (head_dim,), or both None.
        cos, sin: (batch or 1, length, turned columns), of the same strides, or both None.
        stats: also return what the backward needs.
        contiguous: the norm gives row-major tensors (as `F.rms_norm`), not tensors of its input's own order.

    Returns:
        (q', k', rstd, mean): rstd and mean are float32, one for each row of q and then of k, or None; mean is None
        for RMSNorm.
    """
    plan = forward_plan(q, k, q_weight, cos, spec, contiguous)
    return run_forward(plan, q, k, q_weight, k_weight, cos, sin, spec.eps, stats)


def run_forward(plan: Plan, q, k, q_weight, k_weight, cos, sin, eps: float, stats: bool):
    """`qk_norm_forward` of tensors like those that the plan was made for."""
    device, dtype = q.device, q.dtype
    q_strides, k_strides = plan.strides
    yq = torch.empty_strided(q.shape, q_strides, dtype=dtype, device=device)
    yk = torch.empty_strided(k.shape, k_strides, dtype=dtype, device=device)
    rstd = torch.empty(plan.rows, dtype=torch.float32, device=device) if stats else None
    mean = torch.empty_like(rstd) if stats and plan.centered else None
    if plan.rows:
        aligned = plan.vectorised and launch.aligned_pointers(q, k, q_weight, k_weight, cos, sin)
        tensors = (q, k, q_weight, k_weight, cos, sin, yq, yk, rstd, mean)
        args = (*tensors, *plan.arguments[aligned], eps, *plan.constants[aligned])
        QK_NORM_FORWARD(device, plan.grid, args, plan.codes[aligned][stats], aligned, plan.config.num_warps)
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
    given = [d is not None for d in (dq, dk)]
    dq, dk = (d if d is None or d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
    dq, dk = (q if dq is None else dq), (k if dk is None else dk)  # stand-ins that no program reads
    plan = backward_plan(dq, dk, q, k, q_weight, cos, spec, need, launch.device_limits(device.type, device.index))
    dxq, dxk = (
        torch.empty_strided(t.shape, strides, dtype=q.dtype, device=device) if need[0] or need[1] else None
        for t, strides in zip((q, k), plan.strides, strict=True)
    )
    dwq, dwk = (torch.empty_like(w) if n else None for w, n in zip((q_weight, k_weight), need[2:], strict=True))
    if plan.rows:
        q_parts, k_parts = plan.parts[0] * given[0], plan.parts[1] * given[1]
        parts, head_dim = q_parts + k_parts, q.shape[-1]
        partials = torch.empty((parts, head_dim), dtype=torch.float32, device=device) if need[2] or need[3] else None
        aligned = plan.vectorised and launch.aligned_pointers(dq, dk, q, k, q_weight, k_weight, cos, sin)
        tensors = (dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, mean, dxq, dxk, partials)
        args = (*tensors, q_parts, *plan.arguments[aligned], spec.eps, *plan.constants[aligned])
        QK_NORM_BACKWARD(device, (parts, 1, 1), args, plan.codes[aligned][True], aligned, plan.config.num_warps)
        if partials is not None:
            constants = (head_dim, REDUCE.block, REDUCE.rows)
            QK_REDUCE_PARTIALS(
                device, (-(-head_dim // REDUCE.block), 2, 1), (partials, dwq, dwk, q_parts, parts, *constants),
                code_of(device, q.dtype, need[2:], constants), head_dim % VECTOR == 0, REDUCE.num_warps,
            )  # fmt: skip
    else:
        dwq, dwk = (None if t is None else t.zero_() for t in (dwq, dwk))
    return (dxq if need[0] else None), (dxk if need[1] else None), dwq, dwk
