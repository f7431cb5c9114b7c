"""Which modules of a model have their norms computed with what surrounds them, or rotate
q and k in one launch, and why others do not.
"""

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.nn import Module

from ...fused.norm import fusible_norm
from ...fused.recipe import Recipe
from ...fused.source import CannotRewrite, compiled_again, forward_source, guarded
from ...kernels.sizes import MAX_HEAD_DIM
from ..entries import FusedLayer
from ..swap import fuse, replaced_forward
from .calls import FUNCTIONS
from .qk import fuse_qk
from .rotations import fuse_rotations, may_rotate
from .sums import fuse_sums

NO_SUM = "no sum in its forward is followed directly by a patched norm of its own"


class Norms(NamedTuple):
    """The names of a module's children that are patched norms.

    Args:
        simple: those that may be computed with a sum.
        of_rows: those that may be computed with a modulation.
        of_heads: those that may be computed with a rotation.
    """

    simple: frozenset[str]
    of_rows: frozenset[str]
    of_heads: frozenset[str]


Found = tuple["Fusion | None", ast.FunctionDef]


@dataclass(frozen=True)
class Fusion:
    """What is computed with the norms of a forward.

    Args:
        norms: those that may be.
        words: the norms that are, and what they are computed with.
        rotates: it is a rotation; else sums and modulations.
        rotates_alone: one without norms.
        keeps_bits: the fusion changes no bit of what the module returns.
    """

    norms: Norms
    words: str
    rotates: bool = False
    rotates_alone: bool = False
    keeps_bits: bool = True

    def forward_for(self, base: type, owner: list[type]) -> Callable:
        """The forward of the subclass of a class that `owner` will hold."""
        return guarded(self.rewrite(base), base, owner)

    def rewrite(self, base: type) -> Callable:
        """The forward of a class with this fusion.

        Raises:
            CannotRewrite: the class has another forward now, which does not show it.
        """
        fusion, definition = self.found_in(base)
        if fusion != self:
            raise CannotRewrite("its forward is another now")
        return compiled_again(base, definition, self.helpers)

    def found_in(self, cls: type) -> Found:
        """What is found in a class with these norms."""
        return find_fusion(cls, self.norms)

    @property
    def helpers(self) -> dict[str, Callable]:
        """The functions that the changed definition calls, by name."""
        return FUNCTIONS


def find_fusion(cls: type, norms: Norms) -> Found:
    """(what may be computed with these child norms in the forward of a class, or None;
    the definition of that forward, changed to compute it).

    Raises:
        CannotRewrite: the forward has no source that can be compiled again.
    """
    definition, itself = forward_source(cls)
    pieces = fuse_sums(definition, cls, itself, norms.simple, norms.of_rows)
    if pieces:
        is_modulated = any("*" in piece for piece in pieces)
        return Fusion(norms, _in_words(pieces, is_modulated)), definition
    normed = fuse_qk(definition, cls, itself, norms.of_heads)
    alone = fuse_rotations(definition, cls, itself)
    if not normed + alone:
        return None, definition
    words = _in_words(normed + alone, True)
    return Fusion(norms, words, True, bool(alone), not normed), definition


def _in_words(pieces: list[str], in_one_launch: bool) -> str:
    words = ", ".join(pieces)
    if not in_one_launch:
        return words
    each = ", each" if len(pieces) > 1 else ""
    return f"{words}{each} in one launch"


class Finder(NamedTuple):
    """How the fusions of a model are found.

    Args:
        find: finds the `Fusion` of a class with these `Norms`, as `find_fusion` does.
        in_all_layers: also in the layers without a norm of their own.
    """

    find: Callable = find_fusion
    in_all_layers: bool = False


FINDER = Finder()


