"""The inputs of a probed module: rows for which formulas differ, in the layout that the
module normalises.
"""

import contextlib
import itertools
import math

import torch

from ...fused.recipe import Recipe
from ...ops.backend import MAX_HIDDEN_SIZE
from ...reference import reference_norm
from .closeness import close, describe, nearly, same_bits
from .probe import Probe, Unusable

# How rows may be put to a module, and in how many dimensions it is first asked; None:
# any.
FEW = 16  # elements of a row, below which they do not show every kind of weight
LAYOUTS = (("last", None), ("channels_first", (4,)), ("channels_first", (3,)))


class NotInFamily(Exception):
    """The module normalises over its last dimension by a formula that `NormSpec` cannot
    say.
    """


class NotANorm(Exception):
    """The module does not normalise over the last dimension of its input."""


class Trial:
    """One probed module, and the inputs and tensors that it is tried with."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.generator = torch.Generator().manual_seed(0)
        # length of a row; how many elements of it are normalised together
        self.size = self.group = None
        # values of the module's tensors, as rows
        self.tensors: dict[str, torch.Tensor] = {}
        # whether results are to be equal to the last bit, or only `nearly`
        self.exact = True

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32)

    def rows(self, minimum: int = 0, half: bool = False) -> torch.Tensor:
        """(rows, hidden_size) float32: plain, with a large mean, so small that eps
        rules, large, one outlier, zeros.
        """
        small, large = (1e-4, 1e3) if half else (1e-12, 1e12)
        kinds = [
            (1.0, 0.0),
            (1.0, 0.1),
            (30.0, -100.0),
            (0.02, 0.3),
            (1e-3, 0.0),
            (3e-4, 1e-3),
            (small, small),
            (large, 0.0),
            (1.0, 8.0),
            (2.0, -0.5),
            (1.0, 0.0),  # gets an outlier
            (0.0, 0.0),
        ]
        scales, means = torch.tensor(kinds, dtype=torch.float32).unbind(1)
        repeats = max(1, math.ceil(minimum / (len(kinds) * self.size)))
        x = (
            self.normal(repeats, len(kinds), self.size) * scales[:, None]
            + means[:, None]
        )
        x[:, 10, self.size // 2] = 300.0
        return x.flatten(0, 1)

    def gate_for(
        self, x: torch.Tensor, recipe: Recipe, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """Gates from closed to wide open, in x's dtype if no other is named; None where
        the recipe has none.
        """
        if recipe.gate is None:
            return None
        gate = 3.0 * self.normal(*x.shape)
        return torch.where(self.normal(*x.shape) > 1.5, 20.0 * gate, gate).to(
            dtype or x.dtype
        )

    def randomise(self) -> None:
        for name, size in self.probe.sizes.items():
            self.tensors[name] = 0.7 + 0.4 * self.normal(size or self.size)
        self.probe.set(**self.tensors)

    def spread(self, recipe: Recipe, dtype: torch.dtype = torch.float32) -> None:
        """Draw tensors of which half of the weight and a quarter of the bias is of any
        magnitude and sign.
        """
        self.randomise()
        least, most = (-7.5, 2.5) if dtype == torch.float16 else (-15.0, 15.0)
        for name, part in ((recipe.weight, 0.5), (recipe.bias, 0.25)):
            if name is None:
                continue
            tensor = self.tensors[name]
            exponents = self.uniform(*tensor.shape) * (most - least) + least
            wide = torch.pow(10.0, exponents) * self.normal(*tensor.shape).sign()
            chance = self.uniform(*tensor.shape) / part
            wide[chance < 0.25] = 0.0
            wide[chance < 0.125] = -recipe.spec.weight_offset
            self.tensors[name] = torch.where(chance < 1, wide, tensor)
        self.probe.set(**self.tensors)

    def uneven(self, half: bool) -> torch.Tensor:
        """(4, hidden_size) rows whose elements differ by many orders of magnitude,
        among them the most uneven ones.
        """
        size = self.size
        least = -6.0 if half else -7.0
        exponents = self.uniform(4, size) * 9.0 + least
        x = torch.pow(10.0, exponents) * self.normal(4, size).sign()
        x[1:3] = 0.0
        x[1, size // 3] = 1e3
        x[2, size // 2] = -1e-2
        x[3] = 1e-6
        x[3, ::2] = -1e-6
        return x

    def find_input(self) -> None:
        """Settle how rows are put to the module and how long they are: the first way in
        which it normalises them.
        """
        try:
            return self._find_layout()
        except (Unusable, NotANorm) as error:
            if self.probe.gate is None:
                raise
            if self.probe.gate_required:
                words = f"its forward must be given {self.probe.gate!r} besides its input; with that, {error}"
                raise type(error)(words) from error
            # The error itself is not kept: a frame that holds its own error keeps the
            # module alive.
            kind, reason = type(error), error.args
        # a forward may need its second input though None is that input's default
        self.probe.require_gate()
        with contextlib.suppress(Unusable, NotANorm):
            return self._find_layout()
        raise kind(*reason)

    def _find_layout(self) -> None:
        layouts = LAYOUTS[:1] if self.probe.head_dim else LAYOUTS
        failure = None
        for (layout, dims), size in itertools.product(layouts, self._row_sizes()):
            self.size = size
            self.probe.layout = layout
            self.probe.dims = dims
            try:
                self._try_input()
            except (Unusable, NotANorm) as error:
                failure = failure or (type(error), error.args)
                continue
            if dims is None:
                self._find_dims()
            return
        kind, reason = failure
        raise kind(*reason)

    def _row_sizes(self) -> list[int]:
        """The lengths that a row may have, the likeliest first: those of the weights,
        or what attributes name.
        """
        sizes = sorted(
            {size for size in self.probe.sizes.values() if size}, reverse=True
        )
        if sizes:
            return sizes
        # The sizes that a module without weights has in its attributes, as
        # `normalized_shape`
        rows = [
            v
            for v in vars(self.probe.module).values()
            if isinstance(v, (tuple, list)) and v
        ]
        columns = [row[-1] for row in rows if isinstance(row[-1], int)]
        if max(columns, default=0) > MAX_HIDDEN_SIZE:
            raise NotInFamily(
                f"its hidden size {max(columns)} is above {MAX_HIDDEN_SIZE}"
            )
        hints = [*self.probe.numbers.values(), *columns, 64]
        return list(
            dict.fromkeys(
                h for h in hints if isinstance(h, int) and 1 <= h <= MAX_HIDDEN_SIZE
            )
        )

    def _find_dims(self) -> None:
        """Which numbers of dimensions the forward takes, if not any from two to four."""
        fewest = 1 if self.probe.head_dim is None else 2
        every = range(fewest, 6)
        accepted = []
        for dims in every:
            self.probe.dims = (dims,)
            leading = (2, 1, 1, 1)[: dims - fewest]
            with contextlib.suppress(Unusable):
                self.probe.run(self.normal(*leading, self.size))
                accepted.append(dims)
        takes_all = accepted == list(every)
        self.probe.dims = None if takes_all else tuple(accepted)

    def _try_input(self) -> None:
        """Scaling a row must not change its result, other rows must not matter, the
        row's own elements must.
        """
        self.randomise()
        self.probe.run_without_chance(self.normal(2, 3, self.size))
        x = 1e4 * (self.normal(2, 2, self.size) + 0.5)
        y = self.probe.run(x)
        if not y.isfinite().all():
            # Said of a norm only where its plain use gives it: an image's channels put
            # into a row are a guess of ours.
            kind = NotInFamily if self.probe.layout == "last" else NotANorm
            raise kind(
                "it gives NaN or infinity on ordinary input" + self._strange_numbers()
            )
        scales = torch.tensor([1.0, 2.0, 64.0, 1024.0], dtype=torch.float32).view(
            2, 2, 1
        )
        scaled = self.probe.run(x * scales)
        if not close(scaled, y, 1e-3):
            if close(self.probe.run(x * 1024), y, 1e-3):
                raise NotANorm("it normalises over another dimension than the last")
            raise NotANorm(
                describe(x, y, self.tensors)
                or "it does not normalise over the last dimension"
            )
        moved = x.clone()
        moved[0, 0, 0] += 3e4
        change = (self.probe.run(moved) != y).flatten(0, 1)
        if change[1:].any():
            raise NotANorm("the result of a row depends on other rows")
        if self.size > 1 and not change[0, 1:].any():
            raise NotANorm(
                "it does not normalise over the last dimension"
                + self._strange_numbers()
            )
        self.group = 1 if self.size == 1 else int(change[0].nonzero().max()) + 1
        if self.size % self.group:
            raise NotInFamily("it normalises over a part of the last dimension")

    def _strange_numbers(self) -> str:
        strange = [
            f"{name} is {value}"
            for name, value in self.probe.numbers.items()
            if not 0 <= value < math.inf
        ]
        return ": " + ", ".join(strange) if strange else ""

    def in_dtype(self, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        """The module with its tensors in a dtype."""
        return self.probe.having(
            **{name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        )

    def agrees(
        self,
        recipe: Recipe,
        x,
        dtype=torch.float32,
        weight_dtype=torch.float32,
        gate_dtype=None,
    ) -> bool:
        """Whether module and formula give the same on x, in these dtypes."""
        x = x.to(dtype)
        gate = self.gate_for(x, recipe, gate_dtype)
        with self.in_dtype(weight_dtype):
            y = self.probe.run(x, gate)
        weight, bias = self.parameters(recipe, weight_dtype)
        expected = reference_norm(x, weight, bias, recipe.spec, gate)
        if self.exact or y.dtype != expected.dtype:
            return same_bits(y, expected)
        return nearly(y, expected, x, weight, bias, recipe.spec)

    def parameters(
        self, recipe: Recipe, dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor | None]:
        """[weight, bias] as the formula takes them, copied."""
        names = recipe.weight, recipe.bias
        return [
            None if name is None else self.tensors[name].to(dtype, copy=True)
            for name in names
        ]
