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
from .check import MIXED_DTYPES, prove
from .closeness import affine, close, describe
from .inputs import NotInFamily, Trial
from .probe import Probe, Unusable, plain_attributes

# Room for a float32 square root and its reciprocal, each rounded, when eps is read back
# from an output.
EPS_READING = 2e-6
SAME_DTYPES = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))
MACHINE_EPS = tuple(
    torch.finfo(d).eps
    for d in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
)


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
        # What torch's own operator does of it; asked in bfloat16, where a cast to
        # float32 around it shows.
        with self.in_dtype(torch.bfloat16):
            functional = self.probe.torch_norm(self.normal(2, self.size).bfloat16())
        centered, weight, bias, offset = self._find_structure()
        if functional == "hat" and weight is None:
            functional = None
        spec = NormSpec(
            centered=centered,
            eps=0.0,
            has_weight=weight is not None,
            has_bias=bias is not None,
            weight_offset=offset,
            rounding="before_weight" if functional == "hat" else "once",
            functional=functional is not None,
            group_size=None if self.group == self.size else self.group,
        )
        parameters = self.probe.module._parameters
        recipe = Recipe(
            spec,
            weight,
            bias,
            hidden_size=self._fixed_size(weight),
            layout=self.probe.layout,
            dims=self.probe.dims,
            absent=tuple(name for name, value in parameters.items() if value is None),
        )
        recipe = self._find_eps(recipe)
        if gate is not None:
            recipe = replace(
                recipe, spec=replace(recipe.spec, gate=gate), gate=self.probe.gate
            )
        recipe = self._find_rounding(recipe, functional)
        if gate is None and self.probe.gate is not None:
            recipe = self._find_optional_gate(recipe)
        recipe = prove(self, self._with_settings(self._check_gate_dtypes(recipe)))
        if self.probe.head_dim is not None:
            recipe = replace(
                recipe, spec=replace(recipe.spec, group_size=None), hidden_size=None
            )
        return recipe

    # One step of `recipe` each

    def _find_needed_gate(self) -> str | None:
        """Which gate, where one must be given. It is wide open until then: there silu
        is the identity, sigmoid one.
        """
        if self.probe.neutral is None:
            return None
        value, *_ = self.probe.neutral
        x = 1e4 * (self.normal(2, 2, self.size) + 0.5)
        gate = 3.0 * self.normal(*x.shape)
        open_gate = torch.full_like(x, value)
        ungated = self.probe.run(x, open_gate)
        y = self.probe.run(x, gate)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        if close(y, ungated * silu / value, 1e-4):
            self.probe.neutral = value, 1.0, 1 / value
            return "silu_after"
        if close(y, ungated * sigmoid, 1e-4):
            self.probe.neutral = value, 1.0, 1.0
            return "sigmoid_after"
        # The product of x and gate is normalised, so a constant gate changes nothing.
        if close(y, self.probe.run(x * silu / value, open_gate), 1e-4):
            self.probe.neutral = value, 1 / value, 1.0
            return "silu_before"
        raise NotInFamily(
            f"its second input, {self.probe.gate!r}, is no gate that this package knows"
        )

    def _find_structure(self) -> tuple[bool, str | None, str | None, float]:
        """(centered, weight attribute, bias attribute, weight offset)."""
        x = 1e4 * (self.normal(2, 2, self.size) + 0.5)  # so large that eps is nothing
        y = self.probe.run(x).double()
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if tensor.shape[0] == self.size
        }
        for centered in (False, True):
            xhat = self._hat(x.double(), centered)
            operands = affine(xhat, y, tensors, 2e-5)
            if operands:
                return centered, *operands
        raise NotInFamily(
            describe(x, y, tensors) or "its formula is not one that this package knows"
        )

    def _hat(self, x: torch.Tensor, centered: bool) -> torch.Tensor:
        h = x.unflatten(-1, (-1, self.group))
        if centered:
            h = h - h.mean(-1, keepdim=True)
        rstd = h.pow(2).mean(-1, keepdim=True).rsqrt()
        return (h * rstd).flatten(-2)

    def _fixed_size(self, weight: str | None) -> int | None:
        if self.group != self.size:
            # longer rows may have larger groups, or more of them
            return self.size
        if weight is not None:
            return None
        with contextlib.suppress(Unusable):
            self.probe.run(self.normal(2, self.size + 8))
            return None
        return self.size

    def _read_eps(self, recipe: Recipe, scale: float = 1e-12) -> float:
        """eps as the module's own output on rows of about that magnitude tells it, to
        about `EPS_READING`.
        """
        neutral = {}
        for name, value in (
            (recipe.weight, 1.0 - recipe.spec.weight_offset),
            (recipe.bias, 0.0),
        ):
            if name is not None:
                neutral[name] = torch.full((self.size,), value, dtype=torch.float32)
        x = scale * (1.0 + self.normal(1, self.size))
        with self.probe.having(**neutral):
            y = self.probe.run(x).double()[:, : self.group]
        h = x.double()[:, : self.group]
        if recipe.spec.centered:
            h = h - h.mean()
        rstd = ((y * h).sum() / (h * h).sum()).item()
        mean_square = h.pow(2).mean().item()
        if not rstd:
            return math.inf
        if recipe.spec.eps_outside:
            without_eps, with_eps = math.sqrt(mean_square), 1 / rstd
        else:
            without_eps, with_eps = mean_square, rstd**-2
        eps = with_eps - without_eps
        return 0.0 if abs(eps) <= 1e-5 * without_eps else eps

    def _find_eps(self, recipe: Recipe) -> Recipe:
        recipe, reading = self._place_eps(recipe)
        for name, value in self.probe.numbers.items():
            if _reads_as(reading, value) and self._drives_eps(
                recipe, name, 2.0 * value + 1e-3
            ):
                return replace(
                    recipe,
                    spec=recipe.spec.with_eps(float(value)),
                    eps=name,
                    eps_value=value,
                )
        for value in (float(f"{reading:.3g}"), *MACHINE_EPS):
            if _reads_as(reading, value):
                return self._with_unset_eps(
                    replace(recipe, spec=recipe.spec.with_eps(value))
                )
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
                "its eps is negative or not a number" + self._strange_numbers()
            )
        if (
            not reading
            or abs(self._read_eps(recipe, 0.5 * math.sqrt(reading)) - reading)
            <= 1e-3 * reading
        ):
            return recipe, reading
        recipe = replace(recipe, spec=replace(recipe.spec, eps_outside=True))
        reading = self._read_eps(recipe)
        if (
            not reading > 0.0
            or abs(self._read_eps(recipe, 0.5 * reading) - reading) > 1e-3 * reading
        ):
            raise NotInFamily("its eps is neither inside the root nor beside it")
        return recipe, reading

    def _with_unset_eps(self, recipe: Recipe) -> Recipe:
        """The recipe with the attribute that would hold eps; F.rms_norm has a default
        for eps=None.
        """
        if recipe.spec.functional:
            for name, value in plain_attributes(self.probe.module).items():
                if value is None and self._drives_eps(recipe, name, 1e-3):
                    return replace(recipe, eps=name)
        return recipe

    def _drives_eps(self, recipe: Recipe, name: str, other: float) -> bool:
        with contextlib.suppress(Unusable), self.probe.having(**{name: other}):
            return _reads_as(self._read_eps(recipe), other)
        return False

    def _find_rounding(self, recipe: Recipe, functional: str | None) -> Recipe:
        """The recipe with its rounding order; settles whether the module's results are
        to be equal to the last bit.
        """
        x, wide = self.rows(4096), self.rows(4096, half=True)
        dtypes = SAME_DTYPES
        if recipe.weight is not None and functional != "all":
            dtypes += MIXED_DTYPES
        for candidate in self._roundings(recipe, functional):
            self._find_exactness(candidate, x)
            if not self.exact and not self.agrees(recipe, x):
                about = "its float32 results are not those of the formula it is closest to, "
                raise NotInFamily(about + str(recipe.spec))
            if all(self.agrees(candidate, wide, *pair) for pair in dtypes):
                return candidate
        self._find_exactness(recipe, x)
        weight_dtypes = (
            (torch.float32,)
            if recipe.weight is None
            else (torch.float32, torch.bfloat16)
        )
        if not all(
            self.agrees(recipe, x, torch.float32, dtype) for dtype in weight_dtypes
        ):
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
            orders = list(ROUNDINGS) if recipe.weight is not None else ["once", "rstd"]
            if spec.gate is not None or spec.centered or spec.eps_outside:
                orders.remove("rstd")
        return (
            replace(recipe, spec=replace(spec, rounding=rounding))
            for rounding in orders
        )

    def _find_optional_gate(self, recipe: Recipe) -> Recipe:
        """Whether a second input that need not be given is a gate, and of which kind."""
        # a call that gives it runs the module's own forward
        without = replace(recipe, other_input=self.probe.gate)
        if recipe.spec.rounding == "rstd":
            return without
        x = self.rows(1024, half=True)
        dtypes = ((torch.float32, torch.float32),)
        if not recipe.only_float32:
            dtypes += SAME_DTYPES + MIXED_DTYPES
        for kind in GATES:
            spec = replace(recipe.spec, gate=kind)
            gated = replace(recipe, spec=spec, gate=self.probe.gate, gate_optional=True)
            if self._agrees_in(gated, x, dtypes):
                return gated
        return without

    def _check_gate_dtypes(self, recipe: Recipe) -> Recipe:
        """Whether gates of another dtype than x's may be given too."""
        if recipe.gate is None:
            return recipe
        x = self.rows(1024, half=True)
        mixed = [(torch.float32, torch.float32, torch.bfloat16)]
        if not recipe.only_float32:
            mixed += [
                (torch.bfloat16, torch.bfloat16, torch.float32),
                (torch.bfloat16, torch.bfloat16, torch.float16),
                (torch.float16, torch.float16, torch.bfloat16),
            ]
        if self._agrees_in(recipe, x, mixed):
            return recipe
        return replace(recipe, one_gate_dtype=True)

    def _agrees_in(
        self, recipe: Recipe, x: torch.Tensor, dtypes: Iterable[tuple]
    ) -> bool:
        with contextlib.suppress(Unusable):
            return all(self.agrees(recipe, x, *combination) for combination in dtypes)
        return False

    def _with_settings(self, recipe: Recipe) -> Recipe:
        """The recipe with what else the forward reads of the module: plain values,
        without which it may be another.
        """
        module = self.probe.module
        known = {recipe.weight, recipe.bias, recipe.eps, *recipe.absent}
        settings = []
        for name in sorted(self.attributes - known):
            value = getattr(module, name, None)
            if isinstance(value, torch.Tensor):
                raise NotInFamily(
                    f"its forward reads its attribute {name!r}, which no formula here has"
                )
            if hasattr(module, name) and not self._is_shape(value):
                settings.append((name, value))
        # A whole number is the length of its rows, perhaps, or how many groups they
        # have.
        is_fixed = any(type(value) is int for _, value in settings)
        hidden_size = self.size if is_fixed else recipe.hidden_size
        return replace(recipe, settings=tuple(settings), hidden_size=hidden_size)

    def _is_shape(self, value) -> bool:
        return isinstance(value, tuple) and (
            not value or value[-1] in (self.size, self.probe.head_dim)
        )


def _reads_as(reading: float, value: float) -> bool:
    return math.isfinite(value) and abs(reading - value) <= EPS_READING * abs(value)
