"""Walks a model and decides, before anything is changed, what happens to each of its norms."""

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
    """One norm: the module, every path it has, its recipe or the reason it stays as it is."""

    module: torch.nn.Module
    paths: list[str]
    recipe: Recipe | None = None
    reason: str | None = None
    cure: str = ""
    note: str = ""
    already: bool = False  # it was swapped before
    chosen: bool = True  # the globs select it
    excluded: bool = False  # it runs its own forward, as the globs say


def report_on(model: torch.nn.Module, entries: list[Entry], layers: tuple[FusedLayer, ...]) -> PatchReport:
    swapped, skipped = [], []
    for entry in entries:
        name, recipe, fused = class_name(entry.module), entry.recipe, recipe_of(entry.module)
        memory = "" if fused is None else fused.memory_note()
        order = f"as {SERVERS[recipe.numerics]} rounds" if recipe and recipe.numerics != "model" else ""
        shared = f"one module at {len(entry.paths)} paths" if len(entry.paths) > 1 else ""
        notes = "; ".join(filter(None, (recipe.notes() if recipe else "", order, memory, shared, entry.note)))
        if recipe is not None:
            told = recipe.spec_of(entry.module) or recipe.spec, notes, recipe.as_rms, recipe.numerics
            swapped += [Swapped(path, name, *told) for path in entry.paths]
        else:
            skipped += [Skipped(path, name, entry.reason, entry.cure) for path in entry.paths]
    return PatchReport(tuple(swapped), tuple(skipped), layers, tuple(map(runs_on, _devices(model) if swapped else ())))


def _devices(model: torch.nn.Module) -> dict[torch.device, None]:
    """Those that hold the model, or run what accelerate has offloaded; meta is none."""
    found = [(module, p) for module in model.modules() for p in module._parameters.values() if p is not None]
    running = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module, p in found if p.is_meta)
    held = (p.device for _, p in found if not p.is_meta)
    return dict.fromkeys([*held, *(torch.device(where) for where in running if where is not None)])


def make_plan(model: torch.nn.Module, include: Globs = None, exclude: Globs = None) -> list[Entry]:
    """Recognise every module and apply the globs, each of which has to match a norm's path; nothing is changed."""
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    cache: dict[tuple, Verdict] = {}
    entries = [e for module, names in paths.items() if (e := _entry(module, names, cache)) is not None]
    conversion = conversion_of(model)
    if conversion is not None and conversion.trained:
        _check_all_recognised(entries, conversion.norms)
    for entry in entries if conversion is not None else ():
        if entry.recipe is not None and not entry.already:
            entry.recipe, entry.note = conversion.recipe(entry.paths, entry.recipe)
        elif entry.recipe is not None and entry.recipe.as_rms:
            doubt = conversion.doubt.removeprefix(STAYS)
            entry.note = f"runs as RMSNorm, but {doubt}; unpatch and patch again" if doubt else conversion.note
    include, exclude = _globs("include", include), _globs("exclude", exclude)
    norm_paths = [path for entry in entries for path in entry.paths]
    for word, glob in [*(("include", glob) for glob in include or ()), *(("exclude", glob) for glob in exclude or ())]:
        if not any(_matches(path, glob) for path in norm_paths):
            example = f", for example {norm_paths[0]!r}" if norm_paths else ""
            raise ValueError(f"{word}={glob!r} matches the path of no norm in this {type(model).__name__}{example}")
    for entry in entries:
        hit = next((glob for glob in exclude or () for path in entry.paths if _matches(path, glob)), None)
        included = include is None or any(_matches(path, glob) for path in entry.paths for glob in include)
        entry.chosen = included and hit is None
        entry.excluded = hit is not None or not (included or entry.already)
        if entry.excluded:
            entry.recipe, entry.cure = None, ""
            entry.reason = "not in include" if hit is None else f"excluded by {hit!r}"
    # Torch's own norms keep the input that they were given, as the kernels do.
    keeping_a_copy = {e.module: e for e in entries if e.recipe is not None and not e.recipe.spec.functional}
    for module in written_inputs(model, set(keeping_a_copy)):
        entry = keeping_a_copy[module]
        entry.recipe = replace(entry.recipe, input_written=True)
    return entries


def _check_all_recognised(entries: list[Entry], norms: Collection[str]) -> None:
    """Refuse a model that was trained as RMSNorm where one of its norms would stay a LayerNorm, another function."""
    for entry in entries:
        path = next((path for path in entry.paths if path in norms), None)
        if entry.recipe is None and path is not None:
            norm = f"{path} ({class_name(entry.module)})"
            what = f"by its config this model was trained as RMSNorm, and {norm} cannot run so"
            raise ValueError(f"{what}: {entry.reason}")


def _entry(module: torch.nn.Module, paths: list[str], cache: dict) -> Entry | None:
    if (fused := recipe_of(module)) is None:
        recipe, reason, cure = recognise(module, cache)
    elif (spec := fused.spec_of(module)) is not None:
        recipe, reason, cure = replace(fused, spec=spec), None, ""
    else:
        changed = fused.changes(module) or [f"{fused.eps} is now {getattr(module, fused.eps)}"]
        recipe, reason = None, f"it runs its own forward: {', '.join(changed)}"
        cure = "set it back, or unpatch the model and patch it again"
    if recipe is None and reason is None:
        return None
    if recipe is not None and (other := replaced_forward(module)):
        recipe, reason = None, f"its forward was replaced on the instance by {other}"
        cure = "nothing, if that is what should serve it; otherwise undo it and patch again"
    elif recipe is not None and fused is None:
        try:
            fused_class(type(module), recipe)
        except Exception as error:  # a metaclass or __init_subclass__ of the user's may refuse in any way
            recipe, reason = None, f"its class cannot be subclassed: {type(error).__name__}: {error}"
            cure = "let the class be subclassed; until then it runs its own forward"
    return Entry(module, paths, recipe, reason, cure, already=fused is not None)


def _matches(path: str, glob: str) -> bool:
    return path == glob or fnmatchcase(path, glob)  # a path names itself, whatever characters are in it


def _globs(word: str, globs: Globs) -> list[str] | None:
    if globs is None:
        return None
    found = list(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs]
    if not all(isinstance(glob, str) for glob in found):
        raise TypeError(f"{word} is {globs!r}: pass a glob over module paths, or a list of them")
    return found
