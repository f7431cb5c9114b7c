"""Which modules of a model have their norms computed with what surrounds them, and why
others have not.
"""

from typing import NamedTuple

from torch import nn

from ...fused.norm import fusible_recipe
from ...fused.source import CannotRewrite
from ...ops.backend import MAX_HEAD_DIM
from ..report import FusedLayer
from ..swap import fuse, replaced_forward
from .qk import QKFusion, find_qk
from .sums import SumFusion, find_sums

NO_SUM = "no sum in its forward is followed directly by a patched norm of its own"
_ROWS = nn.ModuleList, nn.Sequential


def fuse_layers(model: nn.Module) -> tuple[FusedLayer, ...]:
    """Compile the forwards of a patched model again where they show what surrounds a
    norm; none is fused yet.

    Returns:
        What was done to each module that repeats in the model, or to its parts, and why
        nothing was.
    """
    finder = _FusionFinder(model)
    modules = dict(model.named_modules())
    records: dict[str, FusedLayer] = {}
    rotated: set[str] = set()
    for path, module in modules.items():
        fusion, reason = _fused(module, finder)
        name = type(module).__name__
        if fusion is not None:
            records[path] = FusedLayer(path, name, str(fusion))
        elif reason and module in finder.layers:
            records[path] = FusedLayer(path, name, "", reason)
        if isinstance(fusion, QKFusion):
            rotated.add(path)
    for path, module in reversed(modules.items()):
        if module not in finder.layers or not _holds_norms(module):
            continue
        inside = [p for p in records if p == path or p.startswith(f"{path}.")]
        if rotated.issuperset(inside):
            name = type(module).__name__
            records[path] = FusedLayer(path, name, "", NO_SUM)
    return tuple(records[path] for path in modules if path in records)


def _fused(
    module: nn.Module, finder: "_FusionFinder"
) -> tuple[SumFusion | QKFusion | None, str]:
    """(the fusion that a module was given, why it could not be given one)."""
    if not finder.looks_at(module):
        return None, ""
    try:
        fusion = finder.choice(module)
        if fusion is not None:
            fuse(module, fusion)
    except CannotRewrite as error:
        return None, str(error)
    except Exception as error:
        # whatever a user's class does, its norms are swapped
        return None, f"{type(error).__name__}: {error}"
    return fusion, ""


def _holds_norms(module: nn.Module) -> bool:
    """Whether a module that is no norm itself holds patched norms."""
    first, *parts = module.modules()
    is_norm = fusible_recipe(first) is not None
    return not is_norm and any(fusible_recipe(part) is not None for part in parts)


class _Norms(NamedTuple):
    """The names of a module's children that are patched norms.

    Args:
        simple: those that may be computed with a sum.
        of_rows: those that may be computed with a modulation.
        of_heads: those that may be computed with a rotation: one weight for all heads,
            and no bias. What `F.rms_norm` and `F.layer_norm` return is contiguous, and
            computed behind a transpose it would lie otherwise.
    """

    simple: frozenset[str]
    of_rows: frozenset[str]
    of_heads: frozenset[str]


def _norms_of(module: nn.Module) -> _Norms:
    simple, of_rows, of_heads = set(), set(), set()
    for name, norm in module.named_children():
        recipe = fusible_recipe(norm)
        if recipe is None:
            continue
        if recipe.is_of_rows:
            of_rows.add(name)
        if not recipe.is_simple:
            continue
        simple.add(name)
        shapes = [tuple(p.shape) for p in norm.parameters(recurse=False)]
        is_short = all(len(s) == 1 and s[0] <= MAX_HEAD_DIM for s in shapes)
        if is_short and not (recipe.spec.functional or recipe.spec.has_bias):
            of_heads.add(name)
    return _Norms(frozenset(simple), frozenset(of_rows), frozenset(of_heads))


class _FusionFinder:
    """Looks at the modules of one model, once for all that are alike.

    Attributes:
        layers: the modules of its lists, in their wrappers.
        unrounded: norms of the model read sums before they are rounded.
    """

    def __init__(self, model: nn.Module):
        rows = [row for row in model.modules() if isinstance(row, _ROWS)]
        # a place may hold None
        items = [module for row in rows for module in row if module is not None]
        self.layers = {_inner(module) for module in items}
        recipes = filter(None, map(fusible_recipe, model.modules()))
        self.unrounded = any(not recipe.rounds_sum for recipe in recipes)
        self._known: dict[tuple, SumFusion | QKFusion | None] = {}

    def looks_at(self, module: nn.Module) -> bool:
        # Not at the wrappers around a norm or a layer: FSDP's forward would gather
        # weights, on one rank before another.
        if isinstance(module, nn.ModuleList) or _inner(module) is not module:
            return False
        is_layer = self.unrounded and module in self.layers
        return is_layer or bool(_norms_of(module).of_rows)

    def choice(self, module: nn.Module) -> SumFusion | QKFusion | None:
        """What is fused in a module; a `CannotRewrite` says why nothing can be."""
        if other := replaced_forward(module):
            raise CannotRewrite(f"its forward was replaced on the instance by {other}")
        cls, norms = type(module), _norms_of(module)
        key = cls, cls.forward, norms
        if key not in self._known:
            sums = find_sums(cls, norms.simple, norms.of_rows, self.unrounded)
            self._known[key] = sums or find_qk(cls, norms.of_heads)
        return self._known[key]


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
