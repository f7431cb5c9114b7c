"""Residual sums that a norm reads next, found in the source of one forward, and
computed with that norm.

    h = a + b                   h, y = add_and_norm(a, b, self.norm)
    residual = h          ->    residual = h
    x = self.mlp(self.norm(h))  x = self.mlp(y)

    self.norm(a + b)      ->    norm_of_sum(self.norm, a, b)

Between the two may stand such an alias (LLaMA), and what only computes with other
variables (HunyuanVideo adds to two streams before it normalises them). A norm that runs
only on a condition is left alone. One `if` without `else` may stand between, if its condition and
the sum only compute: sum and norm are then put on both of its ways (GPT-2, Whisper and
BART, whose decoders may have cross-attention). What scales and shifts the norm's result
(`modulation`) is computed with it, and so is a gate of one summand (diffusers):

    y = gate * y                h, y = add_and_modulate(h, gate, y, self.norm, scale, shift)
    h = h + y             ->
    y = self.norm(h)
    y = y * (1 + scale) + shift

`fusions.find_fusion` calls `fuse_sums`. The functions that the changed forward calls are in
`fused.sums` and `fused.modulated`.
"""

import ast
import copy
import inspect
from collections.abc import Set
from typing import NamedTuple

from ...fused.later import later_in
from ...fused.modulated import add_and_modulate, modulated
from ...fused.sums import add_and_norm, norm_of_sum
from ..source import is_of_library
from .calls import call, called
from .modulation import Modulations
from .statements import (
    Replace,
    Statements,
    alias_of,
    bound,
    first_effect,
    is_dead_behind,
    may_pass,
    norm_input,
    only_adds_and_scales,
    only_computes,
    reads,
)


def fuse_sums(
    definition: ast.FunctionDef, cls: type, norms: Set[str], modulated_norms: Set[str]
) -> list[str]:
    """Compute norms with the sum before them or the modulation behind them; returns
    these pieces in words.

    Args:
        definition: of the forward of a class; it is changed.
        norms: the names of the children that one launch may compute with a sum.
        modulated_norms: the names of those that it may compute with a modulation.
    """
    _, *inside = ast.walk(definition)
    if any(_hides_code(node, cls) for node in inside):
        return []
    Modulations(cls, modulated_norms).visit(definition)
    fuser = _SumFuser(norms)
    fuser.fuse_block(definition.body, [])
    fuser.visit(definition)
    return list(dict.fromkeys(fuser.pieces))


def _hides_code(node: ast.AST, cls: type) -> bool:
    """Whether other code may read any variable, as an inner function does, or runs where
    a property of this class is read. A library's, as diffusers' `config`, has no effect.
    """
    match node:
        case ast.FunctionDef() | ast.Global() | ast.Lambda():
            return True
        case ast.Attribute(ast.Name("self"), name):
            found = inspect.getattr_static(cls, name, None)
            return isinstance(found, property) and not is_of_library(found.fget)
    return False


class _NextNorm(NamedTuple):
    """What follows a sum.

    Args:
        passed: how many statements only give the sum another name, or do not read it.
        names: the names that it has behind them.
        call: that of the norm of the sum, if the statement begins with it.
    """

    passed: int
    names: set[str]
    call: ast.Call | None


