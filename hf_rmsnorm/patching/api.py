"""The functions that a user calls: `patch_model`, `unpatch_model`, `patched` and
`is_patched`.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator

from torch.nn import Module

from ..fused.norm import recipe_of
from .layers.fusions import fuse_layers
from .plan import Entry, Globs, carry_out, make_plan
from .report import PatchReport, report_on
from .swap import restore, unfuse, unfuse_all, unswap_norm, why_not_run

# One thread at a time changes models, so that a plan still holds when its modules are
# changed.
_changing = threading.RLock()


def patch_model(
    model: Module,
    include: Globs = None,
    exclude: Globs = None,
    strict: bool = False,
    fuse_residual: bool | None = None,
    memory_efficient: bool | None = None,
) -> PatchReport:
    """Swap every norm with a known formula for the fused kernels, in place.

    A norm is recognised by its arithmetic. It keeps its parameters, buffers, hooks,
    name and `state_dict`; only its class changes, to a subclass. Nothing outside this
    model changes.

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
        strict: raise, and leave the model as it was, if a norm would be skipped that neither
            include nor exclude leaves out. A norm here is a leaf that normalises over
            its last dimension, or is named RMSNorm or LayerNorm.
        fuse_residual: by default True: where the layer's forward shows them, one launch
            also computes the residual add in front of a norm, or the modulation behind
            it, or the rotary embedding of q and k norms. Another launch rotates q and k
            that have no norms. False: each norm by itself, without any of these.
        memory_efficient: by default False. True: keep each norm's output for the
            backward instead of its input. The linear after it keeps the output anyway.
            Gradients carry the output's rounding. Some norms still keep their input;
            the report lists them. A write through ``.data`` to the output or the
            weight, between forward and backward, goes unnoticed and gives wrong
            gradients.

    Returns:
        The report: the swapped norms with their formulas, and the skipped ones with the
            reason.

    Raises:
        TypeError: model is not a module, a glob is not a string, or a flag is not a
            bool.
        ValueError: a glob matches no norm; or, under strict, a norm cannot be swapped
            or there is none.

    Warns:
        UserWarning: no norm was swapped.

    Example:
        >>> import torch, hf_rmsnorm
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> hf_rmsnorm.patch_model(model).swapped[0].text
        'LayerNorm(eps=1e-05, one rounding, bias)'
    """
    options = {"fuse_residual": fuse_residual, "memory_efficient": memory_efficient}
    report, _ = _patch(model, include, exclude, strict, options)
    return report


def is_patched(model: Module) -> bool:
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
    for module in model.modules():
        recipe = recipe_of(module)
        if recipe is not None and why_not_run(module, recipe) is None:
            return True
    return False


def unpatch_model(model: Module) -> int:
    """Give every patched norm its original class and forward back, exactly; returns how
    many there were.

    Raises:
        TypeError: model is not a module.
    """
    check_module("unpatch_model", model)
    count = 0
    with _changing:
        for module in model.modules():
            unfuse(module)
            count += recipe_of(module) is not None
            unswap_norm(module)
    return count


@contextlib.contextmanager
def patched(
    model: Module,
    include: Globs = None,
    exclude: Globs = None,
    strict: bool = False,
    fuse_residual: bool | None = None,
    memory_efficient: bool | None = None,
) -> Iterator[PatchReport]:
    """`patch_model` for the length of a ``with``, which gives the report. The end, or
    an exception, undoes it.

    Args and errors: those of `patch_model`.
    """
    options = {"fuse_residual": fuse_residual, "memory_efficient": memory_efficient}
    report, before = _patch(model, include, exclude, strict, options, stacklevel=4)
    try:
        yield report
    finally:
        with _changing:
            restore(before)


def _patch(
    model, include, exclude, strict, options: dict, stacklevel: int = 3
) -> tuple[PatchReport, list[tuple]]:
    """(the report, what `restore` undoes it by)."""
    check_module("patch_model", model)
    check_options(strict=strict, **options)
    named = {name: flag for name, flag in options.items() if flag is not None}
    with _changing, contextlib.ExitStack() as stack:
        entries = make_plan(model, include, exclude, named)
        before = unfuse_all(model.modules())
        stack.callback(restore, before)
        for entry in entries:
            carry_out(entry)
        _check_served(model, entries, strict)
        layers = fuse_layers(model)
        report = report_on(model, entries, layers)
        warning = _no_change(model, entries)
        if warning:
            # where warnings are errors the changes are undone
            warnings.warn(warning, stacklevel=stacklevel)
        stack.pop_all()
    return report, before


def _check_served(model: Module, entries: list[Entry], strict: bool) -> None:
    """A ValueError where a norm that has to be swapped is not, or there is none."""
    if strict and not entries:
        name = type(model).__name__
        raise ValueError(f"strict: this {name} has no norm to swap, leave strict out")
    left = [entry for entry in entries if entry.proven is None and not entry.excluded]
    for entry in left:
        which = f"{entry.paths[0]!r} ({entry.class_name})"
        reason = entry.refusal.reason
        if entry.required:
            what = "by its config this model was trained as RMSNorm"
            raise ValueError(f"{what}, and {which} cannot run so: {reason}")
        if strict:
            what = f"strict: {len(left)} of the norms cannot be swapped, first {which}"
            raise ValueError(f"{what}: {reason}; list it in exclude to accept that")


def _no_change(model: Module, entries: list[Entry]) -> str:
    """That no norm is patched, and none was to be unpatched; "" otherwise."""
    if any(entry.proven or (entry.before and entry.excluded) for entry in entries):
        return ""
    why = "there is none"
    if entries:
        why = f"none of {len(entries)} could be swapped, print the report"
    return f"patch_model changed no norm of this {type(model).__name__}: {why}"


def check_options(**flags) -> None:
    """Raise the errors of `patch_model` that do not depend on the model."""
    for name, flag in flags.items():
        if not isinstance(flag, bool) and (flag is not None or name == "strict"):
            raise TypeError(f"patch_model's {name} is {flag!r}: pass True or False")


def check_module(function: str, model) -> None:
    """Raise TypeError where something is no module."""
    if not isinstance(model, Module):
        what = f"{function} needs a torch.nn.Module, got {type(model).__name__}"
        raise TypeError(f"{what}: load the model first")
