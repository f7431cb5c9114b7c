"""Norms whose input is written to in place after they have read it, found in the source of the forwards around them.

``x += mlp(norm(x))`` trains in half precision: Hugging Face's norm keeps a float32 copy of x for its backward. The
kernels' backward reads x itself, which is gone by then. So such a norm runs its own forward in training.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import nn

from ...fused.source import CannotRewrite, forward_source
from ..swap import unfused

_Values = frozenset  # of what a name may be bound to: the nodes that made it, and parameters by name


def written_inputs(model: nn.Module, norms: set[nn.Module]) -> set[nn.Module]:
    """Those of `norms` whose input some forward in the model writes to."""
    found: set[nn.Module] = set()
    _visit(model, frozenset(), norms, found, set())
    return found


def _visit(module: nn.Module, written: frozenset[str], norms, found: set, visited: set) -> None:
    """Look into a module whose caller writes to these arguments of its forward."""
    if (module, written) in visited:
        return
    visited.add((module, written))
    if isinstance(module, nn.Sequential):
        for at, child in enumerate(module):
            _visit_child(child, ("input",) if at == 0 and "input" in written else (), norms, found, visited)
        return
    cls = unfused(type(module))
    if isinstance(module, torch.jit.ScriptModule):  # whose class has no forward to read
        return
    calls, last_writes = _forward_of(cls, cls.forward)
    for child in module.children():
        _visit(child, frozenset(), norms, found, visited)
    for name, time, arguments in calls:
        called = module._modules.get(name)
        changed = {value for value, last in last_writes.items() if last > time} | written
        hit = [at for at, values in arguments if values & changed]
        for child in called if isinstance(called, nn.ModuleList) else filter(None, [called]):
            _visit_child(child, hit, norms, found, visited)


def _visit_child(child: nn.Module, hit, norms, found: set, visited: set) -> None:
    """`hit`: positions or names of its arguments that are written to."""
    if child in norms:
        if hit:
            found.add(child)
        return
    if isinstance(child, torch.jit.ScriptModule):
        return
    names = _parameters(type(child), type(child).forward)
    hit = (names[at] if isinstance(at, int) and at < len(names) else at for at in hit)
    _visit(child, frozenset(at for at in hit if isinstance(at, str)), norms, found, visited)


@lru_cache(1024)
def _parameters(cls: type, _) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)[1:]


@lru_cache(1024)
def _forward_of(cls: type, _) -> tuple[list, dict]:
    """(calls of children: (name, time, arguments: (position or keyword, values)), time of the last write to a value).

    Times count calls and writes in the order of the source.
    """
    try:
        function, definition = forward_source(cls)
    except CannotRewrite:
        return [], {}
    reader = _Reader(next(iter(inspect.signature(function).parameters)))
    arguments = definition.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args[1:], *arguments.kwonlyargs)]
    bound = {name: frozenset([name]) for name in names}
    reader.block(definition.body, bound)
    return reader.calls, reader.written


class _Reader:
    """Follows what names are bound to; a later binding adds to an earlier one on branches and in loops."""

    def __init__(self, itself: str):
        self.itself, self.time = itself, 0
        self.calls: list[tuple[str, int, list]] = []
        self.written: dict[object, int] = {}
        self.rows: dict[str, str] = {}  # loop variable -> the child whose modules it takes

    def block(self, statements: list[ast.stmt], bound: dict[str, _Values]) -> None:
        for statement in statements:
            self.statement(statement, bound)

    def statement(self, node: ast.stmt, bound: dict[str, _Values]) -> None:
        match node:
            case ast.Assign(targets, value):
                values = self.values(value, bound)
                for target in targets:
                    self.bind(target, values, bound)
            case ast.AugAssign(target, _, value):
                self.values(value, bound)
                self.write(target, bound)
            case ast.For(target, iterable, body, orelse):
                values = self.values(iterable, bound)
                for child in _children_in(iterable, self.itself):
                    self.rows.update((n.id, child) for n in ast.walk(target) if isinstance(n, ast.Name))
                self.bind(target, values, bound)
                for branch in (body, body, orelse):
                    self.branch(branch, bound)
            case ast.FunctionDef() | ast.ClassDef():
                pass
            case _:
                for _, field in ast.iter_fields(node):
                    parts = field if isinstance(field, list) else [field]
                    if parts and isinstance(parts[0], ast.stmt):
                        self.branch(parts, bound)
                    else:
                        self.parts(parts, bound)

    def parts(self, nodes: list, bound: dict[str, _Values]) -> None:
        for node in nodes:
            if isinstance(node, ast.expr):
                self.values(node, bound)
            elif isinstance(node, ast.ExceptHandler):
                self.branch(node.body, bound)
            elif isinstance(node, ast.AST):
                self.parts(list(ast.iter_child_nodes(node)), bound)

    def branch(self, statements: list[ast.stmt], bound: dict[str, _Values]) -> None:
        inside = dict(bound)
        self.block(statements, inside)
        for name, values in inside.items():
            bound[name] = bound.get(name, frozenset()) | values

    def bind(self, target: ast.expr, values: _Values, bound: dict[str, _Values]) -> None:
        match target:
            case ast.Name(name):
                bound[name] = values
            case ast.Tuple(parts) | ast.List(parts):
                for part in parts:
                    self.bind(part, values, bound)
            case ast.Starred(inner):
                self.bind(inner, values, bound)
            case ast.Subscript():
                self.write(target, bound)

    def write(self, target: ast.expr, bound: dict[str, _Values]) -> None:
        while isinstance(target, ast.Subscript):
            target = target.value
        self.note(self.values(target, bound))

    def note(self, written: _Values) -> None:
        self.time += 1
        self.written.update((value, self.time) for value in written)

    def values(self, node: ast.expr, bound: dict[str, _Values]) -> _Values:
        """What an expression may be: the tensor of a name, a view of one, or a new value, which is the node itself."""
        match node:
            case ast.Name(name):
                return bound.get(name, frozenset())
            case ast.IfExp(test, body, orelse):
                self.values(test, bound)
                return self.values(body, bound) | self.values(orelse, bound)
            case ast.NamedExpr(target, value):
                values = self.values(value, bound)
                self.bind(target, values, bound)
                return values
            case ast.Tuple(parts) | ast.List(parts):
                return frozenset().union(*(self.values(part, bound) for part in parts))
            case ast.Subscript(value) | ast.Starred(value):
                return self.values(value, bound)
            case ast.Attribute(value):
                return self.values(value, bound) | {node}
            case ast.Call(function, arguments, keywords):
                return self.call(node, function, arguments, keywords, bound)
        self.parts(list(ast.iter_child_nodes(node)), bound)
        return frozenset([node])

    def call(self, node: ast.Call, function, arguments, keywords, bound) -> _Values:
        given = [(at, self.values(argument, bound)) for at, argument in enumerate(arguments)]
        given += [(k.arg, self.values(k.value, bound)) for k in keywords if k.arg]
        for keyword in keywords:
            if keyword.arg == "out":
                self.note(self.values(keyword.value, bound))
            elif keyword.arg == "inplace" and arguments:
                self.note(given[0][1])
        match function:
            case ast.Attribute(ast.Name(owner), name) if owner == self.itself:
                self.time += 1
                self.calls.append((name, self.time, given))
                return frozenset([node])
            case ast.Name(name) if name in self.rows:
                self.time += 1
                self.calls.append((self.rows[name], self.time, given))
                return frozenset([node])
            case ast.Attribute(receiver, name):
                values = self.values(receiver, bound)
                if name.endswith("_") and not name.endswith("__"):
                    self.note(values)
                return values | {node}  # a view, perhaps
        return frozenset([node])


def _children_in(iterable: ast.expr, itself: str) -> Iterator[str]:
    """Children that a loop goes through: `layers` of ``enumerate(self.layers[1:])``."""
    for node in ast.walk(iterable):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == itself:
            yield node.attr
