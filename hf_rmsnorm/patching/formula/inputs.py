"""The inputs of a probed module: rows for which formulas differ, in the layout that the
module normalises.
"""

import itertools
import math
from typing import NamedTuple

import torch

from ...fused.recipe import Recipe
from ...ops.backend import MAX_HIDDEN_SIZE
from ...reference import reference_norm
from .closeness import close, nearly, same_bits
from .probe import Probe, Unusable


class NotInFamily(Exception):
    """The module normalises over its last dimension by a formula that `NormSpec` cannot
    say.
    """


class NotANorm(Exception):
    """The module does not normalise over the last dimension of its input."""


class Dtypes(NamedTuple):
    """The dtypes of a run."""

    x: torch.dtype = torch.float32
    weight: torch.dtype = torch.float32
    gate: torch.dtype = torch.float32


ALL_BF16 = Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)


class Trial:
    """One probed module, and the inputs and tensors that it is tried with.

    Attributes:
        size, group: the length of a row; how many elements of it are normalised
            together.
        tensors: values of the module's tensors, as rows.
        exact: whether results are to be equal to the last bit, or only `nearly`.
    """

    def __init__(self, probe: Probe):
        self.probe = probe
        self.generator = torch.Generator().manual_seed(0)
        self.size = self.group = 0
        self.tensors: dict[str, torch.Tensor] = {}
        self.exact = True

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)

    def large_rows(self) -> torch.Tensor:
        """Rows so large that eps is nothing."""
        return 1e4 * (self.normal(4, self.size) + 0.5)

    def rows(self, elements: int, half: bool = False) -> torch.Tensor:
        """Rows of about so many elements: plain, with a large mean, so small that eps
        rules, large, one outlier, zeros.
        """
        small, large = (1e-4, 1e3) if half else (1e-12, 1e12)
        kinds = [
            (1.0, 0.1),
            (30.0, -100.0),
            (0.02, 0.3),
            (1e-3, 0.0),
            (3e-4, 1e-3),
            (small, small),
            (large, 0.0),
            (1.0, 8.0),
            (0.0, 0.0),
            (1.0, 0.0),  # gets an outlier
        ]
        scales, means = torch.tensor(kinds, dtype=torch.float32).unbind(1)
        repeats = math.ceil(elements / (len(kinds) * self.size))
        x = self.normal(repeats, len(kinds), self.size)
        x = x * scales[:, None] + means[:, None]
        x[:, -1, self.size // 2] = 300.0
        return x.flatten(0, 1)

    def gate_for(
        self, x: torch.Tensor, recipe: Recipe, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor | None:
        """Gates from closed to wide open; None where the recipe has none."""
        if recipe.gate is None:
            return None
        gate = 3.0 * self.normal(*x.shape)
        is_wide = self.normal(*x.shape) > 1.5
        return torch.where(is_wide, 20.0 * gate, gate).to(dtype)

    def draw_tensors(self) -> None:
        for name, size in self.probe.sizes.items():
            drawn = self.normal(size or self.size)
            self.tensors[name] = 0.7 + 0.4 * drawn
        self.probe.set(**self.tensors)

    def draw_uneven_tensors(self) -> None:
        """Draw tensors of which some elements are large, tiny, negative or zero."""
        self.draw_tensors()
        for tensor in self.tensors.values():
            chance = self.normal(*tensor.shape)
            tensor[chance > 1.0] *= -30.0
            tensor[chance < -1.0] *= 1e-3
            tensor[chance < -1.5] = 0.0

    def in_dtype(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors in a dtype, which the module has from now on."""
        tensors = {}
        for name, tensor in self.tensors.items():
            tensors[name] = tensor.to(dtype)
        self.probe.set(**tensors)
        return tensors

    def find_input(self) -> None:
        """Settle how rows are put to the module and how long they are: the first way in
        which it normalises them.
        """
        failure = self._find_layout()
        gate = self.probe.gate
        if failure is None:
            return
        kind, reason = failure
        if self.probe.gate_required:
            reason = f"its forward must be given {gate!r} besides its input; with that, {reason}"
        elif gate is not None:
            # a forward may need its second input though None is that input's default
            self.probe.open_gate()
            if self._find_layout() is None:
                return
        raise kind(reason)

    def _find_layout(self) -> tuple[type[Exception], str] | None:
        """None, or the (type, text) of the error that the likeliest layout gave."""
        probe, failures = self.probe, []
        layouts = [("last", 3), ("channels_first", 4), ("channels_first", 3)]
        if probe.head_dim:
            layouts = [("last", 4)]
        for layout, size in itertools.product(layouts, self._row_sizes()):
            probe.layout, probe.dims = layout
            self.size = size
            try:
                self._try_input()
                return None
            except (Unusable, NotANorm) as error:
                failures.append((type(error), str(error)))
        return failures[0]

    def _row_sizes(self) -> list[int]:
        """The lengths that a row may have, the likeliest first: those of the weights,
        or what attributes name.
        """
        sizes = {size for size in self.probe.sizes.values() if size}
        if sizes:
            return sorted(sizes, reverse=True)
        hints = list(self.probe.numbers.values())
        for value in vars(self.probe.module).values():
            if not isinstance(value, tuple) or not value:
                continue
            size = value[-1]  # as in `normalized_shape`
            if type(size) is int and size > MAX_HIDDEN_SIZE:
                raise NotInFamily(f"its hidden size {size} is above {MAX_HIDDEN_SIZE}")
            hints.append(size)
        sizes = [h for h in hints if type(h) is int and 1 <= h <= MAX_HIDDEN_SIZE]
        return list(dict.fromkeys([*sizes, 64]))

    def _try_input(self) -> None:
        """Scaling a row must not change its result, other rows must not matter, the
        row's own elements must.
        """
        self.draw_tensors()
        x = self.large_rows()
        y = self.probe.run(x)
        if not y.isfinite().all():
            # Said of a norm only where its plain use gives it: an image's channels put
            # into a row are a guess of ours.
            kind = NotInFamily if self.probe.layout == "last" else NotANorm
            raise kind(
                f"it gives NaN or infinity on ordinary input, with {self.probe.numbers}"
            )
        scales = torch.tensor([[1.0], [2.0], [64.0], [1024.0]], dtype=torch.float32)
        if not close(self.probe.run(x * scales), y, 1e-3):
            if close(self.probe.run(x * 1024), y, 1e-3):
                raise NotANorm("it normalises over another dimension than the last")
            raise NotANorm("it does not normalise over the last dimension")
        moved = x.clone()
        # so that the sign of a difference changes, all that a row of two may show
        moved[0, 0] = 2 * x[0, 1 % self.size] - x[0, 0]
        change = self.probe.run(moved) != y
        if change[1:].any():
            raise NotANorm("the result of a row depends on other rows")
        if self.size > 1 and not change[0, 1:].any():
            raise NotANorm("it does not normalise over the last dimension")
        self.group = 1 if self.size == 1 else int(change[0].nonzero().max()) + 1
        if self.size % self.group:
            raise NotInFamily("it normalises over a part of the last dimension")

    def agrees(self, recipe: Recipe, x: torch.Tensor, *dtypes: torch.dtype) -> bool:
        """Whether module and formula give the same on x, in these `Dtypes`."""
        dtypes = Dtypes(*dtypes)
        self.draw_uneven_tensors()
        spec = recipe.spec
        x = x.to(dtypes.x)
        gate = self.gate_for(x, recipe, dtypes.gate)
        tensors = self.in_dtype(dtypes.weight)
        y = self.probe.run(x, gate)
        weight = tensors.get(recipe.weight)
        bias = tensors.get(recipe.bias)
        expected = reference_norm(x, weight, bias, spec, gate)
        if self.exact or y.dtype != expected.dtype:
            return same_bits(y, expected)
        return nearly(y, expected, x, bias, spec)
