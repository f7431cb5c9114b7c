"""Residual sums that a norm reads next, found in the source of one forward, and
computed with that norm.

    h = a + b                   h, y = add_and_norm(a, b, self.norm)
    residual = h          ->    residual = h
    x = self.mlp(self.norm(h))  x = self.mlp(y)

    self.norm(a + b)      ->    norm_of_sum(a, b, self.norm)

Nothing but such an alias may stand between the two, and a norm that runs only on a
condition is left alone. One `if` without `else` may stand between: sum and norm are
then put on both of its ways. What scales and shifts the norm's result (`modulation`) is
computed with it, and so is a gate of one summand:

    y = gate * y                h, y = add_and_modulate(h, Product(gate, y), self.norm, scale, shift)
    h = h + y             ->
    y = self.norm(h)
    y = y * (1 + scale) + shift
"""

import ast
import copy
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ...fused import modulated as of_modulations
from ...fused import sums as of_sums
from ...fused.source import call, compiled_again, forward_source, name_of_self
from .helpers import LATER
from .modulation import FACTOR, is_modulated, is_product, mark_modulations
from .order import gather_sums
from .uses import (
    Replace,
    alias_of,
    blocks,
    captured,
    is_read_later,
    leaves,
    reads,
    stays_own,
    unconditional,
)

_PREFIX = "_hf_rmsnorm_"
_NORMED, _PRODUCT = f"{_PREFIX}normed", f"{_PREFIX}product"
_FUNCTIONS = (
    of_sums.add_and_norm, of_sums.add_and_norm_of_seen, of_sums.norm_of_sum,
    of_sums.add_unrounded, of_modulations.modulated, of_modulations.add_and_modulate,
    of_modulations.add_and_modulate_seen, of_modulations.modulated_sum,
)  # fmt: skip
_HELPERS = {f"{_PREFIX}{function.__name__}": function for function in _FUNCTIONS} | {
    _PRODUCT: of_modulations.Product,
    FACTOR: of_modulations.Factor,
    LATER: of_modulations.later,
}
_SIMPLE = ast.Assign, ast.Return, ast.Expr


class Site(NamedTuple):
    """A child norm that is computed with the sum that it reads, with the modulation of
    its result, or with both.
    """

    norm: str
    adds: bool
    modulates: bool

    def __str__(self) -> str:
        return (
            f"{'+ ' * self.adds}{self.norm}{' * (1 + scale) + shift' * self.modulates}"
        )


@dataclass(frozen=True)
class SumFusion:
    """The norms of a forward that are computed with a sum before them or a modulation
    behind them.

    Args:
        norms: the names of those that one launch may compute with a sum.
        rows: the names of those that one launch may compute with a modulation.
        sites: those in the forward.
        keeps: the summands of its other sums are kept for norms that read them
            unrounded.
    """

    norms: frozenset[str]
    rows: frozenset[str]
    sites: tuple[Site, ...]
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
        words = [str(site) for site in self.sites]
        if self.keeps:
            words.append("+ what reads it")
        in_one = any(site.modulates for site in self.sites)
        each = ", each" if len(words) > 1 else ""
        return ", ".join(words) + (f"{each} in one launch" if in_one else "")


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
    return (
        SumFusion(frozenset(norms), frozenset(rows), sites, keeps)
        if sites or keeps
        else None
    )


def _exchange(
    definition: ast.FunctionDef, cls: type, itself: str, norms: Set[str], rows: Set[str]
) -> tuple[Site, ...]:
    """Put the calls in their places; returns the sites."""
    shared = captured(definition)
    exchange = _Exchange(itself, norms, shared)
    modulated = mark_modulations(definition, cls, itself, rows, shared)
    if modulated:
        exchange.merge_products(definition.body, [])
    exchange.block(definition.body, [])
    with_sums = {site.norm for site in exchange.sites if site.modulates}
    exchange.sites.extend(
        Site(norm, False, True) for norm in modulated if norm not in with_sums
    )
    return tuple(dict.fromkeys(exchange.sites))


def adds(cls: type) -> bool:
    """Whether there is a ``+`` in a class's forward; a `CannotRewrite` where it has no
    source.
    """
    return any(_is_sum(node) for node in ast.walk(forward_source(cls)[1]))


