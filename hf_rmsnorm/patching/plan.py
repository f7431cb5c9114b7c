"""Walks a model and decides, before anything is changed, what happens to each of its
norms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.nn import Module

from ..formula import NormSpec
from ..fused.norm import recipe_of
from ..fused.recipe import Recipe
from .converted import follow_conversion
from .formula.recognise import class_name, recognise

Globs = str | Iterable[str] | None


@dataclass
class Entry:
    """One norm of a model, and what becomes of it.

    Attributes:
        recipe: how it is computed; None where its own forward runs.
        reason, cure: why that runs, and how a user may change it.
        note: on the norm that is computed, for the report.
        patched: an earlier call has swapped it.
        stays: it was swapped, and this call does not name it.
        excluded: its own forward runs, as the globs say.
        required: it may not run its own forward.
        formula: what it computes now that it is swapped.
    """

    module: Module
    paths: list[str]
    recipe: Recipe | None = None
    reason: str | None = None
    cure: str = ""
    note: str = ""
    patched: bool = False
    stays: bool = False
    excluded: bool = False
    required: bool = False
    formula: NormSpec | None = None

    @property
    def class_name(self) -> str:
        return class_name(self.module)

    def leave(self, reason: str, cure: str = "") -> None:
        """Have its own forward run."""
        self.recipe = None
        self.reason = reason
        self.cure = cure


def make_plan(
    model: Module, include: Globs = None, exclude: Globs = None
) -> list[Entry]:
    """The norms of a model in its order; each glob has to match the path of one.
    Nothing is changed.
    """
    entries = list_norms(model)
    include = _globs("include", include, model, entries)
    exclude = _globs("exclude", exclude, model, entries)
    for entry in entries:
        _choose(entry, include, exclude or [])
    follow_conversion(model, entries)
    return entries


def list_norms(model: Module) -> list[Entry]:
    """The norms of a model with the recipes that they compute, and what only carries a
    norm's name.
    """
    paths: dict[Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    entries = []
    for module, names in paths.items():
        recipe = recipe_of(module)
        if recipe is not None:
            entries.append(Entry(module, names, recipe, patched=True))
            continue
        verdict = recognise(module)
        if verdict.recipe is not None or verdict.reason is not None:
            entries.append(Entry(module, names, *verdict))
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
            entry.leave(f"excluded by {glob!r}")
            return
    if include is None or any(_matches(entry, glob) for glob in include):
        return
    if entry.patched:
        entry.stays = True
    else:
        entry.excluded = True
        entry.leave("not in include")
