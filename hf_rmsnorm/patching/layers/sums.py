"""Residual sums that a norm reads next, found in the source of one forward, and computed with that norm.

    h = a + b                   h, y = add_and_norm(a, b, self.norm)
    residual = h          ->    residual = h
    x = self.mlp(self.norm(h))  x = self.mlp(y)

    self.norm(a + b)      ->    norm_of_sum(a, b, self.norm)

Nothing but such an alias may stand between the two, and a norm that runs only on a condition is left alone. One `if`
without `else` may stand between: sum and norm are then put on both of its ways.
"""

import ast
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from ...fused import sums as run_time
from ...fused.source import call, compiled_again, forward_source
from .uses import Replace, alias_of, captured, leaves, reads, stays_own, unconditional

_BOTH, _BOTH_OF_SEEN = "_hf_rmsnorm_add_and_norm", "_hf_rmsnorm_add_and_norm_of_seen"
_NORM_OF_SUM, _UNROUNDED = "_hf_rmsnorm_norm_of_sum", "_hf_rmsnorm_add_unrounded"
_NORMED = "_hf_rmsnorm_normed"
_HELPERS = {
    _BOTH: run_time.add_and_norm,
    _BOTH_OF_SEEN: run_time.add_and_norm_of_seen,
    _NORM_OF_SUM: run_time.norm_of_sum,
    _UNROUNDED: run_time.add_unrounded,
}
_SIMPLE = ast.Assign, ast.Return, ast.Expr


@dataclass(frozen=True)
class SumFusion:
    """The sums of a forward that are computed with a norm: the child norms that read one.

    keeps: the summands of its other sums are kept for norms that read them unrounded.
    """

    norms: tuple[str, ...] = ()
    keeps: bool = False

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with these sums and norms exchanged."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            _Exchange(itself, set(self.norms), captured(definition)).block(definition.body, [])
            if self.keeps:
                _keep_summands(definition, itself)
            return definition

        return compiled_again(base, change, _HELPERS)

    def __str__(self) -> str:
        return ", ".join([*(f"+ {norm}" for norm in self.norms), *(["+ what reads it"] if self.keeps else [])])


def find_sums(cls: type, norms: set[str], unrounded: bool = False) -> SumFusion | None:
    """The sums of a class's forward that these child norms read; None where there are none.

    unrounded: norms of the model read sums before they are rounded.

    Raises:
        CannotRewrite: the forward has no source that can be compiled again.
    """
    function, original = forward_source(cls)
    definition, itself = copy.deepcopy(original), next(iter(inspect.signature(function).parameters), "")
    exchange = _Exchange(itself, norms, captured(definition))
    exchange.block(definition.body, [])
    keeps = unrounded and _keep_summands(definition, itself) > 0
    found = tuple(dict.fromkeys(exchange.found))
    return SumFusion(found, keeps) if found or keeps else None


def adds(cls: type) -> bool:
    """Whether there is a ``+`` in a class's forward; a `CannotRewrite` where it has no source."""
    return any(_is_sum(node) for node in ast.walk(forward_source(cls)[1]))


