"""What a launch on queries and keys depends on besides the tensors' memory, worked out once per shape and strides."""

from dataclasses import dataclass, field, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec, promoted
from . import qk, qk_backward
from .compiled import BoundKernel, Kernel
from .plan import formula_constants, remember
from .saved import Saved, saved_of_rows
from .serves import require
from .sizes import (
    MAX_TOKEN,
    BackwardConfig,
    TileConfig,
    backward_config,
    forward_config,
    next_power_of_2,
    reduce_config,
)

QK_NORM_FORWARD = Kernel(
    qk.qk_norm_forward, ("Q", "K", "WQ", "WK", "BQ", "BK", "COS", "SIN", "YQ", "YK", "RSTD", "MEAN", "eps")
)
QK_NORM_BACKWARD = Kernel(
    qk_backward.qk_norm_backward,
    ("DYQ", "DYK", "Q", "K", "WQ", "WK", "COS", "SIN", "RSTD", "MEAN", "DXQ", "DXK", "DW", "DB", "eps"),
)
QK_REDUCE_PARTIALS = Kernel(qk_backward.qk_reduce_partials, ("PARTIALS", "DWQ", "DWK"))
KERNELS = (QK_NORM_FORWARD, QK_NORM_BACKWARD, QK_REDUCE_PARTIALS)
FORWARD_WARPS = 4  # of heads of 512 too: their two halves with their tables would spill in fewer
ELEMENTS = 512  # a warp, 16 a thread, where the rows of a token fill more than that
PROGRAMS_PER_SM = 4  # of the backward: what its registers leave room for


@dataclass(frozen=True)
class QKPlan:
    """One launch, with outputs of `strides` and `dtype`; a forward has a code without statistics and one with.

    A backward has so many partial sums of the weights' gradients, and `sum`, which adds them up. Of a forward, `saved`
    is what its backward expects of q, k, their weights and biases, cos, sin, rstd and mean. `last` is what tells that
    gradients and these are like those of the last backward.
    """

    launch: BoundKernel
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    device: torch.device
    dtype: torch.dtype
    rows: int
    centered: bool
    partials: int = 0
    sum: BoundKernel | None = None
    saved: tuple[Saved | None, ...] = ()
    last: list = field(default_factory=list)


def _output_strides(x: torch.Tensor, cos: torch.Tensor | None, row_major: bool, way: str = "") -> tuple[int, ...]:
    """The strides that eager's operators give a (batch, heads, length, head_dim) result."""
    with _disable_current_modes():
        memory_format = torch.contiguous_format if row_major else torch.preserve_format
        y = torch.empty_like(x, device="meta", memory_format=memory_format)
        if cos is not None:  # rotate_half ends in a concatenation, and so does a rotary embedding of fewer columns
            joined = torch.empty(x.shape, device="meta", dtype=x.dtype)
            whole = cos.shape[-1] == x.shape[-1] and "joined" not in way
            y = y * torch.empty_like(cos, device="meta").unsqueeze(1) + joined if whole else joined
        return y.stride()


