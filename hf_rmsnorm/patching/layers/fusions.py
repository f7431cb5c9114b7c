"""Which modules of a model have their norms computed with what surrounds them, and why
others have not.
"""

import re

from torch import nn

from ...fused.norm import fusible_recipe
from ...fused.source import CannotRewrite
from ...ops.backend import MAX_HEAD_DIM
from ..report import FusedLayer
from ..swap import fuse, replaced_forward, unfused
from .qk import QKRefusal, find_qk
from .sums import adds, find_sums

NO_NORM_NEXT = "its last addition is not followed directly by a patched norm"
ADDS_NOTHING = "its forward adds nothing"
_ROWS = nn.ModuleList, nn.Sequential


def fuse_layers(model: nn.Module) -> tuple[FusedLayer, ...]:
    """Compile the forwards of a patched model again where they show what surrounds a
    norm; none is fused yet.

    Returns:
        What was done to each module that repeats in the model, or to its parts, and why
        nothing was.
    """
    finder = _FusionFinder(model)
    records: dict[str, FusedLayer] = {}
    for path, module in model.named_modules():
        if not finder.looks_at(module):
            continue
        choice = finder.choice(module)
        reason = choice if isinstance(choice, str) else _fuse(module, choice)
        if not reason:
            records[path] = FusedLayer(path, type(module).__name__, str(choice))
        elif (module in finder.layers and norms_of(module)) or isinstance(
            reason, QKRefusal
        ):
            records[path] = FusedLayer(path, type(module).__name__, "", reason)
    for path, reason in _norms_further_in(model, finder.layers, set(records)).items():
        records[path] = FusedLayer(
            path, type(model.get_submodule(path)).__name__, "", reason
        )
    paths = [path for path, _ in model.named_modules() if path in records]
    return tuple(
        records[path] for path in paths if not _is_served_inside(path, records)
    )


def _is_served_inside(path: str, records: dict[str, FusedLayer]) -> bool:
    """Whether a module is not fused, and a module in it has a fused sum."""
    if records[path].fused:
        return False
    inside = (
        record for inner, record in records.items() if inner.startswith(f"{path}.")
    )
    return any(record.fused.startswith("+") for record in inside)


def sums_unknown(layer: FusedLayer) -> bool:
    """Whether norms may read sums of this layer, or in it, of which nothing is known."""
    return bool(layer.reason) and not isinstance(layer.reason, QKRefusal)


def norms_of(module: nn.Module) -> dict[str, nn.Module]:
    """The module's children that are patched norms of one input, and may be computed
    with what surrounds them.
    """
    norms = (
        (name, child, fusible_recipe(child)) for name, child in module.named_children()
    )
    return {
        name: child
        for name, child, recipe in norms
        if recipe is not None and recipe.is_simple
    }


class _FusionFinder:
    """Looks at the modules of one model, once for all that are alike.

    Attributes:
        layers: the modules of its lists, in their wrappers.
        repeated: these, and all that is in them.
        unrounded: norms of the model read sums before they are rounded.
    """

    def __init__(self, model: nn.Module):
        rows = [row for row in model.modules() if isinstance(row, _ROWS)]
        # a place may hold None
        self.layers = {
            _inner(module) for row in rows for module in row if module is not None
        }
        self.repeated = {module for layer in self.layers for module in layer.modules()}
        recipes = filter(None, map(fusible_recipe, model.modules()))
        self.unrounded = any(not recipe.rounds_sum for recipe in recipes)
        self._known: dict[tuple, object] = {}

    def looks_at(self, module: nn.Module) -> bool:
        # Not at the wrappers around a norm or a layer: FSDP's forward would gather
        # weights, on one rank before another.
        if isinstance(module, nn.ModuleList) or _inner(module) is not module:
            return False
        return bool(_of_rows(module)) or (self.unrounded and module in self.layers)

    def choice(self, module: nn.Module) -> object:
        """What is fused in a module, or why nothing is, in words."""
        if other := replaced_forward(module):
            return f"its forward was replaced on the instance by {other}"
        inside = module in self.repeated and module not in self.layers
        if shared := _shared_norms(module):
            names = " and ".join(shared)
            reason = f"its {names} are one norm: sums and q/k norms are fused where each place has its own"
            return QKRefusal(reason) if inside else reason
        key = inside, *structure(module)
        if key not in self._known:
            self._known[key] = self._find(module, inside)
        return self._known[key]

    def _find(self, module: nn.Module, inside: bool) -> object:
        cls = unfused(type(module))
        try:
            fusion = find_sums(
                cls, norms_of(module).keys(), _of_rows(module), self.unrounded
            )
            return fusion or _pair_of(module, cls, inside)
        except CannotRewrite as error:
            return str(error)
        except Exception as error:
            # whatever a user's class does, its norms are swapped
            return f"it could not be examined: {type(error).__name__}: {error}"