@dataclass
class _Exchange:
    """Puts the calls in their places, block by block of a forward.

    Args:
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a sum.
        shared: names that something besides the forward's own statements may read.
        found: the norms of the sums that were exchanged.
    """

    itself: str
    norms: set[str]
    shared: set[str]
    found: list[str] = field(default_factory=list)

    def block(self, body: list[ast.stmt], after: list[ast.stmt] | None) -> None:
        """Exchange what is in a list of statements; `after` are those that follow it, None if that is not known."""
        at = 0
        while at < len(body):
            statement, rest = body[at], None if after is None else body[at + 1 :] + after
            if isinstance(statement, ast.If):
                self._branches(statement, rest)
            elif isinstance(statement, ast.With):
                self.block(statement.body, rest)
            elif isinstance(statement, (ast.For, ast.While)):
                self.block(statement.body, None)
            elif isinstance(statement, _SIMPLE):
                self._direct(statement)
                self._behind(body, at, after)
            at += 1

    def _branches(self, statement: ast.If, after: list[ast.stmt] | None) -> None:
        self.block(statement.body, after)
        self.block(statement.orelse, after)

    def _direct(self, statement: ast.stmt) -> None:
        """``self.norm(a + b)``"""
        for node in unconditional(statement):
            if (name := self._norm(node)) and _is_sum(node.args[0]):
                total = node.args[0]
                new = call(_NORM_OF_SUM, node, total.left, total.right, node.func)
                node.func, node.args = new.func, new.args
                self.found.append(name)

    def _behind(self, body: list[ast.stmt], at: int, after: list[ast.stmt] | None) -> None:
        """``h = a + b`` and, behind aliases of it, a statement that begins with ``self.norm(h)``."""
        made = _name_of_sum(body[at])
        if made is None:
            return
        names, next_at = {made}, at + 1
        while next_at < len(body) and _may_stand_between(body[next_at], names):
            names.update(alias_of(body[next_at], names))
            next_at += 1
        if next_at == len(body):
            return
        reader = body[next_at]
        if isinstance(reader, ast.If):
            self._on_both_ways(body, at, next_at, names, after)
            return
        norm = self._first_call(reader, names) if isinstance(reader, _SIMPLE) else None
        if norm is None:
            return
        self.found.append(norm.func.attr)
        body[next_at] = reader = Replace(norm, ast.copy_location(ast.Name(_NORMED, ast.Load()), norm)).visit(reader)
        own = after is not None and names.isdisjoint(self.shared)
        own = own and stays_own([reader, *body[next_at + 1 :], *after], names)
        _take_both(body[at], norm.func, _BOTH if own else _BOTH_OF_SEEN)

    def _on_both_ways(self, body: list[ast.stmt], at: int, if_at: int, names: set[str], after) -> None:
        """Put the sum, and the norm if it comes behind the `if`, on both ways of it, and exchange them there."""
        branch = body[if_at]
        if branch.orelse or not _is_plain_test(branch.test, names) or leaves(branch):
            return
        head, tail = body[at:if_at], self._tail(body[if_at + 1 :], names)
        if not (tail or self._begins_with_norm(branch.body, names)):
            return
        inside = [*copy.deepcopy(head), *branch.body, *copy.deepcopy(tail)]
        ways = ast.copy_location(ast.If(branch.test, inside, [*head, *tail]), branch)
        body[at : if_at + 1 + len(tail)] = [ways]
        self._branches(ways, None if after is None else body[at + 1 :] + after)

    def _tail(self, statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
        """The aliases behind an `if` and the statement with the norm; empty where that is not what comes."""
        names = set(names)
        for at, statement in enumerate(statements):
            if alias := alias_of(statement, names):
                names |= alias
            elif isinstance(statement, _SIMPLE) and self._first_call(statement, names) is not None:
                return statements[: at + 1]
            else:
                break
        return []

    def _begins_with_norm(self, statements: list[ast.stmt], names: set[str]) -> bool:
        at, names = 0, set(names)
        while at < len(statements) and _may_stand_between(statements[at], names):
            names.update(alias_of(statements[at], names))
            at += 1
        return bool(self._tail(statements[at:], names))

    def _first_call(self, statement: ast.stmt, names: set[str]) -> ast.Call | None:
        """The call of a norm of one of the names, if that is what a statement calls first."""
        first = next((n for n in unconditional(statement) if isinstance(n, ast.Call)), None)
        if first is None or not self._norm(first) or not isinstance(first.args[0], ast.Name):
            return None
        return first if first.args[0].id in names else None

    def _norm(self, node: ast.AST) -> str:
        """The name of the child norm that is called with one argument; "" of anything else."""
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), name), [argument], []) if owner == self.itself:
                return name if name in self.norms and not isinstance(argument, ast.Starred) else ""
        return ""


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _name_of_sum(statement: ast.stmt) -> str | None:
    """The name in ``name = a + b``."""
    match statement:
        case ast.Assign([ast.Name(name)], total) if _is_sum(total):
            return name
    return None


def _may_stand_between(statement: ast.stmt, names: set[str]) -> bool:
    """Whether this is an alias of the sum, or an `if` that only raises and does not look at the sum."""
    if isinstance(statement, ast.If) and not statement.orelse and not reads(statement, names):
        return all(isinstance(inner, ast.Raise) for inner in statement.body)
    return bool(alias_of(statement, names))


def _is_plain_test(test: ast.expr, names: set[str]) -> bool:
    """Whether a condition may be asked before the sum: it calls nothing and does not look at the sum."""
    return not reads(test, names) and not any(isinstance(n, (ast.Call, ast.NamedExpr)) for n in ast.walk(test))


def _take_both(statement: ast.Assign, norm: ast.expr, function: str) -> None:
    """Make ``h, normed = function(a, b, norm)`` of ``h = a + b``."""
    total, (target,) = statement.value, statement.targets
    both = ast.Tuple([target, ast.Name(_NORMED, ast.Store())], ast.Store())
    statement.targets = [ast.copy_location(both, target)]
    statement.value = call(function, total, total.left, total.right, norm)


def _keep_summands(definition: ast.FunctionDef, itself: str) -> int:
    """Exchange the sums that are assigned to a name or returned, first in a tuple maybe; returns how many."""
    count = 0
    for statement in ast.walk(definition):
        if not isinstance(statement, (ast.Assign, ast.Return)):
            continue
        total, holder = statement.value, None
        if isinstance(total, ast.Tuple) and total.elts:
            holder, total = total.elts, total.elts[0]
        if not _is_sum(total):
            continue
        new = call(_UNROUNDED, total, total.left, total.right, ast.Name(itself, ast.Load()))
        if holder is None:
            statement.value = new
        else:
            holder[0] = new
        count += 1
    return count
