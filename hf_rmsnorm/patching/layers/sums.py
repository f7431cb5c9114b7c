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
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

from ...fused import modulated, sums
from ...fused.source import call, compiled_again, forward_source, name_of_self
from .helpers import LATER, is_later
from .modulation import FACTOR, Modulations
from .statements import (
    MODULATED,
    Replace,
    alias_of,
    bound,
    captured,
    first_effect,
    is_modulated,
    is_plain_test,
    is_product,
    is_read_later,
    is_sum,
    leaves,
    norm_input,
    only_adds_and_scales,
    only_computes,
    reads,
)

_PREFIX = "_hf_rmsnorm_"
_ADD_AND_NORM = f"{_PREFIX}add_and_norm"
_ADD_AND_MODULATE = f"{_PREFIX}add_and_modulate"
_ADD_UNROUNDED = f"{_PREFIX}add_unrounded"
_SIMPLE = ast.Assign, ast.Return, ast.Expr
_HELPERS = {
    _ADD_AND_NORM: sums.add_and_norm,
    _ADD_AND_MODULATE: modulated.add_and_modulate,
    _ADD_UNROUNDED: sums.add_unrounded,
    MODULATED: modulated.modulated,
    FACTOR: modulated.OnePlusScale,
    LATER: modulated.later,
}


@dataclass(frozen=True)
class SumFusion:
    """The norms of a forward that are computed with a sum before them or a modulation
    behind them.

    Args:
        norms: the names of those that one launch may compute with a sum.
        rows: the names of those that one launch may compute with a modulation.
        sites: those in the forward, in words.
        keeps: the summands of its other sums are kept for norms that read them
            unrounded.
    """

    norms: frozenset[str]
    rows: frozenset[str]
    sites: tuple[str, ...]
    keeps: bool = False

    @property
    def keeps_bits(self) -> bool:
        """Whether the layer returns what it returns unfused, bit by bit."""
        return not self.keeps

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with these sums, norms and modulations exchanged."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            _exchange(definition, base, itself, self.norms, self.rows)
            if self.keeps:
                _keep_summands(definition, itself)
            return definition

        return compiled_again(base, change, _HELPERS)

    def __str__(self) -> str:
        words = list(self.sites)
        if self.keeps:
            words.append("+ what reads it")
        if any("*" in site for site in self.sites):
            words[-1] += ", each in one launch" if len(words) > 1 else " in one launch"
        return ", ".join(words)


def find_sums(
    cls: type, norms: Set[str], rows: Set[str], unrounded: bool = False
) -> SumFusion | None:
    """The sums and modulations around these child norms in the forward of a class; None
    where there are none.

    Args:
        norms: the names of those that one launch may compute with a sum.
        rows: the names of those that one launch may compute with a modulation.
        unrounded: norms of the model read sums before they are rounded.

    Raises:
        CannotRewrite: the forward has no source that can be compiled again.
    """
    function, original = forward_source(cls)
    definition, itself = copy.deepcopy(original), name_of_self(function)
    sites = _exchange(definition, cls, itself, norms, rows)
    keeps = unrounded and _keep_summands(definition, itself) > 0
    if not (sites or keeps):
        return None
    return SumFusion(frozenset(norms), frozenset(rows), sites, keeps)


def _exchange(
    definition: ast.FunctionDef,
    cls: type,
    itself: str,
    norms: Set[str],
    rows: Set[str],
) -> tuple[str, ...]:
    """Put the calls in their places; returns the norms in them, in words."""
    shared = captured(definition)
    Modulations(cls, itself, rows, shared).visit(definition)
    exchange = _Exchange(itself, norms, shared)
    exchange.block(definition.body, [])
    exchange.visit(definition)
    return tuple(dict.fromkeys(exchange.sites))


class _Reader(NamedTuple):
    """The first statement behind a sum that is more than an alias or a computation.

    Args:
        at: how many stand between.
        names: the names that the sum has there.
        bound: the names that those between have bound.
        norm: the norm of the sum, if the statement begins with it.
    """

    at: int
    names: set[str]
    bound: set[str]
    norm: ast.Call | None


