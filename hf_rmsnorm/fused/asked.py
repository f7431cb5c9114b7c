"""What a patch asks of a norm, beyond the formula that its module computes."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch.nn import Module

from ..formula import NormSpec
from ..ops import input_needed
from .recipe import Recipe, parameters_of


class Rounding(Protocol):
    """An order of rounding that is not the model's own; hashable.

    Attributes:
        name: whose it is.
        spec: the formula in this order.
        row_major: the output is contiguous whatever the strides of the input.
    """

    name: str
    spec: NormSpec
    row_major: bool

    def norm_class(self) -> type:
        """The subclass of `fused.norm.PatchedNorm` that computes it."""


@dataclass(frozen=True)
class Asked:
    """What a patch asks of one norm.

    Args:
        as_rms: to compute RMSNorm, as a converted checkpoint says, where the module's
            own forward is a LayerNorm.
        rounding: in whose order of rounding to compute it; None for the model's.
        fuse_residual: one launch may compute the norm with what surrounds it: a sum, a
            rotation, a modulation.
        memory_efficient: the kernels' backward is to read the norm's output instead of
            its input.
        input_needed: why it reads the input all the same; "" where it need not.
        input_written: whose forward writes to the input in place, once the norm has read
            it; "" if none is known to. In half precision the backward then reads a copy.
    """

    as_rms: bool = False
    rounding: Rounding | None = None
    fuse_residual: bool = True
    memory_efficient: bool = False
    input_needed: str = ""
    input_written: str = ""

    @property
    def rounds_as(self) -> str:
        """The name of the order of rounding; ``"model"`` for the model's own."""
        return "model" if self.rounding is None else self.rounding.name

    def of(self, proven: Recipe) -> Recipe:
        """What a norm of this recipe is to compute."""
        spec = self.formula(proven.spec)
        row_major = proven.row_major
        if self.rounding is not None:
            spec = self.rounding.spec
            row_major = row_major or self.rounding.row_major
        return replace(proven, spec=spec, row_major=row_major)

    def formula(self, spec: NormSpec) -> NormSpec:
        """The formula of a module, in the model's own order of rounding."""
        if self.as_rms:
            return replace(spec, centered=False)
        return spec

    @property
    def instead(self) -> str:
        """What a module computes that its own forward, which never runs then, does not;
        "" where it computes what that does.
        """
        if self.as_rms:
            return "RMSNorm that its converted checkpoint records"
        if self.rounding is not None:
            return f"norm of {self.rounding.name}"
        return ""

    @property
    def keeps_output(self) -> bool:
        """Whether the backward reads the norm's output."""
        return self.memory_efficient and not self.input_needed

    def saving_memory(self, module: Module, recipe: Recipe, needed: str) -> "Asked":
        """The same under `memory_efficient`, for a module with the parameters that it
        has now.

        Args:
            recipe: what it is to compute.
            needed: why the input is needed besides; "" for no other reason.
        """
        weight, bias = parameters_of(module, recipe) or (None, None)
        reason = input_needed(weight, bias, recipe.spec) or needed
        return replace(self, memory_efficient=True, input_needed=reason)

    def notes(self) -> str:
        """What it says for a report; "" where it asks for nothing."""
        notes = []
        if self.as_rms:
            notes.append("as the converted checkpoint says")
        if self.rounding is not None:
            notes.append(f"as {self.rounding} rounds")
        notes.append(self._memory_note())
        return "; ".join(filter(None, notes))

    def _memory_note(self) -> str:
        """The tensor that the module saves for the backward, in words; "" where it is
        its input, unless `memory_efficient` asks for another.
        """
        if self.keeps_output:
            return "keeps its output for backward, but not where one launch rotates or modulates it"
        needed = self.input_needed
        if self.input_written:
            written = f"{self.input_written} writes to its input"
            needed = " and ".join(filter(None, (needed, written)))
            return f"keeps a copy of its input for backward in half precision: {needed}"
        if self.memory_efficient:
            return f"keeps its input for backward: {needed}"
        return ""


NOTHING = Asked()
