"""How the statements of a forward use a value, given the names that hold it. Only the
source is read.

A name loses the value where it is bound again; ``other = name`` gives it to another
name. On a branch a name may keep the value or lose it, so it counts as kept.
"""

import ast
from collections.abc import Iterable

FACTS = {"shape", "dtype", "device", "ndim"}  # asked without getting hold of the tensor
_INNER = ast.FunctionDef, ast.Lambda
_LEAVING = ast.Return, ast.Break, ast.Continue
# What evaluates parts of it on a condition, later or not at all.
_CONDITIONAL = (
    ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom,
)  # fmt: skip


def alias_of(statement: ast.stmt, names: Iterable[str]) -> set[str]:
    """The new name in ``new = name``; none in any other statement."""
    match statement:
        case ast.Assign([ast.Name(new)], ast.Name(name)) if name in names:
            return {new}
    return set()


def reads(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether a statement or an expression mentions one of the names."""
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def captured(definition: ast.FunctionDef) -> set[str]:
    """The names that functions inside of a function mention, and those that it shares
    with its surroundings.
    """
    inner = [
        n for n in ast.walk(definition) if isinstance(n, _INNER) and n is not definition
    ]
    names = {
        n.id
        for function in inner
        for n in ast.walk(function)
        if isinstance(n, ast.Name)
    }
    shared = (
        n for n in ast.walk(definition) if isinstance(n, (ast.Global, ast.Nonlocal))
    )
    return names.union(*(n.names for n in shared))


def stays_own(statements: list[ast.stmt], names: set[str]) -> bool:
    """Whether these statements, the last of a forward, use the value only as an
    operand.

    They do not return it, write to it or give it to a function, which could hook it.
    """
    return _own_names(statements, names) is not None


def _own_names(statements: list[ast.stmt], names: set[str]) -> set[str] | None:
    """The names that still hold the value behind these statements; None where something
    else gets hold of it.
    """
    names = set(names)
    for statement in statements:
        if not names:
            break
        if alias := alias_of(statement, names):
            names |= alias
            continue
        if isinstance(statement, ast.If):
            after = _own_on_branches(statement, names)
        elif isinstance(statement, ast.With):
            whole = not any(reads(item, names) for item in statement.items)
            after = _own_names(statement.body, names) if whole else None
        else:
            after = (
                names - _bound(statement) if _only_operands(statement, names) else None
            )
        if after is None:
            return None
        names = after
    return names


def _own_on_branches(statement: ast.If, names: set[str]) -> set[str] | None:
    if not _only_operands(statement.test, names):
        return None
    branches = [_own_names(body, names) for body in (statement.body, statement.orelse)]
    return None if None in branches else set().union(*branches)


def _bound(statement: ast.stmt) -> set[str]:
    """The names that an assignment binds again."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _only_operands(node: ast.AST, names: set[str]) -> bool:
    """Whether each mention of the names is an operand of ``+``, ``*`` and the like, or
    asks for a shape or dtype.
    """
    allowed: set[ast.AST] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp):
            allowed.update((part.left, part.right))
        elif isinstance(part, ast.Attribute) and part.attr in FACTS:
            allowed.add(part.value)
    if isinstance(node, ast.Assign):
        allowed.update(
            part
            for target in node.targets
            for part in (target, *getattr(target, "elts", ()))
        )
    named = (n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in names)
    return all(name in allowed for name in named)


def unconditional(statement: ast.stmt) -> list[ast.expr]:
    """The expressions that a statement evaluates in any case, in the order in which
    they are done.

    They end where one follows that evaluates something on a condition.
    """
    done: list[ast.expr] = []

    def evaluate(node: ast.AST) -> bool:
        if isinstance(node, _CONDITIONAL):
            return False
        whole = all(map(evaluate, ast.iter_child_nodes(node)))
        if whole and isinstance(node, ast.expr):
            done.append(node)
        return whole

    if statement.value is not None:
        evaluate(statement.value)
    return done


def blocks(
    statement: ast.stmt, after: list[ast.stmt] | None
) -> list[tuple[list[ast.stmt], list[ast.stmt] | None]]:
    """The lists of statements in a statement, each with what follows it; None if that
    is not known.
    """
    match statement:
        case ast.If(_, body, orelse):
            return [(body, after), (orelse, after)]
        case ast.With(_, body):
            return [(body, after)]
        case ast.For(_, _, body) | ast.While(_, body):
            return [(body, None)]
    return []


def is_read_later(name: str, statements: list[ast.stmt]) -> bool:
    """Whether statements may read a variable before they bind it again."""
    for statement in statements:
        match statement:
            case ast.Assign([ast.Name(again)], value) if again == name:
                return reads(value, {name})
        if reads(statement, {name}):
            return True
    return False


def leaves(statement: ast.stmt) -> bool:
    """Whether a statement may leave its block."""
    return any(isinstance(node, _LEAVING) for node in ast.walk(statement))


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)
