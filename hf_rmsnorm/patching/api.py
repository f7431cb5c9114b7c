"""`patch_model`, `unpatch_model` and `patched`: the whole of what a user calls."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..fused.norm import recipe_of
from ..paths import compact_paths
from .centring import centre_at, uncentre
from .converted import recorded_model
from .layers.links import fuse_layers, sums_unknown
from .moved import unwatch, watch
from .numerics import NUMERICS, as_rounded_by
from .plan import Globs, make_plan, report_on
from .report import PatchReport
from .swap import fuse, restore, reswap, swap


def patch_model(
    model: torch.nn.Module,
    include: Globs = None,
    exclude: Globs = None,
    strict: bool = False,
    fuse_residual: bool = True,
    memory_efficient: bool = False,
    numerics: str = "model",
) -> PatchReport:
    """Swap every norm that is recognised by its arithmetic for the fused kernels, in place.

    Each norm keeps its parameters, buffers, hooks, name and `state_dict`; only its class changes, to a subclass of the
    one it had. Nothing outside this model changes. Norms patched earlier stay patched and are reported again.

    Args:
        model: any `torch.nn.Module`, on any devices; it may be a single norm.
        include: a glob over module paths as in ``model.named_modules()``, or a list of them (`fnmatch`; ``*`` crosses
            dots, so ``"*.q_norm"`` reaches every layer). Only norms that match one are swapped. None: all.
        exclude: the same for norms to leave alone; it wins over include. A module at several paths matches if one does.
        strict: raise, before anything changes, if a norm would be neither swapped nor left out by include or exclude:
            a leaf that normalises over its last dimension, or whose class is named RMSNorm or LayerNorm.
        fuse_residual: also compute residual sums in one launch with the norm that reads them, in layers whose own
            forward shows which those are: sums with gradients, of 2**20 elements or more, or in a CUDA graph. False
            undoes that in layers fused earlier.
        memory_efficient: keep each norm's output for the backward, which the linear behind it keeps anyway, instead of
            its input; gradients carry the output's rounding. The value given last holds, also for norms patched
            earlier, where the globs allow them. Some norms keep their input all the same: docs/training.md says which,
            and their notes in the report. A write through ``.data`` to the output or the weight, between forward and
            backward, cannot be seen and gives wrong gradients.
        numerics: in whose order of rounding norms, and residual sums in front of them, are computed: ``"model"``;
            ``"vllm"`` or ``"sglang"``, so that a model trains in the numbers by which its server generates;
            ``"torch"``, as `F.rms_norm`. So it is on every device, by every backend. Under ``fuse_residual=False`` sums
            are rounded first in any case. The value given last holds. docs/numerics.md states each order.

    Returns:
        What was swapped, with which formula, and what was left alone, with the reason.

    Raises:
        TypeError: model is not a module, a glob is not a string, or a flag is not a bool.
        ValueError: a glob matches no norm; numerics is unknown, or has no formula that a norm of the model computes;
            or, under strict, a norm cannot be swapped or there is none, or there are sums to warn of.

    Warns:
        UserWarning: no norm was swapped; or `numerics` reads sums unrounded, and those of some layers are not found.

    Example:
        >>> import torch, hf_rmsnorm
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> hf_rmsnorm.patch_model(model).swapped[0].text
        'LayerNorm(eps=1e-05, one rounding, bias)'
    """
    return _patch(model, include, exclude, strict, fuse_residual, memory_efficient, numerics, stacklevel=3)[0]


def unpatch_model(model: torch.nn.Module) -> int:
    """Give every patched norm its original class and forward back, exactly; returns how many there were.

    Raises:
        TypeError: model is not a module.
    """
    check_module("unpatch_model", model)
    whole = recorded_model(model) is not None  # a part of a converted model may hold a mean that the rest is to lack
    for module in model.modules():
        fuse(module, None)
        if whole:
            uncentre(module)
            unwatch(module)
    return sum([restore(module) for module in model.modules()])


@contextlib.contextmanager
def patched(
    model: torch.nn.Module,
    include: Globs = None,
    exclude: Globs = None,
    strict: bool = False,
    fuse_residual: bool = True,
    memory_efficient: bool = False,
    numerics: str = "model",
) -> Iterator[PatchReport]:
    """`patch_model` for the length of a ``with``, which gives the report; undone on exceptions too, to what was before.

    Args and errors: those of `patch_model`.
    """
    report, undo = _patch(model, include, exclude, strict, fuse_residual, memory_efficient, numerics, stacklevel=4)
    with undo:
        yield report


def _patch(model, include, exclude, strict, fuse_residual, memory_efficient, numerics, stacklevel: int):
    """(the report, what undoes the changes)."""
    check_module("patch_model", model)
    check_options(strict=strict, fuse_residual=fuse_residual, memory_efficient=memory_efficient, numerics=numerics)
    entries = make_plan(model, include, exclude)
    unserved = [entry for entry in entries if entry.recipe is None and not entry.excluded]
    if strict and not entries:
        raise ValueError(f"strict: this {type(model).__name__} has no norm to swap")
    if strict and unserved:
        first, cure = unserved[0], "list it in exclude to accept that"
        which = f"first {first.paths[0]!r} ({type(first.module).__name__})"
        raise ValueError(f"strict: {len(unserved)} of the norms cannot be swapped, {which}: {first.reason}; {cure}")
    chosen = [entry for entry in entries if entry.recipe is not None and (entry.chosen or not entry.already)]
    for entry in chosen:
        try:
            rounded = as_rounded_by(numerics, recipe_of(entry.module) or entry.recipe)
        except ValueError as error:
            raise ValueError(f"numerics={numerics!r}: {error}, as {entry.paths[0]!r} is: list it in exclude") from None
        entry.recipe = replace(rounded, memory_efficient=memory_efficient)
    with contextlib.ExitStack() as undo:
        for entry in chosen:
            if entry.already:
                undo.callback(reswap, entry.module, recipe_of(entry.module))
                reswap(entry.module, entry.recipe)
            else:
                swap(entry.module, entry.recipe)
                undo.callback(restore, entry.module)
        as_rms = any(entry.recipe is not None and entry.recipe.as_rms for entry in entries)
        if as_rms and (found := recorded_model(model)):  # none where this is a part of a model patched before
            centre_at(model, found.centred, undo)
            watch(found, undo)
        for module in () if fuse_residual else model.modules():
            undo.callback(fuse, module, fuse(module, None))
        layers = fuse_layers(model, undo) if fuse_residual else ()
        unrounded = any(not entry.recipe.rounds_sum for entry in chosen) and fuse_residual
        missed = [layer for layer in layers if unrounded and sums_unknown(layer)]
        if strict and missed:
            what = f"the sums of {len(missed)} layers are rounded first, {numerics} reads them unrounded"
            raise ValueError(f"strict: {what}, first {missed[0].path!r}: {missed[0].reason}")
        done = undo.pop_all()
    if not any(entry.recipe for entry in entries):
        found = f"none of {len(entries)} could be swapped, print the report" if entries else "there is none"
        warnings.warn(f"patch_model changed no norm of this {type(model).__name__}: {found}", stacklevel=stacklevel)
    if missed:
        paths = ", ".join(compact_paths([layer.path for layer in missed]))
        what = f"numerics={numerics!r} reads sums unrounded; rounded first are those of {paths}"
        warnings.warn(f"{what}: {missed[0].reason}", stacklevel=stacklevel)
    return report_on(model, entries, layers), done


def check_options(numerics: str = "model", include=None, exclude=None, **flags) -> None:
    """Raises what `patch_model` raises of these arguments whatever the model is."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"patch_model's {name} is {flag!r}: pass True or False")
    if numerics not in NUMERICS:
        raise ValueError(f"numerics is {numerics!r}: choose one of {', '.join(NUMERICS)}")


def check_module(function: str, model) -> None:
    if not isinstance(model, torch.nn.Module):
        inside = isinstance(getattr(model, "model", None), torch.nn.Module)  # as in a pipeline and a Trainer
        cure = "pass its .model" if inside else "load the model first"
        raise TypeError(f"{function} needs a torch.nn.Module, got {type(model).__name__}: {cure}")
