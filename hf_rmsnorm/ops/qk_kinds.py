"""The launches of rotary embeddings, with norms in front and alone: which there are for
given operands, and the same in plain torch.

`launches` asks these kinds where it has no launch yet. The launches themselves are in
`kernels.qk_launch`.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.linalg import vector_norm

from ..formula import Rotation, dtype_of
from ..operands import Operands, row_major
from ..reference import reference_qk_norm, rotated
from ..rows import strided_without_data, without_data
from .kinds import FLOOR, Kind, Launch, largest
from .launches import Launches, kernels
from .limits import serves_qk, why_not_rotated
from .plain import gradients_of_all
from .saved import require_unchanged


@dataclass(eq=False)
class Rotary:
    """A model's rotary function, and the formula that it was shown to compute.

    Args:
        way: the formula.
        function: the model's, as ``function(q, k, cos, sin)`` on operands as
            `reference.rotated` takes them.
        transposed: the model gives it q and k of (batch, length, heads, head_dim).
    """

    way: Rotation
    function: Callable
    transposed: bool = False


class HeadsForwardKind(namedtuple("HeadsForwardKind", "rotary graded"), Kind):
    """Forwards: from `HeadOperands` to (q', k', rstd).

    Args:
        rotary: a `Rotary`.
        graded: a backward will follow.
    """

    __slots__ = ()
    name = "rotary embedding"
    weight_at = 2

    def make(
        self, launches: Launches, operands: Operands, aligned: bool
    ) -> Launch | None:
        spec = launches.spec
        way = self.rotary.way
        if not serves_qk(spec, operands, way):
            return None
        q, k, q_weight, k_weight, cos, sin = operands
        normed = []
        for x in (q, k):
            if spec is None:
                normed.append(strided_without_data(x))
            else:
                dtype = spec.output_dtype(x.dtype, dtype_of(q_weight))
                normed.append(without_data(x, dtype))
        # which gives them the strides that the model's own results have
        tables = map(strided_without_data, (cos, sin))
        results = self.rotary.function(*normed, *tables)
        stats = self.graded and spec is not None
        return kernels().QKForward(operands, results, aligned, way, spec, stats)

    def results(self, launches: Launches, operands: Operands) -> Operands:
        *heads, cos, sin = operands
        return reference_qk_norm(*heads, launches.spec, cos, sin, self.rotary.way)

    def floors(self, launches: Launches, operands: Operands, exact: Operands) -> tuple:
        return tuple(2 * FLOOR * largest(y, -1) for y in exact)


class HeadsBackwardKind(namedtuple("HeadsBackwardKind", "need way"), Kind):
    """Backwards of norms and a rotation: from dq, dk, `HeadOperands` and rstd to the
    gradients of q, k and their weights.

    Args:
        need: which of these are wanted.
        way: how the forward has rotated them.
    """

    __slots__ = ()
    name = "the gradient of q/k norms and rotary embedding"
    weight_at = 4
    is_back = True

    def make(
        self, launches: Launches, operands: Operands, aligned: bool
    ) -> Launch | None:
        dq, dk, *of_forward, rstd = operands
        _require_unchanged(operands)
        # which hooks of saved tensors may have copied
        if not (
            serves_qk(launches.spec, of_forward, self.way) and rstd.stride() == (1,)
        ):
            return None
        copies = dq.stride(-1) != 1 or dk.stride(-1) != 1
        if copies:
            dq, dk = row_major(dq, dk)
        read = dq, dk, *of_forward, rstd
        launch = kernels().QKBackward(launches.spec, read, aligned, self.need, self.way)
        return OnCopies(launch) if copies else launch

    def results(self, launches: Launches, operands: Operands) -> Operands:
        dq, dk, q, k, q_weight, k_weight, cos, sin, _ = operands
        formula = partial(
            reference_qk_norm, spec=launches.spec, cos=cos, sin=sin, way=self.way
        )
        return gradients_of_all(
            formula, (q, k, q_weight, k_weight), (dq, dk), self.need
        )

    def floors(self, launches: Launches, operands: Operands, exact: Operands) -> tuple:
        """Gradients are small differences of these terms."""
        dq, dk, q, k, q_weight, k_weight, *_ = operands
        of_heads = []
        of_weights = []
        for dy, x, weight in ((dq, q, q_weight), (dk, k, k_weight)):
            terms = 2 * FLOOR * largest(dy, -1)
            of_weights.append(terms.sum())
            if weight is not None:
                terms = terms * (launches.spec.weight_offset + largest(weight))
            root = x.shape[-1] ** 0.5
            size = vector_norm(x, dim=-1) + root * launches.spec.eps**0.5
            of_heads.append(terms * root / size)
        return *of_heads, *of_weights


@dataclass
class OnCopies:
    """A launch on gradients whose columns have gaps, as eager attention leaves that of k."""

    inner: Launch

    def on(self, operands: Operands) -> Operands:
        dq, dk, *others = operands
        return self.inner.on((*row_major(dq, dk), *others))


def _require_unchanged(operands: Operands) -> None:
    dq, dk, q, k, q_weight, k_weight, cos, sin, rstd = operands
    *_, length, head_dim = dq.shape
    of_weight = (head_dim,)
    of_table = cos.shape[0], length, cos.shape[-1]
    row_count = (dq.numel() + dk.numel()) // head_dim
    expected = {
        "q": (q, dq.shape),
        "k": (k, dk.shape),
        "the weight of q": (q_weight, of_weight),
        "the weight of k": (k_weight, of_weight),
        "cos": (cos, of_table),
        "sin": (sin, of_table),
        "rstd": (rstd, (row_count,)),
    }
    require_unchanged(dq.device, expected)


class RotaryBackwardKind(namedtuple("RotaryBackwardKind", "forward"), Kind):
    """Backwards of a rotation alone: from `HeadOperands` with dq and dk to the gradients
    of q and k.

    Args:
        forward: the launch of the forward.
    """

    __slots__ = ()
    name = "the gradient of a rotary embedding"
    weight_at = 2
    is_back = True

    def make(
        self, launches: Launches, operands: Operands, aligned: bool
    ) -> Launch | None:
        dq, dk, _, _, cos, sin = operands
        way = self.forward.way
        if why_not_rotated(dq, dk, cos, sin, way):
            return None
        return kernels().QKForward(
            operands, self.forward.inputs, aligned, way, back=True
        )

    def results(self, launches: Launches, operands: Operands) -> Operands:
        dq, dk, _, _, cos, sin = operands

        def formula(*tensors):
            return [rotated(x, cos, sin, self.forward.way) for x in tensors]

        # At any q and k, as it is linear; not made like the gradients, which may be
        # batched.
        inputs = []
        for dy, x in zip((dq, dk), self.forward.inputs, strict=True):
            dtype = cos.dtype if cos.dtype == torch.float64 else x.dtype
            zeros = torch.zeros(dy.shape, dtype=dtype, device=cos.device)
            inputs.append(zeros.requires_grad_())
        return gradients_of_all(formula, inputs, (dq, dk), (True, True))

    def floors(self, launches: Launches, operands: Operands, exact: Operands) -> tuple:
        return tuple(2 * FLOOR * largest(dy, -1) for dy in operands[:2])

    def without_rows(self) -> tuple:
        return (self.forward.way,)
