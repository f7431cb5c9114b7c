"""Reads the source of a forward, and refuses all but plain arithmetic on its input and
on the module's own tensors.

A norm is recognised by a few calls of its forward. Those few speak for all calls where
the forward takes every input through the same steps, remembers nothing and asks for
nothing else. Plain arithmetic does that. The lists below say what counts as such: a
word that is not on them is refused, and the word is the reason in the report.
"""

import ast
import enum
import inspect
import types
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from ...fused.source import CannotRewrite, definition_of
from .probe import is_plain, own_tensors

# Functions of torch and methods of a tensor that a norm may call.
ARITHMETIC = {
    "abs", "add", "bfloat16", "contiguous", "div", "double", "expand", "expand_as",
    "flatten", "float", "half", "layer_norm", "mean", "movedim", "mul", "neg", "norm",
    "normalize", "permute", "pow", "reciprocal", "reshape", "rms_norm", "rsqrt",
    "sigmoid", "silu", "sqrt", "square", "squeeze", "sub", "sum", "to", "transpose",
    "type_as", "unflatten", "unsqueeze", "var", "var_mean", "vector_norm", "view",
    "view_as",
}  # fmt: skip
TAKE_SHAPES = ("view", "reshape", "expand")  # they may be given any size of the input
WRITE = ("out", "inplace")  # arguments that have a function write to a tensor
TORCH_FORWARDS = (torch.nn.LayerNorm.forward, torch.nn.RMSNorm.forward)
SPECIAL_METHODS = ("__call__", "__getattr__", "__getattribute__")


class NotPlain(Exception):
    """Why a forward is not plain arithmetic."""


class Kind(enum.IntEnum):
    """What the value of an expression depends on."""

    CONSTANT = 0  # dtypes, numbers of dimensions, plain attributes: may decide a branch
    LENGTH = 1  # of the rows: a number to compute with
    SHAPE = 2  # any sizes of the input: only for the calls of TAKE_SHAPES, and guards
    TENSOR = 3


def attributes_read(module: torch.nn.Module) -> set[str]:
    """Return the names of the module's attributes that its forward reads; they hold its
    own tensors and plain values.

    Raises:
        NotPlain: the forward is not plain arithmetic, or its source cannot be read.
    """
    for name in SPECIAL_METHODS:
        if getattr(type(module), name) is not getattr(torch.nn.Module, name):
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
        if isinstance(method, staticmethod):
            self.read_function(method.__func__, f"self.{name}")
        else:
            self.read_function(method, f"self.{name}", True, owner)

    def read_function(
        self,
        function,
        text: str,
        takes_module: bool = False,
        owner: type | None = None,
    ) -> None:
        """Read a function that the source calls `text`.

        Args:
            takes_module: whether its first argument is the module.
            owner: the class whose method it is.
        """
        function = getattr(function, "_torchdynamo_orig_callable", function)
        if function in TORCH_FORWARDS:
            self.attributes.add("eps")
            return
        if not isinstance(function, types.FunctionType):
            raise NotPlain(f"its forward calls {text}")
        if str(function.__module__).startswith("torch."):
            raise NotPlain(f"its forward calls {text}")
        if (function, takes_module) not in self._read:
            self._read.add((function, takes_module))
            _Body(self, function, takes_module, owner).read()

    def read_attribute(self, name: str) -> Kind:
        """Note that the forward reads an attribute; refuse any but a plain value or a
        tensor of the module.
        """
        if name == "training":
            raise NotPlain("its forward reads self.training")
        member = inspect.getattr_static(type(self.module), name, None)
        if isinstance(member, property):
            self.read_function(member.fget, f"self.{name}", takes_module=True)
        value = getattr(self.module, name, None)
        self.attributes.add(name)
        if is_plain(value):
            return Kind.CONSTANT
        if any(value is tensor for _, tensor in own_tensors(self.module)):
            return Kind.TENSOR
        raise NotPlain(
            f"its forward reads self.{name}, which is neither a tensor of its own nor a plain value"
        )


