"""A forward compiled again from its own source, with a few expressions replaced by calls.

Nothing else changes: the same statements run in the same order, with the globals, defaults, decorators and line numbers
of the original.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping

_FACTORY = "_hf_rmsnorm_make"
_ADD = "_hf_rmsnorm_add"


class CannotRewrite(Exception):
    """Why a forward cannot be compiled again from its source."""


def forward_source(cls: type) -> tuple[Callable, ast.FunctionDef]:
    """(the innermost function behind `cls.forward`, its definition).

    Raises:
        CannotRewrite: the source is not there, or does more than a function compiled alone can.
    """
    function = inspect.unwrap(cls.forward)
    if not inspect.isfunction(function):
        raise CannotRewrite(f"its forward is a {type(function).__name__}")
    if set(function.__code__.co_freevars) - {"__class__"}:
        raise CannotRewrite("its forward uses variables of the function around it")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise CannotRewrite("the source of its forward is not there") from error
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__name__:
        raise CannotRewrite("its forward is no plain function definition")
    for node in ast.walk(definition):
        name = getattr(node, "attr", getattr(node, "id", ""))
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            raise CannotRewrite(f"its forward uses the private name {name}")
    return function, definition


def sums(definition: ast.FunctionDef) -> list[ast.BinOp]:
    """Every ``a + b`` of a function's body, in the order of its source."""
    found = [
        node
        for statement in definition.body
        for node in ast.walk(statement)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    ]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset, -node.end_lineno, -node.end_col_offset))


def with_sums(cls: type, sites: Mapping[int, str], add: Callable) -> Callable:
    """`cls.forward` with ``a + b`` replaced by ``add(self, a, b, label)`` at the sites: position -> label."""

    def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
        chosen = {id(node): sites[at] for at, node in enumerate(sums(definition)) if at in sites}

        class Replace(ast.NodeTransformer):
            def visit_BinOp(self, node):
                label = chosen.get(id(node))
                self.generic_visit(node)
                return node if label is None else call(_ADD, node, itself, node.left, node.right, label)

        return Replace().visit(definition)

    return compiled_again(cls, change, {_ADD: add})


def call(function: str, where: ast.AST, *arguments) -> ast.Call:
    """``function(*arguments)`` at the place of a node; a string that is an identifier is a name, else a constant."""
    nodes = [a if isinstance(a, ast.AST) else ast.Constant(a) for a in arguments]
    if isinstance(arguments[0], str):
        nodes[0] = ast.Name(arguments[0], ast.Load())
    return ast.copy_location(ast.Call(ast.Name(function, ast.Load()), nodes, []), where)


def compiled_again(cls: type, change: Callable, helpers: Mapping[str, Callable]) -> Callable:
    """`cls.forward`, compiled from its own source once ``change(definition, name of self)`` has been made to it.

    Args:
        change: returns the definition to compile.
        helpers: functions that the changed source calls, by name.

    Raises:
        CannotRewrite: as in `forward_source`.
    """
    function, definition = forward_source(cls)
    definition = change(definition, next(iter(inspect.signature(function).parameters)))
    for argument in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None  # they may name what only type checkers import
    definition.returns = None
    # A function around it gives `super()` its class, and keeps the new names out of the module's globals.
    names = ["__class__", *helpers]
    factory = ast.FunctionDef(
        name=_FACTORY, args=ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []),
        body=[definition, ast.Return(ast.Name(definition.name, ast.Load()))], decorator_list=[], type_params=[],
    )  # fmt: skip
    tree = ast.fix_missing_locations(ast.Module([factory], []))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    made: dict = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, made)
    owner = next((c for c in cls.__mro__ if inspect.unwrap(c.__dict__.get("forward")) is function), cls)
    forward = made[_FACTORY](owner, *helpers.values())
    inner = inspect.unwrap(forward)
    inner.__defaults__, inner.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    inner.__qualname__, inner.__annotations__ = function.__qualname__, function.__annotations__
    return forward


def wrappers(forward: Callable) -> list:
    """The code of each function around the innermost one."""
    codes = []
    while hasattr(forward, "__wrapped__"):
        codes.append(getattr(forward, "__code__", type(forward)))
        forward = forward.__wrapped__
    return codes
