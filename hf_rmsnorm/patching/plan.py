"""Walks a model and decides, before anything is changed, what happens to each of its
norms.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from ..fused.norm import fused_class, recipe_of
from ..fused.recipe import Recipe
from ..ops.backend import runs_on
from .converted import STAYS, conversion_of
from .formula.recognise import Verdict, class_name, recognise
from .layers.writes import written_inputs
from .numerics import SERVERS
from .report import FusedLayer, PatchReport, Skipped, Swapped
from .swap import replaced_forward

Globs = str | Iterable[str] | None


@dataclass
class Entry:
    """One norm: the module, every path it has, its recipe or the reason it stays as it
    is.
    """

    module: torch.nn.Module
    paths: list[str]
    recipe: Recipe | None = None
    reason: str | None = None
    cure: str = ""
    note: str = ""
    already: bool = False  # it was swapped before
    chosen: bool = True  # the globs select it
    excluded: bool = False  # it runs its own forward, as the globs say


def report_on(
    model: torch.nn.Module, entries: list[Entry], layers: tuple[FusedLayer, ...]
) -> PatchReport:
    """The report of a model that was patched by this plan."""
    swapped, skipped = [], []
    for entry in entries:
        name = class_name(entry.module)
        recipe = entry.recipe
        if recipe is None:
            skipped += [
                Skipped(path, name, entry.reason, entry.cure) for path in entry.paths
            ]
            continue
        formula = recipe.spec_of(entry.module) or recipe.spec
        notes = _notes(entry, recipe)
        swapped += [
            Swapped(path, name, formula, notes, recipe.as_rms, recipe.numerics)
            for path in entry.paths
        ]
    devices = map(runs_on, _devices(model)) if swapped else ()
    return PatchReport(tuple(swapped), tuple(skipped), layers, tuple(devices))


def _notes(entry: Entry, recipe: Recipe) -> str:
    fused = recipe_of(entry.module)
    notes = [
        recipe.notes(),
        f"as {SERVERS[recipe.numerics]} rounds" if recipe.numerics != "model" else "",
        "" if fused is None else fused.memory_note(),
        f"one module at {len(entry.paths)} paths" if len(entry.paths) > 1 else "",
        entry.note,
    ]
    return "; ".join(filter(None, notes))


def _devices(model: torch.nn.Module) -> list[torch.device]:
    """The devices that hold the model, or run its offloaded modules; never meta."""
    held, running = [], []
    for module in model.modules():
        for p in module._parameters.values():
            if p is None:
                continue
            if not p.is_meta:
                held.append(p.device)
                continue
            where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if where is not None:
                running.append(torch.device(where))
    return list(dict.fromkeys([*held, *running]))


def make_plan(
    model: torch.nn.Module, include: Globs = None, exclude: Globs = None
) -> list[Entry]:
    """Recognise every module and apply the globs, each of which has to match a norm's
    path; nothing is changed.
    """
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    cache: dict[tuple, Verdict] = {}
    entries = [_entry(module, names, cache) for module, names in paths.items()]
    entries = [entry for entry in entries if entry is not None]
    _follow_conversion(model, entries)
    include, exclude = _globs("include", include), _globs("exclude", exclude)
    norm_paths = [path for entry in entries for path in entry.paths]
    for word, globs in (("include", include), ("exclude", exclude)):
        _require_matches(model, word, globs or [], norm_paths)
    for entry in entries:
        _choose(entry, include, exclude or [])
    _note_written_inputs(model, entries)
    return entries


def _follow_conversion(model: torch.nn.Module, entries: list[Entry]) -> None:
    """Give the norms of a converted model the formulas that its record says."""
    conversion = conversion_of(model)
    if conversion is None:
        return
    if conversion.trained:
        _check_all_recognised(entries, conversion.norms)
    for entry in entries:
        if entry.recipe is None:
            continue
        if not entry.already:
            entry.recipe, entry.note = conversion.recipe(entry.paths, entry.recipe)
        elif entry.recipe.as_rms:
            doubt = conversion.why_not.removeprefix(STAYS)
            entry.note = (
                f"runs as RMSNorm, but {doubt}; unpatch and patch again"
                if doubt
                else conversion.note
            )


def _require_matches(
    model: torch.nn.Module, word: str, globs: list[str], paths: list[str]
) -> None:
    """A ValueError where a glob matches none of the paths."""
    for glob in globs:
        if not any(_matches(path, glob) for path in paths):
            example = f", for example {paths[0]!r}" if paths else ""
            raise ValueError(
                f"{word}={glob!r} matches the path of no norm in this {type(model).__name__}{example}"
            )


def _choose(entry: Entry, include: list[str] | None, exclude: list[str]) -> None:
    """Apply the globs to one norm."""
    excluding = _first_match(entry, exclude)
    included = include is None or _first_match(entry, include) is not None
    entry.chosen = included and excluding is None
    entry.excluded = excluding is not None or not (included or entry.already)
    if entry.excluded:
        entry.recipe, entry.cure = None, ""
        entry.reason = (
            "not in include" if excluding is None else f"excluded by {excluding!r}"
        )


def _first_match(entry: Entry, globs: list[str]) -> str | None:
    for glob in globs:
        if any(_matches(path, glob) for path in entry.paths):
            return glob
    return None


def _note_written_inputs(model: torch.nn.Module, entries: list[Entry]) -> None:
    """Mark the norms whose input is written to in place after them.

    Torch's own norms keep the input that they were given, as the kernels do.
    """
    with_copies = {
        e.module: e
        for e in entries
        if e.recipe is not None and not e.recipe.spec.functional
    }
    for module in written_inputs(model, set(with_copies)):
        entry = with_copies[module]
        entry.recipe = replace(entry.recipe, input_written=True)


def _check_all_recognised(entries: list[Entry], norms: Collection[str]) -> None:
    """Refuse a model that was trained as RMSNorm where one of its norms would stay a
    LayerNorm, another function.
    """
    for entry in entries:
        path = next((path for path in entry.paths if path in norms), None)
        if entry.recipe is None and path is not None:
            norm = f"{path} ({class_name(entry.module)})"
            what = f"by its config this model was trained as RMSNorm, and {norm} cannot run so"
            raise ValueError(f"{what}: {entry.reason}")


def _entry(module: torch.nn.Module, paths: list[str], cache: dict) -> Entry | None:
    """The entry of one module; None if it is no norm."""
    fused = recipe_of(module)
    if fused is not None:
        entry = _patched_entry(module, paths, fused)
    else:
        verdict = recognise(module, cache)
        if verdict.recipe is None and verdict.reason is None:
            return None
        entry = Entry(module, paths, *verdict)
    if entry.recipe is None:
        return entry
    other = replaced_forward(module)
    if other:
        entry.recipe = None
        entry.reason = f"its forward was replaced on the instance by {other}"
        entry.cure = "nothing, if that is what should serve it; otherwise undo it and patch again"
    elif not entry.already:
        _require_subclass(entry)
    return entry


def is_swapped(module: torch.nn.Module) -> bool:
    """Whether a module is patched, computes its formula as it stands, and runs the
    forward of its class.
    """
    recipe = recipe_of(module)
    return (
        recipe is not None
        and recipe.spec_of(module) is not None
        and not replaced_forward(module)
    )


def _patched_entry(module: torch.nn.Module, paths: list[str], fused: Recipe) -> Entry:
    spec = fused.spec_of(module)
    if spec is not None:
        return Entry(module, paths, replace(fused, spec=spec), already=True)
    changed = fused.changes(module) or [
        f"{fused.eps} is now {getattr(module, fused.eps)}"
    ]
    reason = f"it runs its own forward: {', '.join(changed)}"
    return Entry(
        module,
        paths,
        None,
        reason,
        "set it back, or unpatch the model and patch it again",
        already=True,
    )


def _require_subclass(entry: Entry) -> None:
    """Leave a norm alone whose class cannot be subclassed."""
    try:
        fused_class(type(entry.module), entry.recipe)
    except Exception as error:
        # a metaclass or __init_subclass__ of the user's may refuse in any way
        entry.recipe = None
        entry.reason = (
            f"its class cannot be subclassed: {type(error).__name__}: {error}"
        )
        entry.cure = "let the class be subclassed; until then it runs its own forward"


def _matches(path: str, glob: str) -> bool:
    # a path names itself, whatever characters are in it
    return path == glob or fnmatchcase(path, glob)


def _globs(word: str, globs: Globs) -> list[str] | None:
    if globs is None:
        return None
    found = (
        list(globs)
        if isinstance(globs, Iterable) and not isinstance(globs, str)
        else [globs]
    )
    if not all(isinstance(glob, str) for glob in found):
        raise TypeError(
            f"{word} is {globs!r}: pass a glob over module paths, or a list of them"
        )
    return found
