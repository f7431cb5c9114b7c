"""How each tensor of a result is made: read from the source, changed in float64, and
rounded.

A plan says what to make (`planned_tensors` here, `native_build.py` for another
architecture), `checkpoint/layout.py` puts it into shards, and `checkpoint/write.py` asks
each tensor for its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch

from ..converted.record import RECORD_KEY, centre_, is_centred
from .checkpoint.source import FLOATS, Checkpoint
from .errors import ConversionError
from .plan import Centre, CentringPlan

OTHER = "the plan is of another checkpoint, plan this one"
ROWS = 1 << 10  # of a matrix that are in float64 at a time


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: slices are too small for more, and sums are in the same
    order on every machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the source: these rows of it, centred; without either, it keeps its
    dtype and its bytes.
    """

    key: str
    rows: torch.Tensor | None = None
    step: Centre | None = None

    def keys(self) -> set[str]:
        """The tensors of the source that it is made from."""
        return {self.key}

    def shape(self, source: Checkpoint) -> tuple[int, ...]:
        shape = source.tensors[self.key].shape
        return tuple(shape) if self.rows is None else (len(self.rows), *shape[1:])

    def dtype(self, source: Checkpoint) -> torch.dtype:
        """The dtype that the result has it in."""
        if self.rows is None and self.step is None:
            return source.tensors[self.key].dtype
        return dtype_of_changed(self.key, source)

    def read(self, source: Checkpoint) -> torch.Tensor:
        """The rows as the source has them."""
        x = source.read(self.key)
        return x if self.rows is None else x[self.rows]

    def value(self, source: Checkpoint) -> torch.Tensor:
        """The tensor in its own dtype."""
        x = self.read(source).to(self.dtype(source))
        if self.step is None:
            return x
        # What an earlier conversion has centred, and training has not moved since,
        # keeps its bytes.
        if RECORD_KEY in source.config and is_centred(x, **self.step.how):
            return x
        centre_(x, **self.step.how)
        if x.isfinite().all():
            return x
        if not self.read(source).isfinite().all():
            raise ConversionError(
                f"NaN or infinity in {self.key!r}, as in the source: repair that"
            )
        kind = str(x.dtype).removeprefix("torch.")
        raise ConversionError(
            f"centring takes '{self.key} ({kind})' past the largest number of its "
            "dtype: convert a bfloat16 copy"
        )


def dtype_of_changed(key: str, source: Checkpoint) -> torch.dtype:
    """The dtype in which a tensor of the source is written once it is changed."""
    dtype = source.tensors[key].dtype
    if dtype not in FLOATS:
        raise ConversionError(
            f"{key} is {dtype} and is to be changed: it is quantised; convert the "
            "unquantised model, then quantise that"
        )
    return widened(dtype, source)


def widened(dtype: torch.dtype, source: Checkpoint) -> torch.dtype:
    """A dtype of `FLOATS`, or the one of config.json, in which the result is loaded, if
    that rounds less.
    """
    other = source.dtype or dtype
    if torch.finfo(dtype).eps > torch.finfo(other).eps:
        return torch.promote_types(dtype, other)
    return dtype


@dataclass(frozen=True, eq=False)
class Made:
    """A vector that a function of the source makes in float64.

    Args:
        parts: the tensors it is made from; its dtype, its shard and its length are
            those of the first, along `axis`.
    """

    parts: tuple[Stored, ...]
    wide: Callable[[Checkpoint], torch.Tensor]
    axis: int = 0

    def keys(self) -> set[str]:
        return {part.key for part in self.parts}

    def shape(self, source: Checkpoint) -> tuple[int, ...]:
        return (self.parts[0].shape(source)[self.axis],)

    def dtype(self, source: Checkpoint) -> torch.dtype:
        return dtype_of_changed(self.parts[0].key, source)

    def value(self, source: Checkpoint) -> torch.Tensor:
        return self.wide(source).to(self.dtype(source))


Lazy = Stored | Made  # a tensor of a result, made when it is written


def nbytes_of(tensor: Lazy, source: Checkpoint) -> int:
    """The bytes that a tensor of a result will have."""
    return prod(tensor.shape(source)) * tensor.dtype(source).itemsize


def filled(of: Stored, number: float, axis: int = 0) -> Made:
    """A vector of one number, as long as another tensor is along an axis."""

    def wide(source: Checkpoint) -> torch.Tensor:
        return torch.full((of.shape(source)[axis],), number, dtype=torch.float64)

    return Made((of,), wide, axis)


def plus(of: Stored, number: float) -> Made:
    """A vector with a number added: a norm's weight may be stored less one."""
    return Made((of,), lambda source: of.read(source).double() + number)


def folded_bias(weight: Stored, shift: Stored, bias: Stored | None = None) -> Made:
    """The bias that a linear gets when a vector is added to its input: W shift + bias."""

    def wide(source: Checkpoint) -> torch.Tensor:
        added = shift.read(source).double()
        pieces = weight.read(source).split(ROWS)
        total = torch.cat([piece.double() @ added for piece in pieces])
        return total if bias is None else total + bias.read(source).double()

    parts = (weight, shift) if bias is None else (bias, weight, shift)
    return Made(parts, wide)


def planned_tensors(plan: CentringPlan, source: Checkpoint) -> dict[str, Lazy]:
    """Every tensor of a result: copied, centred, or as it is; a step that does not fit
    the source's tensors is refused.
    """
    where = source.folder
    tensors = {name: Stored(name) for name in source.tensors}
    for copy in plan.copy:
        if copy.source not in source.tensors:
            raise ConversionError(f"{where}: no tensor {copy.source}, to copy: {OTHER}")
        if copy.key not in source.tensors:
            tensors[copy.key] = Stored(copy.source)
        elif not source.read(copy.key).equal(source.read(copy.source)):
            raise ConversionError(
                f"{where}: {copy.key} is there already and differs from {copy.source}, "
                "to which config.json ties it: set tie_word_embeddings to false if it "
                "is right, or remove it"
            )
    for step in plan.centre:
        tensor = tensors.get(step.key)
        shape = () if tensor is None else tensor.shape(source)
        length = shape[step.axis] if step.axis < len(shape) else 0
        last = max(step.blocks or (0,))
        if length % step.block or length <= last * step.block:
            raise ConversionError(
                f"{where}: {step.key} is missing, or has another shape than the plan "
                f"says: {OTHER}"
            )
        tensors[step.key] = replace(tensor, step=step)
    return tensors
