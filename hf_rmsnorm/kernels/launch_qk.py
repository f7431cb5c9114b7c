"""Launches of the norms of queries and keys with their rotary embedding: as `launch`
has those of rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import NormSpec, promoted
from . import compiled, qk, qk_backward
from .compiled import Kernel
from .rows import allocator, blank, without_data
from .serves import require
from .sizes import QK_PROGRAMS_PER_SM, qk_config, qk_stages, reduce_config

QK_NORM_FORWARD = Kernel(qk.qk_norm_forward)
QK_NORM_BACKWARD = Kernel(qk_backward.qk_norm_backward)
QK_REDUCE_PARTIALS = Kernel(qk_backward.qk_reduce_partials)
KERNELS = (QK_NORM_FORWARD, QK_NORM_BACKWARD, QK_REDUCE_PARTIALS)


class QKOperands(NamedTuple):
    """The operands of a forward, in the order of the kernel's parameters.

    Args:
        q, k: (batch, heads, length, head_dim), columns of unit stride, of one dtype.
        q_weight, k_weight: (head_dim,), contiguous, of one dtype; or None both.
        cos, sin: (batch or 1, length, turned columns), of one dtype and the same
            strides.
    """

    q: Tensor
    k: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor
    sin: Tensor

    def normed_dtype(self, spec: NormSpec) -> torch.dtype:
        """The dtype of q and k when they are normalised, before they are rotated."""
        weight = self.q_weight
        return spec.output_dtype(self.q.dtype, None if weight is None else weight.dtype)

    def rows(self) -> list[int]:
        """How many rows q and k have."""
        return [math.prod(x.shape[:3]) for x in (self.q, self.k)]

    def tiles(self) -> list[int]:
        """How many tiles q and k are."""
        of_a_tile = qk_config(self.q.shape[-1]).rows
        return [-(-rows // of_a_tile) for rows in self.rows()]


def _arguments(spec: NormSpec, operands: QKOperands) -> dict:
    """The arguments that forward and backward have in common, by name, but for the
    strides of q and k.
    """
    q, k, cos = operands.q, operands.k, operands.cos
    batch, q_heads, length, head_dim = q.shape
    config = qk_config(head_dim)
    return {
        "tokens": batch * length,
        "length": length,
        "q_heads": q_heads,
        "k_heads": k.shape[1],
        "rotary_batch": cos.stride(0) if cos.shape[0] > 1 else 0,
        "rotary_position": cos.stride(1) if length > 1 else 0,
        "N": head_dim,
        "R": cos.shape[-1],
        "BLOCK": config.block // 2,  # of a half of the columns
        "ROWS": config.rows,
        "OFFSET": spec.weight_offset,
        "ROUNDING": spec.rounding,
    }


def _strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of tensors, by the names of the kernels' parameters.

    A dimension of one element may have any stride, also one that no vector divides; 0
    takes its place.
    """
    named = {}
    for name, t in tensors.items():
        for at, dimension in enumerate(("batch", "head", "position")):
            named[f"{name}_{dimension}"] = t.stride(at) if t.shape[at] > 1 else 0
    return named


def _rotated_like(x: Tensor, cos: Tensor, dtype: torch.dtype, way: str) -> Tensor:
    """A meta tensor with the strides that eager's operators give a rotated x."""
    # `rotate_half` ends in a concatenation, and so does a rotary embedding of fewer
    # columns.
    concatenated = torch.empty(x.shape, device="meta", dtype=dtype)
    if cos.shape[-1] != x.shape[-1] or way == "joined":
        return concatenated
    product = without_data(x) * without_data(cos).unsqueeze(1)
    return (product + concatenated).to(dtype)