def fuse_layers(model: Module, finder: Finder = FINDER) -> tuple[FusedLayer, ...]:
    """Compile the forwards of a patched model again where they show what surrounds a
    norm, or a rotation of q and k; none is fused yet. Nothing is, unless a norm may be.

    Returns:
        For each module that repeats in the model, and for its parts: what was fused, or
        the reason for no fusion.
    """
    find = functools.cache(finder.find)  # most layers of a model are alike
    modules = dict(model.named_modules())
    if not any(map(fusible_norm, modules.values())):
        return ()
    repeated = _repeated(model)
    records = []
    with_sums = []
    for path, module in reversed(modules.items()):
        is_layer = module in repeated
        norms = _norms_of(module)
        words, reason = "", ""
        fusion = None
        may_sum = any(norms) or (finder.in_all_layers and is_layer)
        if may_sum or may_rotate(type(module)):
            fusion, reason = _fused(module, find, norms)
        if fusion is not None:
            words = fusion.words
        elif not is_layer or not _holds_norms(module):
            continue
        elif not any(other.startswith(f"{path}.") for other in with_sums):
            reason = reason or NO_SUM
        if words or reason:
            records.append(FusedLayer(path, type(module).__name__, words, reason))
            if not (fusion and fusion.rotates):
                with_sums.append(path)
    return tuple(reversed(records))


def _holds_norms(module: Module) -> bool:
    """Whether there are norms that may be fused in a module that is none itself."""
    _, *parts = module.modules()
    return any(map(fusible_norm, parts))


def _fused(module: Module, find: Callable, norms: Norms) -> tuple[Fusion | None, str]:
    """(the fusion that a module was given, why it could not be given one)."""
    # Not of the wrappers around a norm or a layer: FSDP's forward would gather weights,
    # on one rank before another.
    if _inner(module) is not module:
        return None, ""
    other = replaced_forward(module)
    if other is not None:
        return None, f"its forward was replaced on the instance by {other}"
    if "parametrizations" in module._modules:
        # Removed, they take the class below the current one.
        return None, "its own parameters are parametrized: patch before that"
    try:
        fusion, _ = find(type(module), norms)
        if fusion is not None:
            fuse(module, fusion)
    except CannotRewrite as error:
        return None, str(error)
    except Exception as error:
        # whatever a user's class does, its norms are swapped
        return None, f"{type(error).__name__}: {error}"
    return fusion, ""


def _norms_of(module: Module) -> Norms:
    simple = set()
    of_rows = set()
    of_heads = set()
    for name, norm in module.named_children():
        patched = fusible_norm(norm)
        if patched is None:
            continue
        recipe = patched.recipe
        if recipe.is_simple:
            simple.add(name)
        if patched.asked.input_written:  # with a rotation or modulation no copy is kept
            continue
        if recipe.is_of_rows:
            of_rows.add(name)
        if recipe.is_simple and _is_of_heads(norm, recipe):
            of_heads.add(name)
    return Norms(*map(frozenset, (simple, of_rows, of_heads)))


def _is_of_heads(norm: Module, recipe: Recipe) -> bool:
    """Whether a norm has one weight for all heads and no bias, and its result has the
    strides of its input. That of `F.rms_norm` is row-major instead.
    """
    shapes = [parameter.shape for parameter in norm.parameters(recurse=False)]
    is_short = all(len(s) == 1 and s.numel() <= MAX_HEAD_DIM for s in shapes)
    return is_short and not (recipe.spec.functional or recipe.spec.has_bias)


def _repeated(model: Module) -> set[Module]:
    """The modules of a model's lists, in their wrappers."""
    repeated = set()
    for row in model.modules():
        if isinstance(row, (nn.ModuleList, nn.Sequential)):
            repeated.update(map(_inner, row.children()))  # a place may hold none
    return repeated


def _inner(module: Module) -> Module:
    """The layer in its wrappers (FSDP, activation checkpoints, `torch.compile`): an
    only child by a private name.
    """
    match list(module._modules.items()):
        case [(name, Module() as child)] if name.startswith("_"):
            return _inner(child)
    return module
