"""Walks a model and decides, before anything is changed, what happens to each of its
norms; and carries that out.

`api.patch_model` calls `make_plan`, which asks `formula.recognise` for each module, and
then `carry_out` for each entry, which calls `swap.swap_norm`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch.nn import Module

from ..converted.follow import STAYS, Recorded, conversion_of
from ..formula import NormSpec
from ..fused.norm import NormPatch, patch_of
from ..fused.recipe import NOTHING, Asked, Recipe, parameters_of
from ..ops import input_needed
from .formula.probe import neutral_modes
from .formula.recognise import NOT_A_NORM, class_name, recognise
from .formula.refusals import Refusal
from .swap import swap_norm, unswap_norm, why_not_run

Globs = str | Iterable[str] | None
TRAINED = "trained so, and a LayerNorm where it is loaded without a patch"


@dataclass
class Entry:
    """One norm of a model, and what becomes of it.

    Attributes:
        proven: the recipe of its original forward; None where that runs.
        asked: the options for it.
        refusal: why that runs.
        note: on the norm that is computed, for the report.
        before: what an earlier call has swapped it for, if one has.
        stays: it was swapped, and this call does not name it.
        excluded: its own forward runs, as the globs say.
        required: it must not run its own forward.
        formula: that of the recipe, with the eps that the module has now.
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
    def recipe(self) -> Recipe:
        """What is computed: the proven recipe with the options. Only if its own forward
        does not run.
        """
        return self.asked.of(self.proven)

    def leave(self, refusal: Refusal) -> None:
        """Have its own forward run."""
        self.proven = None
        self.refusal = refusal


def make_plan(
    model: Module, include: Globs, exclude: Globs, options: dict
) -> list[Entry]:
    """The norms of a model in its order; each glob has to match the path of one.
    Nothing is changed.

    Args:
        options: the fields of `Asked` that a call names.
    """
    entries = list_norms(model)
    include = _globs("include", include, model, entries)
    exclude = _globs("exclude", exclude, model, entries)
    for entry in entries:
        _choose(entry, include, exclude or [])
    with neutral_modes():  # in which the values of weights can be read
        _follow_conversion(model, entries)
        for entry in entries:
            if entry.proven is not None:
                _settle(entry, options)
    return entries


def _follow_conversion(model: Module, entries: list[Entry]) -> None:
    """Give the norms of a converted model the formulas that its record says."""
    conversion = conversion_of(model)
    if conversion is None:
        return
    for entry in entries:
        recorded = [path for path in entry.paths if path in conversion.norms]
        if not recorded or entry.excluded:
            continue
        entry.required = conversion.trained
        as_rms = entry.proven is not None and entry.proven.spec.centered
        if as_rms:
            # also of a norm that stays: its weights may have moved since
            why_not = _why_not_as_rms(entry, conversion, recorded[0])
            as_rms = not why_not
            entry.note = why_not or (TRAINED if conversion.trained else "")
        entry.asked = replace(entry.asked, as_rms=as_rms)


def _why_not_as_rms(entry: Entry, conversion: Recorded, path: str) -> str:
    """Why a LayerNorm does not run as the RMSNorm that is recorded for its path."""
    eps = entry.proven.spec.eps
    recorded = conversion.norms[path]
    if not conversion.why_not and eps != recorded:
        return f"{STAYS}its eps is {eps:g}, the record says {recorded:g}"
    return conversion.why_not


def list_norms(model: Module) -> list[Entry]:
    """The norms of a model with the recipes that they compute, and what only carries a
    norm's name.
    """
    paths: dict[Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    entries = []
    for module, names in paths.items():
        patch = patch_of(module)
        if patch is not None:
            entry = Entry(module, names, patch.proven, asked=patch.asked, before=patch)
            entries.append(entry)
            continue
        verdict = recognise(module)
        if verdict != NOT_A_NORM:
            entries.append(Entry(module, names, verdict.recipe, verdict.refusal))
    return entries


def _globs(
    word: str, globs: Globs, model: Module, entries: list[Entry]
) -> list[str] | None:
    """Globs as a list; raises the errors of those that match no norm."""
    if globs is None:
        return None
    chosen = [globs]
    if isinstance(globs, Iterable) and not isinstance(globs, str):
        chosen = list(globs)
    for glob in chosen:
        if not isinstance(glob, str):
            cure = "pass a glob over module paths, or a list of them"
            raise TypeError(f"{word} is {globs!r}: {cure}")
        if not any(_matches(entry, glob) for entry in entries):
            what = f"{word}={glob!r} matches the path of no norm"
            example = ""
            if entries:
                example = f", for example {entries[0].paths[0]!r}"
            raise ValueError(f"{what} in this {type(model).__name__}{example}")
    return chosen


def _matches(entry: Entry, glob: str) -> bool:
    return any(fnmatchcase(path, glob) for path in entry.paths)


def _choose(entry: Entry, include: list[str] | None, exclude: list[str]) -> None:
    """Apply the globs to one norm."""
    for glob in exclude:
        if _matches(entry, glob):
            entry.excluded = True
            entry.leave(Refusal(f"excluded by {glob!r}"))
            return
    if include is None or any(_matches(entry, glob) for glob in include):
        return
    entry.stays = entry.before is not None
    if not entry.stays:
        entry.excluded = True
        entry.leave(Refusal("not in include"))


def _settle(entry: Entry, options: dict) -> None:
    """Apply the options to a norm, and see whether it would run the result."""
    if not entry.stays:
        entry.asked = replace(entry.asked, **options, input_needed="")
    recipe = entry.recipe
    if entry.asked.memory_efficient:
        weight, bias = parameters_of(entry.module, recipe) or (None, None)
        needed = input_needed(weight, bias, recipe.spec)
        entry.asked = replace(entry.asked, input_needed=needed)
    entry.formula = recipe.spec_of(entry.module)
    refusal = why_not_run(entry.module, recipe)
    if refusal is not None:
        entry.leave(refusal)


def carry_out(entry: Entry) -> None:
    """Do to a norm what its entry says, or leave it with the reason."""
    if entry.proven is None:
        if entry.excluded:
            unswap_norm(entry.module)
        return
    try:
        swap_norm(entry.module, entry.proven, entry.asked)
    except Exception as error:
        # a metaclass or __init_subclass__ of the user's may refuse in any way
        what = f"its class cannot be subclassed: {type(error).__name__}: {error}"
        cure = "let the class be subclassed; until then it runs its own forward"
        entry.leave(Refusal(what, cure))
    else:
        patch_of(entry.module).paths[entry.module] = entry.paths[0]
