"""How each tensor of a result is made: read from the source, changed in float64, and
rounded.

A plan says what to make (`planned_tensors` here, `native_build.py` for another
architecture), and `checkpoint/write.py` asks each tensor for its value: first of a
source without values, for the sizes of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
    """A tensor of the source: these rows of it, centred; without a step it keeps its
    dtype and its bytes.
    """

    key: str
    rows: torch.Tensor | None = None
    step: Centre | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors of the source that it is made from."""
        return (self.key,)

    def read(self, source: Checkpoint) -> torch.Tensor:
        """The rows as the source has them."""
        x = source.read(self.key)
        return x if self.rows is None else x[self.rows]

    def value(self, source: Checkpoint) -> torch.Tensor:
        """The tensor in its own dtype."""
        x = self.read(source)
        if self.step is None:
            return x
        x = x.to(dtype_of_changed(self.key, source))
        # What an earlier conversion has centred, and training has not moved since,
        # keeps its bytes.
        was_converted = RECORD_KEY in source.config
        if x.is_meta or (was_converted and is_centred(x, **self.step.how)):
            return x
        centre_(x, **self.step.how)
        if not x.isfinite().all():
            kind = str(x.dtype).removeprefix("torch.")
            raise ConversionError(
                f"NaN or infinity in '{self.key} ({kind})': repair the source if it has "
                "some there, else convert a bfloat16 copy, which has room for the change"
            )
        return x


@dataclass(frozen=True, eq=False)
class Made:
    """A vector that a function of the source makes in float64, from tensors of these
    keys; its dtype is that of the first.
    """

    keys: tuple[str, ...]
    wide: Callable[[Checkpoint], torch.Tensor]

    def value(self, source: Checkpoint) -> torch.Tensor:
        return self.wide(source).to(dtype_of_changed(self.keys[0], source))


Lazy = Stored | Made  # a tensor of a result, made when it is written


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


def filled(of: Stored, number: float, axis: int = 0) -> Made:
    """A vector of one number, as long as another tensor is along an axis."""

    def wide(source: Checkpoint) -> torch.Tensor:
        length = source.tensors[of.key].shape[axis]
        return torch.full((length,), number, dtype=torch.float64)

    return Made(of.keys, wide)


def plus(of: Stored, number: float) -> Made:
    """A vector with a number added: a norm's weight may be stored less one."""
    return Made(of.keys, lambda source: of.read(source).double() + number)


def folded_bias(weight: Stored, shift: Stored, bias: Stored | None = None) -> Made:
    """The bias that a linear gets when a vector is added to its input: W shift + bias."""

    def wide(source: Checkpoint) -> torch.Tensor:
        added = shift.read(source).double()
        pieces = weight.read(source).split(ROWS)
        total = torch.cat([piece.double() @ added for piece in pieces])
        return total if bias is None else total + bias.read(source).double()

    first = () if bias is None else bias.keys
    return Made((*first, weight.key, shift.key), wide)


def planned_tensors(plan: CentringPlan, source: Checkpoint) -> dict[str, Lazy]:
    """Every tensor of a result: copied, centred, or as it is; a step that does not fit
    the source's tensors is refused.
    """
    tensors = {name: Stored(name) for name in source.tensors}
    for copy in plan.copy:
        if copy.source not in source.tensors:
            raise ConversionError(f"no tensor {copy.source}, to copy: {OTHER}")
        if copy.key not in source.tensors:
            tensors[copy.key] = Stored(copy.source)
        elif not source.read(copy.key).equal(source.read(copy.source)):
            raise ConversionError(
                f"{copy.key} is there already and differs from {copy.source}, to which "
                "config.json ties it: set tie_word_embeddings to false if it is right, "
                "or remove it"
            )
    for step in plan.centre:
        tensor = tensors.get(step.key)
        shape = () if tensor is None else source.tensors[tensor.key].shape
        length = shape[step.axis] if step.axis < len(shape) else 0
        last = max(step.blocks or (0,))
        if length % step.block or length <= last * step.block:
            raise ConversionError(
                f"{step.key} is missing, or has another shape than the plan says: {OTHER}"
            )
        tensors[step.key] = replace(tensor, step=step)
    return tensors
