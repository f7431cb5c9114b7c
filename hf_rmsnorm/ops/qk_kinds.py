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
from torch import Tensor
from torch.linalg import vector_norm

from ..formula import NormSpec, OptionalTensor, Rotation, dtype_of
from ..operands import Operands, row_major
from ..reference import reference_norm, reference_qk_norm, rotated
from ..rows import strided_without_data, without_data
from .backend import device_refusal
from .kinds import FLOOR, Kind, Launch, largest
from .launches import Launches, kernels
from .limits import serves_qk, why_not_rotated
from .plain import gradients_of_all
from .saved import made_for, require_unchanged


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
        return normed_and_rotated(launches.spec, operands, self.rotary)

    def exact(self, launches: Launches, operands: Operands) -> tuple[Operands, tuple]:
        heads, weight, _ = _as_one(operands)
        *_, cos, sin = operands
        y = _formula(launches.spec, heads, weight, cos, sin, self.rotary.way)
        return (y,), (2 * FLOOR * largest(y, -1),)

    def joined(self, results: Operands) -> Operands:
        return (torch.cat(results, 1),)


def normed_and_rotated(
    spec: NormSpec | None,
    operands: Operands,
    rotary: Rotary,
    norms: tuple[Callable, Callable] | None = None,
) -> tuple[Tensor, Tensor]:
    """The code that a forward replaces: norms, and then the model's function.

    Args:
        norms: as of `qk.run_qk`.
    """
    q, k, q_weight, k_weight, cos, sin = operands
    if norms is not None:
        norm_q, norm_k = norms
        q = norm_q(q)
        k = norm_k(k)
    elif spec is not None:
        q = reference_norm(q, q_weight, None, spec)
        k = reference_norm(k, k_weight, None, spec)
    return rotary.function(q, k, cos, sin)


def _as_one(operands: Operands) -> tuple[Tensor, OptionalTensor, list[int]]:
    """(q and k of `HeadOperands` as heads of one tensor, (batch, heads, length, head_dim);
    the weight of each head, (heads, 1, head_dim); how many heads q and k have).
    """
    q, k, q_weight, k_weight, _, _ = operands
    counts = [q.shape[1], k.shape[1]]
    weight = None
    if q_weight is not None:
        shapes = [(count, 1, q.shape[-1]) for count in counts]
        of_q = q_weight.expand(shapes[0])
        weight = torch.cat((of_q, k_weight.expand(shapes[1])))
    return torch.cat((q, k), 1), weight, counts


def _formula(spec: NormSpec | None, heads, weight, cos, sin, way: Rotation) -> Tensor:
    if spec is not None:
        heads = reference_norm(heads, weight, None, spec)
    return rotated(heads, cos, sin, way)


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
        device = operands[0].device
        if device_refusal(device.type, device.index) is not None:
            return None

        def make(read):
            return kernels().QKBackward(
                launches.spec, read, aligned, self.need, self.way
            )

        return made_for(operands, _as_read, make)

    def results(self, launches: Launches, operands: Operands) -> Operands:
        dq, dk, q, k, q_weight, k_weight, cos, sin, _ = operands
        formula = partial(
            reference_qk_norm, spec=launches.spec, cos=cos, sin=sin, way=self.way
        )
        return gradients_of_all(
            formula, (q, k, q_weight, k_weight), (dq, dk), self.need
        )

    def exact(self, launches: Launches, operands: Operands) -> tuple[Operands, tuple]:
        dq, dk, *of_forward, rstd = operands
        heads, weight, counts = _as_one(of_forward)
        *_, cos, sin = of_forward
        dy = torch.cat((dq, dk), 1)

        def formula(heads, weight):
            return (_formula(launches.spec, heads, weight, cos, sin, self.way),)

        of_each = True, weight is not None
        of_heads, of_weight = gradients_of_all(formula, (heads, weight), (dy,), of_each)
        terms = 2 * FLOOR * largest(dy, -1)
        of_sums = terms.sum()
        if weight is not None:
            terms = terms * (launches.spec.weight_offset + largest(weight))
            of_weight = [part.sum((0, 1)) for part in of_weight.split(counts)]
        width = heads.shape[-1]
        root = vector_norm(heads, dim=-1) + (width * launches.spec.eps) ** 0.5
        terms = terms * width**0.5 / root
        grads = *of_heads.split(counts, 1), *(of_weight or (None, None))
        floors = *terms.split(counts, 1), of_sums, of_sums
        pairs = zip(grads, self.need, strict=True)
        return tuple(t if needed else None for t, needed in pairs), floors


def _as_read(operands: Operands) -> Operands:
    """The operands of a backward, columns of unit stride and the others without gaps."""
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
    rows = [dq, dk, q, k]
    for at, t in enumerate(rows):
        if t.stride(-1) != 1:
            rows[at] = t.contiguous()
    q_weight, k_weight, rstd = row_major(q_weight, k_weight, rstd)
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = row_major(cos, sin)
    return *rows, q_weight, k_weight, cos, sin, rstd


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
        for x in self.forward.inputs:
            dtype = cos.dtype if cos.dtype == torch.float64 else x.dtype
            zeros = torch.zeros(x.shape, dtype=dtype, device=cos.device)
            inputs.append(zeros.requires_grad_())
        return gradients_of_all(formula, inputs, (dq, dk), (True, True))

    def exact(self, launches: Launches, operands: Operands) -> tuple[Operands, tuple]:
        dy, _, counts = _as_one(operands)
        *_, cos, sin = operands

        def formula(heads):
            return (rotated(heads, cos, sin, self.forward.way),)

        heads = torch.zeros_like(dy)  # any, as it is linear
        (grad,) = gradients_of_all(formula, (heads,), (dy,), (True,))
        floors = 2 * FLOOR * largest(dy, -1)
        return grad.split(counts, 1), floors.split(counts, 1)

    def without_rows(self) -> tuple:
        return (self.forward.way,)
