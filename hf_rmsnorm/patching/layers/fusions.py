"""Finds the modules of a model whose norms, or whose rotation of q and k, can run in
one launch with the code around them. Others get a reason.

`api.patch_model` calls `fuse_layers` once the norms are swapped. For each class that
`find_fusion` finds something in, `swap.fuse` makes a subclass, by `Fusion.rewrite`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.nn import Module

from ...fused.norm import norm_asked_to_fuse, patch_of
from ...fused.recipe import Recipe
from ...kernels.sizes import MAX_HEAD_DIM
from ..report import FusedLayer
from ..source import CannotRewrite, compiled_again, forward_source
from ..swap import fuse, replaced_forward
from .calls import FUNCTIONS
from .qk import fuse_qk
from .rotary_rewrite import fuse_rotations, may_rotate
from .sums import fuse_sums

NO_SUM = "no sum in its forward is followed directly by a patched norm of its own"


def fuse_layers(model: Module) -> tuple[FusedLayer, ...]:
    """Fuse the layers of a model whose norms are patched: compile their forwards again
    where they show what surrounds a norm, or a rotation of q and k.

    Args:
        model: none of its layers is fused. Without a norm that may be fused, no rotation
            is either.

    Returns:
        For each module that repeats in the model, and for its parts: its fusion, or the
        reason for none.
    """
    modules = dict(model.named_modules())
    if not any(map(norm_asked_to_fuse, modules.values())):
        return ()
    find = functools.cache(find_fusion)  # most layers of a model are equal
    repeated = _repeated(model)
    records = []
    explained: list[str] = []  # the paths whose sums are listed
    for path, module in reversed(modules.items()):
        name = type(module).__name__
        reason = ""
        try:
            fusion = _give_fusion(module, find)
        except CannotRewrite as error:
            fusion, reason = None, str(error)
        except Exception as error:
            # whatever a user's class does, its norms are swapped
            fusion, reason = None, f"{type(error).__name__}: {error}"
        if fusion is not None:
            records.append(FusedLayer(path, name, fusion.words))
            if not (fusion.rotates_normed or fusion.rotates_alone):
                explained.append(path)
            continue
        why = _shared_norms(module)
        if not why and module in repeated:
            why = _why_not_fused(path, module, explained, reason)
        if why:
            records.append(FusedLayer(path, name, "", why))
            explained.append(path)
    return tuple(reversed(records))


def _why_not_fused(path: str, module: Module, explained: list[str], reason: str) -> str:
    """The reason, or `NO_SUM`, of a layer that holds norms; "" if it holds none, or a
    part of it is listed already.
    """
    _, *parts = module.modules()
    if not any(map(norm_asked_to_fuse, parts)):
        return ""
    if reason or any(other.startswith(f"{path}.") for other in explained):
        return reason
    return NO_SUM


def _shared_norms(module: Module) -> str:
    """Which patched norms of a module are one, under several names; "" if none are."""
    names = {}
    for name, child in module._modules.items():
        if norm_asked_to_fuse(child) is not None:
            names.setdefault(child, []).append(name)
    for shared in names.values():
        if len(shared) > 1:
            return f"{' and '.join(shared)} are one module"
    return ""


def _give_fusion(module: Module, find: Callable) -> Fusion | None:
    """Give a module the fusion that its forward shows; None where it shows none.

    Raises:
        CannotRewrite: why it cannot be given one.
        Exception: whatever its class does.
    """
    norms = _norms_of(module)
    if not any(norms) and not may_rotate(type(module)):
        return None
    # Not of the wrappers around a norm or a layer: FSDP's forward would gather weights,
    # on one rank before another.
    if _inner(module) is not module:
        return None
    other = replaced_forward(module)
    if other:
        raise CannotRewrite(f"its forward was replaced on the instance by {other}")
    if "parametrizations" in module._modules:
        # Removed, they take the class below the current one.
        raise CannotRewrite("its own parameters are parametrized: patch before that")
    # the changed source is not kept: `Fusion.rewrite` finds it again
    fusion, _ = find(type(module), norms)
    if fusion is not None:
        fuse(module, fusion)
    return fusion


class FusibleNorms(NamedTuple):
    """The names of a module's child norms, by what one launch may compute them with."""

    with_sum: frozenset[str]
    with_modulation: frozenset[str]
    with_rotation: frozenset[str]


