"""What the statements of a forward do with its variables. Only the source is read."""

import ast
from collections.abc import Callable, Iterable, Set

MODULATED = "_hf_rmsnorm_modulated"  # the name of `fused.modulated.modulated`
FACTS = {"shape", "dtype", "device", "ndim"}  # asked without getting hold of the tensor
_METHODS = {
    "chunk",
    "clamp",
    "contiguous",
    "expand",
    "flatten",
    "float",
    "index_select",
    "permute",
    "reshape",
    "size",
    "squeeze",
    "tanh",
    "to",
    "transpose",
    "type_as",
    "unbind",
    "unsqueeze",
    "view",
    "where",
}
# What is evaluated whole, and changes nothing.
_ARITHMETIC = (
    ast.BinOp,
    ast.Constant,
    ast.List,
    ast.Name,
    ast.Slice,
    ast.Starred,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)
_COMPUTING = (
    *_ARITHMETIC,
    ast.Assign,
    ast.BoolOp,
    ast.Compare,
    ast.GeneratorExp,
    ast.If,
    ast.boolop,
    ast.cmpop,
    ast.comprehension,
)
_EVALUATED = (
    *_ARITHMETIC,
    ast.Assign,
    ast.Attribute,
    ast.Call,
    ast.Expr,
    ast.Return,
    ast.keyword,
)
_LEAVING = ast.Return, ast.Break, ast.Continue


def is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def is_modulated(node: ast.AST) -> bool:
    """Whether this is a call of a modulated norm, which a rewriting has put there."""
    match node:
        case ast.Call(ast.Name(name)):
            return name == MODULATED
    return False


def norm_input(node: ast.AST | None, itself: str, norms: Set[str]) -> ast.expr | None:
    """The x in ``self.norm(x)``, a call of one of these child norms with one input; None
    of anything else.
    """
    match node:
        case ast.Call(ast.Attribute(ast.Name(owner), name), [rows], []) if (
            owner == itself and name in norms and not isinstance(rows, ast.Starred)
        ):
            return rows
    return None


def alias_of(statement: ast.stmt, names: Iterable[str]) -> set[str]:
    """The new name in ``new = name``; none in any other statement."""
    match statement:
        case ast.Assign([ast.Name(new)], ast.Name(name)) if name in names:
            return {new}
    return set()


def reads(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether a statement or an expression mentions one of the names."""
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def captured(definition: ast.FunctionDef) -> set[str]:
    """The names that functions inside of a function mention, and those that it shares
    with its surroundings.
    """
    names: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            names.update(node.names)
        if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not definition:
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return names


def only_computes(
    node: ast.AST, inputs: Callable[[ast.Call], list[ast.expr] | None]
) -> bool:
    """Whether a statement gives names to new tensors, and has no other effect.

    Args:
        inputs: what a call that may be made computes with; None of any other call.
            Methods that make a new tensor may be called without asking.
    """
    match node:
        case ast.Attribute(ast.Name("torch")):
            return True
        case ast.Attribute(inner, name):
            return name in FACTS and only_computes(inner, inputs)
        case ast.Call(ast.Attribute(inner, name), arguments, keywords) if (
            name in _METHODS and all(k.arg not in (None, "out") for k in keywords)
        ):
            parts = [inner, *arguments, *(keyword.value for keyword in keywords)]
        case ast.Call():
            parts = inputs(node)
        case ast.Subscript(ctx=ast.Store()):
            parts = None
        case _:
            parts = list(ast.iter_child_nodes(node))
            if not isinstance(node, _COMPUTING):
                parts = None
    return parts is not None and all(only_computes(part, inputs) for part in parts)


def first_effect(node: ast.AST) -> ast.AST | None:
    """The first call that a statement makes, where views of a scale and a shift do
    not count; or what comes before it and is no plain arithmetic.
    """
    if is_modulated(node) or not isinstance(node, _EVALUATED):
        return node
    for child in ast.iter_child_nodes(node):
        effect = first_effect(child)
        if effect is not None:
            return effect
    return node if isinstance(node, ast.Call) else None


def is_plain_test(test: ast.expr, names: set[str]) -> bool:
    """Whether a condition may be asked at another time: it calls nothing and does not
    mention the names.
    """
    calls = (isinstance(n, (ast.Call, ast.NamedExpr)) for n in ast.walk(test))
    return not reads(test, names) and not any(calls)


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


def only_adds_and_scales(statements: list[ast.stmt], names: set[str]) -> bool:
    """Whether statements, the last of a forward, use a value only as an operand.

    They do not return it, write to it or give it to a function, which could hook it.

    Args:
        names: the variables that hold it. A variable loses it where the forward itself,
            and no branch of it, binds it again.
    """
    names = set(names)
    for statement in statements:
        nodes = list(ast.walk(statement))
        for node in nodes:
            names |= alias_of(node, names)
        if any(name in names for name in _other_uses(nodes)):
            return False
        if isinstance(statement, ast.Assign) and not alias_of(statement, names):
            names -= bound(statement)
    return True


def _other_uses(nodes: list[ast.AST]) -> list[str]:
    """The variables that are read other than as an operand, or written to in place."""
    operands: set[ast.AST] = set()
    uses = [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    for node in nodes:
        match node:
            case ast.BinOp(left, _, right):
                operands.update((left, right))
            case ast.Attribute(value, attribute) if attribute in FACTS:
                operands.add(value)
            case ast.Assign([ast.Name()], value):
                operands.add(value)
            case ast.AugAssign(ast.Name() as target):
                uses.append(target)
    return [use.id for use in uses if use not in operands]


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)
