"""Norms of q and k in front of a rotary embedding, found in the source of one forward,
and put in one launch with it.

    q = self.q_norm(rows).transpose(1, 2)          pair = pair_to_rotate(self.q_norm, self.k_norm)
    k = self.k_norm(others).transpose(1, 2)        q = (self.q_norm(rows) if pair is None else rows).transpose(1, 2)
    v = self.v_proj(x)                       ->    k = (self.k_norm(others) if pair is None else others)...
    q, k = apply_rotary_pos_emb(q, k, cos, sin)    v = self.v_proj(x)
                                                   q, k = norm_and_rotate(pair, apply_rotary_pos_emb, q, k, cos, sin)

    x = self.q_norm(x)                             x = norm_and_rotate_one(self.q_norm, rotate, 2, x, cos, sin)
    x = rotate(x, cos, sin, unsqueeze_dim=2) ->

Between a norm and the rotation a forward may transpose q and k. Whatever else reads
them there, or writes in place, leaves them apart. The rotation may stand under an `if`
without `else`, and so may both norms.
"""

import ast
import copy
import itertools
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ...fused import attention as run_time
from ...fused.source import (
    CannotRewrite,
    call,
    compiled_again,
    forward_source,
    name_of_self,
)
from .rotary import is_rotary
from .uses import Replace, captured, reads

_PAIR = "_hf_rmsnorm_pair"
_WAIT, _ROTATE, _BOTH = (
    "_hf_rmsnorm_pair_to_rotate",
    "_hf_rmsnorm_norm_and_rotate",
    "_hf_rmsnorm_norm_both",
)
_ROTATE_ONE = "_hf_rmsnorm_norm_and_rotate_one"
_HELPERS = {
    _WAIT: run_time.pair_to_rotate,
    _ROTATE: run_time.norm_and_rotate,
    _BOTH: run_time.norm_both,
    _ROTATE_ONE: run_time.norm_and_rotate_one,
}


class QKRefusal(str):
    """Why a forward that normalises q and k is left alone."""


@dataclass(frozen=True)
class QKFusion:
    """The child norms of q and k that are computed with the function that rotates both;
    `children` are all children.
    """

    q: str
    k: str
    rotary: str
    children: frozenset[str]

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with its norms put off to the rotation."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            pair = _pair_of(definition, itself, {self.q, self.k}, self.children)
            _put_off(definition, pair)
            return definition

        return compiled_again(base, change, _HELPERS)

    def __str__(self) -> str:
        return f"{self.q}, {self.k}, {self.rotary} in one launch"


@dataclass(frozen=True)
class SingleFusion:
    """The child norms of an attention that are each computed with a function that
    rotates one tensor.
    """

    norms: tuple[str, ...]
    rotary: str

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with each norm and its rotation as one call."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            for single in _singles(definition, itself, set(self.norms)):
                _join(single)
            return definition

        return compiled_again(base, change, _HELPERS)

    def __str__(self) -> str:
        return (
            ", ".join(f"{norm} with {self.rotary}" for norm in self.norms)
            + ", each in one launch"
        )


def find_qk(cls: type, norms: Set[str], children: Set[str]) -> QKFusion | SingleFusion:
    """What the forward of a class rotates of these child norms' results.

    Args:
        children: names of all children.

    Raises:
        CannotRewrite: it rotates nothing of them directly, or not by a function that
            the kernels compute.
    """
    function, definition = forward_source(cls)
    itself = name_of_self(function)
    singles = list(_singles(definition, itself, norms))
    if singles:
        rotary = singles[0].rotary
        called = function.__globals__.get(rotary)
        if all(s.rotary == rotary and is_rotary(called, s.heads_at) for s in singles):
            return SingleFusion(tuple(single.norm for single in singles), rotary)
    pair = _pair_of(definition, itself, norms, children)
    rotary = pair.rotation.func.id
    if not is_rotary(function.__globals__.get(rotary)):
        raise CannotRewrite(f"no kernel computes its {rotary}")
    return QKFusion(pair.q.norm, pair.k.norm, rotary, frozenset(children))


