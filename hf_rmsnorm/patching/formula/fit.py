"""From a module's answers to crafted inputs to the one formula that reproduces them bit
for bit.
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from ...formula import GATES, ROUNDINGS, NormSpec
from ...fused.recipe import Recipe
from ...reference import reference_norm
from .check import prove
from .closeness import affine, close
from .inputs import ALL_BF16, Dtypes, NotInFamily, Trial
from .probe import Neutral, Probe, Unusable

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Room for a float32 square root and its reciprocal, each rounded, when eps is read back
# from an output.
EPS_READING = 2e-6
SAME_DTYPES = (ALL_BF16, Dtypes(FP16, FP16, FP16))
MIXED_DTYPES = (Dtypes(FP32, BF16, FP32), Dtypes(BF16, FP32, BF16))
MIXED_GATES = (Dtypes(FP32, FP32, BF16), Dtypes(BF16, BF16, FP32))
EPS_OF_TORCH = torch.finfo(FP32).eps  # that of F.rms_norm, where none is given


class Fit(Trial):
    """Finds the recipe of one probed module; `NotANorm`, `NotInFamily` or `Unusable` is
    raised if there is none.
    """

    def __init__(self, probe: Probe, attributes: set[str]):
        super().__init__(probe)
        self.attributes = attributes  # names of those that the forward reads

    def recipe(self) -> Recipe:
        self.find_input()
        try:
            return self._find_formula()
        except Unusable as error:
            # it normalises, so it is a norm, if one that fails on some inputs
            raise NotInFamily(str(error)) from error

    def _find_formula(self) -> Recipe:
        if self.probe.head_dim is not None and self.group != self.probe.head_dim:
            raise NotInFamily(
                "it normalises over more than the last dimension, or a part of it"
            )
        gate = self._find_needed_gate()
        recipe, functional = self._find_structure()
        recipe = self._find_eps(recipe)
        if gate is not None:
            spec = replace(recipe.spec, gate=gate)
            recipe = replace(recipe, spec=spec, gate=self.probe.gate)
        recipe = self._find_rounding(recipe, functional)
        if gate is None and self.probe.gate is not None:
            recipe = self._find_optional_gate(recipe)
        recipe = self._with_settings(self._check_gate_dtypes(recipe))
        recipe = prove(self, recipe)
        if self.probe.head_dim is not None:
            spec = replace(recipe.spec, group_size=None)
            recipe = replace(recipe, spec=spec, hidden_size=None)
        return recipe

    # One step of `recipe` each

    def _find_needed_gate(self) -> str | None:
        """Which gate, where one must be given. It is wide open until then: there silu
        is the identity, sigmoid one.
        """
        if self.probe.neutral is None:
            return None
        value = self.probe.neutral.gate
        x = self.large_rows()
        gate = 3.0 * self.normal(*x.shape)
        ungated = self.probe.run(x)
        y = self.probe.run(x, gate)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        if close(y, ungated * silu / value, 1e-4):
            self.probe.neutral = Neutral(value, after=1 / value)
            return "silu_after"
        if close(y, ungated * sigmoid, 1e-4):
            return "sigmoid_after"
        # The product of x and gate is normalised, so a constant gate changes nothing.
        if close(y, self.probe.run(x * silu / value), 1e-4):
            self.probe.neutral = Neutral(value, before=1 / value)
            return "silu_before"
        raise NotInFamily(
            f"its second input, {self.probe.gate!r}, is no gate that this package knows"
        )

    def _find_structure(self) -> tuple[Recipe, str | None]:
        """(the recipe but for eps and rounding, what torch's own norm does of it)."""
        group_size = None if self.group == self.size else self.group
        centered, weight, bias, offset = self._find_operands(group_size)
        self.in_dtype(BF16)
        half_rows = self.normal(4, self.size).bfloat16()
        functional = self.probe.torch_norm(half_rows, autocast=False)
        if self.probe.neutral is not None or (functional == "hat" and weight is None):
            functional = None
        autocast_functional = self.probe.torch_norm(half_rows, autocast=True)
        differs = functional not in (None, autocast_functional)
        spec = NormSpec(
            centered=centered,
            eps=0.0,
            has_weight=weight is not None,
            has_bias=bias is not None,
            weight_offset=offset,
            functional=functional is not None,
            group_size=group_size,
        )
        parameters = self.probe.module._parameters
        recipe = Recipe(
            spec,
            weight,
            bias,
            hidden_size=self._fixed_size(weight),
            layout=self.probe.layout,
            not_under_autocast=differs,
            absent=tuple(name for name, value in parameters.items() if value is None),
        )
        return recipe, functional

    def _find_operands(
        self, group_size: int | None
    ) -> tuple[bool, str | None, str | None, float]:
        """(centered, weight attribute, bias attribute, weight offset)."""
        x = self.large_rows()
        y = self.probe.run(x).double()
        tensors = {}
        for name, tensor in self.tensors.items():
            if len(tensor) == self.size:
                tensors[name] = tensor
        for centered in (False, True):
            spec = NormSpec(centered, 0.0, has_weight=False, group_size=group_size)
            hat = reference_norm(x.double(), None, None, spec)
            operands = affine(hat, y, tensors, 2e-5)
            if operands:
                return centered, *operands
        raise NotInFamily("its formula is not one that this package knows")

    def _fixed_size(self, weight: str | None) -> int | None:
        if self.group != self.size:
            # longer rows may have larger groups, or more of them
            return self.size
        if weight is None:
            try:
                self.probe.run(self.normal(4, self.size + 8))
            except Unusable:
                return self.size
        return None

    def _read_eps(self, recipe: Recipe, scale: float = 1e-12) -> float:
        """eps as the module's own output on rows of about that magnitude tells it, to
        about `EPS_READING`.
        """
        neutral = dict(self.tensors)
        if recipe.weight is not None:
            one = 1.0 - recipe.spec.weight_offset
            neutral[recipe.weight] = torch.full((self.size,), one)
        if recipe.bias is not None:
            neutral[recipe.bias] = torch.zeros(self.size)
        self.probe.set(**neutral)
        x = scale * (1.0 + self.normal(1, self.size))
        y = self.probe.run(x)
        y = y[0, : self.group].double()
        h = x[0, : self.group].double()
        if recipe.spec.centered:
            h = h - h.mean()
        mean_square = h.square().mean().item()
        rstd = (y * h).mean().item() / mean_square
        if not rstd:
            return math.inf
        without_eps = mean_square
        with_eps = rstd**-2
        if recipe.spec.eps_outside:
            without_eps = math.sqrt(mean_square)
            with_eps = 1 / rstd
        eps = with_eps - without_eps
        return 0.0 if abs(eps) <= 1e-5 * without_eps else eps

    def _find_eps(self, recipe: Recipe) -> Recipe:
        recipe, reading = self._place_eps(recipe)
        for name, value in self.probe.numbers.items():
            if _reads_as(reading, value) and self._drives_eps(recipe, name):
                spec = recipe.spec.with_eps(float(value))
                return replace(recipe, spec=spec, eps=name, eps_value=value)
        in_short = float(f"{reading:.3g}")
        for value in (in_short, EPS_OF_TORCH):
            if _reads_as(reading, value):
                spec = recipe.spec.with_eps(value)
                return replace(recipe, spec=spec)
        raise NotInFamily(
            f"its eps, about {reading:.6g}, is fixed in its code and cannot be read exactly"
        )

    def _place_eps(self, recipe: Recipe) -> tuple[Recipe, float]:
        """(the recipe, with eps inside the root or beside it; eps as the output shows
        it).
        """
        reading = self._read_eps(recipe)
        if not (math.isfinite(reading) and reading >= 0.0):
            raise NotInFamily(
                f"its eps is negative or not a number, with {self.probe.numbers}"
            )
        if self._stays(recipe, reading, 0.5 * math.sqrt(reading)):
            return recipe, reading
        recipe = replace(recipe, spec=replace(recipe.spec, eps_outside=True))
        reading = self._read_eps(recipe)
        if reading > 0.0 and self._stays(recipe, reading, 0.5 * reading):
            return recipe, reading
        raise NotInFamily("its eps is neither inside the root nor beside it")

    def _stays(self, recipe: Recipe, reading: float, scale: float) -> bool:
        """Whether eps reads the same on rows of another magnitude."""
        if not reading:
            return True
        return abs(self._read_eps(recipe, scale) - reading) <= 1e-3 * reading

    def _drives_eps(self, recipe: Recipe, name: str) -> bool:
        value = self.probe.numbers[name]
        other = 2.0 * value + 1e-3
        self.probe.set(**{name: other})
        try:
            return _reads_as(self._read_eps(recipe), other)
        except Unusable:
            return False
        finally:
            self.probe.set(**{name: value})

    def _find_rounding(self, recipe: Recipe, functional: str | None) -> Recipe:
        """The recipe with its rounding order; settles whether the module's results are
        to be equal to the last bit.
        """
        x, half_rows = self.rows(4096), self.rows(4096, half=True)
        dtypes = SAME_DTYPES
        if recipe.weight is not None and functional != "all":
            dtypes += MIXED_DTYPES
        for candidate in self._roundings(recipe, functional):
            self._find_exactness(candidate, x)
            if not self.exact and not self.agrees(recipe, x):
                raise NotInFamily(
                    f"its float32 results are not those of the formula it is closest to, {recipe.spec}"
                )
            if all(self.agrees(candidate, half_rows, *each) for each in dtypes):
                return candidate
        self._find_exactness(recipe, x)
        if not all(self.agrees(recipe, x, *each) for each in dtypes if each.x == FP32):
            raise NotInFamily(
                f"it rounds to half precision in an order of its own; in float32 it is {recipe.spec}"
            )
        return replace(recipe, only_float32=True)

    def _find_exactness(self, recipe: Recipe, x: torch.Tensor) -> None:
        self.exact = True
        self.exact = self.agrees(recipe, x)

    @staticmethod
    def _roundings(recipe: Recipe, functional: str | None) -> Iterable[Recipe]:
        """The recipe with every rounding order it may have, the commonest first."""
        spec = recipe.spec
        if functional == "all":
            orders = ["once"]
        elif functional == "hat":
            orders = ["before_weight"]
        else:
            orders = ["once", "rstd"]
            if recipe.weight is not None:
                orders = list(ROUNDINGS)
            if spec.gate is not None or spec.centered or spec.eps_outside:
                orders.remove("rstd")
        for rounding in orders:
            yield replace(recipe, spec=replace(spec, rounding=rounding))

    def _find_optional_gate(self, recipe: Recipe) -> Recipe:
        """Whether a second input that need not be given is a gate, and of which kind."""
        dtypes = [Dtypes()]
        if not recipe.only_float32:
            dtypes += [*SAME_DTYPES, *MIXED_DTYPES]
        for kind in GATES if recipe.spec.rounding != "rstd" else ():
            spec = replace(recipe.spec, gate=kind)
            gated = replace(recipe, spec=spec, gate=self.probe.gate, gate_optional=True)
            if self._agrees_in(gated, dtypes):
                return gated
        # a call that gives it runs the module's own forward
        return replace(recipe, other_input=self.probe.gate)

    def _check_gate_dtypes(self, recipe: Recipe) -> Recipe:
        """Whether gates of another dtype than x's may be given too."""
        if recipe.gate is None:
            return recipe
        dtypes = MIXED_GATES[:1] if recipe.only_float32 else MIXED_GATES
        return replace(recipe, one_gate_dtype=not self._agrees_in(recipe, dtypes))

    def _agrees_in(self, recipe: Recipe, dtypes: Iterable[Dtypes]) -> bool:
        x = self.rows(1024, half=True)
        with contextlib.suppress(Unusable):
            return all(self.agrees(recipe, x, *each) for each in dtypes)
        return False

    def _with_settings(self, recipe: Recipe) -> Recipe:
        """The recipe with what else the forward reads of the module: plain values,
        without which it may be another.
        """
        module = self.probe.module
        known = {recipe.weight, recipe.bias, recipe.eps, *recipe.absent}
        hidden_size = recipe.hidden_size
        settings = []
        for name in sorted(self.attributes - known):
            value = getattr(module, name, None)
            if isinstance(value, torch.Tensor):
                raise NotInFamily(
                    f"its forward reads its attribute {name!r}, which no formula here has"
                )
            if hasattr(module, name) and not self._is_shape(value):
                settings.append((name, value))
            if type(value) is int:
                # perhaps the length of its rows, or how many groups they have
                hidden_size = self.size
        return replace(recipe, settings=tuple(settings), hidden_size=hidden_size)

    def _is_shape(self, value) -> bool:
        return isinstance(value, tuple) and (
            not value or value[-1] in (self.size, self.probe.head_dim)
        )


def _reads_as(reading: float, value: float) -> bool:
    return math.isfinite(value) and abs(reading - value) <= EPS_READING * abs(value)
