"""How a tensor of a result is computed from tensors of a source: a few expressions, evaluated in pieces in float64.

A piece is a range of elements in the order of storage. A range has to begin and end at a multiple of the expression's
`grain`, which is a product of the last sizes of its shape; so every grain divides every larger one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from math import prod

import numpy as np
import torch

from ..plan import Centre, CentringPlan, Scale
from .shard import DTYPES, FLOATS, ConversionError, StoredTensor
from .values import Values

PIECE = 1 << 19
"""Elements that are in float64 at a time, where the grain is shorter: 4 MiB, which allocators use again."""
AGAIN = "make the plan again for this checkpoint"


class Expression:
    """A tensor that is computed. Its dtype is that of the tensor `like` of the source."""

    @property
    def like(self) -> str:
        """The tensor of the source that it takes its dtype from, and its place in a shard."""
        return self.of.like

    def keys(self) -> set[str]:
        """The tensors that it is computed from."""
        return set().union(*(part.keys() for part in self._parts() if isinstance(part, Expression)))

    def dtype(self, values: Values) -> str:
        """As in a header, ``BF16``."""
        return values.stored(self.like).dtype

    def shape(self, values: Values) -> tuple[int, ...]:
        return self.of.shape(values)

    def nbytes(self, values: Values) -> int:
        """Size in a shard."""
        return prod(self.shape(values)) * FLOATS[values.stored(self.like, "").dtype].itemsize

    def grain(self, values: Values) -> int:
        """What a range of its elements has to begin and end at a multiple of."""
        return 1

    def elements(self, values: Values, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) in float64, shape (last - first,); the caller may write into them."""
        raise NotImplementedError

    def ranges(self, values: Values) -> Iterator[tuple[int, int]]:
        """All elements as ranges of bounded size."""
        return _ranges(prod(self.shape(values)), self.grain(values))

    def pieces(self, values: Values) -> Iterator[torch.Tensor]:
        """All elements, in pieces of bounded size."""
        return (self.elements(values, *each) for each in self.ranges(values))

    def rows(self, values: Values, first: int, last: int) -> torch.Tensor:
        """Rows [first, last), along the first axis."""
        rest = self.shape(values)[1:]
        return self.elements(values, first * prod(rest), last * prod(rest)).view(-1, *rest)

    def whole(self, values: Values) -> torch.Tensor:
        """The tensor in float64."""
        return torch.cat([*self.pieces(values), torch.empty(0, dtype=torch.float64)]).view(self.shape(values))

    def data(self, values: Values) -> Iterator[np.ndarray]:
        """Its bytes, in pieces; each value is rounded once."""
        dtype = FLOATS[self.dtype(values)]
        return (rounded(piece, dtype).view(torch.uint8).numpy() for piece in self.pieces(values))

    def centred(self) -> Iterator["Centred"]:
        """Its parts that are centred."""
        for part in self._parts():
            yield from part.centred() if isinstance(part, Expression) else ()

    def described(self) -> list:
        """JSON data that is the same for equal expressions alone."""
        parts = (part.tolist() if isinstance(part, torch.Tensor) else part for part in self._parts())
        return [type(self).__name__, *(part.described() if isinstance(part, Expression) else part for part in parts)]

    def _parts(self) -> list:
        return [getattr(self, each.name) for each in fields(self)]