def _named(q, k, weights, cos, spec: NormSpec, config: TileConfig, addresses: dict) -> dict:
    """What forward and backward bind alike; addresses: strides of (batch, heads, length, head_dim) tensors, or None."""
    batch, q_heads, length, head_dim = q.shape
    named = {
        "tokens": batch * length, "length": length, "q_heads": q_heads, "k_heads": k.shape[1],
        "N": head_dim, "R": 0 if cos is None else cos.shape[-1],
        "BLOCK": max(1, config.block // 2),  # of a half of the columns
        "WHOLE": any(w is not None and w.dim() == 1 and w.shape != (head_dim,) for w in weights),
        "rotary_batch": cos.stride(0) if cos is not None and cos.shape[0] > 1 else 0,
        "rotary_position": cos.stride(1) if cos is not None and length > 1 else 0,
        **formula_constants(spec, weights[0]),
    }  # fmt: skip
    for end, (rows, heads) in zip(("", "_K"), _tiles(q, k, weights), strict=True):
        named |= {f"ROWS{end}": rows, f"HEADS{end}": heads}
    for name, strides in addresses.items():
        of_batch, of_head, of_position, _ = strides or (0, 0, 0, 0)
        # Where there is one of a kind its stride is anybody's choice, and need not be a multiple of anything.
        named[f"{name}_batch"] = of_batch if batch > 1 else 0
        named[f"{name}_position"] = of_position if length > 1 else 0
        named[f"{name}_head"] = of_head if (k if "k" in name else q).shape[1] > 1 else 0
    return named


def _tiles(q, k, weights) -> list[tuple[int, int]]:
    """(rows of a tile, and heads of a token if all rows of a tile are of one) of q and of k."""
    config = forward_config(q.shape[-1])  # a backward's tile has the same rows
    if all(w is None or w.shape == q.shape[-1:] for w in weights):
        return [(config.rows, 0)] * 2
    most = MAX_TOKEN // config.block
    return [(min(most, next_power_of_2(x.shape[1])), x.shape[1]) for x in (q, k)]


def _rows(x: torch.Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[2]


def _count(x: torch.Tensor, rows: int, heads: int) -> int:
    """How many tiles of `rows` rows x has; heads: as in `_tiles`."""
    return x.shape[0] * x.shape[2] * -(-heads // rows) if heads else -(-_rows(x) // rows)


def forward_plan(q, k, weights, cos, spec: NormSpec, way: str = "") -> QKPlan:
    """The launch on tensors like these; none of their values is read.

    way: how it is rotated, as in `reference.rotated`.

    Raises:
        NotImplementedError: the kernels do not compute this formula.
    """
    weight = weights[0]
    dtypes = (q.device, q.dtype, *(None if t is None else t.dtype for t in (weight, cos)))
    table = None if cos is None else (cos.shape, cos.stride())
    like = q.shape, q.stride(), k.shape, k.stride(), table, weight is not None and tuple(w.shape for w in weights)

    def make() -> QKPlan:
        require(spec, "queries and keys")
        config, tiles, once = forward_config(q.shape[-1]), _tiles(q, k, weights), "once" in way
        warps = max(FORWARD_WARPS, max(tiles)[0] * config.block // ELEMENTS)
        outputs = tuple(_output_strides(t, cos, spec.functional, way) for t in (q, k))
        dtype = spec.output_dtype(q.dtype, None if weight is None else weight.dtype)
        grid = (sum(_count(t, *tile) for t, tile in zip((q, k), tiles, strict=True)), 1, 1)
        addresses = {"q": q.stride(), "k": k.stride(), "yq": outputs[0], "yk": outputs[1]}
        named = _named(q, k, weights, cos, spec, config, addresses) | {"ONCE": once, "PAIRS": "pairs" in way}
        keys = ((*dtypes, spec.has_bias, way, stats) for stats in (False, True))
        rows = _rows(q) + _rows(k)
        read_again = {"q": q, "k": k, "the weight of q": weights[0], "the weight of k": weights[1]}
        biases = weights if spec.has_bias else (None, None)  # shapes and dtypes are those of the weights
        read_again |= {"the bias of q": biases[0], "the bias of k": biases[1], "cos": cos, "sin": cos}
        return QKPlan(
            launch=QK_NORM_FORWARD.bind(grid, warps, named, *keys), strides=outputs, device=q.device,
            dtype=dtype if cos is None or once else promoted(dtype, cos.dtype),
            rows=rows, centered=spec.centered, saved=saved_of_rows(read_again, rows),
        )  # fmt: skip

    return remember(("qk forward", like, dtypes, spec.but_eps, way), make)


def backward_plan(dq, dk, q, k, weights, cos, spec: NormSpec, need: tuple[bool, ...], limits) -> QKPlan:
    """As `forward_plan`, of what a backward is given. limits: as `plan.backward_plan`."""
    weight, wanted = weights[0], tuple(any(need[at : at + 2]) for at in (0, 2, 4))
    dtypes = (q.device, *(None if t is None else t.dtype for t in (q, weight, cos, dq, dk)), *wanted)
    table = None if cos is None else (cos.shape, cos.stride())
    like = q.shape, q.stride(), k.shape, k.stride(), dq.stride(), dk.stride(), table
    like = *like, weight is not None and tuple(w.shape for w in weights)

    def make() -> QKPlan:
        require(spec, "queries and keys")
        sms, shared = limits
        head_dim = q.shape[-1]
        itemsize = max(t.element_size() for t in (q, cos, dq, dk) if t is not None)
        tiles = _tiles(q, k, weights)
        config = qk_backward_config(head_dim, spec.centered, itemsize, shared, cos is not None, tiles)
        outputs = tuple(_output_strides(t, None, False) for t in (q, k))
        counts = [_count(t, *tile) for t, tile in zip((q, k), tiles, strict=True)]
        parts = min(sms * config.programs_per_sm, sum(counts))  # in proportion to their tiles, at least one for each
        q_parts = min(max(1, round(parts * counts[0] / max(1, sum(counts)))), parts - 1) if counts[1] else parts
        # As many of each as tiles of a token, or some times as many; these share a row of partial sums.
        shares = [-(-heads // rows) or 1 for rows, heads in tiles]
        q_sums, k_sums = (
            max(min(1, count), part // share)
            for count, part, share in zip(counts, (q_parts, parts - q_parts), shares, strict=True)
        )
        q_parts, parts = q_sums * shares[0], q_sums * shares[0] + k_sums * shares[1]
        addresses = {"q": q.stride(), "k": k.stride(), "dxq": outputs[0], "dxk": outputs[1]}
        addresses |= {"dyq": dq.stride(), "dyk": dk.stride()}
        named = _named(q, k, weights, cos, spec, config, addresses) | {"q_parts": q_parts, "STAGES": config.stages}
        wide, wide_k = (head_dim * max(1, heads) for _, heads in tiles)
        reduce = reduce_config(max(wide, wide_k))
        of_sum = {"q_parts": q_sums, "k_parts": k_sums, "N": wide, "N_K": wide_k, "BLOCK": reduce.block}
        grid, keys = (-(-max(wide, wide_k) // reduce.block), 2, 1), ((*dtypes, need[at : at + 2]) for at in (2, 4))
        return QKPlan(
            launch=QK_NORM_BACKWARD.bind((parts, 1, 1), config.num_warps, named, dtypes), strides=outputs,
            device=q.device, dtype=q.dtype, rows=_rows(q) + _rows(k), centered=spec.centered,
            partials=q_sums * wide + k_sums * wide_k,
            sum=QK_REDUCE_PARTIALS.bind(grid, reduce.num_warps, of_sum | {"ROWS": reduce.rows}, *keys),
        )  # fmt: skip

    return remember(("qk backward", like, dtypes, need, spec.but_eps, limits), make)


def qk_backward_config(
    head_dim: int, centered: bool, itemsize: int, shared: int, rotary: bool, tiles: list[tuple[int, int]]
) -> BackwardConfig:
    """The shape for rows of `head_dim`: four operands pass through shared memory if `rotary`, else two.

    Arguments as in `backward_config`, and `_tiles`. There are as many stages as let all programs fit at once.
    """
    (rows, heads), (rows_k, _) = tiles
    config = backward_config(head_dim, centered, itemsize, shared)
    elements = max(rows, rows_k) * config.block
    programs = min(PROGRAMS_PER_SM, max(1, MAX_TOKEN // elements))
    buffer = (4 if rotary else 2) * elements * itemsize
    if heads and rows == rows_k:  # Triton lets those of q and of k share no memory then
        buffer *= 2
    stages = 1 + (shared // programs - 1_024 * (1 + bool(heads))) // buffer
    warps = max(config.num_warps, elements // ELEMENTS)
    return replace(config, stages=max(1, min(3, stages)), num_warps=warps, programs_per_sm=programs)