def structure(module: nn.Module) -> tuple:
    """What modules alike have in common: their class and its forward, the classes of
    their children, norms' shapes.
    """
    cls = unfused(type(module))
    children = tuple((name, type(child)) for name, child in module.named_children())
    shapes = tuple(
        tuple(p.shape)
        for norm in norms_of(module).values()
        for p in norm.parameters(recurse=False)
    )
    return cls, cls.forward, children, shapes


def _fuse(module: nn.Module, fusion) -> str:
    """Give a module its fusion; returns why that cannot be, or ""."""
    try:
        fuse(module, fusion)
    except CannotRewrite as error:
        return str(error)
    except Exception as error:
        # a metaclass or __init_subclass__ of the user's may refuse in any way
        return f"{type(error).__name__}: {error}"
    return ""


def _pair_of(module: nn.Module, cls: type, inside: bool):
    """What is fused of a module's norms of q and k, or why nothing of it is."""
    norms = norms_of(module)
    try:
        return find_qk(
            cls,
            {name for name, norm in norms.items() if _is_of_heads(norm)},
            module._modules.keys(),
        )
    except CannotRewrite as error:
        if inside and len(norms) > 1:
            return QKRefusal(error)
    return NO_NORM_NEXT if adds(cls) else ADDS_NOTHING


def _is_of_heads(norm: nn.Module) -> bool:
    """Whether a norm may be computed with a rotation: one weight for all heads, and no
    bias.

    What `F.rms_norm` and `F.layer_norm` return is contiguous. Computed behind a
    transpose it would lie otherwise.
    """
    spec = fusible_recipe(norm).spec
    shapes = [tuple(p.shape) for p in norm.parameters(recurse=False)]
    short = all(len(shape) == 1 and shape[0] <= MAX_HEAD_DIM for shape in shapes)
    return short and not (spec.functional or spec.has_bias)


def _norms_further_in(
    model: nn.Module, layers: set[nn.Module], recorded: set[str]
) -> dict[str, str]:
    """Of the layers that hold patched norms, and have no record: path -> why none of their sums is fused."""
    names = {path for path, module in model.named_modules() if module in layers}
    holders: dict[str, list[str]] = {}
    for path in (
        path
        for path, module in model.named_modules()
        if fusible_recipe(module) is not None
    ):
        parents = [path[: dot.start()] for dot in re.finditer(r"\.", path)]
        layer = next((parent for parent in reversed(parents) if parent in names), None)
        if layer is not None and recorded.isdisjoint(
            parent for parent in parents if parent.startswith(layer)
        ):
            holders.setdefault(layer, []).append(
                path[len(layer) + 1 :].rpartition(".")[0]
            )
    return {layer: _why_apart(inside) for layer, inside in holders.items()}


def _why_apart(holders: list[str]) -> str:
    """Why no sum of a layer is fused: the paths in it of the modules that hold its
    norms say so.
    """
    if "" in holders:
        return "no launch serves a sum with norms like its own, as their formula or notes say"
    where = ", ".join(dict.fromkeys(holders))
    return f"its norms are in {where}: sums are fused where the forward that adds calls the norm directly after"


def _inner(module: nn.Module) -> nn.Module:
    """The layer in its wrappers (FSDP, activation checkpoints, `torch.compile`): an
    only child by a private name.
    """
    while len(module._modules) == 1:
        ((name, child),) = module._modules.items()
        if child is None or not name.startswith("_"):
            break
        module = child
    return module


def _shared_norms(module: nn.Module) -> list[str]:
    """The names under which a module holds one patched norm more than once."""
    names: dict[nn.Module, list[str]] = {}
    for name, child in module._modules.items():
        if child is not None and fusible_recipe(child) is not None:
            names.setdefault(child, []).append(name)
    return next((shared for shared in names.values() if len(shared) > 1), [])


def _of_rows(module: nn.Module) -> set[str]:
    recipes = ((name, fusible_recipe(child)) for name, child in module.named_children())
    return {
        name for name, recipe in recipes if recipe is not None and recipe.is_of_rows
    }