class _Normed(NamedTuple):
    """``name = self.norm(rows)``, transposed maybe: its statement, and the list of
    statements that this stands in.
    """

    statement: ast.Assign
    block: list[ast.stmt]
    call: ast.Call

    @property
    def name(self) -> str:
        return self.statement.targets[0].id

    @property
    def norm(self) -> str:
        return self.call.func.attr


class _Pair(NamedTuple):
    """A normalised q and k, and the statement that rotates them; `branch` is the `if`
    that it stands under.
    """

    q: _Normed
    k: _Normed
    statement: ast.Assign
    branch: ast.If | None

    @property
    def rotation(self) -> ast.Call:
        return self.statement.value


class _Single(NamedTuple):
    """``x = self.norm(rows)`` and right behind it ``x = rotary(x, cos, sin,
    unsqueeze_dim=heads_at)``.
    """

    block: list[ast.stmt]
    at: int
    norm: str
    rotary: str
    heads_at: int


@dataclass
class _Search:
    """Goes through a forward's statements with the normalised tensors that nothing has
    read or written yet.

    Args:
        norms: names of the children that may be computed with a rotation.
        children: names of all children.
        memory: by the name of a variable, the names that may hold views of the same
            memory.
        waiting: by the name of the variable that holds one, a tensor that was
            normalised.
        pairs: what the search has come to.
    """

    itself: str
    norms: Set[str]
    children: Set[str]
    memory: dict[str, set[str]] = field(default_factory=dict)
    waiting: dict[str, _Normed] = field(default_factory=dict)
    pairs: list[_Pair] = field(default_factory=list)

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement, body)

    def statement(self, statement: ast.stmt, body: list[ast.stmt]) -> None:
        if self._is_plain_branch(statement):
            if sum(self._norm_in(inner) is not None for inner in statement.body) == 2:
                self.block(statement.body)
                return
            if self._rotates(statement.body[-1], statement, statement.body[:-1]):
                return
        if self._rotates(statement) or _is_transposed(statement, self.waiting):
            return
        self._forget(statement)
        self._share(statement)
        norm_call = self._norm_in(statement)
        if norm_call is not None:
            normed = _Normed(statement, body, norm_call)
            self.waiting[normed.name] = normed

    def _is_plain_branch(self, statement: ast.stmt) -> bool:
        return (
            isinstance(statement, ast.If)
            and not statement.orelse
            and not reads(statement.test, self.waiting)
        )

    def _forget(self, statement: ast.stmt) -> None:
        """Drop what a statement may read, or write to."""
        if any(_writes_in_place(node) for node in ast.walk(statement)):
            self.waiting.clear()
        viewed = _viewed(statement, self._norm_in(statement))
        for name, normed in list(self.waiting.items()):
            shared = self.memory.get(name, set()) - {name, viewed}
            if reads(statement, {name, *shared}) or self._mentions_child(
                statement, normed.norm
            ):
                del self.waiting[name]

    def _mentions_child(self, statement: ast.stmt, name: str) -> bool:
        if self._norm_in(statement) is not None:
            return False
        attributes = (
            node for node in ast.walk(statement) if isinstance(node, ast.Attribute)
        )
        return any(
            node.attr == name and getattr(node.value, "id", "") == self.itself
            for node in attributes
        )

    def _share(self, statement: ast.stmt) -> None:
        """Note which variables may hold views of the same memory once a statement has
        run.
        """
        for node in ast.walk(statement):
            if not isinstance(node, ast.Assign):
                continue
            targets = {
                n.id
                for target in node.targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name)
            }
            sources = set(self._tensors_in(node.value))
            related = targets | sources.union(
                *(self.memory.get(name, set()) for name in sources)
            )
            for name in related:
                self.memory[name] = (
                    self.memory.get(name, {name}) | related
                    if name not in targets
                    else related
                )

    def _tensors_in(self, node: ast.AST) -> Iterator[str]:
        """The variables of which an expression may be a view: not what a child reads,
        nor a shape or a number.
        """
        match node:
            case ast.Call(ast.Attribute(ast.Name(self.itself), name)) if (
                name in self.children - self.norms
            ):
                return
            case ast.Attribute(_, "shape" | "dtype" | "device" | "ndim") | ast.Call(
                ast.Attribute(_, "size" | "dim")
            ):
                return
            case ast.Call(ast.Attribute(inner, name)) if name in _SHAPING:
                yield from self._tensors_in(inner)
                return
            case ast.Name(name) if name != self.itself:
                yield name
        for child in ast.iter_child_nodes(node):
            yield from self._tensors_in(child)

    def _norm_in(self, statement: ast.stmt) -> ast.Call | None:
        """The call of a norm in ``name = self.norm(rows)`` or ``name =
        self.norm(rows).transpose(1, 2)``.
        """
        match statement:
            case ast.Assign([ast.Name()], value):
                value = _transposed(value) or value
                match value:
                    case ast.Call(
                        ast.Attribute(ast.Name(self.itself), name), [rows], []
                    ) if name in self.norms:
                        return None if isinstance(rows, ast.Starred) else value
        return None

    def _rotates(
        self,
        statement: ast.stmt,
        branch: ast.If | None = None,
        before: list[ast.stmt] = (),
    ) -> bool:
        """Note ``q, k = rotary(q, k, cos, sin)`` of two that wait; a branch may do
        other things before.
        """
        match statement:
            case ast.Assign(
                [ast.Tuple([ast.Name(q), ast.Name(k)])],
                ast.Call(ast.Name(), [ast.Name(of_q), ast.Name(of_k), *tables], []),
            ) if (of_q, of_k) == (q, k) and q != k and len(tables) == 2:
                pass
            case _:
                return False
        for other in (*before, *tables):
            self._forget(other)
        if q not in self.waiting or k not in self.waiting:
            return False
        of_q, of_k = self.waiting.pop(q), self.waiting.pop(k)
        if of_q.block is of_k.block:
            self.pairs.append(_Pair(of_q, of_k, statement, branch))
        return True


