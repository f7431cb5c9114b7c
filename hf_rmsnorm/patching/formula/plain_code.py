"""Reads the source of a forward, and refuses all but plain arithmetic on its input and
on the module's own tensors.

A norm is recognised by a few calls of its forward. Those few speak for all calls where
the forward takes every input through the same steps, remembers nothing and asks for
nothing else. Plain arithmetic does that. The lists below say what counts as such: a
word that is not on them is refused, and the word is the reason in the report.
"""

import ast
import inspect
import types
from collections import Counter
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from ...fused.source import CannotRewrite, definition_of
from .probe import is_plain

# Functions of torch and methods of a tensor that a norm may call.
ARITHMETIC = {
    "abs", "add", "bfloat16", "contiguous", "div", "double", "expand", "expand_as",
    "flatten", "float", "half", "layer_norm", "mean", "movedim", "mul", "neg", "norm",
    "normalize", "permute", "pow", "reciprocal", "reshape", "rms_norm", "rsqrt",
    "sigmoid", "silu", "sqrt", "square", "squeeze", "sub", "sum", "to", "transpose",
    "type_as", "unflatten", "unsqueeze", "var", "var_mean", "vector_norm", "view",
    "view_as",
}  # fmt: skip
SIZES = ("dim", "size")  # methods that say how large a tensor is
# the only calls that may be given all sizes of the input
TAKE_SHAPES = ("view", "reshape", "expand", "len")
WRITE = ("out", "inplace")  # arguments that have a function write to a tensor
TORCH_FORWARDS = (torch.nn.LayerNorm.forward, torch.nn.RMSNorm.forward)
SPECIAL_METHODS = ("__call__", "__getattr__", "__getattribute__")
# Syntax that is read part by part. Other syntax has a method of `_Body`, or is refused.
SYNTAX = (
    ast.BinOp, ast.Constant, ast.Expr, ast.List, ast.Pass, ast.Return, ast.Starred,
    ast.Tuple, ast.UnaryOp, ast.expr_context, ast.operator, ast.unaryop,
)  # fmt: skip


class NotPlain(Exception):
    """Why a forward is not plain arithmetic."""


def attributes_read(module: torch.nn.Module) -> set[str]:
    """Return the names of the module's attributes that its forward reads; they hold its
    own tensors and plain values.

    Raises:
        NotPlain: the forward is not plain arithmetic, or its source cannot be read.
    """
    for name in SPECIAL_METHODS:
        owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
        if owner not in (torch.nn.Module, object):
            raise NotPlain(f"its class defines {name}")
    code = _Code(module)
    code.read_method("forward", type(module).__mro__)
    return code.attributes


