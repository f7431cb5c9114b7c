"""Norms of q and k in front of a rotary embedding, found in the source of one forward,
and put in one launch with it.

    q = self.q_norm(rows).transpose(1, 2)          norms = waiting(self.q_norm, self.k_norm)
    k = self.k_norm(others).transpose(1, 2)        q = norm_now(norms, self.q_norm, rows).transpose(1, 2)
    v = self.v_proj(x)                       ->    k = norm_now(norms, self.k_norm, others).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)    v = self.v_proj(x)
                                                   q, k = norm_and_rotate(norms, True, apply_rotary_pos_emb, q, k, ...)

    x = self.q_norm(x)                             norms = waiting(self.q_norm)
    x = rotate(x, cos, sin, unsqueeze_dim=2) ->    x = norm_now(norms, self.q_norm, x)
                                                   x = norm_and_rotate_one(norms, False, rotate, x, ...)

Between a norm and the rotation a forward may transpose q and k, and may do what can
neither read nor write them: compute, and call children on its own arguments. The
rotation may stand under an `if` without `else`, and so may both norms.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ...fused import attention as run_time
from ...fused.source import call, compiled_again, forward_source, name_of_self
from .rotary import is_rotary
from .statements import (
    FACTS,
    Replace,
    captured,
    is_plain_test,
    norm_input,
    only_computes,
    reads,
)

_LOAD = ast.Load()
_NORMS = "_hf_rmsnorm_norms"
_WAITING = "_hf_rmsnorm_waiting"
_NORM_NOW = "_hf_rmsnorm_norm_now"
_ROTATE = "_hf_rmsnorm_norm_and_rotate"
_ROTATE_ONE = "_hf_rmsnorm_norm_and_rotate_one"
_NORM_EACH = "_hf_rmsnorm_norm_each"
_HELPERS = {
    _WAITING: run_time.waiting,
    _NORM_NOW: run_time.norm_now,
    _ROTATE: run_time.norm_and_rotate,
    _ROTATE_ONE: run_time.norm_and_rotate_one,
    _NORM_EACH: run_time.norm_each,
}


@dataclass(frozen=True)
class QKFusion:
    """The child norms of q and k that are computed with the function that rotates them.

    Args:
        norms: their names.
        rotary: the function's name.
        each: the function rotates one tensor, so each norm is one launch with it.
        others: the names of all norms that might have been among them.
    """

    norms: tuple[str, ...]
    rotary: str
    each: bool
    others: frozenset[str]

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with its norms put off to the rotation."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            search = _Search(definition, itself, self.others)
            for rotation in list(search.rotations(definition.body)):
                _put_off(definition, rotation)
            return definition

        return compiled_again(base, change, _HELPERS)

    def __str__(self) -> str:
        if self.each:
            words = [f"{norm} with {self.rotary}" for norm in self.norms]
            return f"{', '.join(words)}, each in one launch"
        return f"{', '.join(self.norms)}, {self.rotary} in one launch"


def find_qk(cls: type, norms: Set[str]) -> QKFusion | None:
    """What the forward of a class rotates of these child norms' results; None where it
    rotates nothing of them directly, or not by a function that the kernels compute.

    Raises:
        CannotRewrite: the forward has no source that can be compiled again.
    """
    function, definition = forward_source(cls)
    search = _Search(definition, name_of_self(function), norms)
    rotations = list(search.rotations(definition.body))
    names = tuple(norm for rotation in rotations for norm in rotation.norms)
    each = len(rotations) == len(names)
    functions = {rotation.call.func.id for rotation in rotations}
    if len(functions) != 1 or (len(rotations) > 1 and not each):
        return None
    (rotary,) = functions
    called = function.__globals__.get(rotary)
    if not all(is_rotary(called, len(rotation.names) == 1) for rotation in rotations):
        return None
    return QKFusion(names, rotary, each, frozenset(norms))


class _Normed(NamedTuple):
    """``name = self.norm(rows)``, transposed maybe.

    Args:
        block: the list of statements that it stands in.
        transposed: heads and rows change places between the norm and the rotation.
    """

    statement: ast.Assign
    block: list[ast.stmt]
    norm: ast.Call
    transposed: bool


@dataclass
class _Rotation:
    """``q, k = rotary(q, k, cos, sin)`` or ``x = rotary(x, cos, sin, unsqueeze_dim=2)``.

    Args:
        names: of the variables that it rotates.
        branch: the `if` that it stands under.
        tensors: where the variables were normalised.
    """

    statement: ast.Assign
    names: list[str]
    branch: ast.If | None = None
    tensors: list[_Normed] = field(default_factory=list)

    @property
    def call(self) -> ast.Call:
        return self.statement.value

    @property
    def norms(self) -> list[str]:
        return [normed.norm.func.attr for normed in self.tensors]


def _rotation(statement: ast.stmt) -> _Rotation | None:
    """The statement, if it may be a rotation."""
    match statement:
        case ast.Assign(
            [ast.Tuple([ast.Name(q), ast.Name(k)])],
            ast.Call(ast.Name(), [ast.Name(of_q), ast.Name(of_k), *tables], []),
        ) if (q, k) == (of_q, of_k) and q != k:
            names = [q, k]
        case ast.Assign(
            [ast.Name(x)],
            ast.Call(
                ast.Name(),
                [ast.Name(of_x), *tables],
                [ast.keyword("unsqueeze_dim", ast.Constant(2))],
            ),
        ) if x == of_x:
            names = [x]
        case _:
            return None
    if len(tables) != 2 or any(reads(table, names) for table in tables):
        return None
    return _Rotation(statement, names)


class _Search:
    """Finds the rotations of normalised tensors in a forward."""

    def __init__(self, definition: ast.FunctionDef, itself: str, norms: Set[str]):
        self.itself = itself
        self.norms = norms
        self.captured = captured(definition)
        self.inputs = _given_to_children_alone(definition, itself)

    def rotations(self, body: list[ast.stmt]) -> Iterator[_Rotation]:
        for at, statement in enumerate(body):
            rotation = _rotation(statement)
            if isinstance(statement, ast.If):
                rotation = self._under(statement)
            if rotation is not None and self._are_normed(rotation, body[:at], body):
                yield rotation
            elif isinstance(statement, ast.If):
                yield from self.rotations(statement.body)
                yield from self.rotations(statement.orelse)

    def _under(self, branch: ast.If) -> _Rotation | None:
        """The rotation of q and k that is the last statement of an `if` without `else`."""
        *before, last = branch.body
        rotation = _rotation(last)
        if branch.orelse or rotation is None or len(rotation.names) == 1:
            return None
        if not is_plain_test(branch.test, set(rotation.names)):
            return None
        if not all(self._may_pass(statement, rotation.names) for statement in before):
            return None
        rotation.branch = branch
        return rotation

    def _are_normed(
        self, rotation: _Rotation, before: list[ast.stmt], block: list[ast.stmt]
    ) -> bool:
        """Whether the tensors of a rotation are normalised in one place; notes where."""
        for name in rotation.names:
            normed = self._normed(name, before, block)
            if normed is None or name in self.captured:
                return False
            rotation.tensors.append(normed)
        first, last = rotation.tensors[0], rotation.tensors[-1]
        return first.block is last.block and first.transposed == last.transposed

    def _normed(
        self, name: str, before: list[ast.stmt], block: list[ast.stmt]
    ) -> _Normed | None:
        """The statement that normalised a tensor, if only what may pass it stands
        behind.
        """
        transposed = False
        for statement in reversed(before):
            match statement:
                case ast.Assign([ast.Name(target)], value) if target == name:
                    inner = _transposed(value)
                    transposed ^= inner is not None
                    inner = inner or value
                    if self._is_norm(inner):
                        return _Normed(statement, block, inner, transposed)
                    if inner is value or getattr(inner, "id", "") != name:
                        return None
                case ast.If(_, body, []) if reads(statement, {name}):
                    normed = self._normed(name, body, body)
                    if normed is None:
                        return None
                    return normed._replace(transposed=transposed ^ normed.transposed)
                case _:
                    if not self._may_pass(statement, [name]):
                        return None
        return None

    def _is_norm(self, node: ast.expr) -> bool:
        return norm_input(node, self.itself, self.norms) is not None

    def _may_pass(self, statement: ast.stmt, names: list[str]) -> bool:
        """Whether a statement can neither read nor write the tensors with these names."""
        return not reads(statement, names) and only_computes(statement, self._inputs)

    def _inputs(self, node: ast.Call) -> list[ast.expr] | None:
        """What a norm is computed with, and nothing of another child that cannot get
        hold of q or k; None of any other call.
        """
        if self._is_norm(node):
            return node.args
        match node:
            case ast.Call(ast.Attribute(ast.Name(self.itself)), [ast.Name(name)], []):
                return [] if name in self.inputs else None
        return None


def _given_to_children_alone(definition: ast.FunctionDef, itself: str) -> set[str]:
    """The arguments of a forward that nothing but its children, and a question for a
    shape, gets hold of: no variable is a view of them.
    """
    passed: set[ast.AST] = set()
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner))) if owner == itself:
                passed.update(node.args)
                passed.update(keyword.value for keyword in node.keywords)
            case ast.Attribute(value, name) if name in FACTS:
                passed.add(value)
    names = [n for n in ast.walk(definition) if isinstance(n, ast.Name)]
    others = {name.id for name in names if name not in passed}
    return {argument.arg for argument in definition.args.args} - others


def _put_off(definition: ast.FunctionDef, rotation: _Rotation) -> None:
    """Let the norms of a rotation wait for it."""
    first = rotation.tensors[0]
    norms = [copy.deepcopy(normed.norm.func) for normed in rotation.tensors]
    for normed in rotation.tensors:
        norm = normed.norm
        names = ast.Name(_NORMS, _LOAD), norm.func
        now = call(_NORM_NOW, norm, *names, norm.args[0])
        Replace(norm, now).visit(normed.statement)
    outer = next(
        at
        for at, statement in enumerate(definition.body)
        if any(node is first.statement for node in ast.walk(statement))
    )
    wait = call(_WAITING, first.norm, *norms)
    _insert(first.block, first.block.index(first.statement), wait)
    if first.block is not definition.body:
        _insert(definition.body, outer, ast.Constant(None))
    waiting = ast.Name(_NORMS, _LOAD), ast.Constant(first.transposed)
    rotated, statement = rotation.call, rotation.statement
    if rotation.branch is not None:
        unrotated = copy.deepcopy(statement)
        tensors = rotated.args[: len(norms)]
        unrotated.value = call(_NORM_EACH, rotated, *waiting, *tensors)
        rotation.branch.orelse = [unrotated]
    rotate = _ROTATE if len(norms) == 2 else _ROTATE_ONE
    statement.value = call(rotate, rotated, *waiting, rotated.func, *rotated.args)


def _insert(block: list[ast.stmt], at: int, value: ast.expr) -> None:
    """Put a statement that names the norms into a list of statements."""
    statement = ast.Assign([ast.Name(_NORMS, ast.Store())], value)
    block.insert(at, ast.copy_location(statement, block[at]))


def _transposed(value: ast.expr) -> ast.expr | None:
    """x in ``x.transpose(1, 2)``."""
    match value:
        case ast.Call(
            ast.Attribute(inner, "transpose"), [ast.Constant(1), ast.Constant(2)], []
        ):
            return inner
    return None