@dataclass
class _Exchange:
    """Puts the calls in their places, block by block of a forward.

    Args:
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a sum.
        shared: names that something besides the forward's own statements may read.
        sites: of the calls that were put in their places.
    """

    itself: str
    norms: Set[str]
    shared: set[str]
    sites: list[Site] = field(default_factory=list)

    def merge_products(
        self, body: list[ast.stmt], after: list[ast.stmt] | None
    ) -> None:
        """Make ``h = h + gate * y`` of ``y = gate * y`` and ``h = h + y``, where
        nothing reads that y later.
        """
        for at in range(len(body) - 1, -1, -1):
            statement = body[at]
            rest = None if after is None else body[at + 1 :] + after
            for block, follows in blocks(statement, rest):
                self.merge_products(block, follows)
            if at and rest is not None:
                self._merge(body, at, rest)
        gather_sums(body, _name_of_sum, is_modulated)

    def _merge(self, body: list[ast.stmt], at: int, rest: list[ast.stmt]) -> None:
        match body[at - 1], body[at]:
            case (
                ast.Assign([ast.Name(name)], ast.BinOp(_, ast.Mult(), _) as product),
                ast.Assign(
                    [ast.Name(made)], ast.BinOp(left, ast.Add(), right) as total
                ),
            ):
                pass
            case _:
                return
        is_left, is_right = (
            isinstance(side, ast.Name) and side.id == name for side in (left, right)
        )
        dead = name == made or not is_read_later(name, rest)
        if is_left == is_right or not dead or name in self.shared:
            return
        if is_left:
            total.left = product
        else:
            total.right = product
        del body[at - 1]

    def block(self, body: list[ast.stmt], after: list[ast.stmt] | None) -> None:
        """Exchange the sums in a list of statements; `after` are those that follow it,
        None if that is not known.
        """
        at = 0
        while at < len(body):
            statement = body[at]
            rest = None if after is None else body[at + 1 :] + after
            for block, follows in blocks(statement, rest):
                self.block(block, follows)
            if isinstance(statement, _SIMPLE):
                self._direct(statement)
                self._behind(body, at, after)
            at += 1

    def _direct(self, statement: ast.stmt) -> None:
        """``self.norm(a + b)``"""
        for node in unconditional(statement):
            site = self._site(node)
            if site is None or not _is_sum(node.args[0]):
                continue
            name = "modulated_sum" if site.modulates else "norm_of_sum"
            new = _of_both(name, node.args[0], node)
            node.func, node.args = new.func, new.args
            self.sites.append(site)

    def _behind(
        self, body: list[ast.stmt], at: int, after: list[ast.stmt] | None
    ) -> None:
        """``h = a + b`` and, behind aliases of it, a statement that begins with
        ``self.norm(h)``.
        """
        made = _name_of_sum(body[at])
        if made is None:
            return
        next_at, names = _behind_aliases(body, at + 1, {made})
        if next_at == len(body):
            return
        reader = body[next_at]
        if isinstance(reader, ast.If):
            self._on_both_ways(body, at, next_at, names, after)
            return
        norm = self._first_call(reader, names) if isinstance(reader, _SIMPLE) else None
        if norm is None:
            return
        site = self._site(norm)
        self.sites.append(site)
        normed = ast.copy_location(ast.Name(_NORMED, ast.Load()), norm)
        body[next_at] = reader = Replace(norm, normed).visit(reader)
        stays = after is not None and names.isdisjoint(self.shared)
        stays = stays and stays_own([reader, *body[next_at + 1 :], *after], names)
        _take_both(body[at], norm, _name_of_both(site.modulates, stays))

    def _on_both_ways(
        self, body: list[ast.stmt], at: int, if_at: int, names: set[str], after
    ) -> None:
        """Put the sum, and the norm if it comes behind the `if`, on both ways of it,
        and exchange them there.
        """
        branch = body[if_at]
        if branch.orelse or not _is_plain_test(branch.test, names) or leaves(branch):
            return
        head, tail = body[at:if_at], self._tail(body[if_at + 1 :], names)
        if not (tail or self._begins_with_norm(branch.body, names)):
            return
        inside = [*copy.deepcopy(head), *branch.body, *copy.deepcopy(tail)]
        ways = ast.copy_location(ast.If(branch.test, inside, [*head, *tail]), branch)
        body[at : if_at + 1 + len(tail)] = [ways]
        rest = None if after is None else body[at + 1 :] + after
        for block, follows in blocks(ways, rest):
            self.block(block, follows)

    def _tail(self, statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
        """The aliases behind an `if` and the statement with the norm; empty where
        another statement comes.
        """
        names = set(names)
        for at, statement in enumerate(statements):
            if alias := alias_of(statement, names):
                names |= alias
            elif (
                isinstance(statement, _SIMPLE)
                and self._first_call(statement, names) is not None
            ):
                return statements[: at + 1]
            else:
                break
        return []

    def _begins_with_norm(self, statements: list[ast.stmt], names: set[str]) -> bool:
        at, names = _behind_aliases(statements, 0, names)
        return bool(self._tail(statements[at:], names))

    def _first_call(self, statement: ast.stmt, names: set[str]) -> ast.Call | None:
        """The call of a norm of one of the names, if a statement calls nothing before
        it.
        """
        calls = [
            node for node in unconditional(statement) if isinstance(node, ast.Call)
        ]
        views = {
            node
            for call in calls
            if is_modulated(call)
            for part in call.args[2:]
            for node in ast.walk(part)
        }
        first = next((call for call in calls if call not in views), None)
        if (
            first is None
            or self._site(first) is None
            or not isinstance(first.args[0], ast.Name)
        ):
            return None
        if any(reads(part, names) for part in first.args[1:]):
            return None
        return first if first.args[0].id in names else None

    def _site(self, node: ast.AST) -> Site | None:
        """The norm that a call computes, with its modulation if it has one; None of
        another call.
        """
        if is_modulated(node):
            return Site(node.args[1].attr, True, True)
        match node:
            case ast.Call(
                ast.Attribute(ast.Name(self.itself), name), [argument], []
            ) if name in self.norms:
                return (
                    None
                    if isinstance(argument, ast.Starred)
                    else Site(name, True, False)
                )
        return None


def _behind_aliases(
    body: list[ast.stmt], at: int, names: set[str]
) -> tuple[int, set[str]]:
    """The place behind what may stand between a sum and its norm, and the names that
    the sum has there.
    """
    names = set(names)
    while at < len(body) and _may_stand_between(body[at], names):
        names.update(alias_of(body[at], names))
        at += 1
    return at, names


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _name_of_sum(statement: ast.stmt) -> str | None:
    """The name in ``name = a + b``."""
    match statement:
        case ast.Assign([ast.Name(name)], total) if _is_sum(total):
            return name
    return None


def _may_stand_between(statement: ast.stmt, names: set[str]) -> bool:
    """Whether this is an alias of the sum, or an `if` that only raises and does not
    look at the sum.
    """
    if (
        isinstance(statement, ast.If)
        and not statement.orelse
        and not reads(statement, names)
    ):
        return all(isinstance(inner, ast.Raise) for inner in statement.body)
    return bool(alias_of(statement, names))


def _is_plain_test(test: ast.expr, names: set[str]) -> bool:
    """Whether a condition may be asked before the sum: it calls nothing and does not
    look at the sum.
    """
    return not reads(test, names) and not any(
        isinstance(n, (ast.Call, ast.NamedExpr)) for n in ast.walk(test)
    )


def _name_of_both(modulates: bool, stays_own: bool) -> str:
    if modulates:
        return "add_and_modulate" if stays_own else "add_and_modulate_seen"
    return "add_and_norm" if stays_own else "add_and_norm_of_seen"


def _take_both(statement: ast.Assign, norm: ast.Call, name: str) -> None:
    """Make ``h, normed = name(a, b, norm)`` of ``h = a + b``."""
    total, (target,) = statement.value, statement.targets
    both = ast.Tuple([target, ast.Name(_NORMED, ast.Store())], ast.Store())
    statement.targets = [ast.copy_location(both, target)]
    statement.value = _of_both(name, total, norm)


def _of_both(name: str, total: ast.BinOp, norm: ast.Call) -> ast.Call:
    """``name(a, b, norm, ...)`` of a sum and a call of a norm, which may be modulated."""
    left, right = total.left, total.right
    if not is_modulated(norm):
        return call(f"{_PREFIX}{name}", total, left, right, norm.func)
    if is_product(right):
        right = call(_PRODUCT, right, right.left, right.right)
    elif is_product(left):
        left = call(_PRODUCT, left, left.left, left.right)
    return call(f"{_PREFIX}{name}", total, left, right, *norm.args[1:])


def _keep_summands(definition: ast.FunctionDef, itself: str) -> int:
    """Exchange the sums that are assigned to a name or returned, first in a tuple
    maybe; returns how many.
    """
    count = 0
    for statement in ast.walk(definition):
        if not isinstance(statement, (ast.Assign, ast.Return)):
            continue
        total, holder = statement.value, None
        if isinstance(total, ast.Tuple) and total.elts:
            holder, total = total.elts, total.elts[0]
        if not _is_sum(total):
            continue
        new = call(
            f"{_PREFIX}add_unrounded",
            total,
            total.left,
            total.right,
            ast.Name(itself, ast.Load()),
        )
        if holder is None:
            statement.value = new
        else:
            holder[0] = new
        count += 1
    return count
