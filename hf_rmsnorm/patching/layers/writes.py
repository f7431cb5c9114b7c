"""Norms whose input or output a forward writes to in place, found in its source.

    h += self.mlp(self.norm(h))      h.mul_(2)      h[mask] = 0      torch.add(h, 1, out=h)

A backward that reads such a tensor would find another one. A write that the source does
not show, as one by the caller, is an error in the backward: `ops.autograd`. Of one
through `.data` nothing else tells.
"""

import ast
import contextlib
import inspect
from typing import NamedTuple

from ...fused.layer import layer_part
from ...fused.source import CannotRewrite, definition_of, name_of_self

# Methods and attributes whose result may be a view of the tensor, or the tensor itself.
_VIEWS = {
    "chunk", "contiguous", "detach", "expand", "expand_as", "flatten", "movedim",
    "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "to",
    "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
_VIEW_ATTRIBUTES = {"data", "mT", "T"}  # the result is a view of the tensor


class Writes(NamedTuple):
    """The names of the children whose input, and whose output, a forward writes to once
    the child has run.
    """

    inputs: set[str]
    outputs: set[str]


def written_in(cls: type) -> Writes:
    """The writes that the source of a class's forward shows; none without a source."""
    part = layer_part(cls)
    if part is not None:
        cls = part._hf_rmsnorm_layer_base
    function = inspect.unwrap(cls.forward)
    writes = Writes(set(), set())
    with contextlib.suppress(CannotRewrite):
        if inspect.isfunction(function):
            definition = definition_of(function.__code__)
            _Walk(name_of_self(function), writes).block(definition.body)
    return writes


class _Walk(ast.NodeVisitor):
    """Follows a forward, statement by statement.

    Attributes:
        uses: variable -> who has to find its tensor unchanged, as (child, whether it is
            that child's output). Variables that hold one tensor share the set.
    """

    def __init__(self, itself: str, writes: Writes):
        self.itself = itself
        self.writes = writes
        self.uses: dict[str, set] = {}

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        pass  # it runs another time

    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        for block in ([node.test], node.body, node.orelse):
            before = dict(self.uses)
            self.block(block)
            for name, users in before.items():  # a branch that does not run binds none
                if self.uses[name] is not users:
                    self.uses[name] = self.uses[name] | users

    def visit_For(self, node: ast.For | ast.While) -> None:
        for _ in range(2):  # a write may stand above the norm that has read
            self.generic_visit(node)

    visit_While = visit_For

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._write(node.target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)  # its arguments come first
        match node:
            case ast.Call(ast.Attribute(ast.Name(self.itself), child)):
                named = [keyword.value for keyword in node.keywords]
                for argument in node.args + named:
                    self._users(argument).add((child, False))
            case ast.Call(ast.Attribute(tensor, name)) if _is_in_place(name):
                self._write(tensor)
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._write(keyword.value)
            elif keyword.arg == "inplace" and node.args:
                self._write(node.args[0])

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(name), _:
                self.uses[name] = self._users(value)
            case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
                for each, of_each in zip(targets, values, strict=True):
                    self._assign(each, of_each)
            case ((ast.Tuple(targets) | ast.List(targets)), _):
                for each in targets:
                    self._assign(each, value)
            case ((ast.Subscript() | ast.Attribute()), _):
                self._write(target)

    def _users(self, value: ast.expr) -> set:
        """Who has to find the tensor that is the value of an expression unchanged."""
        match _viewed(value):
            case ast.Name(name):
                return self.uses.setdefault(name, set())
            case ast.Call(ast.Attribute(ast.Name(self.itself), child)):
                return {(child, True)}
        return set()

    def _write(self, target: ast.expr) -> None:
        for child, is_output in self._users(target):
            names = self.writes.outputs if is_output else self.writes.inputs
            names.add(child)


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def _viewed(value: ast.expr) -> ast.expr:
    """x in an expression whose value may be a view of the tensor x."""
    match value:
        case ast.Subscript(inner):
            return _viewed(inner)
        case ast.Attribute(inner, name) if name in _VIEW_ATTRIBUTES:
            return _viewed(inner)
        case ast.Call(ast.Attribute(inner, name)):
            if name in _VIEWS or _is_in_place(name):
                return _viewed(inner)
    return value