_SHAPING = {
    "view",
    "reshape",
    "transpose",
    "permute",
    "unflatten",
    "flatten",
    "contiguous",
    "unsqueeze",
    "squeeze",
}


def _viewed(statement: ast.AST, norm_call: ast.Call | None) -> str:
    """The variable that a statement makes a view of, and does nothing else with."""
    match norm_call, statement:
        case ast.Call(_, [rows]), _:
            node = rows
        case None, ast.Assign([ast.Name()], node):
            pass
        case _:
            return ""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Call(ast.Attribute(inner, name), _, []) if name in _SHAPING:
                node = inner
            case ast.Subscript(inner):
                node = inner
            case _:
                return ""
    return node.id


def _pair_of(
    definition: ast.FunctionDef, itself: str, norms: Set[str], children: Set[str]
) -> _Pair:
    """The one pair that a forward normalises and rotates; `children` are the names of
    all children.

    Raises:
        CannotRewrite: there is none, or there are more.
    """
    search = _Search(itself, norms, children)
    search.block(definition.body)
    pairs = [
        pair
        for pair in search.pairs
        if captured(definition).isdisjoint({pair.q.name, pair.k.name})
    ]
    if len(pairs) != 1:
        raise CannotRewrite(
            "its forward does not rotate a normalised q and a normalised k directly"
        )
    return pairs[0]


