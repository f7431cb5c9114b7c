"""Which norms read a value that the same forward writes to in place later, as in ``x +=
self.mlp(self.norm(x))``.

Hugging Face's norms keep a float32 copy of such an x for their backward in half
precision. The kernels' backward reads x itself, so such norms train by their own
forward. A write in another module is not found: there autograd raises.
"""

import ast
import inspect
from collections.abc import Iterable
from functools import lru_cache

from torch import nn

from ...fused.source import CannotRewrite, definition_of, name_of_self
from ..swap import unfused

_Values = dict[str, frozenset]  # name -> a token for each value that it may hold


def written_inputs(model: nn.Module, norms: set[nn.Module]) -> set[nn.Module]:
    """Those of `norms` whose input the forward that calls them writes to later."""
    found: set[nn.Module] = set()
    for module in model.modules():
        names = [name for name, child in module._modules.items() if child in norms]
        if names:
            cls = unfused(type(module))
            found.update(
                module._modules[name]
                for name in _written(cls, cls.forward, frozenset(names))
            )
    return found


@lru_cache(1024)
def _written(cls: type, _, norms: frozenset[str]) -> frozenset[str]:
    """The names of the norms whose input is written to; none where the forward has no
    source.
    """
    function = inspect.unwrap(cls.forward)
    if not inspect.isfunction(function):
        return frozenset()
    try:
        definition = definition_of(function.__code__)
    except CannotRewrite:
        return frozenset()
    scan = _Scan(name_of_self(function), norms)
    scan.block(definition.body, {})
    return frozenset(scan.written)


class _Scan:
    """Goes through the statements of a forward, and notes the inputs of norms and the
    later writes to them.
    """

    def __init__(self, itself: str, norms: Iterable[str]):
        self.itself, self.norms = itself, norms
        self.readers: dict[object, set[str]] = {}  # of each value
        self.written: set[str] = set()

    def block(self, body: list[ast.stmt], values: _Values) -> None:
        for statement in body:
            self.statement(statement, values)

    def statement(self, statement: ast.stmt, values: _Values) -> None:
        blocks = [
            getattr(statement, part, []) for part in ("body", "orelse", "finalbody")
        ]
        if any(blocks):
            for body in blocks * 2:  # twice: a loop begins with the values of its end
                inside = dict(values)
                self.block(body, inside)
                values.update(
                    (name, held | values.get(name, frozenset()))
                    for name, held in inside.items()
                )
            return
        for node in ast.walk(statement):
            self._read(node, values)
        for node in ast.walk(statement):
            for name in _written_names(node):
                self.written.update(
                    *(self.readers.get(value, ()) for value in values.get(name, ()))
                )
        if isinstance(statement, ast.Assign):
            self._bind(statement, values)

    def _read(self, node: ast.AST, values: _Values) -> None:
        match node:
            case ast.Call(
                ast.Attribute(ast.Name(owner), norm), [ast.Name(name), *_]
            ) if owner == self.itself:
                if norm in self.norms:
                    for value in values.setdefault(name, frozenset([object()])):
                        self.readers.setdefault(value, set()).add(norm)

    @staticmethod
    def _bind(statement: ast.Assign, values: _Values) -> None:
        same = statement.value.id if isinstance(statement.value, ast.Name) else None
        value = frozenset([object()])
        if same is not None:
            value = values.setdefault(same, value)
        for target in statement.targets:
            for part in getattr(target, "elts", [target]):
                if isinstance(part, ast.Name):
                    values[part.id] = value


def _written_names(node: ast.AST) -> list[str]:
    """The name whose value an expression or statement writes to: ``x += y``, ``x[0] =
    y``, ``x.view(-1).mul_(y)``.
    """
    match node:
        case ast.AugAssign(target):
            return _base(target)
        case ast.Subscript(value, ctx=ast.Store()):
            return _base(value)
        case ast.Call(ast.Attribute(value, method)) if method.endswith(
            "_"
        ) and not method.endswith("__"):
            return _base(value)
        case ast.keyword("out", value):
            return _base(value)
    return []


def _base(node: ast.expr) -> list[str]:
    """The name whose value an expression is, or is a view of."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return [node.id] if isinstance(node, ast.Name) else []
