"""The effects of a forward's statements on its variables. Only the source is read."""

import ast
import itertools
from collections.abc import Callable, Iterable, Set

from ...fused.later import later_in
from ...fused.modulated import modulated
from ..arithmetic import FACTS, OF_TENSORS, WRITING
from .calls import called

Statements = list[ast.stmt]

# Nodes that are evaluated whole, and change nothing.
_ARITHMETIC = (
    *(ast.Assign, ast.Attribute, ast.BinOp, ast.Constant, ast.Expr, ast.List, ast.Name),
    *(ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp),
    *(ast.expr_context, ast.keyword, ast.operator, ast.unaryop),
)
_COMPUTING = (
    *_ARITHMETIC,
    *(ast.BoolOp, ast.Compare, ast.GeneratorExp, ast.If),
    *(ast.boolop, ast.cmpop, ast.comprehension),
)
_EVALUATED = *_ARITHMETIC, ast.Call, ast.Return


def norm_input(node: ast.AST | None, norms: Set[str]) -> ast.expr | None:
    """The x in ``self.norm(x)``, a call of one of these child norms with one input; None
    of anything else.
    """
    match node:
        case ast.Call(ast.Attribute(ast.Name("self"), name), [rows], []) if (
            name in norms
        ):
            return rows
    return None


def alias_of(statement: ast.AST, names: Iterable[str]) -> set[str]:
    """The new name in ``new = name``; none in any other statement."""
    match statement:
        case ast.Assign([ast.Name(new)], ast.Name(name)) if name in names:
            return {new}
    return set()


def reads(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether a statement or an expression mentions one of the names."""
    return any(name.id in names for name in names_in(node))


def names_in(node: ast.AST) -> list[ast.Name]:
    """The mentions of variables in a statement or an expression."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Name)]


def bound(*statements: ast.stmt) -> set[str]:
    """The names that statements bind."""
    names = itertools.chain(*map(names_in, statements))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def only_computes(
    node: ast.AST, may_call: Callable[[ast.Call], bool] | None = None
) -> bool:
    """Whether a statement gives names to new tensors, and has no other effect.

    Args:
        may_call: whether a call only computes with its arguments. Methods that make a
            new tensor may be called without asking; None: nothing else may.
    """
    match node:
        case ast.Call(ast.Attribute(owner, name)) if (
            name in OF_TENSORS and not _is_of_self(owner)
        ):
            parts = ast.iter_child_nodes(node)
        case ast.Call() if may_call is not None and may_call(node):
            parts = [*node.args, *node.keywords]
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            return False
        case ast.keyword(name) if name in WRITING:
            return False
        case _ if isinstance(node, _COMPUTING):
            parts = ast.iter_child_nodes(node)
        case _:
            return False
    return all(only_computes(part, may_call) for part in parts)


def _is_of_self(node: ast.AST) -> bool:
    """Whether this is the module or one of its attributes, whose methods may be no
    tensor's. An attribute indexed by None is a tensor, as LTX's tables are.
    """
    match node:
        case ast.Subscript(_, ast.Tuple([ast.Constant(None), *_]) | ast.Constant(None)):
            return False
        case ast.Attribute(owner) | ast.Subscript(owner):
            return _is_of_self(owner)
    return isinstance(node, ast.Name) and node.id == "self"


def first_effect(node: ast.AST) -> ast.AST | None:
    """The first call that a statement makes, where those in the operands of a modulated
    norm do not count; or what comes before it and is no plain arithmetic.
    """
    if called(node) in (modulated, later_in) or not isinstance(node, _EVALUATED):
        return node
    for child in ast.iter_child_nodes(node):
        effect = first_effect(child)
        if effect is not None:
            return effect
    return node if isinstance(node, ast.Call) else None


def may_pass(
    node: ast.AST, names: Set[str], may_call: Callable[[ast.Call], bool] | None = None
) -> bool:
    """Whether a statement or a condition may as well run at another time than what
    reads and binds these variables: it computes without them.

    Args:
        may_call: as of `only_computes`.
    """
    return not reads(node, names) and only_computes(node, may_call)


def is_dead_behind(statement: ast.stmt, name: str, rest: Statements) -> bool:
    """Whether a statement binds a variable again, or none behind it mentions that."""
    if name in bound(statement):
        return True
    return not any(reads(other, {name}) for other in rest)


def only_adds_and_scales(statements: Statements, names: set[str]) -> bool:
    """Whether statements, the last of a forward, use a value only as an operand.

    They do not return it, or give it to a function, which could hook it.

    Args:
        names: the variables that hold it. A variable loses it where the forward itself,
            and no branch of it, binds it again.
    """
    names = set(names)
    for statement in statements:
        if names & _other_uses(statement):
            return False
        alias = alias_of(statement, names)
        if isinstance(statement, ast.Assign):
            names -= bound(statement)
        names |= alias
    return True


def _other_uses(statement: ast.stmt) -> set[str]:
    """The variables that are read other than as an operand, or behind an alias that a
    branch or a loop may give them.
    """
    operands = set()
    for node in ast.walk(statement):
        match node:
            case ast.BinOp(left, _, right):
                operands |= {left, right}
            case ast.Attribute(value, name) if name in FACTS:
                operands.add(value)
            case ast.Assign([ast.Name()], value) if node is statement:
                operands.add(value)
    others = set(names_in(statement)) - operands
    return {name.id for name in others if isinstance(name.ctx, ast.Load)}


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)
