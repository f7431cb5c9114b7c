"""The functions that a user calls: `patch_model`, `unpatch_model`, `patched` and
`is_patched`.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..fused.norm import recipe_of
from ..fused.recipe import Recipe
from ..paths import compact_paths
from .layers.fusions import fuse_layers, sums_unknown
from .numerics import NUMERICS, as_rounded_by
from .plan import Entry, Globs, is_swapped, make_plan, report_on
from .report import FusedLayer, PatchReport
from .swap import fuse, fuse_again, restore, reswap, swap, swap_again

# One thread at a time changes models, so that a plan still holds when its modules are
# changed.
_changing = threading.RLock()


@dataclass(frozen=True)
class Options:
    """The options of one call of `patch_model` that a norm keeps; None is an option
    that the call does not name.
    """

    fuse_residual: bool | None = None
    memory_efficient: bool | None = None
    numerics: str | None = None

    def recipe(self, recipe: Recipe, module: torch.nn.Module) -> Recipe:
        """A norm's recipe with the options of this call. Others stay, or have their
        default.
        """
        kept = recipe_of(module) or recipe
        numerics = kept.numerics if self.numerics is None else self.numerics
        fuse_residual = (
            kept.fuse_residual if self.fuse_residual is None else self.fuse_residual
        )
        memory_efficient = (
            kept.memory_efficient
            if self.memory_efficient is None
            else self.memory_efficient
        )
        rounded = as_rounded_by(numerics, kept)
        result = replace(
            rounded,
            fuse_residual=fuse_residual,
            memory_efficient=False,
            input_needed="",
        )
        return result.saving_memory(module) if memory_efficient else result


def patch_model(
    model: torch.nn.Module,
    include: Globs = None,
    exclude: Globs = None,
    strict: bool = False,
    fuse_residual: bool | None = None,
    memory_efficient: bool | None = None,
    numerics: str | None = None,
) -> PatchReport:
    """Swap every norm with a known formula for the fused kernels, in place.

    A norm is recognised by its arithmetic. It keeps its parameters, buffers, hooks,
    name and `state_dict`; only its class changes, to a subclass of its own. Nothing
    outside this model changes.

    A second call patches further norms and changes options. Norms that `exclude`
    matches get their original class back. An option that the call does not name stays
    as an earlier call has set it.

    Args:
        model: any `torch.nn.Module`, on any devices; it may be a single norm.
        include: a glob over module paths as in ``model.named_modules()``, or a list of
            them (`fnmatch`; ``*`` crosses dots, so ``"*.q_norm"`` reaches every layer).
            Only norms that match one are selected. None: all.
        exclude: the same for norms to run their own forward; it wins over include. A
            module at several paths matches if one does.
        strict: raise, before anything changes, if a norm would be skipped that neither
            include nor exclude leaves out. A norm here is a leaf that normalises over
            its last dimension, or is named RMSNorm or LayerNorm.
        fuse_residual: by default True: one launch also computes the residual add in
            front of a norm, or the rotary embedding or modulation behind it, where the
            layer's forward shows them. False: each norm by itself.
        memory_efficient: by default False. True: keep each norm's output for the
            backward instead of its input. The linear after it keeps the output anyway.
            Gradients carry the output's rounding. Some norms still keep their input;
            the report lists them. A write through ``.data`` to the output or the
            weight, between forward and backward, goes unnoticed and gives wrong
            gradients.
        numerics: the order of rounding of norms and of the residual adds in front of
            them, on every device. By default ``"model"``. ``"vllm"`` and ``"sglang"``
            train a model in the numbers of its server; ``"torch"`` rounds as
            `F.rms_norm`. With ``fuse_residual=False`` sums are always rounded first.
            See docs/correctness.md.

    Returns:
        The report: the swapped norms with their formulas, and the skipped ones with the
            reason.

    Raises:
        TypeError: model is not a module, a glob is not a string, or a flag is not a
            bool.
        ValueError: a glob matches no norm; numerics is unknown, or has no formula that
            a norm of the model computes; or, under strict, a norm cannot be swapped or
            there is none, or there are sums to warn of.

    Warns: UserWarning: no norm was swapped; or `numerics` reads sums unrounded, and
        those of some layers are not found.

    Example:
        >>> import torch, hf_rmsnorm
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> hf_rmsnorm.patch_model(model).swapped[0].text
        'LayerNorm(eps=1e-05, one rounding, bias)'
    """
    options = Options(fuse_residual, memory_efficient, numerics)
    return _patch(model, include, exclude, strict, options, stacklevel=3)[0]


def is_patched(model: torch.nn.Module) -> bool:
    """Whether the module, or any inside it, is a norm that a report lists as swapped.

    Whether a kernel computes it depends on the device and the call: see
    `count_launches`.

    Raises:
        TypeError: model is not a module.

    Example:
        >>> import torch, hf_rmsnorm
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> hf_rmsnorm.is_patched(model), hf_rmsnorm.patch_model(model).skipped, hf_rmsnorm.is_patched(model[1])
        (False, (), True)
    """
    check_module("is_patched", model)
    return any(map(is_swapped, model.modules()))


def repatch_model(model: torch.nn.Module) -> None:
    """Unpatch a model and patch the same norms again as they are now, each with its
    options.
    """
    with _changing:
        paths: dict[Options, list[str]] = {}
        for path, module in model.named_modules():
            if (recipe := recipe_of(module)) is not None:
                options = Options(
                    recipe.fuse_residual, recipe.memory_efficient, recipe.numerics
                )
                paths.setdefault(options, []).append(path)
        unpatch_model(model)
        for options, chosen in paths.items():
            _patch(model, chosen, None, False, options, stacklevel=3)


def unpatch_model(model: torch.nn.Module) -> int:
    """Give every patched norm its original class and forward back, exactly; returns how
    many there were.

    Raises:
        TypeError: model is not a module.
    """
    check_module("unpatch_model", model)
    with _changing:
        for module in model.modules():
            fuse(module, None)
        return sum([restore(module) for module in model.modules()])


@contextlib.contextmanager
def patched(
    model: torch.nn.Module,
    include: Globs = None,
    exclude: Globs = None,
    strict: bool = False,
    fuse_residual: bool | None = None,
    memory_efficient: bool | None = None,
    numerics: str | None = None,
) -> Iterator[PatchReport]:
    """`patch_model` for the length of a ``with``, which gives the report. The end, or
    an exception, undoes it.

    Args and errors: those of `patch_model`.
    """
    options = Options(fuse_residual, memory_efficient, numerics)
    report, undo = _patch(model, include, exclude, strict, options, stacklevel=4)
    try:
        yield report
    finally:
        with _changing:
            undo.close()


def _patch(model, include, exclude, strict, options: Options, stacklevel: int):
    """(the report, what undoes the changes)."""
    check_module("patch_model", model)
    check_options(strict=strict, **vars(options))
    with _changing:
        report, warned, undo = _change(model, include, exclude, strict, options)
    for warning in warned:
        warnings.warn(warning, stacklevel=stacklevel)
    return report, undo


def _change(
    model, include, exclude, strict, options: Options
) -> tuple[PatchReport, list[str], contextlib.ExitStack]:
    """(the report, what to warn of, what undoes the changes)."""
    entries = make_plan(model, include, exclude)
    if strict:
        _must_serve(model, entries)
    chosen = _with_options(entries, options)
    returned = [entry.module for entry in entries if entry.excluded and entry.already]
    with contextlib.ExitStack() as undo:
        alone = _swap_all(chosen, returned, undo)
        if returned or alone:  # the fusions that remain are found again
            for module in model.modules():
                undo.callback(fuse_again, model, module, fuse(module, None))
        layers = fuse_layers(model, undo)
        server, missed = _rounded_first(chosen, layers)
        if strict and missed:
            what = f"the sums of {len(missed)} layers are rounded first, {server} reads them unrounded"
            raise ValueError(
                f"strict: {what}, first {missed[0].path!r}: {missed[0].reason}"
            )
        done = undo.pop_all()
    warned = [] if returned else _warnings_of_nothing(model, entries)
    if server is not None:
        warned += _warnings_of_sums(model, server, missed)
    return report_on(model, entries, layers), warned, done


def _with_options(entries: list[Entry], options: Options) -> list[Entry]:
    """The norms that are to be patched, with the options of this call in their recipes."""
    chosen = [entry for entry in entries if entry.recipe is not None and entry.chosen]
    for entry in chosen:
        try:
            entry.recipe = options.recipe(entry.recipe, entry.module)
        except ValueError as error:
            what, cure = (
                f"numerics={options.numerics!r}: {error}",
                f"as {entry.paths[0]!r} is: list it in exclude",
            )
            raise ValueError(f"{what}, {cure}") from None
    return chosen


def _warnings_of_nothing(model: torch.nn.Module, entries: list[Entry]) -> list[str]:
    """A warning where no norm is patched."""
    if any(entry.recipe is not None for entry in entries):
        return []
    why = (
        f"none of {len(entries)} could be swapped, print the report"
        if entries
        else "there is none"
    )
    return [f"patch_model changed no norm of this {type(model).__name__}: {why}"]


def _rounded_first(
    chosen: list[Entry], layers: tuple[FusedLayer, ...]
) -> tuple[str | None, list[FusedLayer]]:
    """(the server that reads sums unrounded, or None; the layers whose sums are rounded
    all the same).
    """
    unrounded = [
        e.recipe for e in chosen if e.recipe.fuse_residual and not e.recipe.rounds_sum
    ]
    if not unrounded:
        return None, []
    return unrounded[0].numerics, [layer for layer in layers if sums_unknown(layer)]


def _warnings_of_sums(
    model: torch.nn.Module, server: str, missed: list[FusedLayer]
) -> list[str]:
    warned = []
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        warned.append(
            f"numerics={server!r} reads sums unrounded; those that are copied to another device of this model's "
            "device_map are rounded first"
        )
    if missed:
        paths = ", ".join(compact_paths([layer.path for layer in missed]))
        what = f"numerics={server!r} reads sums unrounded; rounded first are those of {paths}"
        warned.append(f"{what}: {missed[0].reason}")
    return warned


def _must_serve(model: torch.nn.Module, entries: list[Entry]) -> None:
    """A ValueError where a norm that no glob leaves out cannot be swapped, or there is
    none.
    """
    if not entries:
        raise ValueError(f"strict: this {type(model).__name__} has no norm to swap")
    unserved = [
        entry for entry in entries if entry.recipe is None and not entry.excluded
    ]
    if unserved:
        first, cure = unserved[0], "list it in exclude to accept that"
        which = f"first {first.paths[0]!r} ({type(first.module).__name__})"
        raise ValueError(
            f"strict: {len(unserved)} of the norms cannot be swapped, {which}: {first.reason}; {cure}"
        )


def _swap_all(
    chosen: list[Entry], returned: list[torch.nn.Module], undo: contextlib.ExitStack
) -> bool:
    """Swap the chosen norms and give others their class back; True if a norm is fused
    with its surroundings no more.
    """
    alone = False
    for module in returned:
        undo.callback(swap_again, module, recipe_of(module))
        restore(module)
    for entry in chosen:
        before = recipe_of(entry.module)
        if before is None:
            swap(entry.module, entry.recipe)
            undo.callback(restore, entry.module)
        else:
            undo.callback(reswap, entry.module, before)
            reswap(entry.module, entry.recipe)
            alone = alone or (before.fuse_residual and not entry.recipe.fuse_residual)
    return alone


def check_options(
    numerics: str | None = None, include=None, exclude=None, **flags
) -> None:
    """Raise the errors of `patch_model` that do not depend on the model."""
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (flag is not None or name == "strict"):
            raise TypeError(f"patch_model's {name} is {flag!r}: pass True or False")
    if numerics is not None and numerics not in NUMERICS:
        raise ValueError(
            f"numerics is {numerics!r}: choose one of {', '.join(NUMERICS)}"
        )


def check_module(function: str, model) -> None:
    if not isinstance(model, torch.nn.Module):
        # as in a pipeline and a Trainer
        inside = isinstance(getattr(model, "model", None), torch.nn.Module)
        cure = "pass its .model" if inside else "load the model first"
        raise TypeError(
            f"{function} needs a torch.nn.Module, got {type(model).__name__}: {cure}"
        )
