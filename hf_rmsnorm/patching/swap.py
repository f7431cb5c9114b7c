"""Gives a module a fused class, and its original class back, with all attributes of the
instance.

`plan.carry_out` swaps norms, and `layers.fusions` fuses layers. The classes are made by
`fused.norm.fused_class` and `layers.layer_class.fused_layer_class`.
"""

import functools
import types
from collections.abc import Iterable

from torch.nn import Module

from ..fused.hooks import name_of
from ..fused.norm import fused_class, fused_part, patch_of
from ..fused.recipe import NOTHING, Asked, Recipe
from ..fused.subclass import exchanged
from . import registries
from .formula.refusals import Refusal
from .layers.layer_class import fused_layer_class, layer_part


def swap_norm(norm: Module, proven: Recipe, asked: Asked = NOTHING) -> None:
    """Give a norm the class that computes a recipe as it is asked, in place of one that
    it has.

    A class may refuse to be subclassed: then its error is raised, and the norm has its
    own class.
    """
    part = fused_part(type(norm))
    if part is not None:
        has = part._hf_rmsnorm_patch
        if (has.proven, has.asked) == (proven, asked):
            return
        unswap_norm(norm)
    _put_on(norm, fused_class(type(norm), proven, asked))


def unswap_norm(norm: Module) -> None:
    """Give a norm its own class. A class derived from the fused one derives from the
    original afterwards.
    """
    part = fused_part(type(norm))
    if part is not None:
        _take_off(norm, part, part._hf_rmsnorm_base)


def unfuse(layer: Module):
    """Give a layer its own class; returns the fusion that it had, or None."""
    part = layer_part(type(layer))
    if part is None:
        return None
    registries.remove(layer, part)
    _take_off(layer, part, part._hf_rmsnorm_layer_base)
    return part._hf_rmsnorm_fusion


def fuse(layer: Module, fusion) -> None:
    """Give a layer that has no fusion the class that computes one.

    Raises:
        CannotRewrite, TypeError: there is no such class.
    """
    base = type(layer)
    _put_on(layer, fused_layer_class(base, fusion))
    registries.add(layer, base)


def take_fusions_off(modules: Iterable[Module]) -> list[tuple]:
    """Give layers among modules their own classes, as the norms in them may change;
    returns for `restore` what each module was before.
    """
    return [(module, patch_of(module), unfuse(module)) for module in modules]


def restore(before: list[tuple]) -> None:
    """Give norms and layers the classes back that they had before."""
    for module, patch, _ in before:
        if patch is None:
            unswap_norm(module)
        else:
            swap_norm(module, patch.proven, patch.asked)
    for module, _, fusion in before:
        unfuse(module)
        if fusion is not None:
            fuse(module, fusion)


def why_not_run(norm: Module, recipe: Recipe) -> Refusal | None:
    """Why a norm with a class for this recipe would run its own forward all the same."""
    other = replaced_forward(norm)
    if other:
        reason = f"its forward was replaced on the instance by {other}"
        cure = "nothing, if that is what should serve it; otherwise undo it and patch again"
        return Refusal(reason, cure)
    if recipe.spec_of(norm) is None:
        changed = ", ".join(recipe.changes(norm))
        changed = changed or f"{recipe.eps} is now {getattr(norm, recipe.eps)}"
        reason = f"it runs its own forward: {changed}"
        return Refusal(reason, "set it back, or unpatch the model and patch it again")
    return None


def replaced_forward(module: Module) -> str:
    """The name of a forward that other code has set on the instance; "" if there is
    none.

    The forward of the class would not run. The hooks of accelerate and diffusers do not
    count, and neither do wrappers around the module's own forward, as in Transformers'
    tensor parallelism: `_change_class` exchanges the forward that they call.
    """
    stored = module.__dict__.get("forward")
    if stored is None:
        return ""
    called = [stored]
    if isinstance(stored, functools.partial):
        # a hook's; it calls a forward that is kept elsewhere
        held = [attributes[name] for attributes, name in _places(module)]
        called = [one for one in held if not isinstance(one, functools.partial)]
        stored = (called or held)[0]
    own = type(module).forward
    if any(_cells_of(types.CellType(forward), module, own) for forward in called):
        return ""
    return name_of(stored)


def _take_off(module: Module, part: type, base: type) -> None:
    cls = exchanged(type(module), part, base)
    _change_class(module, cls, part.forward, base.forward)


def _put_on(module: Module, cls: type) -> None:
    _change_class(module, cls, type(module).forward, cls.forward)


def _change_class(module: Module, cls: type, old, new) -> None:
    """Change a module's class, and each forward of the old class that the instance
    holds.
    """
    module.__class__ = cls
    for attributes, name in _places(module):
        stored = types.CellType(attributes[name])
        for cell in _cells_of(stored, module, old):
            cell.cell_contents = types.MethodType(new, module)
        attributes[name] = stored.cell_contents


def _places(module: Module) -> list[tuple[dict, str]]:
    """The attributes of an instance and of its hooks that hold a forward: the one set
    on the module, then those that the hooks of accelerate and diffusers call.
    """
    places = [(module.__dict__, "forward"), (module.__dict__, "_old_forward")]
    hooks = module.__dict__.get("_diffusers_hook")
    for reference in getattr(hooks, "_fn_refs", ()):
        places.append((reference.__dict__, "original_forward"))
        places.append((reference.__dict__, "forward"))
    return [place for place in places if place[0].get(place[1]) is not None]


def _cells_of(stored: types.CellType, module: Module, forward) -> list[types.CellType]:
    """Of a cell, and the cells of the wrappers that it leads to, those that hold the
    module's own forward.
    """
    own = types.MethodType(forward, module)
    cells = []
    waiting = [stored]
    seen = set()
    while waiting:
        cell = waiting.pop()
        try:
            content = cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
        if isinstance(content, types.MethodType):
            if content == own:
                cells.append(cell)
                continue
            content = content.__func__
        if isinstance(content, types.FunctionType) and content not in seen:
            seen.add(content)
            waiting.extend(content.__closure__ or ())
    return cells
