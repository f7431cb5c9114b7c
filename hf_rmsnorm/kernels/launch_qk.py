"""Launches of the norms of queries and keys, with their rotary embedding: as `launch` has those of rows."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec, promoted
from . import compiled, qk, qk_backward
from .compiled import Kernel
from .launch import Nothing, formula_constants
from .saved import Saved, require_saved, saved_of_rows
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

QK_NORM_FORWARD = Kernel(qk.qk_norm_forward)
QK_NORM_BACKWARD = Kernel(qk_backward.qk_norm_backward)
QK_REDUCE_PARTIALS = Kernel(qk_backward.qk_reduce_partials)
KERNELS = (QK_NORM_FORWARD, QK_NORM_BACKWARD, QK_REDUCE_PARTIALS)
FORWARD_WARPS = 4  # of heads of 512 too: their two halves with their tables would spill in fewer
ELEMENTS = 512  # a warp, 16 a thread, where the rows of a token fill more than that
PROGRAMS_PER_SM = 4  # of the backward: what its registers leave room for


class QKOperands(NamedTuple):
    """What a forward reads, in the order of the kernel's parameters.

    Args:
        q, k: (batch, heads, length, head_dim), columns of unit stride, of one dtype.
        q_weight, k_weight, q_bias, k_bias: the weights, of one dtype, and the biases; each two are None, or both
            (head_dim,), or (heads, head_dim) for a weight of each head, or (heads * head_dim,) for one norm over all
            heads.
        cos, sin: (batch or 1, length, turned columns), of the same dtype and strides, or both None.
    """

    q: Tensor
    k: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class _Layout:
    """Tiles of q and of k, and the arguments that forward and backward have in common."""

    def __init__(self, spec: NormSpec, operands: QKOperands):
        require(spec, "queries and keys")
        self.spec, self.operands = spec, operands
        q, k = operands.q, operands.k
        self.head_dim = q.shape[-1]
        self.sides = q, k
        self.tiles = [self._tile(x) for x in self.sides]
        self.counts = [self._count(x, *tile) for x, tile in zip(self.sides, self.tiles, strict=True)]
        self.rows = sum(x.shape[0] * x.shape[1] * x.shape[2] for x in self.sides)

    def _of_weights(self) -> list[Tensor]:
        return [w for w in (self.operands.q_weight, self.operands.k_weight) if w is not None]

    def _tile(self, x: Tensor) -> tuple[int, int]:
        """(rows of a tile, and heads of a token if all rows of a tile are of one)."""
        config = forward_config(self.head_dim)  # a backward's tile has the same rows
        if all(w.shape == (self.head_dim,) for w in self._of_weights()):
            return config.rows, 0
        return min(MAX_TOKEN // config.block, next_power_of_2(x.shape[1])), x.shape[1]

    def _count(self, x: Tensor, rows: int, heads: int) -> int:
        """How many tiles of so many rows x has."""
        if heads:
            return x.shape[0] * x.shape[2] * -(-heads // rows)
        return -(-x.shape[0] * x.shape[1] * x.shape[2] // rows)

    def named(self, config: TileConfig, addresses: dict[str, tuple]) -> dict:
        """Arguments by name; addresses: strides of (batch, heads, length, head_dim) tensors."""
        (batch, q_heads, length, head_dim), k_heads = self.operands.q.shape, self.operands.k.shape[1]
        cos, weight = self.operands.cos, self.operands.q_weight
        (rows, heads), (rows_k, heads_k) = self.tiles
        named = {
            "tokens": batch * length,
            "length": length,
            "q_heads": q_heads,
            "k_heads": k_heads,
            "N": head_dim,
            "R": 0 if cos is None else cos.shape[-1],
            "BLOCK": max(1, config.block // 2),  # of a half of the columns
            "WHOLE": any(w.dim() == 1 and w.shape != (head_dim,) for w in self._of_weights()),
            "ROWS": rows,
            "ROWS_K": rows_k,
            "HEADS": heads,
            "HEADS_K": heads_k,
            "rotary_batch": cos.stride(0) if cos is not None and cos.shape[0] > 1 else 0,
            "rotary_position": cos.stride(1) if cos is not None and length > 1 else 0,
            **formula_constants(self.spec, weight),
        }
        for name, (of_batch, of_head, of_position, _) in addresses.items():
            # Where there is one of a kind its stride is anybody's choice, and need not be a multiple of anything.
            named[f"{name}_batch"] = of_batch if batch > 1 else 0
            named[f"{name}_position"] = of_position if length > 1 else 0
            named[f"{name}_head"] = of_head if (k_heads if "k" in name else q_heads) > 1 else 0
        return named


def _output_strides(x: Tensor, cos: Tensor | None, row_major: bool, way: str = "") -> tuple[int, ...]:
    """The strides that eager's operators give a (batch, heads, length, head_dim) result."""
    with _disable_current_modes():
        memory_format = torch.contiguous_format if row_major else torch.preserve_format
        y = torch.empty_like(x, device="meta", memory_format=memory_format)
        if cos is None:
            return y.stride()
        # rotate_half ends in a concatenation, and so does a rotary embedding of fewer columns
        joined = torch.empty(x.shape, device="meta", dtype=x.dtype)
        if cos.shape[-1] != x.shape[-1] or "joined" in way:
            return joined.stride()
        return (y * torch.empty_like(cos, device="meta").unsqueeze(1) + joined).stride()


