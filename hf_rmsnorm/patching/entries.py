"""What becomes of each norm and of each layer of a model."""

import re
from dataclasses import dataclass

from torch.nn import Module

from ..formula import NormSpec
from ..fused.norm import NormPatch
from ..fused.recipe import NOTHING, Asked, Recipe
from .formula.recognise import class_name
from .formula.refusals import Refusal


@dataclass
class Entry:
    """One norm of a model, and what becomes of it.

    Attributes:
        proven: what its own forward computes; None where that runs.
        asked: what is asked of it besides.
        refusal: why that runs.
        note: on the norm that is computed, for the report.
        before: what an earlier call has swapped it for, if one has.
        stays: it was swapped, and this call does not name it.
        excluded: its own forward runs, as the globs say.
        required: it may not run its own forward.
        formula: what it computes once it is swapped.
    """

    module: Module
    paths: list[str]
    proven: Recipe | None = None
    refusal: Refusal | None = None
    note: str = ""
    asked: Asked = NOTHING
    before: NormPatch | None = None
    stays: bool = False
    excluded: bool = False
    required: bool = False
    formula: NormSpec | None = None

    @property
    def class_name(self) -> str:
        return class_name(self.module)

    @property
    def computed(self) -> Recipe:
        """What it computes as it is asked; only where that is not its own forward."""
        return self.asked.of(self.proven)

    def leave(self, refusal: Refusal) -> None:
        """Have its own forward run."""
        self.proven = None
        self.refusal = refusal


@dataclass(frozen=True)
class FusedLayer:
    """A layer whose norms are fused with the code around them, or the reason why they
    are not.

    Attributes:
        fused: ``"+ post_attention_layernorm"`` for a residual add with that norm; ""
            where nothing is.
        reason: why nothing is; its norms are swapped all the same.
    """

    path: str
    class_name: str
    fused: str
    reason: str = ""

    @property
    def text(self) -> str:
        """The fused pieces, with the residual adds named; or the reason."""
        return re.sub(r"(^|, )\+ ", r"\1residual add + ", self.fused) or self.reason
