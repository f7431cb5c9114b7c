"""Scale and shift of what a norm returned, as in an adaptive LayerNorm, found in the source of one forward.

    y = self.norm(x) * (1 + scale[:, None]) + shift    ->    y = modulated(x, self.norm, scale[:, None], shift)

    y = self.norm(x)
    y = y * (1 + scale) + shift                        ->    y = modulated(x, self.norm, scale, shift)

The factors may stand in any order, and the shift may be missing. Scale and shift are variables, or views of them. So it
does not matter when they are computed.
"""

import ast
from collections.abc import Set
from typing import NamedTuple

from ...fused.source import call
from .uses import reads

MODULATED = "_hf_rmsnorm_modulated"
_PURE = (ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
_VIEWS = {"unsqueeze", "squeeze", "view", "expand", "to"}
_VIEWS_OF_A_SUM = {"unsqueeze", "squeeze", "expand"}  # which give the same of 1 + scale and of scale
_MEMORY = {"data", "numpy"}  # what a write goes by without moving a version


class _Modulation(NamedTuple):
    """``normed * (1 + scale) + shift``."""

    normed: ast.expr
    scale: ast.expr
    shift: ast.expr | None


class MarkModulations(ast.NodeTransformer):
    """Makes one call of each norm and its modulation.

    Args:
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a modulation.
    """

    def __init__(self, itself: str, norms: Set[str]):
        self.itself = itself
        self.norms = norms
        self.count = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            if isinstance(block, list):
                self._join_statements(block)
        return super().generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        parts = _modulation(node)
        if parts is None or not self._is_norm(parts.normed):
            return self.generic_visit(node)
        return self._call(parts.normed, parts)

    def _join_statements(self, block: list[ast.stmt]) -> None:
        """Make one statement of ``y = self.norm(x)`` and ``y = y * (1 + scale) + shift`` right behind it."""
        for at in range(len(block) - 1, 0, -1):
            match block[at - 1], block[at]:
                case ast.Assign([ast.Name(name)], norm), ast.Assign([ast.Name(again)], value) if name == again:
                    parts = _modulation(value)
                case _:
                    continue
            if parts is None or not self._is_norm(norm) or getattr(parts.normed, "id", "") != name:
                continue
            if any(reads(part, {name}) for part in parts[1:] if part is not None):
                continue
            block[at].value = self._call(norm, parts)
            del block[at - 1]

    def _is_norm(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(ast.Attribute(ast.Name(self.itself), name), [rows], []):
                return name in self.norms and not isinstance(rows, ast.Starred)
        return False

    def _call(self, norm: ast.Call, parts: _Modulation) -> ast.Call:
        self.count += 1
        shift = [] if parts.shift is None else [parts.shift]
        return call(MODULATED, norm, norm.args[0], norm.func, parts.scale, *shift)


def _modulation(node: ast.expr) -> _Modulation | None:
    """The parts of ``y * (1 + scale) + shift`` in any order; None of anything else."""
    product, shift = node, None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        product, shift = node.left, node.right
        if not is_product(product):
            product, shift = shift, product
        if not _is_pure(shift):
            return None
    if not is_product(product):
        return None
    for normed, factor in ((product.left, product.right), (product.right, product.left)):
        scale = _scale(factor)
        # What the norm reads may change the scale as it is computed: then the order decides.
        in_order = _is_first(normed, node) or all(map(_is_pure, getattr(normed, "args", ())))
        if scale is not None and _is_pure(scale) and in_order:
            return _Modulation(normed, scale, shift)
    return None


def _is_first(part: ast.expr, node: ast.expr) -> bool:
    """Whether a part of sums and products is what Python evaluates first of them."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return part is node


def is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _scale(factor: ast.expr) -> ast.expr | None:
    """The scale in ``1 + scale``; where a view is made of that sum, a view of the scale."""
    match factor:
        case ast.BinOp(ast.Constant(1), ast.Add(), scale) | ast.BinOp(scale, ast.Add(), ast.Constant(1)):
            return scale
        case ast.Subscript(inner, index):
            scale = _scale(inner)
            return None if scale is None else ast.copy_location(ast.Subscript(scale, index, ast.Load()), factor)
        case ast.Call(ast.Attribute(inner, name), arguments, []) if name in _VIEWS_OF_A_SUM:
            scale = _scale(inner)
            if scale is None:
                return None
            return ast.copy_location(ast.Call(ast.Attribute(scale, name, ast.Load()), arguments, []), factor)
    return None


def _is_pure(node: ast.AST) -> bool:
    """Whether an expression is a variable, or a view of one."""
    match node:
        case ast.Call(ast.Attribute(inner, name), arguments, []):
            return name in _VIEWS and all(map(_is_pure, (inner, *arguments)))
        case ast.Attribute(_, name) if name in _MEMORY:
            return False
    return isinstance(node, _PURE) and all(map(_is_pure, ast.iter_child_nodes(node)))
