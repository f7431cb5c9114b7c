"""Whether anybody but a norm and a ``+`` can get hold of a sum of a layer's forward, read from its source.

A sum that only its norm and other operators read may be one node of autograd's graph with its norm. One that something
else is given (a module, a function, whoever gets what the layer returns) may be hooked, differentiated by, or written
to, on branches too that no trial run takes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

_FACTS = {"shape", "dtype", "device", "ndim"}  # what may be asked of a sum without getting hold of it
_QUESTIONS = {"size", "dim", "numel"}
_Held = frozenset[str]  # names that may be bound to the sum


class _Escapes(Exception):
    """The sum reaches something else."""


def is_seen(definition: ast.FunctionDef, total: ast.BinOp, itself: str, norms: Iterable[str]) -> bool:
    """Whether anything but operators and these norms may be given what a ``+`` of a forward returns.

    Args:
        definition: of the forward.
        total: the ``+``, one of the nodes of `definition`.
        itself: the forward's name for its module.
        norms: names of the children that may read the sum.
    """
    try:
        _Reader(total, itself, set(norms)).block(definition.body, frozenset())
    except _Escapes:
        return True
    return False


class _Reader:
    """Follows one sum through the statements of a forward, along every branch."""

    def __init__(self, total: ast.BinOp, itself: str, norms: set[str]):
        self.total, self.itself, self.norms = total, itself, norms

    def block(self, statements: list[ast.stmt], held: _Held) -> _Held:
        for statement in statements:
            held = self.statement(statement, held)
        return held

    def statement(self, node: ast.stmt, held: _Held) -> _Held:
        match node:
            case ast.Assign(targets, value):
                return self.assign(targets, value, held)
            case ast.AnnAssign(target, _, value) if value is not None:
                return self.assign([target], value, held)
            case ast.AugAssign(target, _, value):
                if self.mentions(target, held):  # it writes to the sum
                    raise _Escapes
                self.is_sum(value, held)
                return held
            case ast.Expr(value):
                self.is_sum(value, held)
                return held
            case ast.If(test, body, orelse):
                self.nowhere([test], held)
                return self.block(body, held) | self.block(orelse, held)
            case ast.For(target, iterable, body, orelse):
                self.nowhere([target, iterable], held)
                return self.loop(body, orelse, held)
            case ast.While(test, body, orelse):
                self.nowhere([test], held)
                return self.loop(body, orelse, held)
            case ast.With(items, body):
                self.nowhere([item.context_expr for item in items], held)
                return self.block(body, held)
            case ast.Delete(targets):
                return held - {t.id for t in targets if isinstance(t, ast.Name)}
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Global() | ast.Import() | ast.ImportFrom():
                return held
        self.nowhere(list(ast.iter_child_nodes(node)), held)  # it returns the sum, or does something unforeseen
        return held

    def loop(self, body: list[ast.stmt], orelse: list[ast.stmt], held: _Held) -> _Held:
        while not (after := self.block(body, held)) <= held:
            held |= after
        return self.block(orelse, held)

    def assign(self, targets: list[ast.expr], value: ast.expr, held: _Held) -> _Held:
        pairs = [(target, value) for target in targets]
        match targets, value:
            case [ast.Tuple(names)], ast.Tuple(values) if len(names) == len(values):
                pairs = list(zip(names, values, strict=True))
        is_sum = [self.is_sum(value, held) for _, value in pairs]
        for (target, _), found in zip(pairs, is_sum, strict=True):
            if isinstance(target, ast.Name):
                held = held | {target.id} if found else held - {target.id}
            elif found or (not isinstance(target, ast.Tuple) and self.mentions(target, held)):
                raise _Escapes
            else:
                held -= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        return held

    def is_sum(self, node: ast.expr, held: _Held) -> bool:
        """Whether an expression may be the sum itself.

        Raises:
            _Escapes: it gives the sum to something.
        """
        match node:
            case ast.Name(name):
                return name in held
            case ast.BinOp(left, _, right):
                for operand in (left, right):
                    self.is_sum(operand, held)
                return node is self.total
            case ast.UnaryOp(_, operand):
                return self.is_sum(operand, held) and isinstance(node.op, ast.UAdd)
            case ast.IfExp(test, body, orelse):
                self.nowhere([test], held)
                return self.is_sum(body, held) | self.is_sum(orelse, held)
            case ast.Attribute(ast.Name(name), fact) if name in held and fact in _FACTS:
                return False
            case ast.Call(ast.Attribute(ast.Name(name), question), given) if name in held and question in _QUESTIONS:
                self.nowhere(given, held)
                return False
            case ast.Call(ast.Attribute(ast.Name(owner), norm), [rows], []) if owner == self.itself:
                if norm in self.norms:
                    self.is_sum(rows, held)
                    return False
        self.nowhere(list(ast.iter_child_nodes(node)), held)
        return False

    def nowhere(self, nodes: list[ast.AST], held: _Held) -> None:
        """Look into expressions whose values go where nobody knows.

        Raises:
            _Escapes: the sum is among them.
        """
        for node in nodes:
            if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.comprehension, ast.NamedExpr)):
                if self.mentions(node, held) or any(each is self.total for each in ast.walk(node)):
                    raise _Escapes
            elif isinstance(node, ast.expr):
                if self.is_sum(node, held):
                    raise _Escapes
            elif isinstance(node, ast.stmt):
                self.statement(node, held)
            else:
                self.nowhere(list(ast.iter_child_nodes(node)), held)

    @staticmethod
    def mentions(node: ast.AST, held: _Held) -> bool:
        return any(isinstance(each, ast.Name) and each.id in held for each in ast.walk(node))
