"""Norms of q and k in front of a rotary embedding, found in the source of one forward,
and put in one launch with it.

    q = self.q_norm(rows).transpose(1, 2)
    k = self.k_norm(others).transpose(1, 2)
    v = self.v_proj(x)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)

becomes

    q = later(self.q_norm, rows).transpose(1, 2)
    k = later(self.k_norm, others).transpose(1, 2)
    v = self.v_proj(x)
    q, k = norm_and_rotate(apply_rotary_pos_emb, q, k, cos, sin)

and

    x = self.q_norm(x)
    x = rotate(x, cos, sin, unsqueeze_dim=2)

becomes

    x = later(self.q_norm, x)
    x = norm_and_rotate_one(rotate, x, cos, sin)

Between a norm and the rotation a forward may transpose q and k, and may do what can
neither read nor write them: compute, and call children on its own arguments. The
rotation may stand under an `if` without `else`, and so may both norms.
"""

import ast
import copy
import inspect
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ...fused.attention import (
    ONE,
    PAIR,
    norm_and_rotate,
    norm_and_rotate_one,
)
from ...fused.later import computed, later
from .calls import call
from .rotary_code import may_be_rotary
from .statements import (
    FACTS,
    Replace,
    Statements,
    may_pass,
    names_in,
    norm_input,
    reads,
)


def fuse_qk(definition: ast.FunctionDef, cls: type, norms: Set[str]) -> list[str]:
    """Put norms off to the function that rotates their results; returns these pieces
    in words. There are none where the forward does not rotate such results directly,
    or not by one function that the kernels compute.

    Args:
        definition: of the forward of a class; it is changed.
        norms: the names of the children that one launch may compute with a rotation.
    """
    search = _Search(definition, norms)
    rotations = list(search.rotations(definition.body))
    names = {rotation.call.func.id for rotation in rotations}
    is_pair = any(len(rotation.names) == 2 for rotation in rotations)
    if len(names) != 1 or (is_pair and len(rotations) > 1):
        return []
    (name,) = names
    rotary = inspect.unwrap(cls.forward).__globals__.get(name)
    if not may_be_rotary(rotary, PAIR if is_pair else ONE):
        return []
    for rotation in rotations:
        _put_off(rotation)
    children = [norm.func.attr for each in rotations for norm, _ in each.norms]
    if is_pair:
        return [f"{', '.join(children)}, {name}"]
    return [f"{child} with {name}" for child in children]


class _Normed(NamedTuple):
    """A norm's call, and its statement: ``name = self.norm(rows)``, transposed maybe."""

    call: ast.Call
    statement: ast.Assign


@dataclass
class _Rotation:
    """``q, k = rotary(q, k, cos, sin)`` or ``x = rotary(x, cos, sin, unsqueeze_dim=2)``.

    Args:
        names: of the variables that it rotates.
        norms: where these are normalised.
        branch: the `if` that it stands under.
    """

    statement: ast.Assign
    names: list[str]
    norms: list[_Normed] = field(default_factory=list)
    branch: ast.If | None = None

    @property
    def call(self) -> ast.Call:
        return self.statement.value


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

    def __init__(self, definition: ast.FunctionDef, norms: Set[str]):
        self.norms = norms
        self.inputs = _given_to_children_alone(definition)

    def rotations(self, body: Statements) -> Iterator[_Rotation]:
        for at, statement in enumerate(body):
            is_branch = isinstance(statement, ast.If)
            rotation = _rotation(statement)
            if is_branch:
                rotation = self._under(statement)
            if rotation is not None:
                named = rotation.names
                rotation.norms = [self._normed(name, body[:at]) for name in named]
            if rotation is not None and None not in rotation.norms:
                yield rotation
            elif is_branch:
                yield from self.rotations(statement.orelse)

    def _under(self, branch: ast.If) -> _Rotation | None:
        """The rotation of q and k that is the last statement of an `if` without `else`."""
        *before, last = branch.body
        rotation = _rotation(last)
        if branch.orelse or rotation is None or len(rotation.names) == 1:
            return None
        others = [branch.test, *before]
        if not all(self._may_pass(each, rotation.names) for each in others):
            return None
        rotation.branch = branch
        return rotation

    def _normed(self, name: str, before: Statements) -> _Normed | None:
        """The statement that normalised a tensor, if only what may pass it stands
        behind.
        """
        for statement in reversed(before):
            match statement:
                case ast.Assign([ast.Name(target)], value) if target == name:
                    value = _untransposed(value)
                    if norm_input(value, self.norms) is not None:
                        return _Normed(value, statement)
                    if not isinstance(value, ast.Name) or value.id != name:
                        return None
                case ast.If(_, body, []) if reads(statement, {name}):
                    return self._normed(name, body)
                case _ if not self._may_pass(statement, [name]):
                    return None
        return None

    def _may_pass(self, node: ast.AST, names: list[str]) -> bool:
        """Whether a statement or a condition can neither read nor write the tensors with
        these names.
        """
        return may_pass(node, set(names), self._may_call)

    def _may_call(self, node: ast.Call) -> bool:
        """Whether this is a norm, or another child that cannot get hold of q or k."""
        match node:
            case ast.Call(ast.Attribute(ast.Name("self")), [ast.Name(name)], []) if (
                name in self.inputs
            ):
                return True
        return norm_input(node, self.norms) is not None


def _given_to_children_alone(definition: ast.FunctionDef) -> set[str]:
    """The arguments of a forward that nothing but its children, and a question for a
    shape, gets hold of: no variable is a view of them.
    """
    passed = set()
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Attribute(ast.Name("self"))):
                passed.update(node.args)
                passed.update(keyword.value for keyword in node.keywords)
            case ast.Attribute(value, name) if name in FACTS:
                passed.add(value)
    arguments = {argument.arg for argument in definition.args.args}
    return arguments - {name.id for name in names_in(definition) if name not in passed}


def _put_off(rotation: _Rotation) -> None:
    """Let the norms of a rotation wait for it."""
    for norm, statement in rotation.norms:
        waiting = call(later, norm, norm.func, *norm.args)
        Replace(norm, waiting).visit(statement)
    statement = rotation.statement
    rotated = rotation.call
    if rotation.branch is not None:
        unrotated = copy.deepcopy(statement)
        unrotated.value = call(computed, rotated, *rotation.names)
        rotation.branch.orelse = [unrotated]
    rotate = norm_and_rotate if len(rotation.names) == 2 else norm_and_rotate_one
    statement.value = call(rotate, rotated, rotated.func, *rotated.args)


def _untransposed(value: ast.expr) -> ast.expr:
    """x in ``x.transpose(1, 2)``; anything else as it is."""
    match value:
        case ast.Call(
            ast.Attribute(inner, "transpose"), [ast.Constant(1), ast.Constant(2)], []
        ):
            return inner
    return value