def _ranges(size: int, grain: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE // max(1, grain)) * max(1, grain)
    return ((first, min(size, first + step)) for first in range(0, size, step))


@dataclass(eq=False)
class Stored(Expression):
    """A tensor of the source as it is; it keeps its bytes."""

    key: str

    like = property(lambda self: self.key)

    def keys(self):
        return {self.key}

    def shape(self, values):
        return values.stored(self.key).shape

    def nbytes(self, values):
        return values.stored(self.key).nbytes

    def elements(self, values, first, last):
        return values.elements(self.key, first, last)

    def data(self, values):
        return values.raw(self.key)


@dataclass(eq=False)
class _Of(Expression):
    of: Expression


class _Along(_Of):
    """Computed along `axis`, in pieces of whole rows where it is the last of several, else of what lies behind it."""

    def in_rows(self, values) -> bool:
        return self.axis == len(self.of.shape(values)) - 1 > 0

    def grain(self, values):
        behind = self.of.shape(values)[self.axis + (not self.in_rows(values)) :]
        return max(self.of.grain(values), prod(behind))


@dataclass(eq=False)
class Centred(_Along):
    """Less the mean of each block along an axis: what writes to the stream, along the features.

    Args:
        block, blocks: as in `Centre`; a block of 0 is the whole axis.
    """

    axis: int
    block: int = 0
    blocks: tuple[int, ...] | None = None

    def elements(self, values, first, last):
        x, shape = self.of.elements(values, first, last), self.of.shape(values)
        length, block, inner = shape[self.axis], self.block or shape[self.axis], prod(shape[self.axis + 1 :])
        if self.in_rows(values):
            split = x.view(-1, length // block, block)
            for part in (split,) if self.blocks is None else (split[:, index] for index in self.blocks):
                part -= part.mean(-1, keepdim=True)
            return x
        means = values.once(self, lambda: self._means(values, length, block, inner))
        rows = x.view(-1, inner)
        for index, start, stop in self._in_blocks(length, block, first // inner, last // inner):
            rows[start:stop] -= means[index]
        return x

    def centred(self):
        yield self

    def data(self, values):
        dtype = FLOATS[self.dtype(values)]
        for piece in self.pieces(values):
            narrow = rounded(piece, dtype)
            if not bool(narrow.isfinite().all()):
                raise ConversionError(_not_finite(self.like, piece, dtype))
            yield narrow.view(torch.uint8).numpy()

    def _in_blocks(self, length: int, block: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(number of a block, where it begins and ends) of those blocks that lie in rows [first, last), from first."""
        chosen = None if self.blocks is None else set(self.blocks)
        for index in range(first // block, -(-last // block)):
            if chosen is None or index % (length // block) in chosen:
                yield index, max(first, index * block) - first, min(last, (index + 1) * block) - first

    def _means(self, values, length: int, block: int, inner: int) -> torch.Tensor:
        sums = torch.zeros(prod(self.of.shape(values)) // (block * inner), inner, dtype=torch.float64)
        for first, last in self.ranges(values):
            rows = self.of.elements(values, first, last).view(-1, inner)
            for index, start, stop in self._in_blocks(length, block, first // inner, last // inner):
                sums[index] += rows[start:stop].sum(0)
        return sums.div_(block)


def _not_finite(key: str, piece: torch.Tensor, dtype: torch.dtype) -> str:
    if piece.isnan().any():  # as the mean is too, of infinities
        return f"NaN or infinity in {key!r}, as in the source: mend that"
    name = str(dtype).removeprefix("torch.")
    return f"centring takes '{key} ({name})' past the largest number of its dtype: convert a bfloat16 copy"


@dataclass(eq=False)
class Rows(_Of):
    """Chosen rows in a new order: a part of a fused tensor, or the channels of each head moved."""

    index: torch.Tensor = field(repr=False)

    def shape(self, values):
        return (len(self.index), *self.of.shape(values)[1:])

    def grain(self, values):
        return prod(self.of.shape(values)[1:])

    def elements(self, values, first, last):
        width = self.grain(values)
        index = self.index[first // width : last // width]
        low = int(index.min())
        return self.of.rows(values, low, int(index.max()) + 1)[index - low].view(-1)


@dataclass(eq=False)
class Transposed(_Of):
    """A matrix transposed; it is in memory whole."""

    def shape(self, values):
        return self.of.shape(values)[::-1]

    def elements(self, values, first, last):
        whole = values.once(self, lambda: self.of.whole(values).T.contiguous().view(-1))
        return whole[first:last].clone()


@dataclass(eq=False)
class Plus(_Of):
    """A number added: a norm's weight that is stored less one."""

    number: float

    def grain(self, values):
        return self.of.grain(values)

    def elements(self, values, first, last):
        return self.of.elements(values, first, last) + self.number


@dataclass(eq=False)
class Scaled(_Along):
    """Times a vector along an axis."""

    by: Expression
    axis: int

    def elements(self, values, first, last):
        x, inner = self.of.elements(values, first, last), prod(self.of.shape(values)[self.axis + 1 :])
        by = values.once(self, lambda: self.by.whole(values))
        if self.in_rows(values):
            return x.view(-1, len(by)).mul_(by).view(-1)
        factors = by[torch.arange(first // inner, last // inner) % len(by)]
        return x.view(-1, inner).mul_(factors[:, None]).view(-1)


@dataclass(eq=False)
class Filled(_Of):
    """A vector of one number, as long as `of` has rows or, with `axis` 1, columns."""

    number: float
    axis: int = 0

    def shape(self, values):
        return (self.of.shape(values)[self.axis],)

    def elements(self, values, first, last):
        return torch.full((last - first,), self.number, dtype=torch.float64)


@dataclass(eq=False)
class FoldedBias(_Of):
    """The bias that a linear of weight `of` gets when a vector is added to its input: W shift + bias."""

    shift: Expression
    bias: Expression | None = None

    like = property(lambda self: (self.bias or self.of).like)

    def shape(self, values):
        return self.of.shape(values)[:1]

    def ranges(self, values):
        count, *rest = self.of.shape(values)
        return ((first // prod(rest), last // prod(rest)) for first, last in _ranges(count * prod(rest), prod(rest)))

    def elements(self, values, first, last):
        shift = values.once(self, lambda: self.shift.whole(values))
        y = self.of.rows(values, first, last) @ shift
        return y + self.bias.elements(values, first, last) if self.bias else y


def planned_tensors(plan: CentringPlan, values: Values, where: object) -> dict[str, Expression]:
    """Every tensor of the checkpoint that a plan makes of another: scaled, then centred; the others as they are.

    A step that does not fit the tensors is refused; `where` is the folder, for that.
    """
    tensors: dict[str, Expression] = {name: Stored(name) for name in values.names()}

    def stored(key: str, purpose: str | None = None) -> StoredTensor:
        if key not in values.names() and key not in values.given:
            raise ConversionError(f"{where}: no tensor {key}, which the plan names: {AGAIN}")
        return values.stored(key, purpose)

    def length(step: Scale | Centre) -> int:
        """Of the axis that a step names."""
        tensor = stored(step.key if step.key not in tensors else tensors[step.key].like, "is to be changed")
        if 0 <= step.axis < len(tensor.shape):
            return tensor.shape[step.axis]
        raise ConversionError(f"{where}: {step.key} has shape {[*tensor.shape]} and no axis {step.axis}: {AGAIN}")

    for copy in plan.copy:
        stored(copy.source)
        if copy.key not in values.names():
            tensors[copy.key] = Stored(copy.source)
            continue
        pairs = zip(values.raw(copy.key), values.raw(copy.source), strict=True)
        there, source = values.stored(copy.key), values.stored(copy.source)
        if (there.dtype, there.shape) != (source.dtype, source.shape) or not all(np.array_equal(*p) for p in pairs):
            what = f"{copy.key} is there already and differs from {copy.source}, of which the plan makes it a copy"
            cure = "set tie_word_embeddings to false if it is right, remove it if it is stale"
            raise ConversionError(f"{where}: {what}: {cure}")
    for scale in plan.scale:
        shape = stored(scale.by, "multiplies another tensor").shape
        if shape != (size := length(scale),):
            what = f"{size} elements along axis {scale.axis} of {scale.key} times {scale.by} of shape {list(shape)}"
            raise ConversionError(f"{where}: the plan says {what}: {AGAIN}")
        tensors[scale.key] = Scaled(tensors[scale.key], Stored(scale.by), scale.axis)
    for centre in plan.centre:
        count, rest = divmod(length(centre), centre.block) if centre.block > 0 else (0, 1)
        if rest or any(not 0 <= index < count for index in centre.blocks or ()):
            which = "" if centre.blocks is None else f", number {' '.join(map(str, centre.blocks))}"
            what = f"axis {centre.axis} of {centre.key} has {length(centre)} elements and no blocks of {centre.block}"
            raise ConversionError(f"{where}: {what}{which}: config.json or the plan is of other weights")
        tensors[centre.key] = Centred(tensors[centre.key], centre.axis, centre.block, centre.blocks)
    for key in {scale.by for scale in plan.scale} & values.names():  # the rest is given, and no tensor of the result
        tensors[key] = Filled(tensors[key], 1.0)
    return tensors


def look_at_centred(tensors: Iterable[Expression], values: Values) -> None:
    """Refuse NaN, infinity and what grows past its dtype in what is centred; one tensor is in memory at a time."""
    for part in dict.fromkeys(part for made in tensors for part in made.centred()):
        for _ in part.data(values):
            pass
        values.kept.clear()


def computed(tensors: dict[str, Expression], values: Values) -> dict[str, torch.Tensor]:
    """Tensors in memory, each rounded once to its own dtype."""
    made = {}
    for name, expression in tensors.items():
        data = np.concatenate([*expression.data(values), np.empty(0, np.uint8)])
        dtype = DTYPES[expression.dtype(values)]
        made[name] = torch.from_numpy(data).view(dtype).view(expression.shape(values))
        values.kept.clear()
    return made


def largest_output(weight: Expression, gain: Expression | None, bias: Expression | None, values: Values) -> float:
    """A bound of |W (gain * x) + bias| over every normalised x: |x| is at most sqrt(n), so Cauchy-Schwarz gives it."""
    n = weight.shape(values)[1]
    gains = gain.whole(values) if gain else 1.0
    rows = (weight.rows(values, first // n, last // n) for first, last in _ranges(prod(weight.shape(values)), n))
    norms = torch.cat([(each * gains).norm(dim=1) for each in rows]) * n**0.5
    return float((norms + (bias.whole(values).abs() if bias else 0.0)).max())


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 values of shape (n,) rounded to the nearest of a dtype, ties to even.

    PyTorch casts float64 to bfloat16 and float16 by way of float32: two roundings, of which the first can make the tie
    that the second then breaks the wrong way.
    """
    if dtype == torch.float16:
        with np.errstate(over="ignore"):  # an infinity, as by PyTorch
            return torch.from_numpy(x.numpy().astype(np.float16))  # NumPy rounds once
    if dtype != torch.bfloat16:
        return x.to(dtype)
    single = x.float()
    bits = single.view(torch.int32).numpy()
    # Where the half that bfloat16 drops is a tie; NumPy finds them in a quarter of the time.
    ties = torch.from_numpy(np.flatnonzero((bits & 0xFFFF) == 0x8000))
    away = single[ties].double() - x[ties]
    # A step to where x is: towards zero where the first rounding went away from it, else away from zero.
    single.view(torch.int32)[ties] -= (away.sign() * x[ties].sign()).int()
    return single.bfloat16()
