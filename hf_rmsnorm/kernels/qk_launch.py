"""Launches of the rotary embedding of queries and keys, with their norms and alone: as
`norm_launch` has those of rows.
"""

import torch
from torch import Tensor

from ..formula import HALVES, NormSpec, Rotation
from ..operands import HeadOperands
from ..rows import allocator, blank, without_data
from . import compiled, qk_backward, qk_forward
from .c_launcher import Pointers
from .compiled import Kernel
from .norm_launch import sum_of_partials
from .sizes import QK_PROGRAMS_PER_SM, qk_config, qk_stages

QK_NORM_FORWARD = Kernel(qk_forward.qk_norm_forward)
QK_NORM_BACKWARD = Kernel(qk_backward.qk_norm_backward)
# without norms the same, forward and backward
ROTARY_FORWARD = Kernel(qk_forward.qk_norm_forward, name="rotary_forward")
ROTARY_BACKWARD = Kernel(qk_forward.qk_norm_forward, name="rotary_backward")
KERNELS = (QK_NORM_FORWARD, QK_NORM_BACKWARD, ROTARY_FORWARD, ROTARY_BACKWARD)


def _tiles(q: Tensor, k: Tensor) -> tuple[int, int]:
    """How many tiles q and k are."""
    head_dim = q.shape[-1]
    elements = qk_config(head_dim).rows * head_dim
    return -(-q.numel() // elements), -(-k.numel() // elements)


def _arguments(cos: Tensor, strided: dict[str, Tensor]) -> dict:
    """The arguments of a kernel of heads, by name.

    Args:
        strided: by their names in the kernel, the tensors of which it takes strides.
    """
    q = strided["q"]
    k = strided["k"]
    batch, q_heads, length, head_dim = q.shape
    config = qk_config(head_dim)
    named = {
        "tokens": batch * length,
        "length": length,
        "q_heads": q_heads,
        "k_heads": k.shape[1],
        "rotary_batch": _stride(cos, 0),
        "rotary_position": _stride(cos, 1),
        "N": head_dim,
        "R": cos.shape[-1],
        "BLOCK": config.block // 2,  # of a half of the columns
        "ROWS": config.rows,
    }
    for name, t in strided.items():
        named[f"{name}_batch"] = _stride(t, 0)
        named[f"{name}_head"] = _stride(t, 1)
        named[f"{name}_position"] = _stride(t, 2)
    return named


def _stride(t: Tensor, dimension: int) -> int:
    """A dimension of one element may have any stride, also one that no vector divides;
    0 takes its place.
    """
    return t.stride(dimension) if t.shape[dimension] > 1 else 0


def _formula(spec: NormSpec | None) -> dict:
    """The constants of the norms' formula, or of none."""
    if spec is None:
        return {"eps": 0.0, "OFFSET": 0.0, "ROUNDING": None}
    return {"eps": spec.eps, "OFFSET": spec.weight_offset, "ROUNDING": spec.rounding}


class QKForward:
    """The rotary embedding of queries and keys with this layout, with the norms before
    it if there are any; or the backward of a rotation alone.

    Args:
        operands: also as a plain tuple; of a backward with the gradients of the
            results.
        results: meta tensors with the strides and dtypes of the results.
        aligned: the operands start at multiples of 16 bytes.
        way: how they are rotated; with norms halves.
        spec: a formula that `serves` lists; None without norms.
        stats: also return rstd for the backward.
        back: this is a backward.

    Attributes:
        inputs: meta tensors with the strides and the dtype of the gradients of q and k.
    """

    def __init__(
        self,
        operands: HeadOperands,
        results: tuple[Tensor, Tensor],
        aligned: bool,
        way: Rotation = HALVES,
        spec: NormSpec | None = None,
        stats: bool = False,
        back: bool = False,
    ):
        q, k, q_weight, k_weight, cos, sin = operands
        yq, yk = results
        self.way = way
        self.stats = stats
        self.inputs = without_data(q), without_data(k)
        self.empty_yq = allocator(q, yq)
        self.empty_yk = allocator(k, yk)
        self.blank = blank(q.device, (q.numel() + k.numel()) // q.shape[-1])
        strided = {"q": q, "k": k, "yq": yq, "yk": yk}
        sides = way.reads_pairs, way.writes_pairs
        reads, writes = reversed(sides) if back else sides
        named = {
            **_arguments(cos, strided),
            **_formula(spec),
            "R": way.columns(cos.shape[-1]),
            "BACK": back,
            "READ_PAIRS": reads,
            "WRITE_PAIRS": writes,
            "SHARED": way.tables != "all",
            "ONCE": way.once and not (back and way.casts_twice),
        }
        kernel = ROTARY_BACKWARD if back else ROTARY_FORWARD
        if spec is not None:
            kernel = QK_NORM_FORWARD
        grid = (sum(_tiles(q, k)), 1, 1)
        num_warps = qk_config(q.shape[-1]).num_warps
        self.kernel = kernel.bind(grid, num_warps, named, q.device, aligned)

    def on(self, operands: HeadOperands) -> tuple:
        """(q', k', rstd): rstd is float32, one for each row of q and then of k; or
        None.
        """
        q, k = operands[:2]
        yq = self.empty_yq(q)
        yk = self.empty_yk(k)
        rstd = torch.empty_like(self.blank) if self.stats else None
        written = yq, yk, rstd
        self.kernel.start(operands + written)
        return written


class QKBackward:
    """The backward of a formula on queries and keys with this layout, and the sum of
    its partial gradients.

    Args:
        operands: dq, dk, the `HeadOperands` of the forward, and its rstd. dq and dk are
            gradients of q' and k', with columns of unit stride.
        aligned: all but rstd start at multiples of 16 bytes.
        need: whether gradients of q, k and their weights are wanted.
        way: how the forward has rotated them.
    """

    def __init__(
        self,
        spec: NormSpec,
        operands: Pointers,
        aligned: bool,
        need: tuple[bool, ...],
        way: Rotation = HALVES,
    ):
        dq, dk, q, k, q_weight, k_weight, cos, sin, rstd = operands
        self.need = need
        head_dim = q.shape[-1]
        device = q.device
        sms, shared = compiled.device_limits(device.type, device.index)
        q_parts, k_parts = shares(_tiles(q, k), sms * QK_PROGRAMS_PER_SM)
        itemsize = max(t.element_size() for t in (q, cos, dq, dk))
        dxq = without_data(q)
        dxk = without_data(k)
        strided = {"dyq": dq, "dyk": dk, "q": q, "k": k, "dxq": dxq, "dxk": dxk}
        named = {
            **_arguments(cos, strided),
            **_formula(spec),
            "q_parts": q_parts,
            "ONCE": way.once and not way.casts_twice,
            "STAGES": qk_stages(itemsize, shared),
        }
        grid = (q_parts + k_parts, 1, 1)
        num_warps = qk_config(head_dim).num_warps
        self.kernel = QK_NORM_BACKWARD.bind(grid, num_warps, named, device, aligned)
        self.partials = blank(device, q_parts + k_parts, head_dim)
        self.sum = sum_of_partials(device, q_parts, k_parts, head_dim)

    def on(self, operands: Pointers) -> tuple:
        """The gradients of q, k and their weights, None where not wanted; the sums have
        a fixed order.
        """
        dq, dk, q, k, q_weight, k_weight, cos, sin, rstd = operands
        need_q, need_k, need_q_weight, need_k_weight = self.need
        dxq = dxk = dwq = dwk = partials = None
        if need_q or need_k:
            dxq = torch.empty_like(q)
            dxk = torch.empty_like(k)
        if need_q_weight:
            dwq = torch.empty_like(q_weight)
        if need_k_weight:
            dwk = torch.empty_like(k_weight)
        if need_q_weight or need_k_weight:
            partials = torch.empty_like(self.partials)
        written = dxq, dxk, partials
        self.kernel.start(operands + written)
        if partials is not None:
            self.sum.start((partials, dwq, dwk))
        return dxq if need_q else None, dxk if need_k else None, dwq, dwk


def shares(tiles: tuple[int, int], programs: int) -> tuple[int, int]:
    """How many programs walk the tiles of q and of k: in proportion, and at least one
    for any tile.
    """
    of_q, of_k = tiles
    programs = min(programs, of_q + of_k)
    if not of_k:
        return programs, 0
    programs = max(2, programs)
    q_programs = round(programs * of_q / (of_q + of_k))
    q_programs = max(1, min(q_programs, programs - 1))
    return q_programs, programs - q_programs