class _SumFuser(ast.NodeTransformer):
    """Joins sums and norms: of two statements by `fuse_block`, of one expression by
    `visit`.

    Args:
        norms: the names of the children that may be computed with a sum.

    Attributes:
        pieces: the joined ones, in words.
    """

    def __init__(self, norms: Set[str]):
        self.norms = norms
        self.pieces: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``self.norm(a + b)``, and modulations without a sum."""
        self.generic_visit(node)
        match self._norm_inputs(node):
            case [ast.BinOp(left, ast.Add(), right) as total, *_]:
                self._note(node, "+ ")
                if called(node) is not modulated:
                    return call(norm_of_sum, node, node.func, left, right)
                both = _add_and_norm(total, node)
                return ast.Subscript(both, ast.Constant(1), ast.Load())
        if called(node) in (modulated, later_in):
            self._note(node, "")
        return node

    def fuse_block(self, body: Statements, after: Statements) -> None:
        """Fuse the sums in a list of statements; `after` are those that follow it."""
        for at, statement in enumerate(body):  # which may get shorter behind
            match statement:
                case ast.Assign([ast.Name(name)], ast.BinOp(op=ast.Add())):
                    next_norm = self._next_norm(body[at + 1 :], {name})
                    if next_norm.call is not None:
                        self._fuse(body, at, next_norm, after)
                    else:
                        self._copy_into_branches(body, at, next_norm)
            match body[at]:
                case ast.If(_, inside, otherwise):
                    rest = [*body[at + 1 :], *after]
                    self.fuse_block(inside, rest)
                    self.fuse_block(otherwise, rest)

    def _fuse(
        self, body: Statements, at: int, next_norm: _NextNorm, after: Statements
    ) -> None:
        """Fuse ``h = a + b`` with the norm of h in a statement behind it."""
        norm = next_norm.call
        self._note(norm, "+ ")
        if called(norm) is modulated and at:
            _take_product(body, at, after)
        adds = body[at]
        fused = _add_and_norm(adds.value, norm)
        normed = f"_hf_rmsnorm_normed_{len(self.pieces)}"
        reader_at = at + 1 + next_norm.passed
        use = ast.Name(normed, ast.Load())
        body[reader_at] = Replace(norm, use).visit(body[reader_at])
        if not only_adds_and_scales([*body[reader_at:], *after], next_norm.names):
            fused.keywords.append(ast.keyword("shared", ast.Constant(True)))
        names = [*adds.targets, ast.Name(normed, ast.Store())]
        adds.targets = [ast.Tuple(names, ast.Store())]
        adds.value = fused

    def _copy_into_branches(
        self, body: Statements, at: int, next_norm: _NextNorm
    ) -> None:
        """Put a sum on both ways of the `if` that follows it, and the norm too if that
        comes behind, to be fused there.
        """
        if_at = at + 1 + next_norm.passed
        head = body[at:if_at]
        match body[if_at:]:
            case [ast.If(test, inside, []) as branch, *behind] if may_pass(
                test, bound(*head)
            ):
                pass
            case _:
                return
        if not only_computes(body[at].value):
            return
        names = next_norm.names
        following = self._next_norm(behind, names)
        count = 0 if following.call is None else following.passed + 1
        if not count and self._next_norm(inside, names).call is None:
            return
        tail = behind[:count]
        branch.orelse = head + tail
        branch.body = copy.deepcopy(head) + inside + copy.deepcopy(tail)
        body[at : if_at + 1 + count] = [branch]

    def _next_norm(self, statements: Statements, names: set[str]) -> _NextNorm:
        """The norm of a sum that a statement behind it begins with; what stands between
        is as well computed behind the norm.
        """
        names = set(names)
        changed = set(names)
        for passed, statement in enumerate(statements):
            alias = alias_of(statement, names)
            if not alias and not may_pass(statement, names):
                norm = self._first_norm(statement, names, changed)
                return _NextNorm(passed, names, norm)
            names |= alias
            changed |= bound(statement)
        return _NextNorm(len(statements), names, None)

    def _first_norm(
        self, statement: ast.stmt, names: set[str], changed: set[str]
    ) -> ast.Call | None:
        """The norm of one of these names, where a statement calls that first, with a
        scale and shift that are not changed before.
        """
        effect = first_effect(statement)
        match self._norm_inputs(effect):
            case [ast.Name(name), *modulation] if name in names:
                if not any(reads(part, changed) for part in modulation):
                    return effect
        return None

    def _norm_inputs(self, node: ast.AST | None) -> list[ast.expr]:
        """The operands of a norm: its input, and its scale and shift; none of another
        call.
        """
        if called(node) is modulated:
            return [node.args[0], *node.args[2:]]
        rows = norm_input(node, self.norms)
        return [] if rows is None else [rows]

    def _note(self, norm: ast.Call, before: str) -> None:
        """Note a norm in words."""
        child = norm.func
        behind = ""
        if called(norm) in (modulated, later_in):
            child = norm.args[1]
            behind = " * (1 + scale) + shift"
        self.pieces.append(f"{before}{child.attr}{behind}")


def _take_product(body: Statements, at: int, after: Statements) -> None:
    """Join ``y = gate * y; h = h + y`` into ``h = h + gate * y``, if nothing reads y
    later.
    """
    total = body[at].value
    match body[at - 1], total:
        case (
            ast.Assign([ast.Name(name)], ast.BinOp(op=ast.Mult()) as product),
            ast.BinOp(ast.Name(left), _, ast.Name(right)),
        ) if left != name == right:
            if is_dead_behind(body[at], name, [*body[at + 1 :], *after]):
                total.right = product
                body[at - 1] = ast.Pass()


def _add_and_norm(total: ast.BinOp, norm: ast.Call) -> ast.Call:
    """``(a + b, norm(a + b))`` in one call, of a norm that may be modulated."""
    if called(norm) is not modulated:
        return call(add_and_norm, total, total.left, total.right, norm.func)
    factors = [total.right, None]
    match total.right:
        case ast.BinOp(left, ast.Mult(), right):
            factors = [left, right]
    return call(add_and_modulate, total, total.left, *factors, *norm.args[1:])
