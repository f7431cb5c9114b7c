"""Gives a module a fused class, and its original class back, with all attributes of the
instance.
"""

import contextlib
import functools
import types

import torch

from ..fused.layer import fused_layer_class, layer_part
from ..fused.norm import fused_class, fused_part, recipe_of
from ..fused.recipe import Recipe
from ..fused.subclass import exchanged

# Instance attributes that can hold a forward: one set on the module, and the one an
# accelerate hook calls.
_FORWARD_ATTRIBUTES = ("forward", "_old_forward")


def replaced_forward(module: torch.nn.Module) -> str | None:
    """The name of a forward that other code has set on the instance; None if there is
    none.

    The forward of the class would not run. accelerate's hooks do not count, and neither
    do wrappers around the module's own forward, as in Transformers' tensor parallelism:
    `swap` exchanges the forward that they call.
    """
    stored = module.__dict__.get("forward")
    if "_hf_hook" in module.__dict__ and isinstance(stored, functools.partial):
        stored = module.__dict__.get("_old_forward")
    own = type(module).forward
    if (
        stored is None
        or _is_own(stored, module, own)
        or _own_cells(stored, module, own)
    ):
        return None
    function = getattr(stored, "__func__", stored)
    return f"{getattr(function, '__module__', type(function).__module__)}.{getattr(function, '__qualname__', '?')}"


def swap(module: torch.nn.Module, recipe: Recipe) -> None:
    """Give module a fused subclass of its current class; a TypeError, with nothing
    changed, if there can be none.
    """
    base, cls = type(module), fused_class(type(module), recipe)
    _change_class(module, cls, base.forward, cls.forward)


def restore(module: torch.nn.Module) -> bool:
    """Undo `swap`; returns whether there was one. A class derived from the fused one
    derives from the original then.
    """
    if (fused := fused_part(type(module))) is not None:
        base = fused._hf_rmsnorm_base
        _change_class(
            module, exchanged(type(module), fused, base), fused.forward, base.forward
        )
    return fused is not None


def swap_again(module: torch.nn.Module, recipe: Recipe) -> None:
    """Give a module the recipe back that it had, unless it has one."""
    if recipe_of(module) is None:
        swap(module, recipe)


def reswap(module: torch.nn.Module, recipe: Recipe) -> None:
    """Give a module, if it is swapped, another recipe in place of the one that it has."""
    if recipe_of(module) not in (None, recipe):
        restore(module)
        swap(module, recipe)


def fuse(layer: torch.nn.Module, fusion):
    """Give a layer the class that computes a fusion, or none; returns the fusion that
    it had.

    Raises:
        CannotRewrite, TypeError: there is no such class. The layer is left without a
            fusion.
    """
    part = layer_part(type(layer))
    before = None if part is None else part._hf_rmsnorm_fusion
    if fusion != before:
        if part is not None:
            _change_class(
                layer,
                unfused(type(layer)),
                part.forward,
                part._hf_rmsnorm_layer_base.forward,
            )
        if fusion is not None:
            base, cls = type(layer), fused_layer_class(type(layer), fusion)
            _change_class(layer, cls, base.forward, cls.forward)
    return before


def fuse_again(model: torch.nn.Module, layer: torch.nn.Module, fusion) -> None:
    """Give a layer its earlier fusion back, or none if no norm of the model is patched
    any more.
    """
    patched = any(recipe_of(module) is not None for module in model.modules())
    fuse(layer, fusion if patched else None)


def unfused(cls: type) -> type:
    """A layer's class as it is without a fusion."""
    part = layer_part(cls)
    return cls if part is None else exchanged(cls, part, part._hf_rmsnorm_layer_base)


def _change_class(module: torch.nn.Module, cls: type, old, new) -> None:
    """Change a module's class, and each forward of the old class that the instance
    holds.
    """
    module.__class__ = cls
    for name in _FORWARD_ATTRIBUTES:
        stored = module.__dict__.get(name)
        if _is_own(stored, module, old):
            module.__dict__[name] = types.MethodType(new, module)
        for cell in _own_cells(stored, module, old):
            cell.cell_contents = types.MethodType(new, module)


def _own_cells(stored, module: torch.nn.Module, function) -> list[types.CellType]:
    """The cells of a wrapper, and of the wrappers in those, that hold the module's own
    forward.
    """
    found, waiting, seen = [], [stored], set()
    while waiting:
        wrapper = waiting.pop()
        wrapper = wrapper.__func__ if isinstance(wrapper, types.MethodType) else wrapper
        if not isinstance(wrapper, types.FunctionType) or wrapper in seen:
            continue
        seen.add(wrapper)
        for cell in wrapper.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing is in it yet
                if _is_own(cell.cell_contents, module, function):
                    found.append(cell)
                else:
                    waiting.append(cell.cell_contents)
    return found


def _is_own(stored, module: torch.nn.Module, function) -> bool:
    return (
        isinstance(stored, types.MethodType)
        and stored.__self__ is module
        and stored.__func__ is function
    )
