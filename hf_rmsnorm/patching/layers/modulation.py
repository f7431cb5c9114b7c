"""Scale and shift of a norm's result, as in an adaptive LayerNorm, found in the source
of one forward.

    y = self.norm(x) * (1 + scale[:, None]) + shift    ->    y = modulated(x, self.norm, scale[:, None], shift)

    y = self.norm(x)
    z = y * (1 + scale) + shift                        ->    z = modulated(x, self.norm, scale, shift)

    scale = 1 + scale
    y = self.norm(x) * scale                           ->    y = modulated(x, self.norm, Factor(scale))

The factors may have any order, and the shift may be missing. x, scale and shift only
compute, so it does not matter when, and neither do statements that only compute between
a norm and its modulation. A function that only scales and shifts its argument is read
too (`helpers`).
"""

import ast
import copy
from collections.abc import Set
from typing import NamedTuple

from ...fused.source import call
from .helpers import LATER, is_helper
from .statements import (
    MODULATED,
    bound,
    is_product,
    is_read_later,
    is_sum,
    norm_input,
    only_computes,
    reads,
)

FACTOR = "_hf_rmsnorm_factor"


class _Modulation(NamedTuple):
    """``normed * (1 + scale) + shift``; the scale may be a `FACTOR`."""

    normed: ast.expr
    scale: ast.expr
    shift: ast.expr | None


class Modulations(ast.NodeTransformer):
    """Makes one call of each norm and its modulation.

    Args:
        cls: whose forward it is.
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a modulation.
        shared: names that something besides the forward's own statements may read.
    """

    def __init__(self, cls: type, itself: str, norms: Set[str], shared: Set[str]):
        self.cls = cls
        self.itself = itself
        self.norms = norms
        self.shared = shared
        self.factors: set[str] = set()

    def visit_FunctionDef(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        for statement in ast.walk(definition):
            if isinstance(statement, ast.Assign):
                self.factors |= _prepared_factors(statement)
        self._join_block(definition.body, [])
        return self.generic_visit(definition)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        parts = self._parts(node)
        if parts is None or not self._is_norm(parts.normed):
            return self.generic_visit(node)
        return self._call(parts.normed, parts)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not node.args or not self._is_norm(node.args[0]):
            return node
        norm, *others = node.args
        others += [keyword.value for keyword in node.keywords]
        if all(map(self._computes, others)) and self._is_helper(node):
            helper = copy.deepcopy(node.func)
            node.args[0] = call(LATER, norm, norm.args[0], norm.func, helper)
        return node

    def _is_helper(self, node: ast.Call) -> bool:
        return is_helper(node.func, self.cls, self.itself)

    def _join_block(self, body: list[ast.stmt], after: list[ast.stmt]) -> None:
        for at in reversed(range(len(body))):
            rest = [*body[at + 1 :], *after]
            if isinstance(body[at], ast.If):
                self._join_block(body[at].body, rest)
                self._join_block(body[at].orelse, rest)
            else:
                self._join(body, at, rest)

    def _join(self, body: list[ast.stmt], at: int, rest: list[ast.stmt]) -> None:
        """Make one statement of ``y = self.norm(x)`` and ``z = y * (1 + scale) +
        shift``, or ``z = helper(y, scale, shift)``.
        """
        match body[at]:
            case ast.Assign([ast.Name(name)], norm) if self._is_norm(norm):
                pass
            case _:
                return
        places = (i for i in range(at + 1, len(body)) if reads(body[i], {name}))
        reader_at = next(places, at)
        reader = body[reader_at]
        parts = self._parts_of(reader, name)
        takes_norm = self._takes(reader, name)
        if parts is None and not takes_norm:
            return
        between = body[at + 1 : reader_at]
        if not all(self._may_pass(norm, other) for other in between):
            return
        later = rest[reader_at - at :]
        is_dead = name in bound(reader) or not is_read_later(name, later)
        if not is_dead or name in self.shared:
            return
        if takes_norm:
            reader.value.args[0] = norm  # `visit_Call` puts it off
        else:
            reader.value = self._call(norm, parts)
        del body[at]

    def _takes(self, reader: ast.stmt, name: str) -> bool:
        """Whether a statement is ``... = helper(y, ...)``, where y is this name."""
        match reader:
            case ast.Assign(_, ast.Call(_, [ast.Name(first), *others], keywords)):
                others = [*others, *(keyword.value for keyword in keywords)]
            case _:
                return False
        if first != name or any(reads(other, {name}) for other in others):
            return False
        return all(map(self._computes, others)) and self._is_helper(reader.value)

    def _parts_of(self, reader: ast.stmt, name: str) -> _Modulation | None:
        """The parts of ``z = y * (1 + scale) + shift``, if y is this name."""
        match reader:
            case ast.Assign([ast.Name()], value):
                parts = self._parts(value)
            case _:
                return None
        if parts is None or getattr(parts.normed, "id", "") != name:
            return None
        others = [part for part in parts[1:] if part is not None]
        return None if any(reads(part, {name}) for part in others) else parts

    def _may_pass(self, norm: ast.Call, other: ast.stmt) -> bool:
        """Whether a norm may be computed behind another statement as well."""
        return self._computes(other) and not reads(norm, bound(other))

    def _is_norm(self, node: ast.expr) -> bool:
        rows = norm_input(node, self.itself, self.norms)
        return rows is not None and self._computes(rows)

    def _computes(self, node: ast.AST) -> bool:
        return only_computes(
            node, lambda call: call.args if self._is_norm(call) else None
        )

    def _call(self, norm: ast.Call, parts: _Modulation) -> ast.Call:
        shift = [] if parts.shift is None else [parts.shift]
        return call(MODULATED, norm, norm.args[0], norm.func, parts.scale, *shift)

    def _parts(self, node: ast.expr) -> _Modulation | None:
        """The parts of ``y * (1 + scale) + shift`` in any order; None of anything else."""
        product, shift = node, None
        if is_sum(node):
            product, shift = node.left, node.right
            if not is_product(product):
                product, shift = shift, product
            if not self._computes(shift):
                return None
        if not is_product(product):
            return None
        for normed, factor in (
            (product.left, product.right),
            (product.right, product.left),
        ):
            scale = _scale_in(factor)
            if isinstance(factor, ast.Name) and factor.id in self.factors:
                scale = call(FACTOR, factor, factor)
            elif scale is not None and not self._computes(scale):
                scale = None
            if scale is not None:
                return _Modulation(normed, scale, shift)
        return None


def _prepared_factors(statement: ast.Assign) -> set[str]:
    """The names to which a statement assigns ``1 + scale``."""
    targets, values = statement.targets, [statement.value]
    match statement:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
            pass
    pairs = zip(targets, values, strict=False)
    return {
        target.id
        for target, value in pairs
        if isinstance(target, ast.Name) and _scale_in(value) is not None
    }


def _scale_in(factor: ast.expr) -> ast.expr | None:
    """The scale in ``1 + scale``, or in a part ``(1 + scale)[...]`` of it."""
    match factor:
        case ast.BinOp(ast.Constant(1), ast.Add(), scale):
            return scale
        case ast.BinOp(scale, ast.Add(), ast.Constant(1)):
            return scale
        case ast.Subscript(inner, index):
            scale = _scale_in(inner)
            view = ast.Subscript(scale, index, ast.Load())
            return None if scale is None else ast.copy_location(view, factor)
    return None