class _Code:
    """The forward of one module, with the helpers of its class and its file that it
    calls.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.attributes: set[str] = set()
        self._read: set[tuple[types.FunctionType, bool]] = set()

    def read_method(self, name: str, classes: Iterable[type]) -> None:
        """Read the method that the first of these classes has under that name."""
        owner = next((cls for cls in classes if name in vars(cls)), None)
        replaced = name in vars(self.module) and name != "forward"
        if owner is None or replaced:
            raise NotPlain(f"its forward calls self.{name}")
        method = vars(owner)[name]
        takes_module = not isinstance(method, (staticmethod, classmethod))
        self.read_function(
            getattr(method, "__func__", method), f"self.{name}", takes_module, owner
        )

    def read_function(
        self, function, text: str, takes_module: bool, owner: type | None = None
    ) -> None:
        """Read a function that the source calls `text`.

        Args:
            takes_module: whether its first argument is the module.
            owner: the class whose method it is.
        """
        function = getattr(function, "_torchdynamo_orig_callable", function)
        if any(function is forward for forward in TORCH_FORWARDS):
            return
        if not isinstance(function, types.FunctionType) or str(
            function.__module__
        ).startswith("torch."):
            raise NotPlain(f"its forward calls {text}")
        if (function, takes_module) in self._read:
            return
        self._read.add((function, takes_module))
        _Body(self, function, takes_module, owner).read()

    def read_attribute(self, name: str) -> None:
        """Note that the forward reads an attribute; refuse any but a plain value or a
        tensor of the module.
        """
        member = inspect.getattr_static(type(self.module), name, None)
        if isinstance(member, property):
            self.read_function(member.fget, f"self.{name}", takes_module=True)
            return
        if name == "training":
            raise NotPlain("its forward reads self.training")
        value = getattr(self.module, name, None)
        if not is_plain(value) and not self._is_own_tensor(name, value):
            raise NotPlain(
                f"its forward reads self.{name}, which is neither a tensor of its own nor a plain value"
            )
        self.attributes.add(name)

    def _is_own_tensor(self, name: str, value) -> bool:
        stores = (self.module._parameters, self.module._buffers, vars(self.module))
        return isinstance(value, torch.Tensor) and any(
            name in store for store in stores
        )


class _Body(ast.NodeVisitor):
    """Reads the body of one function, statement by statement."""

    def __init__(
        self,
        code: _Code,
        function: types.FunctionType,
        takes_module: bool,
        owner: type | None,
    ):
        self.code = code
        self.function = function
        self.owner = owner
        try:
            self.definition = definition_of(function.__code__)
        except CannotRewrite as error:
            raise NotPlain(str(error)) from error
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters)
        names = [
            node for node in ast.walk(self.definition) if isinstance(node, ast.Name)
        ]
        stored = Counter(node.id for node in names if isinstance(node.ctx, ast.Store))
        self.itself = parameters[0] if takes_module else None
        self.local = {*parameters, *stored}
        self.assigned_once = {
            name for name, times in stored.items() if times == 1
        } - set(parameters)
        # local names that hold a dtype, a number of dimensions or a constant
        self.static: set[str] = set()
        self.sizes: set[str] = set()  # local names that hold a size of the input
        # those that are not the length of its rows
        self.leading_sizes: set[str] = set()

    def read(self) -> None:
        defaults = (
            *(self.function.__defaults__ or ()),
            *(self.function.__kwdefaults__ or {}).values(),
        )
        if not all(map(is_plain, defaults)):
            raise NotPlain("its forward has a default that is no plain value")
        self._visit_all(self.definition.body)

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, SYNTAX):
            raise NotPlain(f"its forward uses {type(node).__name__.lower()}")
        super().generic_visit(node)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # Statements

    def visit_If(self, node: ast.If) -> None:
        if self._is_off(node.test):
            self._visit_all(node.orelse)
            return
        is_guard = not node.orelse and all(
            isinstance(statement, ast.Raise) for statement in node.body
        )
        self._check_condition(node.test, sizes=is_guard)
        self._visit_all(node.body)
        self._visit_all(node.orelse)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._check_condition(node.test, sizes=True)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # what an error says is no part of a result

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign([node.target], node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        raise NotPlain(f"its forward writes {ast.unparse(node.target)} in place")

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        parts = [
            part for target in targets for part in getattr(target, "elts", [target])
        ]
        names = [_name_stored(part) for part in parts]
        if _is_shape(value):
            is_unpacked = isinstance(targets[0], (ast.Tuple, ast.List))
            self.sizes.update(names)
            self.leading_sizes.update(names[:-1] if is_unpacked else names)
            self._visit_shape(value)
            return
        once = self.assigned_once.intersection(names)
        if self._is_static(value):
            self.static.update(once)
        elif self._is_static(value, sizes=True):
            self.sizes.update(once)
        self.visit(value)

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._check_condition(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._check_condition(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._check_condition(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._check_condition(node)
        else:
            self.visit(node.operand)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.leading_sizes:
            raise NotPlain(f"its forward computes with {node.id}, a size of its input")
        if node.id == self.itself or node.id not in self.local:
            raise NotPlain(
                f"its forward reads {node.id}, which is neither its input nor a tensor of its own"
            )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_self(node.value):
            self.code.read_attribute(node.attr)
        elif node.attr in ("dtype", "ndim"):
            self.visit(node.value)
        elif node.attr == "shape":
            raise NotPlain(
                f"its forward computes with {ast.unparse(node)}, the sizes of its input"
            )
        elif not isinstance(self._resolve(node), torch.dtype):
            raise NotPlain(f"its forward reads {ast.unparse(node)}")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = ast.unparse(node.slice)
        if _is_shape(node.value):
            if index not in ("-1", "-1:"):
                raise NotPlain(
                    f"its forward computes with {ast.unparse(node)}, a size of its input"
                )
            self._visit_shape(node.value)
            return
        if not all(
            part in ("None", "...", ":") for part in index.strip("()").split(", ")
        ):
            raise NotPlain(f"its forward reads {ast.unparse(node)}")
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        text = ast.unparse(node.func)
        if any(
            keyword.arg is None or keyword.arg in WRITE for keyword in node.keywords
        ):
            raise NotPlain(
                f"its forward calls {text} with {ast.unparse(node.keywords)}"
            )
        self._check_function(node, text)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if self._is_given_module(node):
            arguments = arguments[1:]
        for argument in arguments:
            self._visit_argument(argument, text.rpartition(".")[2])

    def _visit_argument(self, argument: ast.expr, function: str) -> None:
        value = argument.value if isinstance(argument, ast.Starred) else argument
        if function in TAKE_SHAPES and _is_shape(value):
            self._visit_shape(value)
        elif (
            function not in TAKE_SHAPES or getattr(value, "id", None) not in self.sizes
        ):
            self.visit(argument)

    def _visit_shape(self, node: ast.expr) -> None:
        """Read whose shape it is."""
        shape = node.value if isinstance(node, ast.Subscript) else node
        self.visit(shape.value)

    # Functions that are called

    def _check_function(self, call: ast.Call, text: str) -> None:
        function = call.func
        name = text.rpartition(".")[2]
        if text == f"super().{name}" and self.owner is not None:
            classes = type(self.code.module).__mro__
            self.code.read_method(name, classes[classes.index(self.owner) + 1 :])
        elif isinstance(function, ast.Attribute) and self._is_self(function.value):
            self.code.read_method(name, type(self.code.module).__mro__)
        elif text.startswith("ACT2FN["):
            # Transformers' table of gates, of which the module names one
            self.visit(function.slice)
        elif self._is_global(function):
            self._check_global_function(call, text)
        elif isinstance(function, ast.Attribute) and self._is_method_of_tensor(
            call, name
        ):
            self.visit(function.value)
        else:
            raise NotPlain(f"its forward calls {text}")

    def _is_method_of_tensor(self, call: ast.Call, name: str) -> bool:
        if name == "size":
            return [ast.unparse(argument) for argument in call.args] == ["-1"]
        return name in ARITHMETIC or name in SIZES

    def _check_global_function(self, call: ast.Call, text: str) -> None:
        """Refuse a function of the file unless it is one of torch's in the list, or a
        helper that is plain itself.
        """
        function, name = self._resolve(call.func), text.rpartition(".")[2]
        if function is int or function is len:
            if not all(self._is_static(argument, sizes=True) for argument in call.args):
                raise NotPlain(f"its forward calls {ast.unparse(call)}")
        elif not _is_arithmetic_of_torch(function, name):
            self.code.read_function(
                function, text, takes_module=self._is_given_module(call)
            )

    def _is_given_module(self, call: ast.Call) -> bool:
        """Whether a function's first argument is the module, as in
        ``nn.LayerNorm.forward(self, x)``.
        """
        is_function = isinstance(self._resolve(call.func), types.FunctionType)
        return is_function and bool(call.args) and self._is_self(call.args[0])

    def _is_global(self, node: ast.expr) -> bool:
        """Whether an expression is a name of the file, or an attribute of one."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.local

    def _resolve(self, node: ast.expr):
        """Return the value of a name of the file, or of an attribute of one; None if it
        is neither.
        """
        if isinstance(node, ast.Attribute):
            return getattr(self._resolve(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.local:
            return None
        return self.function.__globals__.get(
            node.id, {"int": int, "len": len}.get(node.id)
        )

    # Conditions

    def _check_condition(self, test: ast.expr, sizes: bool = False) -> None:
        """Refuse a condition that values decide: dtypes, dimensions and plain
        attributes may, and sizes if allowed.
        """
        if not self._is_static(test, sizes):
            raise NotPlain(f"its forward branches on {ast.unparse(test)}")
        for node in ast.walk(test):
            if isinstance(node, ast.Attribute) and self._is_self(node.value):
                self.code.read_attribute(node.attr)

    def _is_static(self, node: ast.expr, sizes: bool = False) -> bool:
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.List, ast.Tuple, ast.UnaryOp)):
            operands = [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.expr)
            ]
            return all(self._is_static(operand, sizes) for operand in operands)
        match node:
            case ast.Attribute():
                return self._is_static_attribute(node, sizes)
            case ast.Call():
                return self._is_static_call(node, sizes)
            case ast.Compare():
                return self._is_static_comparison(node, sizes)
        return isinstance(node, ast.Constant) or self._is_static_name(node, sizes)

    def _is_static_name(self, node: ast.expr, sizes: bool) -> bool:
        if isinstance(node, ast.Subscript):  # `x.shape[-1]`
            return sizes and _is_shape(node.value)
        known = self.static | self.sizes if sizes else self.static
        return isinstance(node, ast.Name) and node.id in known

    def _is_static_attribute(self, node: ast.Attribute, sizes: bool) -> bool:
        if self._is_self(node.value):
            return is_plain(getattr(self.code.module, node.attr, None))
        if node.attr in ("dtype", "ndim") or (sizes and node.attr == "shape"):
            return self._is_variable(node.value)
        return isinstance(self._resolve(node), torch.dtype)

    def _is_static_call(self, node: ast.Call, sizes: bool) -> bool:
        function = ast.unparse(node.func)
        if function == "len":
            return _is_shape(node.args[0])
        if function == "isinstance":
            return True
        allowed = SIZES if sizes else ("dim",)
        return (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in allowed
            and self._is_variable(node.func.value)
        )

    def _is_static_comparison(self, node: ast.Compare, sizes: bool) -> bool:
        operands = [node.left, *node.comparators]
        if all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
            # `gate is None`
            return all(
                self._is_variable(operand) or self._is_static(operand)
                for operand in operands
            )
        return all(self._is_static(operand, sizes) for operand in operands)

    def _is_variable(self, node: ast.expr) -> bool:
        """Whether an expression is a local name or an attribute of the module."""
        if isinstance(node, ast.Attribute):
            return self._is_self(node.value)
        return isinstance(node, ast.Name) and node.id in self.local

    def _is_off(self, test: ast.expr) -> bool:
        """Whether a condition asks for a library that is not there, as
        `is_torch_npu_available()` does.
        """
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return any(self._is_off(part) for part in test.values)
        name = ast.unparse(test).removesuffix("()")
        if not isinstance(test, ast.Call) or not (
            name.startswith("is_") and name.endswith("_available")
        ):
            return False
        return self._resolve(test.func)() is False

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.itself


def _name_stored(target: ast.expr) -> str:
    """Return the local name that a target of an assignment is."""
    target = target.value if isinstance(target, ast.Starred) else target
    if not isinstance(target, ast.Name):
        raise NotPlain(f"its forward writes {ast.unparse(target)}")
    return target.id


def _is_shape(node: ast.expr) -> bool:
    """Whether an expression is ``x.shape`` or ``x.shape[:-1]``."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.slice) == ":-1" and _is_shape(node.value)
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _is_arithmetic_of_torch(function, name: str) -> bool:
    places = (torch, F, torch.linalg)
    return name in ARITHMETIC and any(
        function is getattr(place, name, None) for place in places
    )
