"""Residual sums whose summands are kept, for norms that read them before they are
rounded.

    h = a + b             ->    h = add_unrounded(a, b, self)
    x = self.norm(h)            x = self.norm(h)
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Module

from ...formula import HALF_DTYPES
from ...fused.source import call, exchangeable, forward_source
from ...ops.backend import under_transform
from ..entries import Entry, FusedLayer
from ..layers.fusions import FINDER, Finder, Found, Fusion, Norms, find_fusion
from ..layers.statements import Replace, is_sum
from .norm import reads_unrounded
from .summands import keep_summands

_ADDS = "_hf_rmsnorm_add_unrounded"


def finder_for(entries: list[Entry]) -> Finder:
    """How fusions are found in a model with these norms."""
    if any(map(_reads_unrounded, entries)):
        return Finder(_find, in_all_layers=True)
    return FINDER


def missed_sums(entries: list[Entry], layers: tuple[FusedLayer, ...]) -> str:
    """That norms read sums before they are rounded, and some sums are rounded all the
    same; "" otherwise.
    """
    unfused = [layer for layer in layers if layer.reason]
    readers = list(filter(_reads_unrounded, entries))
    if not unfused or not readers:
        return ""
    numerics = readers[0].asked.rounds_as
    first = unfused[0]
    which = f"{len(unfused)} layers, first {first.path!r}: {first.reason}"
    return f"numerics={numerics!r} reads sums unrounded; rounded all the same are those of {which}"


def _reads_unrounded(entry: Entry) -> bool:
    return entry.proven is not None and reads_unrounded(entry.asked)


@dataclass(frozen=True)
class SummandsKept(Fusion):
    """Sums of a forward that keep their summands."""

    def forward_for(self, base: type, owner: list[type]) -> Callable:
        return exchangeable(self.rewrite(base), base)

    def found_in(self, cls: type) -> Found:
        return _find(cls, self.norms)

    @property
    def helpers(self) -> dict[str, Callable]:
        return {_ADDS: add_unrounded}


def _find(cls: type, norms: Norms) -> Found:
    """`find_fusion` where norms of the model read sums before they are rounded."""
    definition, itself = forward_source(cls)
    sums = list(_sums_in(definition, itself))
    if not sums:
        return find_fusion(cls, norms)
    for total in sums:
        module = ast.Name(itself, ast.Load())
        new = call(_ADDS, total, total.left, total.right, module)
        definition = Replace(total, new).visit(definition)
    return SummandsKept(norms, "+ what reads it", keeps_bits=False), definition


def _sums_in(definition: ast.FunctionDef, itself: str) -> Iterator[ast.BinOp]:
    """The sums that are assigned to a name, returned, first in a tuple maybe, or given
    to a child.
    """
    for node in ast.walk(definition):
        match node:
            case ast.Assign(_, total) | ast.Return(total):
                if isinstance(total, ast.Tuple) and total.elts:
                    total = total.elts[0]
            case ast.Call(ast.Attribute(ast.Name(owner)), [total]) if owner == itself:
                pass
            case _:
                continue
        if is_sum(total):
            yield total


@torch.compiler.disable
def add_unrounded(left, right, module: Module):
    """``left + right``, whose summands are kept for a norm that reads the sum before it
    is rounded.

    Args:
        module: which adds.

    Raises:
        RuntimeError: the sum is one of a graph that is compiled, exported or
            transformed, or of other tensors.
    """
    total = left + right
    plain = type(left) is type(right) is type(total) is Tensor
    if plain and not (is_compiling() or under_transform()):
        again = module.training or is_grad_enabled()
        keep_summands(total, left, right, again)
    elif getattr(total, "dtype", None) in HALF_DTYPES:
        raise RuntimeError(
            "numerics='vllm' and 'sglang' read residual sums before they are rounded, which torch.export, functorch "
            "and tensors of other types do not allow: run the model without them"
        )
    return total