class _Body(ast.NodeVisitor):
    """Reads the body of one function, statement by statement; `visit` gives the kind of
    an expression.
    """

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
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters)
        self.itself = parameters[0] if takes_module else None
        self.local = dict.fromkeys(parameters, Kind.TENSOR)

    def read(self) -> None:
        try:
            definition = definition_of(self.function.__code__)
        except CannotRewrite as error:
            raise NotPlain(f"{error}: {self.function.__name__}") from error
        named_defaults = self.function.__kwdefaults__ or {}
        defaults = (*(self.function.__defaults__ or ()), *named_defaults.values())
        if not all(map(is_plain, defaults)):
            raise NotPlain("its forward has a default that is no plain value")
        self._read_statements(definition.body)

    def generic_visit(self, node: ast.AST) -> Kind:
        raise NotPlain(f"its forward uses {type(node).__name__.lower()}")

    def _visit_all(self, nodes: Iterable[ast.AST]) -> Kind:
        return max((self.visit(node) for node in nodes), default=Kind.CONSTANT)

    # Statements

    def _read_statements(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if not self._is_off(node.test):
            most = Kind.CONSTANT
            if isinstance(node.body[0], ast.Raise):  # a guard
                most = Kind.SHAPE
            self._check_condition(node.test, most)
            self._read_statements(node.body)
        self._read_statements(node.orelse)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._check_condition(node.test, Kind.SHAPE)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # what an error says is no part of a result

    def visit_Assign(self, node: ast.Assign) -> None:
        kind = self.visit(node.value)
        for target in node.targets:
            self._store(target, kind)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._store(node.target, self.visit(node.value))

    def _store(self, target: ast.expr, kind: Kind) -> None:
        if isinstance(target, ast.Tuple):
            *leading, last = target.elts
            for element in leading:
                self._store(element, kind)
            # `batch, length, size = x.shape`
            if kind == Kind.SHAPE and not isinstance(last, ast.Starred):
                kind = Kind.LENGTH
            self._store(last, kind)
            return
        name = target.value if isinstance(target, ast.Starred) else target
        if not isinstance(name, ast.Name):
            raise NotPlain(f"its forward writes {ast.unparse(target)}")
        before = self.local.get(name.id, kind)
        self.local[name.id] = max(kind, before)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        raise NotPlain(f"its forward writes {ast.unparse(node.target)} in place")

    # Conditions

    def _check_condition(self, test: ast.expr, most: Kind = Kind.CONSTANT) -> None:
        """Refuse a condition that values decide, or sizes where they may not."""
        if self.visit(test) > most:
            raise NotPlain(f"its forward branches on {ast.unparse(test)}")

    def _visit_condition(self, node: ast.expr, operands: list[ast.expr]) -> Kind:
        kind = self._visit_all(operands)
        if kind == Kind.TENSOR:
            raise NotPlain(f"its forward branches on {ast.unparse(node)}")
        if kind == Kind.LENGTH:
            kind = Kind.SHAPE
        return kind

    def visit_Compare(self, node: ast.Compare) -> Kind:
        operands = [node.left, *node.comparators]
        if all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
            self._visit_all(operands)  # `gate is None`
            return Kind.CONSTANT
        return self._visit_condition(node, operands)

    def visit_BoolOp(self, node: ast.BoolOp) -> Kind:
        return self._visit_condition(node, node.values)

    def visit_IfExp(self, node: ast.IfExp) -> Kind:
        self._check_condition(node.test)
        return self._visit_all((node.body, node.orelse))

    def _is_off(self, test: ast.expr) -> bool:
        """Whether a condition asks for a library that is not there, as
        `is_torch_npu_available()` does.
        """
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return any(self._is_off(part) for part in test.values)
        name = ast.unparse(test)
        is_question = name.startswith("is_") and name.endswith("_available()")
        return is_question and self._resolve(test.func)() is False

    # Expressions

    def visit_Constant(self, node: ast.Constant) -> Kind:
        return Kind.CONSTANT

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> Kind:
        return self._visit_all(node.elts)

    visit_List = visit_Tuple

    def visit_Starred(self, node: ast.Starred) -> Kind:
        return self.visit(node.value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Kind:
        if isinstance(node.op, ast.Not):
            return self._visit_condition(node, [node.operand])
        return self._number(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> Kind:
        return max(self._number(node.left), self._number(node.right))

    def _number(self, node: ast.expr) -> Kind:
        """The kind of an operand; refuse sizes other than the length of the rows."""
        kind = self.visit(node)
        if kind == Kind.SHAPE:
            raise NotPlain(
                f"its forward computes with {ast.unparse(node)}, a size of its input"
            )
        return kind

    def visit_Name(self, node: ast.Name) -> Kind:
        if node.id == self.itself or node.id not in self.local:
            raise NotPlain(
                f"its forward reads {node.id}, which is neither its input nor a tensor of its own"
            )
        return self.local[node.id]

    def visit_Attribute(self, node: ast.Attribute) -> Kind:
        if self._is_self(node.value):
            return self.code.read_attribute(node.attr)
        if node.attr == "shape":
            self.visit(node.value)
            return Kind.SHAPE
        if node.attr in ("dtype", "ndim"):
            self.visit(node.value)
            return Kind.CONSTANT
        if not isinstance(self._resolve(node), torch.dtype):
            raise NotPlain(f"its forward reads {ast.unparse(node)}")
        return Kind.CONSTANT

    def visit_Subscript(self, node: ast.Subscript) -> Kind:
        kind = self.visit(node.value)
        index = ast.unparse(node.slice)
        if kind == Kind.SHAPE and index in ("-1", "-1:"):
            return Kind.LENGTH
        parts = index.strip("()").split(", ")
        is_plain_index = all(part in ("None", "...", ":") for part in parts)
        if kind == Kind.TENSOR and not is_plain_index:
            raise NotPlain(f"its forward reads {ast.unparse(node)}")
        return kind

    # Calls

    def visit_Call(self, node: ast.Call) -> Kind:
        function = node.func
        text = ast.unparse(function)
        name = text.rpartition(".")[2]
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in WRITE:
                raise NotPlain(f"its forward calls {text} with {ast.unparse(keyword)}")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        gives_module = bool(node.args) and self._is_self(node.args[0])
        if gives_module:  # `nn.LayerNorm.forward(self, x)`
            arguments = arguments[1:]
        if text in ("len", "int"):
            return self._visit_number(node)
        if isinstance(function, ast.Attribute) and name in ("dim", "size"):
            self._visit_all((function.value, *arguments))
            return _kind_of_size(node)
        self._check_function(function, text, gives_module)
        read = self.visit if name in TAKE_SHAPES else self._number
        for argument in arguments:
            read(argument)
        return Kind.TENSOR

    def _visit_number(self, node: ast.Call) -> Kind:
        """The kind of ``len(x.shape)`` or ``int(number)``."""
        kind = self._visit_all(node.args)
        if kind == Kind.TENSOR:
            raise NotPlain(f"its forward calls {ast.unparse(node)}")
        return Kind.CONSTANT if ast.unparse(node.func) == "len" else kind

    def _check_function(
        self, function: ast.expr, text: str, gives_module: bool
    ) -> None:
        """Refuse a function unless it is one of torch's in the list, or a helper that
        is plain itself.
        """
        name = text.rpartition(".")[2]
        mro = type(self.code.module).__mro__
        is_method = isinstance(function, ast.Attribute)
        called = self._resolve(function)
        if text == f"super().{name}" and self.owner is not None:
            self.code.read_method(name, mro[mro.index(self.owner) + 1 :])
        elif is_method and self._is_self(function.value):
            self.code.read_method(name, mro)
        elif text.startswith("ACT2FN["):
            # Transformers' table of gates, of which the module names one
            self._check_condition(function.slice)
        elif _is_arithmetic_of_torch(called, name):
            return
        elif isinstance(called, types.FunctionType):
            self.code.read_function(called, text, gives_module)
        elif is_method and name in ARITHMETIC:
            self._number(function.value)
        else:
            raise NotPlain(f"its forward calls {text}")

    def _resolve(self, node: ast.expr):
        """Return the value of a name of the file, or of an attribute of one; None if it
        is neither.
        """
        if isinstance(node, ast.Attribute):
            return getattr(self._resolve(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.local:
            return None
        return self.function.__globals__.get(node.id)

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.itself


def _kind_of_size(call: ast.Call) -> Kind:
    """The kind of ``x.dim()``, ``x.size(-1)`` or ``x.size()``."""
    if call.func.attr == "dim":
        return Kind.CONSTANT
    is_last = ast.unparse(call).endswith(".size(-1)")
    return Kind.LENGTH if is_last else Kind.SHAPE


def _is_arithmetic_of_torch(function, name: str) -> bool:
    if function is None or name not in ARITHMETIC:
        return False
    places = (torch, F, torch.linalg)
    return any(function is getattr(place, name, None) for place in places)
