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
too, as Qwen-Image's block calls one:

    y, gate = self.scaled(self.norm(x), c)    ->    y, gate = self.scaled(later_in(self.scaled, self.norm, x), c)

`later_in` returns an object that computes the norm when the helper adds the shift.
"""

import ast
import copy
import inspect
import itertools
from collections.abc import Set
from types import CodeType, FunctionType

from ...fused.later import HELPERS, later_in
from ...fused.modulated import OnePlusScale, modulated
from ..source import CannotRewrite, definition_of
from .calls import call, called
from .statements import (
    Replace,
    Statements,
    bound,
    first_effect,
    is_dead_behind,
    may_pass,
    names_in,
    norm_input,
    only_computes,
    reads,
)


class Modulations(ast.NodeTransformer):
    """Makes one call of each norm and its modulation.

    Args:
        cls: whose forward it is.
        norms: the names of the children that may be computed with a modulation.
    """

    def __init__(self, cls: type, norms: Set[str]):
        self.cls = cls
        self.norms = norms
        self.factors: set[str] = set()

    def visit_FunctionDef(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        for statement in ast.walk(definition):
            self._note_factors(statement)
        self._join_block(definition.body, [])
        return self.generic_visit(definition)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """``self.norm(x) * (1 + scale) + shift``, its factors in any order."""
        match node:
            case ast.BinOp(ast.BinOp(left, ast.Mult(), right), ast.Add(), shift) if (
                only_computes(shift)
            ):
                shifts = [shift]
            case ast.BinOp(left, ast.Mult(), right):
                shifts = []
            case _:
                return self.generic_visit(node)
        for norm, factor in itertools.permutations((left, right)):
            scale = self._scale(factor)
            if scale is not None and self._is_norm(norm):
                return call(modulated, norm, norm.args[0], norm.func, scale, *shifts)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``helper(self.norm(x), scale, shift)``."""
        self.generic_visit(node)
        if not node.args or not self._is_norm(node.args[0]):
            return node
        norm, *others = node.args
        code = _helper_of(node.func, self.cls)
        if code is not None and all(map(only_computes, others + node.keywords)):
            HELPERS.add(code)
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
            if may_pass(reader, {name}) and not reads(norm, bound(reader)):
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
        mentions = [mention for mention in names_in(reader) if mention.id == name]
        read = [mention for mention in mentions if isinstance(mention.ctx, ast.Load)]
        if len(read) != 1:
            return None
        Replace(read[0], norm).visit(reader)
        joined = self.visit(copy.deepcopy(reader))
        Replace(norm, read[0]).visit(reader)
        is_joined = called(first_effect(joined)) in (modulated, later_in)
        return joined if is_joined else None

    def _is_norm(self, node: ast.AST) -> bool:
        rows = norm_input(node, self.norms)
        return rows is not None and only_computes(rows)

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


def _helper_of(node: ast.expr, cls: type) -> CodeType | None:
    """The code of a function or method, if it only scales and shifts its first argument.

    Args:
        node: the callee in the forward of the class.
    """
    skipped = 0
    match node:
        case ast.Attribute(ast.Name("self"), name):
            function, skipped = inspect.getattr_static(cls, name, None), 1
        case ast.Name(name):
            function = inspect.unwrap(cls.forward).__globals__.get(name)
        case _:
            return None
    if not isinstance(function, FunctionType):
        return None
    try:
        definition = definition_of(function.__code__)
    except CannotRewrite:
        return None
    parameters = definition.args.args[skipped:]
    match definition.body:
        case [*body, ast.Return(ast.expr() as value)] if parameters:
            parts = [*body, value]
        case _:
            return None
    name = parameters[0].arg
    if not all(map(only_computes, parts)) or not _scales_and_shifts(definition, name):
        return None
    return function.__code__


def _scales_and_shifts(definition: ast.FunctionDef, name: str) -> bool:
    """Whether ``name * factor + shift`` is the only mention of a parameter."""
    mentions = [mention for mention in names_in(definition) if mention.id == name]
    for node in ast.walk(definition):
        match node:
            case ast.BinOp(ast.BinOp(x, ast.Mult()), ast.Add()) if mentions == [x]:
                return True
    return False
