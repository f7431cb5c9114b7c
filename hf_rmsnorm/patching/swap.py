"""Makes the classes of patched norms and layers; gives a module such a class, and its
original class back, with all attributes of the instance.

`plan.carry_out` swaps norms, and `layers.fusions` fuses layers. A made class is a subclass
of the module's class that overrides `forward`. So parameters, buffers, hooks, `isinstance`,
`extra_repr` and saved bytes do not change; the `repr` of a norm shows that it is patched.
"""

import copyreg
import functools
import types
from collections.abc import Callable, Iterable

from torch.nn import Module

from ..fused.hooks import name_of
from ..fused.layer import guarded
from ..fused.norm import NormPatch, forward_of, patch_of
from ..fused.recipe import NOTHING, Asked, Recipe
from . import registries
from .formula.refusals import Refusal
from .source import CannotRewrite, is_of_library, wrapper_codes


def fused_class(base: type, proven: Recipe, asked: Asked = NOTHING) -> type:
    """A subclass of base, with base's name and module, whose forward is the fused norm.

    A call that the kernels do not serve runs ``base.forward``: another device or dtype,
    an argument besides the input and a gate, or a weight that is absent, on meta or of
    another shape. Where that forward computes something else than is asked, plain torch
    computes the formula. The same arguments give the same class again.

    Args:
        base: the current class of the module, an `nn.Module` subclass.
        proven: the formula it was recognised to compute.
        asked: the patch's options for it.

    Raises:
        TypeError: base cannot be subclassed.
    """
    forward = base.forward
    code = getattr(forward, "__code__", None)
    return _made_norm(base, forward, code, proven, asked)


@functools.cache
def _made_norm(base: type, forward: Callable, code, proven, asked) -> type:
    def __repr__(self):
        return f"{base.__repr__(self)} [hf_rmsnorm]"

    patch = NormPatch(base, forward, code, proven, asked)
    marks = {"_hf_rmsnorm_patch": patch, "__repr__": __repr__}
    return derive(base, forward_of(patch), marks, fused_class, proven, asked)


def fused_layer_class(base: type, fusion) -> type:
    """A subclass of base, with base's name and module, whose forward is base's own but
    for a fusion.

    Args:
        fusion: hashable; its ``rewrite(base)`` makes the forward.

    Raises:
        CannotRewrite: the forward cannot be compiled again, or is wrapped by what its
            source does not show.
        TypeError: base cannot be subclassed.
    """
    return _made_layer(base, base.forward, fusion)


@functools.cache
def _made_layer(base: type, own: Callable, fusion) -> type:
    owner: list[type] = []
    forward = guarded(fusion.rewrite(base), base, owner)
    marks = {"_hf_rmsnorm_fusion": fusion}
    cls = derive(base, forward, marks, fused_layer_class, fusion)
    owner.append(cls)
    if wrapper_codes(cls.forward) != wrapper_codes(own):
        raise CannotRewrite(
            "something has wrapped its forward that its source does not show"
        )
    return cls


def derive(
    base: type, forward: Callable, marks: dict, make: Callable, *arguments
) -> type:
    """A subclass of base with base's name and module, that pickles.

    Args:
        forward: of the new class.
        marks: class attributes by which the class is known.
        make: ``make(base, *arguments)`` gives this class again; by name, for pickle.

    Raises:
        TypeError: base cannot be subclassed, or the user's code would run for that.
    """
    hearer = _hears_of_subclasses(base)
    if hearer:
        raise TypeError(f"{hearer} would run for the patched class too")
    namespace = {"forward": forward, **marks}
    for name in ("__module__", "__qualname__", "__doc__"):
        namespace[name] = getattr(base, name)
    cls = type(base)(base.__name__, (base,), namespace)

    def __reduce_ex__(self, protocol):
        # older ones ask for a class by name
        reduced = super(cls, self).__reduce_ex__(max(protocol, 2))
        # The class is made at run time, so pickle cannot find it by name: have it made
        # again instead.
        made, of_class, *state = reduced
        if type(self) is cls and made is copyreg.__newobj__ and of_class == (cls,):
            return _new, (make, base, *arguments), *state
        return reduced

    cls.__reduce_ex__ = __reduce_ex__
    return cls


def _hears_of_subclasses(base: type) -> str:
    """The name of the user's code that runs for a new subclass; "" if there is none."""
    for cls in base.__mro__:
        if "__init_subclass__" in vars(cls) and not is_of_library(cls):
            return f"{cls.__qualname__}.__init_subclass__"
    for cls in type(base).__mro__:
        if not is_of_library(cls):
            return f"the metaclass {cls.__qualname__}"
    return ""


def _new(make: Callable, base: type, *arguments):
    cls = make(base, *arguments)
    return cls.__new__(cls)


def _exchanged(cls: type, part: type, other: type) -> type:
    """cls with `part` replaced by `other` among its ancestors; a new class only if
    `part` has subclasses among them.
    """
    if cls is part:
        return other
    if part not in cls.__mro__:
        return cls
    namespace = dict(cls.__dict__)
    namespace.pop("__dict__", None)
    namespace.pop("__weakref__", None)
    bases = tuple(_exchanged(base, part, other) for base in cls.__bases__)
    return type(cls)(cls.__name__, bases, namespace)


def fused_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_class` made, or None; it differs from cls
    where others subclassed it.
    """
    return _marked(cls, "_hf_rmsnorm_patch")


def layer_part(cls: type) -> type | None:
    """The same of `fused_layer_class`."""
    return _marked(cls, "_hf_rmsnorm_fusion")


def _marked(cls: type, mark: str) -> type | None:
    return next((part for part in cls.__mro__ if mark in vars(part)), None)


def swap_norm(norm: Module, proven: Recipe, asked: Asked = NOTHING) -> None:
    """Give a norm the class that computes a recipe as it is asked, in place of one that
    it has.

    A class may refuse to be subclassed: then its error is raised, and the norm has its
    own class.
    """
    patch = patch_of(norm)
    if patch is not None:
        if (patch.proven, patch.asked) == (proven, asked):
            return
        unswap_norm(norm)
    _put_on(norm, fused_class(type(norm), proven, asked))


def unswap_norm(norm: Module) -> None:
    """Give a norm its own class. A class derived from the fused one derives from the
    original afterwards.
    """
    part = fused_part(type(norm))
    if part is not None:
        _take_off(norm, part)


def unfuse(layer: Module):
    """Give a layer its own class; returns the fusion that it had, or None."""
    part = layer_part(type(layer))
    if part is None:
        return None
    registries.remove(layer, part)
    _take_off(layer, part)
    return part._hf_rmsnorm_fusion


def fuse(layer: Module, fusion) -> None:
    """Give a layer that has no fusion the class that computes one.

    Raises:
        CannotRewrite, TypeError: there is no such class.
    """
    base = type(layer)
    _put_on(layer, fused_layer_class(base, fusion))
    registries.add(layer, base)


def unfuse_all(modules: Iterable[Module]) -> list[tuple]:
    """Give layers among modules their own classes, as the norms in them may change.

    Returns:
        What `restore` undoes this and all later changes by: of each module, norms
        included, what it was before.
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


def _take_off(module: Module, part: type) -> None:
    base = part.__base__
    cls = _exchanged(type(module), part, base)
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