class _Exchange(ast.NodeTransformer):
    """Puts the calls in their places: of two statements by `block`, of one expression
    by `visit`.

    Args:
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a sum.
        shared: names that something besides the forward's own statements may read.
    """

    def __init__(self, itself: str, norms: Set[str], shared: Set[str]):
        self.itself = itself
        self.norms = norms
        self.shared = shared
        self.sites: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``self.norm(a + b)``, and what is left of modulations."""
        self.generic_visit(node)
        inputs = self._inputs(node)
        if inputs and is_sum(inputs[0]):
            self._note(node, True)
            both = _of_both(inputs[0], node)
            last = ast.Subscript(both, ast.Constant(1), ast.Load())
            return ast.copy_location(last, node)
        if is_modulated(node) or is_later(node):
            self._note(node, False)
        return node

    def block(self, body: list[ast.stmt], after: list[ast.stmt]) -> None:
        """Exchange the sums in a list of statements; `after` are those that follow it."""
        at = 0
        while at < len(body):
            self._behind(body, at, after)
            if isinstance(body[at], ast.If):
                rest = [*body[at + 1 :], *after]
                self.block(body[at].body, rest)
                self.block(body[at].orelse, rest)
            at += 1

    def _behind(self, body: list[ast.stmt], at: int, after: list[ast.stmt]) -> None:
        """``h = a + b`` and a statement behind it that begins with ``self.norm(h)``."""
        match body[at]:
            case ast.Assign([ast.Name(made)], total) if is_sum(total):
                pass
            case _:
                return
        following = body[at + 1 :]
        reader = self._reader(following, {made})
        if reader.norm is None:
            self._on_both_ways(body, at, reader)
            return
        self._note(reader.norm, True)
        target = ast.Name(f"{_PREFIX}normed_{len(self.sites)}", ast.Store())
        normed = ast.copy_location(ast.Name(target.id, ast.Load()), reader.norm)
        changed = Replace(reader.norm, normed).visit(following[reader.at])
        body[at + 1 + reader.at] = changed
        later = [changed, *following[reader.at + 1 :], *after]
        if is_modulated(reader.norm) and at:
            self._take_product(body, at, [*following, *after])
        both = _of_both(total, reader.norm)
        if reader.names & self.shared or not only_adds_and_scales(later, reader.names):
            both.keywords.append(ast.keyword("seen", ast.Constant(True)))
        targets = ast.Tuple([body[at].targets[0], target], ast.Store())
        body[at].targets = [ast.copy_location(targets, total)]
        body[at].value = both

    def _take_product(
        self, body: list[ast.stmt], at: int, later: list[ast.stmt]
    ) -> None:
        """Make ``h = h + gate * y`` of ``y = gate * y`` and ``h = h + y``, where
        nothing reads that y later.
        """
        total = body[at].value
        match body[at - 1], total.right:
            case ast.Assign([ast.Name(name)], product), ast.Name(right) if (
                is_product(product) and name == right and name not in self.shared
            ):
                pass
            case _:
                return
        is_dead = name == body[at].targets[0].id or not is_read_later(name, later)
        if not is_dead or reads(total.left, {name}):
            return
        # The product is then computed behind the other summand. Dropouts of both
        # would draw their numbers in another order.
        may_move = only_computes(product, self._inputs)
        if may_move or isinstance(total.left, ast.Name):
            total.right = product
            body[at - 1] = ast.copy_location(ast.Pass(), body[at - 1])

    def _on_both_ways(self, body: list[ast.stmt], at: int, reader: _Reader) -> None:
        """Put a sum that an `if` reads first, and the norm if it comes behind that, on
        both ways of it, to be exchanged there.
        """
        if_at = at + 1 + reader.at
        branch = body[if_at] if if_at < len(body) else None
        if not isinstance(branch, ast.If) or branch.orelse or leaves(branch):
            return
        if not is_plain_test(branch.test, reader.names | reader.bound):
            return
        behind = self._reader(body[if_at + 1 :], reader.names)
        inside = self._reader(branch.body, reader.names)
        end = if_at + 1
        if behind.norm is not None:
            end += behind.at + 1
        elif inside.norm is None:
            return
        head, tail = body[at:if_at], body[if_at + 1 : end]
        branch.body = [*copy.deepcopy(head), *branch.body, *copy.deepcopy(tail)]
        branch.orelse = [*head, *tail]
        body[at:end] = [branch]

    def _reader(self, statements: list[ast.stmt], names: set[str]) -> _Reader:
        """The first statement behind a sum that is no alias and does more than compute."""
        names, others, at = set(names), set(), 0
        while at < len(statements) and self._may_pass(statements[at], names):
            names |= alias_of(statements[at], names)
            others |= bound(statements[at])
            at += 1
        norm = None
        if at < len(statements) and isinstance(statements[at], _SIMPLE):
            norm = first_effect(statements[at])
        row, *modulation = self._inputs(norm) or [None]
        moved = any(reads(part, names | others) for part in modulation)
        if moved or getattr(row, "id", "") not in names:
            norm = None
        return _Reader(at, names, others, norm)

    def _may_pass(self, statement: ast.stmt, names: set[str]) -> bool:
        """Whether a norm of a sum may be computed before a statement as well."""
        if reads(statement, names):
            return bool(alias_of(statement, names))
        return only_computes(statement, self._inputs)

    def _inputs(self, node: ast.AST | None) -> list[ast.expr] | None:
        """What a norm is computed with: its input, and its scale and shift; None of
        another call.
        """
        if is_modulated(node):
            return [node.args[0], *node.args[2:]]
        rows = norm_input(node, self.itself, self.norms)
        return None if rows is None else [rows]

    def _note(self, norm: ast.Call, adds: bool) -> None:
        """Note a norm in words."""
        modulates = is_modulated(norm) or is_later(norm)
        child = norm.args[1] if modulates else norm.func
        words = " * (1 + scale) + shift" if modulates else ""
        self.sites.append(f"{'+ ' * adds}{child.attr}{words}")


def _of_both(total: ast.BinOp, norm: ast.Call) -> ast.Call:
    """``(a + b, norm(a + b))`` in one call, of a norm that may be modulated."""
    left, right = total.left, total.right
    if not is_modulated(norm):
        return call(_ADD_AND_NORM, total, left, right, norm.func)
    factors = [right, ast.Constant(None)]
    if is_product(right):
        factors = [right.left, right.right]
    return call(_ADD_AND_MODULATE, total, left, *factors, *norm.args[1:])


def _keep_summands(definition: ast.FunctionDef, itself: str) -> int:
    """Exchange the sums that are assigned to a name or returned, first in a tuple
    maybe; returns how many.
    """
    count = 0
    for statement in ast.walk(definition):
        if not isinstance(statement, (ast.Assign, ast.Return)):
            continue
        total = statement.value
        if isinstance(total, ast.Tuple) and total.elts:
            total = total.elts[0]
        if not is_sum(total):
            continue
        operands = total.left, total.right, ast.Name(itself, ast.Load())
        new = call(_ADD_UNROUNDED, total, *operands)
        statement.value = Replace(total, new).visit(statement.value)
        count += 1
    return count
