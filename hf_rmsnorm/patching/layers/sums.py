"""Residual sums that a norm reads next, found in the source of one forward, and
computed with that norm.

    h = a + b                   h, y = add_and_norm(a, b, self.norm)
    residual = h          ->    residual = h
    x = self.mlp(self.norm(h))  x = self.mlp(y)

    self.norm(a + b)      ->    add_and_norm(a, b, self.norm)[1]

Only such an alias, and statements that only compute and do not mention the sum, may
stand between the two. A norm that runs only on a condition is left alone. One `if`
without `else` may stand between: sum and norm are then put on both of its ways. What
scales and shifts the norm's result (`modulation`) is computed with it, and so is a gate
of one summand:

    y = gate * y                h, y = add_and_modulate(h, gate, y, self.norm, scale, shift)
    h = h + y             ->
    y = self.norm(h)
    y = y * (1 + scale) + shift
"""

import ast
import copy
from collections.abc import Set
from typing import NamedTuple

from ...fused.modulated import add_and_modulate
from ...fused.sums import add_and_norm
from .calls import call, is_modulated
from .modulation import Modulations
from .statements import (
    Replace,
    Statements,
    alias_of,
    bound,
    first_effect,
    is_dead_behind,
    is_plain_test,
    is_product,
    is_sum,
    norm_input,
    only_adds_and_scales,
    only_computes,
    reads,
)


def fuse_sums(
    definition: ast.FunctionDef,
    cls: type,
    itself: str,
    norms: Set[str],
    rows: Set[str],
) -> list[str]:
    """Compute norms with the sum before them or the modulation behind them; returns
    these pieces in words.

    Args:
        definition: of the forward of a class; it is changed.
        itself: the forward's name for its module.
        norms: the names of the children that one launch may compute with a sum.
        rows: the names of those that one launch may compute with a modulation.
    """
    _, *inside = ast.walk(definition)
    if any(isinstance(node, (ast.FunctionDef, ast.Lambda)) for node in inside):
        return []  # it may read any variable
    Modulations(cls, itself, rows).visit(definition)
    exchange = _Exchange(itself, norms)
    exchange.block(definition.body, [])
    exchange.visit(definition)
    return list(dict.fromkeys(exchange.sites))


class _Reader(NamedTuple):
    """The first statement behind a sum that is more than an alias or a computation.

    Args:
        at: how many stand between.
        names: the names that the sum has there.
        norm: the norm of the sum, if the statement begins with it.
    """

    at: int
    names: set[str]
    norm: ast.Call | None


