"""Scale and shift of a norm's result, as in an adaptive LayerNorm, found in the source
of one forward.

    y = self.norm(x) * (1 + scale[:, None]) + shift    ->    y = modulated(x, self.norm, scale[:, None], shift)

    y = self.norm(x)
    z = y * (1 + scale) + shift                        ->    z = modulated(x, self.norm, scale, shift)

    scale = 1 + scale
    y = self.norm(x) * scale                           ->    y = modulated(x, self.norm, OnePlusScale(scale))

The factors may have any order, and the shift may be missing. x, scale and shift only
compute, so it does not matter when, and neither do statements that only compute between
a norm and its modulation. A function that only scales and shifts its argument is read
too (`helpers`).
"""

import ast
import copy
import itertools
from collections.abc import Set

from ...fused.later import later_in
from ...fused.modulated import OnePlusScale, modulated
from .calls import call, is_modulated
from .helpers import note_helper
from .statements import (
    Replace,
    Statements,
    bound,
    first_effect,
    is_dead_behind,
    is_product,
    is_sum,
    names_in,
    norm_input,
    only_computes,
    reads,
)


class Modulations(ast.NodeTransformer):
    """Makes one call of each norm and its modulation.

    Args:
        cls: whose forward it is.
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a modulation.
    """

    def __init__(self, cls: type, itself: str, norms: Set[str]):
        self.cls = cls
        self.itself = itself
        self.norms = norms
        self.factors: set[str] = set()

    def visit_FunctionDef(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        for statement in ast.walk(definition):
            self._note_factors(statement)
        self._join_block(definition.body, [])
        return self.generic_visit(definition)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """``self.norm(x) * (1 + scale) + shift`` in any order."""
        product = node
        shift = []
        if is_sum(node):
            product = node.left
            shift = [node.right]
            if not is_product(product):
                product = node.right
                shift = [node.left]
        if not is_product(product) or not all(map(only_computes, shift)):
            return self.generic_visit(node)
        for norm, factor in itertools.permutations((product.left, product.right)):
            scale = self._scale(factor)
            if scale is not None and self._is_norm(norm):
                return call(modulated, norm, norm.args[0], norm.func, scale, *shift)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``helper(self.norm(x), scale, shift)``."""
        self.generic_visit(node)
        if not node.args or not self._is_norm(node.args[0]):
            return node
        norm, *others = node.args
        computes = all(map(only_computes, others + node.keywords))
        if computes and note_helper(node.func, self.cls, self.itself):
            helper = copy.deepcopy(node.func)
            node.args[0] = call(later_in, norm, helper, norm.func, norm.args[0])
        return node

    def _join_block(self, body: Statements, after: Statements) -> None:
        for at in reversed(range(len(body))):
            rest = [*body[at + 1 :], *after]
            if isinstance(body[at], ast.If):
                self._join_block(body[at].body, rest)
                self._join_block(body[at].orelse, rest)
            else:
                self._join(body, at, rest)

    def _join(self, body: Statements, at: int, rest: Statements) -> None:
        """Put the norm of ``y = self.norm(x)`` into the statement that reads y, where
        that statement modulates it.
        """
        match body[at]:
            case ast.Assign([ast.Name(name)], norm) if self._is_norm(norm):
                pass
            case _:
                return
        for reader_at in range(at + 1, len(body)):
            reader = body[reader_at]
            if self._may_pass(norm, name, reader):
                continue
            if is_dead_behind(reader, name, rest[reader_at - at :]):
                joined = self._joined(reader, name, norm)
                if joined is not None:
                    body[reader_at] = joined
                    del body[at]
            return

    def _joined(self, reader: ast.stmt, name: str, norm: ast.Call) -> ast.stmt | None:
        """A statement with a norm in place of the variable that holds its result; None
        where it does not begin with a modulation of that.
        """
        named = [mention for mention in names_in(reader) if mention.id == name]
        read = [mention for mention in named if isinstance(mention.ctx, ast.Load)]
        if len(read) != 1:
            return None
        Replace(read[0], norm).visit(reader)
        joined = self.visit(copy.deepcopy(reader))
        Replace(norm, read[0]).visit(reader)
        is_joined = is_modulated(first_effect(joined), or_later=True)
        return joined if is_joined else None

    def _may_pass(self, norm: ast.Call, name: str, statement: ast.stmt) -> bool:
        """Whether a norm, assigned to this name, may be computed behind a statement."""
        if reads(statement, {name}) or reads(norm, bound(statement)):
            return False
        return self._computes(statement)

    def _is_norm(self, node: ast.AST) -> bool:
        rows = norm_input(node, self.itself, self.norms)
        return rows is not None and self._computes(rows)

    def _computes(self, node: ast.AST) -> bool:
        return only_computes(node, self._is_norm)

    def _scale(self, factor: ast.expr) -> ast.expr | None:
        """The scale in ``1 + scale``; a `OnePlusScale` if it was computed before."""
        if isinstance(factor, ast.Name) and factor.id in self.factors:
            return call(OnePlusScale, factor, factor)
        scale = _scale_in(factor)
        return scale if scale is not None and only_computes(scale) else None

    def _note_factors(self, statement: ast.AST) -> None:
        """Note the names to which a statement assigns ``1 + scale``."""
        match statement:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                for target, value in zip(targets, values, strict=False):
                    self._note_factors(ast.Assign([target], value))
            case ast.Assign([ast.Name(name)], value) if _scale_in(value) is not None:
                self.factors.add(name)


def _scale_in(factor: ast.expr) -> ast.expr | None:
    """The scale in ``1 + scale``, or in a part ``(1 + scale)[...]`` of it."""
    match factor:
        case ast.BinOp(ast.Constant(1), ast.Add(), scale) | ast.BinOp(
            scale, ast.Add(), ast.Constant(1)
        ):
            return scale
        case ast.Subscript(inner, index):
            scale = _scale_in(inner)
            return scale and ast.Subscript(scale, index, ast.Load())
    return None
