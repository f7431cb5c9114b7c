"""Moves a modulation behind its norm, and a sum before its norm, where the statements
between them do not matter.

    h = h + gate * x                    c = c + gate * d
    c = c + gate * d                    h = h + gate * x
    y = self.norm(h)              ->    y = self.norm(h)
    z = self.other_norm(c)              y = y * (1 + scale) + shift
    y = y * (1 + scale) + shift         z = self.other_norm(c)

A statement is moved past others only if none of them mentions a name that it binds, it
mentions none that they bind, and all of them only compute: they write to nothing and
call nothing but norms and methods that make a new tensor.
"""

import ast
from collections.abc import Callable

from .uses import FACTS, reads

_METHODS = {
    "chunk", "clamp", "expand", "flatten", "float", "index_select", "permute",
    "reshape", "size", "squeeze", "tanh", "to", "transpose", "type_as", "unbind",
    "unsqueeze", "view", "where",
}  # fmt: skip
_COMPUTING = (
    ast.BinOp, ast.BoolOp, ast.Compare, ast.Constant, ast.GeneratorExp, ast.List,
    ast.Name, ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.comprehension,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip

IsNorm = Callable[[ast.expr], bool]


def gather_modulations(
    body: list[ast.stmt], is_norm: IsNorm, modulates: Callable[[ast.stmt], str | None]
) -> None:
    """Put each norm and the modulation of its result next to each other in a list of
    statements.

    Args:
        is_norm: whether an expression is a call of a norm that may be computed with a
            modulation.
        modulates: the name that a statement modulates, or None.
    """
    for at in range(2, len(body)):
        name = modulates(body[at])
        norm_at = None if name is None else _last_that_binds(name, body[:at])
        if norm_at is None or not is_norm(body[norm_at].value):
            continue
        between = body[norm_at + 1 : at]
        if _may_pass(body[at], between, is_norm):
            body.insert(norm_at + 1, body.pop(at))
        elif computes(body[norm_at], is_norm) and _may_pass(
            body[norm_at], between, _is_no_norm
        ):
            body.insert(at - 1, body.pop(norm_at))


def gather_sums(
    body: list[ast.stmt], name_of_sum: Callable[[ast.stmt], str | None], is_norm: IsNorm
) -> None:
    """Put each sum directly before the first statement that mentions it, which may be
    its norm.
    """
    for at in range(len(body) - 3, -1, -1):
        name = name_of_sum(body[at])
        if name is None or not computes(body[at], _is_no_norm):
            continue
        reader = next(
            (i for i in range(at + 1, len(body)) if reads(body[i], {name})), at
        )
        if _calls(body[reader], is_norm) and _may_pass(
            body[at], body[at + 1 : reader], is_norm
        ):
            body.insert(reader - 1, body.pop(at))


def _last_that_binds(name: str, statements: list[ast.stmt]) -> int | None:
    """Where a name got its value, if a plain assignment gave it and nothing has read it
    since.
    """
    at = next(
        (i for i in range(len(statements) - 1, -1, -1) if reads(statements[i], {name})),
        None,
    )
    if at is None:
        return None
    match statements[at]:
        case ast.Assign([ast.Name(target)]) if target == name:
            return at
    return None


def _may_pass(moved: ast.stmt, others: list[ast.stmt], is_norm: IsNorm) -> bool:
    """Whether a statement that only computes, or calls one norm, may be done before or
    after others as well.
    """
    free = (
        not reads(other, _bound(moved)) and not reads(moved, _bound(other))
        for other in others
    )
    return all(free) and all(computes(other, is_norm) for other in others)


def _calls(statement: ast.stmt, is_norm: IsNorm) -> bool:
    return any(is_norm(node) for node in ast.walk(statement))


def computes(statement: ast.stmt, is_norm: IsNorm) -> bool:
    """Whether a statement gives names to new tensors, and has no other effect."""
    if isinstance(statement, ast.If):
        inner = (*statement.body, *statement.orelse)
        return _is_quiet(statement.test, is_norm) and all(
            computes(part, is_norm) for part in inner
        )
    if not isinstance(statement, ast.Assign):
        return False
    to_names = all(
        isinstance(target, (ast.Name, ast.Tuple)) for target in statement.targets
    )
    return to_names and all(
        _is_quiet(part, is_norm) for part in (*statement.targets, statement.value)
    )


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    return {
        n.id
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _is_quiet(node: ast.AST, is_norm: IsNorm) -> bool:
    match node:
        case ast.Call() if is_norm(node):
            return all(
                _is_quiet(argument, is_norm)
                for argument in node.args
                if not _is_child(argument)
            )
        case ast.Call(ast.Attribute(inner, name), arguments, keywords) if (
            name in _METHODS
        ):
            return all(
                _is_quiet(part, is_norm)
                for part in (inner, *arguments, *(k.value for k in keywords))
            )
        case ast.Attribute(inner, name):
            return name in FACTS and _is_quiet(inner, is_norm)
    return isinstance(node, _COMPUTING) and all(
        _is_quiet(child, is_norm) for child in ast.iter_child_nodes(node)
    )


def _is_child(node: ast.expr) -> bool:
    """Whether this is ``self.norm``, as the call of a modulated norm has it."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def _is_no_norm(_: ast.expr) -> bool:
    return False