class QKForward:
    """The forward of a formula on queries and keys with this layout; it reads none of
    their values.

    Args:
        operands: `QKOperands`.
        aligned: they start at multiples of 16 bytes.
        stats: also return rstd for the backward.
        way: how they are rotated, as in `reference.rotated`.

    Raises:
        NotImplementedError: the kernels do not compute this formula.
    """

    def __init__(
        self, spec: NormSpec, operands: tuple, aligned: bool, stats: bool = True,
        way: str = "",
    ):  # fmt: skip
        require(spec, "queries and keys")
        operands = QKOperands(*operands)
        q, k, cos = operands.q, operands.k, operands.cos
        normed = operands.normed_dtype(spec)
        dtype = normed if way == "once" else promoted(normed, cos.dtype)
        yq, yk = (_rotated_like(x, cos, dtype, way) for x in (q, k))
        self.empty_yq, self.empty_yk = allocator(q, yq), allocator(k, yk)
        rows = sum(operands.rows())
        self.stats, self.blank = stats, blank(q.device, rows)
        named = {
            **_arguments(spec, operands),
            **_strides(q=q, k=k, yq=yq, yk=yk),
            "eps": spec.eps,
            "ONCE": way == "once",
        }
        grid, warps = (sum(operands.tiles()), 1, 1), qk_config(q.shape[-1]).num_warps
        self.start = QK_NORM_FORWARD.bind(grid, warps, named, q.device, aligned)

    def launch(self, *operands):
        """(q', k', rstd): rstd is float32, one for each row of q and then of k; or
        None.
        """
        q, k = operands[:2]
        yq, yk = self.empty_yq(q), self.empty_yk(k)
        rstd = torch.empty_like(self.blank) if self.stats else None
        self.start.on((*operands, yq, yk, rstd))
        return yq, yk, rstd


class QKBackward:
    """The backward of a formula on queries and keys with this layout, and the sum of
    its partial gradients.

    Args:
        operands: (dq, dk, q, k, q_weight, k_weight, cos, sin, rstd). dq and dk are
            gradients of q' and k', with columns of unit stride; rstd is a result of the
            forward.
        aligned: all but rstd start at multiples of 16 bytes.
        need: whether gradients of q, k and their weights are wanted.
        way: how the forward has rotated them.
    """

    def __init__(
        self, spec: NormSpec, operands: tuple, aligned: bool, need: tuple[bool, ...],
        way: str = "",
    ):  # fmt: skip
        dq, dk, *read, _ = operands
        read = QKOperands(*read)
        q, k, cos = read.q, read.k, read.cos
        self.need = need
        head_dim, device = q.shape[-1], q.device
        sms, shared = compiled.device_limits(device.type, device.index)
        q_parts, k_parts = shares(read.tiles(), sms * QK_PROGRAMS_PER_SM)
        parts = {"q_parts": q_parts, "k_parts": k_parts}
        self.partials = blank(device, q_parts + k_parts, head_dim)
        dxq, dxk = without_data(q), without_data(k)
        itemsize = max(t.element_size() for t in (q, cos, dq, dk))
        named = {
            **_arguments(spec, read),
            **_strides(dyq=dq, dyk=dk, q=q, k=k, dxq=dxq, dxk=dxk),
            "q_parts": q_parts,
            # Else autograd rounds each product, to the dtype that the tables promote.
            "ONCE": way == "once" and cos.dtype == read.normed_dtype(spec),
            "STAGES": qk_stages(itemsize, shared),
        }
        grid, warps = (q_parts + k_parts, 1, 1), qk_config(head_dim).num_warps
        self.start = QK_NORM_BACKWARD.bind(grid, warps, named, device, aligned)
        config = reduce_config(head_dim)
        named = {**parts, "N": head_dim, "BLOCK": config.block, "ROWS": config.rows}
        grid = (-(-head_dim // config.block), 2, 1)
        self.sum = QK_REDUCE_PARTIALS.bind(grid, config.num_warps, named, device, True)

    def launch(self, *operands):
        """The gradients of q, k and their weights, None where not wanted; the sums have
        a fixed order.
        """
        _, _, q, k, q_weight, k_weight, *_ = operands
        need_q, need_k, need_q_weight, need_k_weight = self.need
        dxq = dxk = partials = None
        if need_q or need_k:
            dxq, dxk = torch.empty_like(q), torch.empty_like(k)
        dwq = torch.empty_like(q_weight) if need_q_weight else None
        dwk = torch.empty_like(k_weight) if need_k_weight else None
        sums = need_q_weight or need_k_weight
        if sums:
            partials = torch.empty_like(self.partials)
        self.start.on((*operands, dxq, dxk, partials))
        if sums:
            self.sum.on((partials, dwq, dwk))
        return dxq if need_q else None, dxk if need_k else None, dwq, dwk


def shares(tiles: list[int], programs: int) -> tuple[int, int]:
    """How many programs walk the tiles of q and of k: in proportion, and at least one
    for any tile.
    """
    of_q, of_k = tiles
    programs = min(programs, of_q + of_k)
    if not of_k:
        return programs, 0
    q_programs = round(programs * of_q / (of_q + of_k))
    q_programs = max(1, min(q_programs, programs - 1))
    return q_programs, max(1, programs - q_programs)