def _put_off(definition: ast.FunctionDef, pair: _Pair) -> None:
    """Let the norms of a pair wait for the rotation."""
    name = ast.Name(_PAIR, ast.Load())
    q, k, rotation = pair.q, pair.k, pair.rotation
    for normed in (q, k):
        waits = ast.Compare(name, [ast.Is()], [ast.Constant(None)])
        rows = copy.deepcopy(normed.call.args[0])
        either = ast.copy_location(ast.IfExp(waits, normed.call, rows), normed.call)
        Replace(normed.call, either).visit(normed.statement)
    first = min((q, k), key=lambda normed: q.block.index(normed.statement)).statement
    both = call(_WAIT, first, copy.deepcopy(q.call.func), copy.deepcopy(k.call.func))
    _insert(q.block, q.block.index(first), _assign(_PAIR, both))
    pair.statement.value = call(_ROTATE, rotation, name, rotation.func, *rotation.args)
    if pair.branch is not None:
        names = (ast.Name(normed.name, ast.Load()) for normed in (q, k))
        unrotated = copy.deepcopy(pair.statement)
        unrotated.value = call(_BOTH, rotation, name, *names)
        pair.branch.orelse = [unrotated]
    if q.block is not definition.body:
        outer = next(
            at
            for at, statement in enumerate(definition.body)
            if q.block is getattr(statement, "body", None)
        )
        _insert(definition.body, outer, _assign(_PAIR, ast.Constant(None)))


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _insert(block: list[ast.stmt], at: int, statement: ast.stmt) -> None:
    block.insert(at, ast.copy_location(statement, block[at]))


def _transposed(value: ast.expr) -> ast.expr | None:
    """x in ``x.transpose(1, 2)``."""
    match value:
        case ast.Call(
            ast.Attribute(inner, "transpose"), [ast.Constant(1), ast.Constant(2)], []
        ):
            return inner
    return None


def _is_transposed(statement: ast.stmt, names: Set[str]) -> bool:
    """Whether this is ``x = x.transpose(1, 2)`` of one of the names."""
    match statement:
        case ast.Assign([ast.Name(name)], value) if name in names:
            inner = _transposed(value)
            return isinstance(inner, ast.Name) and inner.id == name
    return False


def _writes_in_place(node: ast.AST) -> bool:
    """Whether an expression or a statement says that it writes into a tensor."""
    match node:
        case ast.AugAssign():
            return True
        case ast.Subscript(ctx=ast.Store()):
            return True
        case ast.Attribute(_, name):
            return name.endswith("_") and not name.endswith("__")
        case ast.keyword(name):
            return name in ("out", "inplace")
    return False


def _singles(
    definition: ast.FunctionDef, itself: str, norms: Set[str]
) -> Iterator[_Single]:
    for node in ast.walk(definition):
        for block in (getattr(node, part, None) for part in ("body", "orelse")):
            if not isinstance(block, list):
                continue
            for at, (first, second) in enumerate(itertools.pairwise(block)):
                single = _single_at(block, at, first, second, itself, norms)
                if single is not None:
                    yield single


def _single_at(
    block: list[ast.stmt],
    at: int,
    first: ast.stmt,
    second: ast.stmt,
    itself: str,
    norms: Set[str],
) -> _Single | None:
    match first, second:
        case (
            ast.Assign(
                [ast.Name(name)],
                ast.Call(ast.Attribute(ast.Name(owner), norm), [rows], []),
            ),
            ast.Assign(
                [ast.Name(again)],
                ast.Call(
                    ast.Name(rotary),
                    [ast.Name(rotated), ast.Name(cos), ast.Name(sin)],
                    [ast.keyword("unsqueeze_dim", ast.Constant(1 | 2 as heads_at))],
                ),
            ),
        ) if (
            owner == itself
            and norm in norms
            and name == again == rotated
            and name not in (cos, sin)
        ):
            return (
                None
                if isinstance(rows, ast.Starred)
                else _Single(block, at, norm, rotary, heads_at)
            )
    return None


def _join(single: _Single) -> None:
    """Make one call of a norm and the rotation behind it."""
    first, second = single.block[single.at : single.at + 2]
    norm, rotation = first.value, second.value
    _, cos, sin = rotation.args
    second.value = call(
        _ROTATE_ONE,
        rotation,
        norm.func,
        rotation.func,
        single.heads_at,
        *norm.args,
        cos,
        sin,
    )
    single.block[single.at] = ast.copy_location(ast.Pass(), first)
