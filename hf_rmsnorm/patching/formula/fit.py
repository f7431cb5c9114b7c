"""From a module's answers to crafted inputs to the one formula that reproduces them bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...formula import GATES, ROUNDINGS, NormSpec
from ...fused.recipe import Recipe
from ...ops.backend import TILE_MAX
from .check import MIXED_DTYPES, prove
from .closeness import close, same_bits
from .effects import otherwise
from .inputs import FEW, NotInFamily, Trial
from .lookalikes import describe
from .probe import Unusable, is_plain, own_tensors, plain_attributes

# Room for a float32 square root and its reciprocal, each rounded, when eps is read back from an output.
EPS_READING = 2e-6
SAME_DTYPES = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))
# (train mode, whether the input needs gradients, whether the weights do, inference mode)
MODES = (
    *((False, False, False, False), (True, False, False, False), (False, True, True, False), (True, True, True, False)),
    *((True, True, False, False), (True, False, True, False), (False, False, False, True)),
)
TORCH_FORWARDS = (torch.nn.LayerNorm.forward, torch.nn.RMSNorm.forward)
MACHINE_EPS = tuple(torch.finfo(d).eps for d in (torch.float32, torch.float16, torch.bfloat16, torch.float64))


class Fit(Trial):
    """Finds the recipe of one probed module.

    `recipe()` raises `NotANorm`, `NotInFamily` or `Unusable` where there is none.
    """

    def recipe(self) -> Recipe:
        self.find_input()
        self.probe.faults.extend(self.probe.code.faults())
        try:
            recipe = None if self.probe.faults else self._find_formula()
        except Unusable as error:  # it normalises, so it is a norm, if one that fails on some inputs
            raise NotInFamily(str(error)) from error
        if self.probe.faults:
            raise NotInFamily("; ".join(self.probe.faults))
        return recipe

    def _find_formula(self) -> Recipe:
        if self.probe.head_dim is not None and self.group != self.probe.head_dim:
            raise NotInFamily("it normalises over more than the last dimension, or a part of it")
        gate = self._find_needed_gate()
        functional = self._find_functional()
        centered, weight, bias, offset, weight_first = self._find_structure()
        if functional == "hat" and weight is None:
            functional = None
        spec = NormSpec(
            centered, 0.0, weight is not None, bias is not None, offset, functional=functional is not None,
            rounding="before_weight" if functional == "hat" else "once",
            weight_first=weight_first, group_size=None if self.group == self.size else self.group,
        )  # fmt: skip
        if self.group > TILE_MAX and (self.probe.gate_required or self.group != self.size):
            raise NotInFamily(f"its rows of {self.group} are longer than {TILE_MAX}, with a gate, groups or heads")
        absent = tuple(name for name, value in self.probe.module._parameters.items() if value is None)
        recipe = Recipe(spec, weight, bias, hidden_size=self._fixed_size(weight), layout=self.probe.layout,
                        dims=self.probe.dims, absent=absent)  # fmt: skip
        recipe = self._find_eps(recipe)
        if gate is not None:
            recipe = replace(recipe, spec=replace(recipe.spec, gate=gate), gate=self.probe.gate)
        recipe, exact = self._find_rounding(recipe, functional)
        if gate is None and self.probe.gate is not None:
            recipe = self._find_optional_gate(recipe, exact)
        recipe = self._check_gate_dtypes(recipe, exact)
        recipe = self._check_other_attributes(recipe)
        recipe = prove(self, recipe, exact)
        if self.probe.head_dim is not None and self.probe.layout == "last":
            recipe = replace(recipe, spec=replace(recipe.spec, group_size=None), hidden_size=None)
        return recipe

    # One step of `recipe` each

    def _find_needed_gate(self) -> str | None:
        """Which gate, where one must be given. It is wide open until then: there silu is the identity, sigmoid one."""
        if self.probe.neutral is None:
            return None
        value, *_ = self.probe.neutral
        x = 1e4 * (self.normal(2, 2, self.size) + 0.5)
        gate = 3.0 * self.normal(*x.shape)
        wide, y = (self.probe.run(x, g) for g in (torch.full_like(x, value), gate))
        sigmoid = torch.sigmoid(gate)
        for kind, expected, before, after in (
            ("silu_after", wide * gate * sigmoid / value, 1.0, 1 / value),
            ("sigmoid_after", wide * sigmoid, 1.0, 1.0),
            ("silu_before", None, 1 / value, 1.0),
        ):
            if expected is None:  # what the gate multiplies is normalised, so a gate alike for all elements is no gate
                expected = self.probe.run(x * gate * sigmoid / value, torch.full_like(x, value))
            if close(y, expected, 1e-4):
                self.probe.neutral = value, before, after
                return kind
        raise NotInFamily(f"its second input, {self.probe.gate!r}, is no gate that this package knows")

    def _find_functional(self) -> str | None:
        """What torch's own operator does of it; asked in bfloat16, where a cast to float32 around it shows."""
        self.probe.set(**{name: tensor.bfloat16() for name, tensor in self.tensors.items()})
        functional = self.probe.torch_norm(self.normal(2, self.size).bfloat16())
        self.probe.set(**self.tensors)
        return functional

    def _find_structure(self) -> tuple[bool, str | None, str | None, float, bool]:
        """(centered, weight attribute, bias attribute, weight offset, whether the weight is applied first).

        Asked with rows so large that eps is nothing.
        """
        x = 1e4 * (self.normal(2, 2, self.size) + 0.5)
        y = self.probe.run(x).double()
        names = [name for name, tensor in self.tensors.items() if tensor.shape[0] == self.size]
        for centered, weight, bias in itertools.product((False, True), [None, *names], [None, *names]):
            if bias is not None and bias == weight:
                continue
            h = self._hat(x.double(), centered)
            shift = 0.0 if bias is None else self.tensors[bias].double()
            for offset in (0.0, 1.0) if weight else (0.0,):
                scale = 1.0 if weight is None else self.tensors[weight].double() + offset
                if close(h * scale + shift, y, 2e-5):
                    return centered, weight, bias, offset, False
        for name, offset in itertools.product(names if self.size <= TILE_MAX else (), (0.0, 1.0)):
            if close(self._hat(x.double() * (self.tensors[name].double() + offset), False), y, 2e-5):
                return False, name, None, offset, True
        raise NotInFamily(describe(self.probe, x, y) or "its formula is not one that this package knows")

    def _hat(self, x: torch.Tensor, centered: bool) -> torch.Tensor:
        h = x.unflatten(-1, (-1, self.group))
        h = h - h.mean(-1, keepdim=True) if centered else h
        return (h * h.pow(2).mean(-1, keepdim=True).rsqrt()).flatten(-2)

    def _fixed_size(self, weight: str | None) -> int | None:
        if self.group != self.size:
            return self.size  # whether the groups keep their number or their size as rows grow, nobody is asked
        if weight is not None:
            return None
        try:
            self.probe.run(self.normal(2, self.size + 8))
        except Unusable:
            return self.size
        return None

    def _read_eps(self, recipe: Recipe, scale: float = 1e-12) -> float:
        """eps as the module's own output on rows of about that magnitude tells it, to about `EPS_READING`."""
        neutral = {}
        if recipe.weight:
            neutral[recipe.weight] = torch.full((self.size,), 1.0 - recipe.spec.weight_offset, dtype=torch.float32)
        if recipe.bias:
            neutral[recipe.bias] = torch.zeros(self.size, dtype=torch.float32)
        self.probe.set(**neutral)
        x = scale * (1.0 + self.normal(1, self.size))
        y = self.probe.run(x).double()[:, : self.group]
        self.probe.set(**{name: self.tensors[name] for name in neutral})
        h = x.double()[:, : self.group]
        h = h - h.mean() if recipe.spec.centered else h
        rstd = ((y * h).sum() / (h * h).sum()).item()
        square = h.pow(2).mean().item()
        if not rstd:
            return math.inf
        if recipe.spec.eps_outside:
            eps, least = 1 / rstd - math.sqrt(square), 1e-5 * math.sqrt(square)
        else:
            eps, least = rstd**-2 - square, 1e-5 * square
        return 0.0 if abs(eps) <= least else eps

    def _find_eps(self, recipe: Recipe) -> Recipe:
        reading = self._read_eps(recipe)
        if not (math.isfinite(reading) and reading >= 0.0):
            raise NotInFamily("its eps is negative or not a number" + self._strange_numbers())
        if reading and abs(self._read_eps(recipe, 0.5 * math.sqrt(reading)) - reading) > 1e-3 * reading:
            recipe = replace(recipe, spec=replace(recipe.spec, eps_outside=True))
            reading = self._read_eps(recipe)
            if not reading > 0.0 or abs(self._read_eps(recipe, 0.5 * reading) - reading) > 1e-3 * reading:
                raise NotInFamily("its eps is neither inside the root nor beside it")
        finite = {name: value for name, value in self.probe.numbers.items() if math.isfinite(value)}
        for name, value in finite.items():
            if _reads_as(reading, value) and self._drives_eps(recipe, name, 2.0 * value + 1e-3):
                return replace(recipe, spec=recipe.spec.with_eps(float(value)), eps=name, eps_value=value)
        for value in (float(f"{reading:.3g}"), *MACHINE_EPS):
            if _reads_as(reading, value):
                recipe = replace(recipe, spec=recipe.spec.with_eps(value))
                unset = [k for k, v in plain_attributes(self.probe.module).items() if v is None]
                for name in unset if recipe.spec.functional else ():  # F.rms_norm has a default of its own for eps=None
                    if self._drives_eps(recipe, name, 1e-3):
                        return replace(recipe, eps=name)
                return recipe
        raise NotInFamily(f"its eps, about {reading:.6g}, is fixed in its code and cannot be read exactly")

    def _drives_eps(self, recipe: Recipe, name: str, other: float) -> bool:
        value = getattr(self.probe.module, name)
        self.probe.set(**{name: other})
        try:
            return _reads_as(self._read_eps(recipe), other)
        except Unusable:
            return False
        finally:
            self.probe.set(**{name: value})

    def _find_rounding(self, recipe: Recipe, functional: str | None) -> tuple[Recipe, bool]:
        """The rounding order, and whether float32 results are equal to the formula's to the last bit."""
        x, wide = self.rows(4096), self.rows(4096, half=True)
        float32 = (torch.float32, torch.float32)
        dtypes = SAME_DTYPES
        if recipe.weight is not None and functional != "all":
            dtypes += MIXED_DTYPES
        for candidate in self._roundings(recipe, functional):
            exact = self.agrees(candidate, x, *float32, exact=True)
            if not exact and not self.agrees(recipe, x, *float32, exact=False):
                about = "its float32 results are not those of the formula it is closest to, "
                raise NotInFamily(about + str(recipe.spec))
            if all(self.agrees(candidate, wide, *pair, exact) for pair in dtypes):
                return candidate, exact
        exact = self.agrees(recipe, x, *float32, exact=True)
        pairs = [(torch.float32, d) for d in (torch.float32, torch.bfloat16)[: 1 if recipe.weight is None else 2]]
        if not all(self.agrees(recipe, x, *pair, exact) for pair in pairs):
            raise NotInFamily(f"it rounds to half precision in an order of its own; in float32 it is {recipe.spec}")
        return replace(recipe, only_float32=True), exact

    @staticmethod
    def _roundings(recipe: Recipe, functional: str | None) -> Iterator[Recipe]:
        """The recipe with every rounding order it may have, the commonest first."""
        orders = ROUNDINGS if recipe.weight is not None else ("once", "rstd", "every_step")
        orders = ("once",) if recipe.spec.weight_first else orders
        if recipe.spec.gate is not None:
            orders = [order for order in orders if order not in ("rstd", "every_step")]
        if recipe.spec.centered or recipe.spec.eps_outside:
            orders = [order for order in orders if order != "rstd"]
        orders = {"all": ("once",), "hat": ("before_weight",)}.get(functional, orders)
        for rounding in orders:
            yield replace(recipe, spec=replace(recipe.spec, rounding=rounding))
        if recipe.spec.weight_offset and not functional:
            yield replace(recipe, spec=replace(recipe.spec, round_offset=True))

    def _find_optional_gate(self, recipe: Recipe, exact: bool) -> Recipe:
        """Whether a second input that need not be given is a gate, and of which kind."""
        without = replace(recipe, other_input=self.probe.gate)  # a call that gives it runs the module's own forward
        if recipe.spec.rounding in ("rstd", "every_step") or recipe.spec.weight_first or self.group > TILE_MAX:
            return without
        x = self.rows(1024, half=True)
        dtypes = ((torch.float32, torch.float32), *(() if recipe.only_float32 else SAME_DTYPES + MIXED_DTYPES))
        for kind in GATES:
            spec = replace(recipe.spec, gate=kind)
            gated = replace(recipe, spec=spec, gate=self.probe.gate, gate_optional=True)
            try:
                if all(self.agrees(gated, x, *pair, exact) for pair in dtypes):
                    return gated
            except Unusable:
                break
        return without

    def _check_gate_dtypes(self, recipe: Recipe, exact: bool) -> Recipe:
        """Whether gates of another dtype than x's may be given too."""
        if recipe.gate is None:
            return recipe
        x, half = self.rows(1024, half=True), torch.bfloat16
        mixed = [(torch.float32, torch.float32, half)]
        if not recipe.only_float32:
            mixed += [(half, half, torch.float32), (half, half, torch.float16), (torch.float16, torch.float16, half)]
        try:
            same = all(self.agrees(recipe, x, *pair, exact, gate_dtype) for *pair, gate_dtype in mixed)
        except Unusable:
            same = False
        return recipe if same else replace(recipe, one_gate_dtype=True)

    def _check_other_attributes(self, recipe: Recipe) -> Recipe:
        """Nothing else may matter: no mode, no gradients, no other tensor, and no attribute that is not watched."""
        x = self.rows()[[0, 4, 7, 10]]
        gate = self.gate_for(x, recipe)
        self.spread(recipe)
        y = self._in_every_mode(x, gate)
        if self.size < FEW:  # too few elements to show what else matters beside weights of every kind
            self.randomise()
            y = self._in_every_mode(x, gate)
        others = {name: 2.0 * value + 0.125 for name, value in self.probe.numbers.items() if isinstance(value, float)}
        for name, tensor in own_tensors(self.probe.module, floating=False):
            of_numbers = tensor.is_floating_point()
            others[name] = 2.0 * tensor.flatten() + 0.125 if of_numbers else ~tensor
        for name in sorted(others.keys() - {recipe.weight, recipe.bias, recipe.eps}):
            if self._matters(name, others[name], x, gate, y):
                raise NotInFamily(f"its result depends on its attribute {name!r}, which no formula here has")
        for name in sorted(self.probe.code.names):
            value = getattr(self.probe.module, name, None)
            if is_plain(value) or (other := otherwise(value)) is None:
                continue
            if self._matters(name, other, x, gate, y) and not self._is_eps_alone(name, other, gate):
                raise NotInFamily(f"its result depends on what its attribute {name!r} holds, which is not watched")
        settings, fixed = [], recipe.hidden_size
        own = {} if type(self.probe.module).forward in TORCH_FORWARDS else self.probe.module.__dict__
        for name, value in plain_attributes(self.probe.module).items():
            of_shape = isinstance(value, tuple) and (not value or value[-1] in (self.size, self.probe.head_dim))
            if name in (recipe.eps, "training") or of_shape:
                continue
            other = None if isinstance(value, float) else _another(value)
            matters = other is not None and self._matters(name, other, x, gate, y)
            # What others set on every module begins with an underscore; the rest is the module's own to read, if its
            # forward is not torch's.
            if matters or (name in own and not name.startswith("_")):
                settings.append((name, value))
            if matters and type(value) is int:  # the length of the rows, perhaps, or how many groups they have
                fixed = self.size
        return replace(recipe, settings=tuple(settings), hidden_size=fixed)

    def _matters(self, name: str, value, x: torch.Tensor, gate: torch.Tensor | None, y: torch.Tensor) -> bool:
        """Whether another value of an attribute changes the result y of x, in any mode."""
        before = getattr(self.probe.module, name)
        self.probe.set(**{name: value})
        try:
            return self._other_mode(x, gate, y, MODES[:4]) is not None
        except Unusable:
            return True
        finally:
            self.probe.set(**{name: before})

    def _is_eps_alone(self, name: str, value, gate: torch.Tensor | None) -> bool:
        """Whether what an attribute holds matters for eps alone, which is read when a module is patched."""
        x = 1e8 * (1.0 + self.normal(6, self.size))
        return not self._matters(name, value, x, gate, self.probe.run(x, gate))

    def _in_every_mode(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        y = self.probe.run(x, gate)
        mode = self._other_mode(x, gate, y, MODES)
        if mode is not None:
            raise NotInFamily(f"it computes something else {mode}")
        return y

    def _other_mode(self, x: torch.Tensor, gate: torch.Tensor | None, y: torch.Tensor, modes: tuple) -> str | None:
        """In which mode x does not give y, in words, or None."""
        try:
            for training, of_x, of_weights, inference in modes:
                self.probe.module.training = training
                for parameter in self.probe.module._parameters.values():
                    if parameter is not None and parameter.is_floating_point():
                        parameter.requires_grad_(of_weights)
                with torch.inference_mode(inference), torch.set_grad_enabled(of_x or of_weights):
                    given = x.clone().requires_grad_(of_x)
                    # In inference mode dropout shows itself as one operator, drawn from or not.
                    if not same_bits(self.probe.run_watched(given, gate, random=inference).detach(), y):
                        words = [("in train mode", training), ("with gradients", of_x or of_weights)]
                        words += [("in inference mode", inference)]
                        return " ".join(word for word, is_so in words if is_so) or "when it is called again"
            return None
        finally:
            self.probe.module.training = False
            for parameter in self.probe.module._parameters.values():
                if parameter is not None:
                    parameter.requires_grad_(False)


def _another(value):
    """Another value of an attribute, of the same kind; None if there is none."""
    if isinstance(value, str):
        return "another " + value
    return value + 1 if type(value) is int else otherwise(value)


def _reads_as(reading: float, value: float) -> bool:
    return abs(reading - value) <= EPS_READING * abs(value)