class _Exchange(ast.NodeTransformer):
    """Puts the calls in their places: of two statements by `block`, of one expression
    by `visit`.

    Args:
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a sum.
    """

    def __init__(self, itself: str, norms: Set[str]):
        self.itself = itself
        self.norms = norms
        self.sites: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``self.norm(a + b)``, and what is left of modulations."""
        self.generic_visit(node)
        inputs = self._inputs(node)
        if inputs and is_sum(inputs[0]):
            self._note(node, "+ ")
            both = _of_both(inputs[0], node)
            return ast.Subscript(both, ast.Constant(1), ast.Load())
        if is_modulated(node, or_later=True):
            self._note(node, "")
        return node

    def block(self, body: Statements, after: Statements) -> None:
        """Exchange the sums in a list of statements; `after` are those that follow it."""
        for at, statement in enumerate(body):  # which may get shorter behind
            match statement:
                case ast.Assign([ast.Name(name)], total) if is_sum(total):
                    self._behind(body, at, name, after)
            match body[at]:
                case ast.If(_, inside, otherwise):
                    rest = [*body[at + 1 :], *after]
                    self.block(inside, rest)
                    self.block(otherwise, rest)

    def _behind(self, body: Statements, at: int, name: str, after: Statements) -> None:
        """Exchange ``h = a + b`` and a statement behind it that begins with
        ``self.norm(h)``.
        """
        adds, *following = body[at:]
        reader = self._reader(following, {name})
        if reader.norm is None:
            self._on_both_ways(body, at, reader)
            return
        self._note(reader.norm, "+ ")
        normed = f"_hf_rmsnorm_normed_{len(self.sites)}"
        use = ast.Name(normed, ast.Load())
        changed = Replace(reader.norm, use).visit(following[reader.at])
        body[at + 1 + reader.at] = changed
        if is_modulated(reader.norm) and at:
            self._take_product(body, at, following + after)
        both = _of_both(adds.value, reader.norm)
        later = [changed, *following[reader.at + 1 :], *after]
        if not only_adds_and_scales(later, reader.names):
            shared = ast.keyword("shared", ast.Constant(True))
            both.keywords.append(shared)
        names = [*adds.targets, ast.Name(normed, ast.Store())]
        adds.targets = [ast.Tuple(names, ast.Store())]
        adds.value = both

    def _take_product(self, body: Statements, at: int, later: Statements) -> None:
        """Make ``h = h + gate * y`` of ``y = gate * y`` and ``h = h + y``, where
        nothing reads that y later.
        """
        total = body[at].value
        match body[at - 1], total:
            case (
                ast.Assign([ast.Name(name)], product),
                ast.BinOp(ast.Name(left), _, ast.Name(right)),
            ) if is_product(product) and left != name == right:
                if is_dead_behind(body[at], name, later):
                    total.right = product
                    body[at - 1] = ast.Pass()

    def _on_both_ways(self, body: Statements, at: int, reader: _Reader) -> None:
        """Put a sum that an `if` reads first, and the norm if it comes behind that, on
        both ways of it, to be exchanged there.
        """
        if_at = at + 1 + reader.at
        head = body[at:if_at]
        match body[if_at:]:
            case [ast.If(test, inside, []) as branch, *behind] if is_plain_test(
                test, bound(*head)
            ):
                next_reader = self._reader(behind, reader.names)
                count = 0 if next_reader.norm is None else next_reader.at + 1
                if count or self._reader(inside, reader.names).norm is not None:
                    tail = behind[:count]
                    branch.orelse = head + tail
                    branch.body = copy.deepcopy(head) + inside + copy.deepcopy(tail)
                    body[at : if_at + 1 + count] = [branch]

    def _reader(self, statements: Statements, names: set[str]) -> _Reader:
        """The first statement behind a sum that is no alias and does more than compute."""
        names = set(names)
        at = 0
        while at < len(statements) and self._may_pass(statements[at], names):
            names |= alias_of(statements[at], names)
            at += 1
        norm = None
        if at < len(statements):
            norm = first_effect(statements[at])
        row, *modulation = self._inputs(norm) or [None]
        changed = names | bound(*statements[:at])
        is_of_sum = isinstance(row, ast.Name) and row.id in names
        if not is_of_sum or any(reads(part, changed) for part in modulation):
            norm = None
        return _Reader(at, names, norm)

    def _may_pass(self, statement: ast.stmt, names: set[str]) -> bool:
        """Whether a norm of a sum may be computed before a statement as well."""
        if reads(statement, names):
            return bool(alias_of(statement, names))
        return only_computes(statement, self._is_norm)

    def _is_norm(self, node: ast.AST) -> bool:
        return self._inputs(node) is not None

    def _inputs(self, node: ast.AST | None) -> list[ast.expr] | None:
        """What a norm is computed with: its input, and its scale and shift; None of
        another call.
        """
        if is_modulated(node):
            return [node.args[0], *node.args[2:]]
        rows = norm_input(node, self.itself, self.norms)
        return None if rows is None else [rows]

    def _note(self, norm: ast.Call, before: str) -> None:
        """Note a norm in words."""
        child = norm.func
        behind = ""
        if is_modulated(norm, or_later=True):
            child = norm.args[1]
            behind = " * (1 + scale) + shift"
        self.sites.append(f"{before}{child.attr}{behind}")


def _of_both(total: ast.BinOp, norm: ast.Call) -> ast.Call:
    """``(a + b, norm(a + b))`` in one call, of a norm that may be modulated."""
    right = total.right
    if not is_modulated(norm):
        return call(add_and_norm, total, total.left, right, norm.func)
    factors = [right, None]
    if is_product(right):
        factors = [right.left, right.right]
    return call(add_and_modulate, total, total.left, *factors, *norm.args[1:])
