"""Puts a fused class on a module and takes it off again, whatever has been hung on the instance in between."""

from __future__ import annotations

import contextlib
import functools
import types
from dataclasses import replace

import torch

from ..fused.layer import Fusion, fused_layer_class, layer_part
from ..fused.norm import fused_class, fused_part
from ..fused.recipe import Recipe

# Instance attributes that can hold a forward: one set on the module, and the one an accelerate hook calls.
_FORWARD_ATTRIBUTES = ("forward", "_old_forward")


def replaced_forward(module: torch.nn.Module) -> str | None:
    """Who else has set a forward on the instance, so that a class's forward would not run; None if nobody.

    accelerate's hooks do not count, nor do wrappers that hold the module's own forward (Transformers' tensor
    parallelism): they call the forward they found, which `swap` exchanges.
    """
    stored = module.__dict__.get("forward")
    if "_hf_hook" in module.__dict__ and isinstance(stored, functools.partial):
        stored = module.__dict__.get("_old_forward")
    if stored is None:
        return None
    if _is_own(stored, module, type(module).forward) or _own_cells(stored, module, type(module).forward):
        return None
    function = getattr(stored, "__func__", stored)
    return f"{getattr(function, '__module__', type(function).__module__)}.{getattr(function, '__qualname__', '?')}"


def swap(module: torch.nn.Module, recipe: Recipe) -> None:
    """Give module a fused subclass of its current class.

    Raises:
        TypeError: the class cannot be subclassed, or its instances cannot change class; nothing has changed then.
    """
    base = type(module)
    cls = fused_class(base, recipe)
    module.__class__ = cls
    _rebind(module, base.forward, cls.forward)


def restore(module: torch.nn.Module) -> bool:
    """Undo `swap`, exactly; classes that others derived from the fused one are derived from the original instead.

    Returns:
        Whether the module was swapped.
    """
    fused = fused_part(type(module))
    if fused is None:
        return False
    _take_off(module, fused, fused._hf_rmsnorm_base)
    return True


def remember(module: torch.nn.Module, memory_efficient: bool) -> bool:
    """Set `Recipe.memory_efficient` of a module, if it is swapped; returns what it was."""
    fused = fused_part(type(module))
    if fused is None:
        return memory_efficient
    recipe = fused._hf_rmsnorm_recipe
    if recipe.memory_efficient != memory_efficient:
        restore(module)
        swap(module, replace(recipe, memory_efficient=memory_efficient))
    return recipe.memory_efficient


def fuse(layer: torch.nn.Module, fusion: Fusion) -> None:
    """Give a layer the subclass of its current class whose sums are fused.

    Raises:
        CannotRewrite, TypeError: there is none; nothing has changed then.
    """
    base = type(layer)
    cls = fused_layer_class(base, fusion)
    layer.__class__ = cls
    _rebind(layer, base.forward, cls.forward)


def unfused(cls: type) -> type:
    """What `unfuse` makes of a layer's class."""
    part = layer_part(cls)
    return cls if part is None else _without(cls, part, part._hf_rmsnorm_layer_base)


def unfuse(layer: torch.nn.Module):
    """Undo `fuse`, exactly; the fusion that was undone, or None."""
    fused = layer_part(type(layer))
    if fused is None:
        return None
    _take_off(layer, fused, fused._hf_rmsnorm_layer_base)
    return fused._hf_rmsnorm_fusion


def _take_off(module: torch.nn.Module, fused: type, base: type) -> None:
    module.__class__ = _without(type(module), fused, base)
    _rebind(module, fused.forward, base.forward)


def _rebind(module: torch.nn.Module, old, new) -> None:
    for name in _FORWARD_ATTRIBUTES:
        stored = module.__dict__.get(name)
        if _is_own(stored, module, old):
            module.__dict__[name] = types.MethodType(new, module)
        for cell in _own_cells(stored, module, old):
            cell.cell_contents = types.MethodType(new, module)


def _own_cells(stored, module: torch.nn.Module, function) -> list[types.CellType]:
    """The cells of a wrapper, and of the wrappers in those, that hold the module's own forward."""
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
    return isinstance(stored, types.MethodType) and stored.__self__ is module and stored.__func__ is function


def _without(cls: type, fused: type, base: type) -> type:
    """cls with `fused` replaced by `base` among its ancestors; made anew only if someone subclassed `fused`."""
    if cls is fused:
        return base
    if fused not in cls.__mro__:
        return cls
    namespace = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(_without(b, fused, base) for b in cls.__bases__), namespace)