class QKForward:
    """The forward of a formula on queries and keys laid out like these; none of their values is read.

    Args:
        operands: `QKOperands`.
        aligned: they start at multiples of 16 bytes.
        stats: also return what the backward needs.
        way: how they are rotated, as in `reference.rotated`.

    Raises:
        NotImplementedError: the kernels do not compute this formula.
    """

    def __init__(self, spec: NormSpec, operands: tuple, aligned: bool, stats: bool = True, way: str = ""):
        operands = QKOperands(*operands)
        layout = _Layout(spec, operands)
        q, k, cos, weight = operands.q, operands.k, operands.cos, operands.q_weight
        once = "once" in way
        dtype = spec.output_dtype(q.dtype, None if weight is None else weight.dtype)
        self.dtype = dtype if cos is None or once else promoted(dtype, cos.dtype)
        self.strides = [_output_strides(x, cos, spec.functional, way) for x in (q, k)]
        self.device = q.device
        self.rows = layout.rows
        self.stats, self.has_mean = stats, stats and spec.centered
        names = "q", "k", "the weight of q", "the weight of k", "the bias of q", "the bias of k", "cos", "sin"
        self.saved = saved_of_rows(dict(zip(names, operands, strict=True)), self.rows)
        self.start = Nothing
        if self.rows:
            config = forward_config(layout.head_dim)
            addresses = {"q": q.stride(), "k": k.stride(), "yq": self.strides[0], "yk": self.strides[1]}
            named = layout.named(config, addresses) | {"ONCE": once, "PAIRS": "pairs" in way}
            warps = max(FORWARD_WARPS, max(layout.tiles)[0] * config.block // ELEMENTS)
            self.start = QK_NORM_FORWARD.bind((sum(layout.counts), 1, 1), warps, named, q.device, aligned)

    def launch(self, q, k, *others):
        """(q', k', rstd, mean): rstd and mean are float32, one for each row of q and then of k, or None."""
        yq, yk = (
            torch.empty_strided(x.shape, strides, dtype=self.dtype, device=self.device)
            for x, strides in zip((q, k), self.strides, strict=True)
        )
        rstd = torch.empty(self.rows, dtype=torch.float32, device=self.device) if self.stats else None
        mean = torch.empty_like(rstd) if self.has_mean else None
        self.start.on((q, k, *others, yq, yk, rstd, mean))
        return yq, yk, rstd, mean

    def as_saved(self, operands: tuple, dq: Tensor | None, dk: Tensor | None) -> tuple:
        """What was saved, as the kernels read it: columns of unit stride and parameters without gaps.

        Raises:
            RuntimeError: one has another shape, dtype or device than the forward read.
        """
        gradients = Saved("the gradient of q", self.saved[0].shape), Saved("the gradient of k", self.saved[1].shape)
        require_saved(self.device, (*gradients, *self.saved), (dq, dk, *operands))
        q, k, *parameters, cos, sin, rstd, mean = operands
        q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
        parameters = [t if t is None else t.contiguous() for t in parameters]
        if cos is not None and (cos.stride(-1) != 1 or cos.stride() != sin.stride()):
            cos, sin = cos.contiguous(), sin.contiguous()
        return q, k, *parameters, cos, sin, rstd.contiguous(), mean if mean is None else mean.contiguous()


class QKBackward:
    """The backward of a formula on queries and keys laid out like these, and the sum of its partial gradients.

    Args:
        operands: (dq, dk, q, k, q_weight, k_weight, cos, sin, q_bias, k_bias, rstd, mean). dq and dk are gradients of
            q' and k', with columns of unit stride; the others as in the forward, and what it returned.
        aligned: those that are read start at multiples of 16 bytes.
        need: whether gradients of q, k, their weights and their biases are wanted.
    """

    def __init__(self, spec: NormSpec, operands: tuple, aligned: bool, need: tuple[bool, ...]):
        dq, dk, q, k, q_weight, k_weight, cos, sin, *_ = operands
        layout = _Layout(spec, QKOperands(q, k, q_weight, k_weight, cos=cos, sin=sin))
        sms, shared = compiled.device_limits(q.device.type, q.device.index)
        itemsize = max(t.element_size() for t in (q, cos, dq, dk) if t is not None)
        config = qk_backward_config(
            layout.head_dim, spec.centered, itemsize, shared, rotary=cos is not None, tiles=layout.tiles
        )
        # As many programs of each as tiles of a token, or some times as many; these share a row of partial sums.
        shares = [-(-heads // rows) or 1 for rows, heads in layout.tiles]
        q_sums, k_sums = partial_rows(layout.counts, shares, sms * config.programs_per_sm)
        q_parts, parts = q_sums * shares[0], q_sums * shares[0] + k_sums * shares[1]
        wide, wide_k = (layout.head_dim * max(1, heads) for _, heads in layout.tiles)
        self.need = need
        self.rows = layout.rows
        self.device = q.device
        self.strides = [_output_strides(x, None, False) for x in (q, k)]
        self.partials = q_sums * wide + k_sums * wide_k
        if not self.rows:
            return
        addresses = {"q": q.stride(), "k": k.stride(), "dxq": self.strides[0], "dxk": self.strides[1]}
        addresses |= {"dyq": dq.stride(), "dyk": dk.stride()}
        named = layout.named(config, addresses) | {"q_parts": q_parts, "STAGES": config.stages}
        self.start = QK_NORM_BACKWARD.bind((parts, 1, 1), config.num_warps, named, q.device, aligned)
        reduce = reduce_config(max(wide, wide_k))
        named = {"q_parts": q_sums, "k_parts": k_sums, "N": wide, "N_K": wide_k}
        named |= {"BLOCK": reduce.block, "ROWS": reduce.rows}
        grid = (-(-max(wide, wide_k) // reduce.block), 2, 1)
        self.sums = [QK_REDUCE_PARTIALS.bind(grid, reduce.num_warps, named, q.device, True) for _ in range(2)]

    def launch(self, dq, dk, q, k, q_weight, k_weight, cos, sin, q_bias, k_bias, rstd, mean):
        """The six gradients, None where not wanted; those of the parameters are summed in a fixed order."""
        need_q, need_k, *need_parameters = self.need
        dxq = dxk = None
        if need_q or need_k:
            dxq, dxk = (
                torch.empty_strided(x.shape, strides, dtype=x.dtype, device=self.device)
                for x, strides in zip((q, k), self.strides, strict=True)
            )
        parameters = q_weight, k_weight, q_bias, k_bias
        grads = [torch.empty_like(p) if n else None for p, n in zip(parameters, need_parameters, strict=True)]
        if not self.rows:
            grads = [t if t is None else t.zero_() for t in grads]
            return dxq if need_q else None, dxk if need_k else None, *grads
        pairs = grads[:2], grads[2:]
        dw, db = (self._empty_partials() if any(t is not None for t in pair) else None for pair in pairs)
        self.start.on((dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, mean, dxq, dxk, dw, db))
        for start, partials, pair in zip(self.sums, (dw, db), pairs, strict=True):
            if partials is not None:
                start.on((partials, *pair))
        return dxq if need_q else None, dxk if need_k else None, *grads

    def _empty_partials(self) -> Tensor:
        return torch.empty(self.partials, dtype=torch.float32, device=self.device)


def partial_rows(counts: list[int], shares: list[int], programs: int) -> list[int]:
    """How many rows of partial sums q and k have: in proportion to their tiles, at least one where there is a tile."""
    total = sum(counts)
    parts = min(programs, total)
    q_parts = parts
    if counts[1]:
        q_parts = min(max(1, round(parts * counts[0] / max(1, total))), parts - 1)
    sides = zip(counts, (q_parts, parts - q_parts), shares, strict=True)
    return [max(min(1, count), part // share) for count, part, share in sides]


def qk_backward_config(
    head_dim: int, centered: bool, itemsize: int, shared: int, rotary: bool, tiles: list[tuple[int, int]]
) -> BackwardConfig:
    """The shape of a backward whose operands have `itemsize` bytes an element, of a whole row by so many rows a tile.

    Arguments as in `backward_config`; tiles: as `_Layout` has them. There are as many stages as let all programs fit at
    once.
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