def _norms_of(module: Module) -> FusibleNorms:
    with_sum = set()
    with_modulation = set()
    with_rotation = set()
    for name, norm in module.named_children():
        patch = patch_of(norm)
        if patch is None or not patch.may_fuse:
            continue
        with_modulation.add(name)
        if patch.is_plain:
            with_sum.add(name)
            if _is_of_heads(norm, patch.recipe):
                with_rotation.add(name)
    sets = with_sum, with_modulation, with_rotation
    return FusibleNorms(*map(frozenset, sets))


def _is_of_heads(norm: Module, recipe: Recipe) -> bool:
    """Whether a norm has one weight for all heads and no bias, and its result has the
    strides of its input. That of `F.rms_norm` is row-major instead.
    """
    if recipe.spec.functional or recipe.spec.has_bias:
        return False
    for parameter in norm.parameters(recurse=False):
        if parameter.dim() != 1 or parameter.numel() > MAX_HEAD_DIM:
            return False
    return True


def _repeated(model: Module) -> set[Module]:
    """The modules of a model's lists, in their wrappers."""
    repeated = set()
    for row in model.modules():
        if isinstance(row, (nn.ModuleList, nn.Sequential)):
            for module in row:
                if module is not None:  # a place may hold none
                    repeated.add(_inner(module))
    return repeated


def _inner(module: Module) -> Module:
    """The layer in its wrappers (FSDP, activation checkpoints, `torch.compile`): an
    only child by a private name.
    """
    while len(module._modules) == 1:
        ((name, child),) = module._modules.items()
        if child is None or not name.startswith("_"):
            break
        module = child
    return module


def find_fusion(
    cls: type, norms: FusibleNorms
) -> tuple[Fusion | None, ast.FunctionDef]:
    """(what may be computed with these child norms in the forward of a class, None where
    nothing may; the forward's definition, changed to compute it).

    Raises:
        CannotRewrite: the forward has no source that can be compiled again.
    """
    definition = forward_source(cls)
    pieces = fuse_sums(definition, cls, norms.with_sum, norms.with_modulation)
    if pieces:
        is_modulated = any("*" in piece for piece in pieces)
        return Fusion(norms, _in_words(pieces, is_modulated)), definition
    normed = fuse_qk(definition, cls, norms.with_rotation)
    alone = fuse_rotations(definition, cls)
    pieces = normed + alone
    if not pieces:
        return None, definition
    fusion = Fusion(norms, _in_words(pieces, True), bool(normed), bool(alone))
    return fusion, definition


def _in_words(pieces: list[str], in_one_launch: bool) -> str:
    words = ", ".join(pieces)
    if not in_one_launch:
        return words
    if len(pieces) > 1:
        words += ", each"
    return f"{words} in one launch"


@dataclass(frozen=True)
class Fusion:
    """The operations that one launch computes with the norms of a forward.

    Args:
        norms: those that may be.
        words: the norms that are, each with its operations.
        rotates_normed: it rotates q and k with their norms, which may change bits.
        rotates_alone: it rotates q and k without norms.
    """

    norms: FusibleNorms
    words: str
    rotates_normed: bool = False
    rotates_alone: bool = False

    def rewrite(self, base: type, functions: dict = FUNCTIONS) -> Callable:
        """The forward of a class with this fusion. It is found again in the class's source:
        a model that was pickled whole brings only what the fusion says.

        Args:
            functions: those that it calls, by the names of `FUNCTIONS`.

        Raises:
            CannotRewrite: the class has another forward now, which does not show it.
        """
        fusion, definition = find_fusion(base, self.norms)
        if fusion != self:
            raise CannotRewrite("its forward is another now")
        return compiled_again(base, definition, functions)
