"""Reads the source of a forward, and refuses all but plain arithmetic on its input and
on the module's own tensors.

A norm is recognised by a few calls of its forward. Those few speak for all calls where
the forward takes every input through the same steps, remembers nothing and asks for
nothing else. Plain arithmetic does that. The lists below say what counts as such: a
word that is not on them is refused, and the word is the reason in the report.
"""

import ast
import inspect
import itertools
from collections.abc import Iterable
from types import FunctionType, MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from ..arithmetic import EFFECTS, QUESTION, SAME_STEPS, WRITING
from ..source import CannotRewrite, definition_of
from .refusals import NotPlain

PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
MODULE_STATE = set(vars(Module()))  # what every module's instance holds
PLACES = (torch, F, torch.linalg)
TORCH_FUNCTIONS = [
    getattr(place, name)
    for place in PLACES
    for name in SAME_STEPS.intersection(dir(place))
]
TORCH_FORWARDS = (torch.nn.LayerNorm.forward, torch.nn.RMSNorm.forward)
READ_BY_TORCH = {"normalized_shape", "weight", "bias", "eps"}
AUTOCASTS = (("torch", "autocast"), ("transformers", "maybe_autocast"))  # make one
# Depend on their parts, and on nothing else.
CONDITIONS = (ast.Compare, ast.BoolOp)
EXPRESSIONS = (ast.Expr, ast.Return, ast.Tuple, ast.List, ast.Starred, ast.UnaryOp)
EXPRESSIONS += CONDITIONS
# May be given any size of the input: in each place, or in their second alone.
TAKE_SIZES = ("view", "reshape", "expand")
TAKE_SHAPE = ("layer_norm", "rms_norm")


# The kinds of an expression: what its value depends on.
CONSTANT = 0  # dtypes, numbers of dimensions, plain attributes: may decide a branch
SIZE = 1  # sizes of the input, numbers made of them: may decide whether it raises
TENSOR = 2  # or a device: may decide no branch
# Those of the attributes and the questions of an input, and of its device.
KIND_OF_FACT = {
    "shape": SIZE,
    "size": SIZE,
    "dtype": CONSTANT,
    "ndim": CONSTANT,
    "dim": CONSTANT,
    "device": TENSOR,
    "type": TENSOR,
}


def look_up(place, name: str):
    """The value of a name in a namespace, a class with its bases, a function or a
    module; None if it has none.
    """
    if isinstance(place, (dict, MappingProxyType)):
        return place.get(name)
    if isinstance(place, type):
        return inspect.getattr_static(place, name, None)
    return getattr(place, name, None)


def own_values(module: Module) -> dict[str, object]:
    """The module's own floating tensors, and its instance's plain values (numbers,
    words, flags, tuples of them), by their names.
    """
    values = {}
    stores = module._parameters, module._buffers, vars(module)
    for name, value in itertools.chain(*[store.items() for store in stores]):
        is_value = is_plain(value)
        if isinstance(value, Tensor):
            is_value = value.is_floating_point()
        if is_value and name not in MODULE_STATE:
            values[name] = value
    return values


def is_plain(value) -> bool:
    """Whether a value is a number, a flag, a word, a dtype, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN_TYPES)


class Code:
    """The forward of one module, with the helpers of its class and its file that it
    calls.

    Attributes:
        reads: all that was looked up, as (place, name, value), without the attributes
            of the module's instance. While these are the values, the forward is plain
            arithmetic, or is not for the same reason.
        attributes: names of the module's attributes that it reads; they hold its own
            tensors and plain values.
        numbers: those from 0 on that its source and its defaults have, in order.
        asks_autocast: it asks whether autocast is on; the branch with autocast off is
            read.
    """

    def __init__(self, module: Module):
        self.module = module
        self.reads: list[tuple] = []
        self.attributes: set[str] = set()
        self.numbers: dict[float, None] = {}
        self.asks_autocast = False

    def read(self) -> None:
        """Read the forward.

        Raises:
            NotPlain: it is not plain arithmetic, or its source cannot be read.
        """
        self.read_method("forward", type(self.module).__mro__)

    def look_up(self, place, name: str):
        """The value of a name in a place, which is noted; None if it has none."""
        value = look_up(place, name)
        self.reads.append((place, name, value))
        return value

    def read_method(self, name: str, classes: Iterable[type]) -> None:
        """Read the method that the first of these classes has under that name."""
        # A forward on the instance is another matter: accelerate wraps the class's own.
        if name == "forward" or name not in vars(self.module):
            for owner in classes:
                method = self.look_up(vars(owner), name)
                if method is not None:
                    return self.read_function(method, f"self.{name}", owner)
        raise NotPlain(f"its forward calls self.{name}")

    def read_function(self, function, text: str, owner: type | None = None) -> None:
        """Read a function that the source calls `text`; `owner` is the class whose
        method it is, so that its first argument is the module.
        """
        if function in TORCH_FORWARDS:
            self.attributes |= READ_BY_TORCH
            return
        is_python = isinstance(function, FunctionType)
        if not is_python or function.__module__.startswith("torch."):
            raise NotPlain(f"its forward calls {text}")
        code = self.look_up(function, "__code__")
        defaults = self.look_up(function, "__defaults__") or ()
        named = self.look_up(function, "__kwdefaults__") or {}
        for value in (*defaults, *[self.look_up(named, name) for name in named]):
            self.note_number(value)
        try:
            definition = definition_of(code)
        except CannotRewrite as error:
            raise NotPlain(f"{error}: {function.__name__}") from error
        body = _Body(self, function, definition.args, owner)
        body.read(definition.body)

    def note_number(self, value) -> None:
        if type(value) in (int, float) and value >= 0:
            self.numbers[float(value)] = None

    def read_attribute(self, name: str) -> int:
        """Note that the forward reads an attribute; refuse any but a plain value or a
        tensor of the module.
        """
        self.attributes.add(name)
        of_class = self.look_up(type(self.module), name)
        values = own_values(self.module)
        value = values.get(name, of_class)
        # a property of its class comes before its own attribute
        if is_plain(of_class) and (name in values or of_class is not None):
            if is_plain(value):
                return CONSTANT
            if of_class is None:
                return TENSOR
        raise NotPlain(
            f"its forward reads self.{name}, which is neither a tensor of its own nor a plain value"
        )


class _Body(ast.NodeVisitor):
    """Reads the body of one function, statement by statement; `visit` gives the kind of
    an expression.
    """

    def __init__(
        self,
        code: Code,
        function: FunctionType,
        parameters: ast.arguments,
        owner: type | None,
    ):
        self.code = code
        self.function = function
        self.owner = owner
        named = [*parameters.args, *parameters.kwonlyargs]
        if parameters.vararg is not None:
            named.append(parameters.vararg)
        self.local = {parameter.arg: TENSOR for parameter in named}
        self.itself = None
        if owner is not None:
            self.itself = parameters.args[0].arg

    def read(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> int:
        """The kind of what has parts: that of the part which depends on most."""
        if not isinstance(node, EXPRESSIONS):
            raise NotPlain(f"its forward uses {type(node).__name__.lower()}")
        parts = ast.iter_child_nodes(node)
        kind = self._most(part for part in parts if isinstance(part, ast.expr))
        is_not = isinstance(getattr(node, "op", None), ast.Not)
        if kind == TENSOR and (is_not or isinstance(node, CONDITIONS)):
            raise _refusal("branches on", node)
        return kind

    def _most(self, nodes: Iterable[ast.expr]) -> int:
        return max(map(self.visit, nodes), default=CONSTANT)

    # Statements

    def visit_If(self, node: ast.If) -> None:
        answer = self._answer(node.test)
        if answer is None:
            is_guard = isinstance(node.body[0], ast.Raise)
            self._check_condition(node.test, SIZE if is_guard else CONSTANT)
        if answer is not False:
            self.read(node.body)
        if answer is not True:
            self.read(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if not self._is_autocast_off(item.context_expr):
                raise _refusal("enters", item.context_expr)
        self.read(node.body)

    def _is_autocast_off(self, context: ast.expr) -> bool:
        """Whether a context is `torch.autocast(..., enabled=False)`, by any of its
        names.
        """
        if not isinstance(context, ast.Call):
            return False
        called = self._resolve(context.func)
        package, _, _ = str(getattr(called, "__module__", "")).partition(".")
        if (package, getattr(called, "__name__", "")) not in AUTOCASTS:
            return False
        self._most(_arguments(context))
        return "enabled=False" in map(ast.unparse, context.keywords)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # what an error says is no part of a result

    def visit_Assign(self, node: ast.Assign) -> None:
        kind = self.visit(node.value)
        for target in node.targets:
            self._store(target, kind)

    def _store(self, target: ast.expr, kind: int) -> None:
        match target:
            case ast.Name(name) | ast.Starred(ast.Name(name)):
                before = self.local.get(name, kind)
                self.local[name] = max(kind, before)
            case ast.Tuple(elements):
                for element in elements:
                    self._store(element, kind)
            case _:
                raise _refusal("writes", target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        raise NotPlain(f"its forward writes {ast.unparse(node.target)} in place")

    # Conditions

    def _check_condition(self, test: ast.expr, most: int = CONSTANT) -> None:
        """Refuse a condition that values decide, or sizes where they may not."""
        if self.visit(test) > most:
            raise _refusal("branches on", test)

    def visit_Compare(self, node: ast.Compare) -> int:
        match node:
            case ast.Compare(asked, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                self.visit(asked)  # `gate is None`
                return CONSTANT
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> int:
        self._check_condition(node.test)
        return self._most((node.body, node.orelse))

    def _answer(self, test: ast.expr) -> bool | None:
        """The value of a condition for every input; None if it is not known here."""
        match test:
            case ast.BoolOp(operator, parts):
                deciding = isinstance(operator, ast.Or)
                return deciding if deciding in map(self._answer, parts) else None
            case ast.UnaryOp(ast.Not(), operand):
                answer = self._answer(operand)
                return None if answer is None else not answer
            case ast.Call():
                return self._answer_of_call(test)
            case ast.Attribute(ast.Name(self.itself), name):
                self.code.read_attribute(name)
                answer = getattr(self.code.module, name, None)
                return answer if isinstance(answer, bool) else None
        return None

    def _answer_of_call(self, test: ast.Call) -> bool | None:
        """That of a question for autocast, or for a library, as
        `is_torch_npu_available()` is.
        """
        called = self._resolve(test.func)
        if called is None:
            return None
        text = ast.unparse(test)
        _, _, name = ast.unparse(test.func).rpartition(".")
        if name == "is_autocast_enabled":  # some files wrap torch's under its name
            self.code.asks_autocast = True
            return False
        if text.startswith("is_") and text.endswith("_available()"):
            return bool(called())
        return None

    # Expressions

    def visit_Constant(self, node: ast.Constant) -> int:
        self.code.note_number(node.value)
        return CONSTANT

    def visit_BinOp(self, node: ast.BinOp) -> int:
        left = self.visit(node.left)
        right = self.visit(node.right)
        if {left, right} == {SIZE, TENSOR}:
            raise _uses_size(node.left if left == SIZE else node.right)
        return max(left, right)

    def visit_Name(self, node: ast.Name) -> int:
        if node.id == self.itself or node.id not in self.local:
            raise NotPlain(
                f"its forward reads {node.id}, which is neither its input nor a tensor of its own"
            )
        return self.local[node.id]

    def visit_Attribute(self, node: ast.Attribute) -> int:
        if isinstance(node.value, ast.Name) and node.value.id == self.itself:
            return self.code.read_attribute(node.attr)
        if isinstance(self._resolve(node), torch.dtype):
            return CONSTANT
        if node.attr not in KIND_OF_FACT:
            raise _refusal("reads", node)
        self.visit(node.value)
        return KIND_OF_FACT[node.attr]

    def visit_Subscript(self, node: ast.Subscript) -> int:
        if self.visit(node.value) != SIZE:
            raise _refusal("reads", node)
        return SIZE

    # Calls

    def visit_Call(self, node: ast.Call) -> int:
        text = ast.unparse(node.func)
        _, _, name = text.rpartition(".")
        arguments = _arguments(node)
        if text in ("len", "int"):
            kind = self._most(arguments)
            if kind == TENSOR:
                raise _refusal("calls", node)
            return CONSTANT if text == "len" else kind
        if isinstance(node.func, ast.Attribute) and EFFECTS.get(name) == QUESTION:
            self._most((node.func.value, *arguments))
            return KIND_OF_FACT[name]
        self._check_function(node.func, text)
        sizes = []
        if name in TAKE_SIZES:
            sizes = arguments
        elif name in TAKE_SHAPE:
            sizes = node.args[1:2]
        for argument in arguments:
            if self.visit(argument) == SIZE and argument not in sizes:
                raise _uses_size(argument)
        return TENSOR

    def _check_function(self, function: ast.expr, text: str) -> None:
        """Refuse a function unless it is one of torch's in the list, or a helper that
        is plain itself.
        """
        called = self._resolve(function)
        if called in TORCH_FUNCTIONS:
            return
        if called is not None:
            self.code.read_function(called, text)
            return
        match function:
            case ast.Attribute(ast.Call(ast.Name("super"), []), name) if self.owner:
                mro = type(self.code.module).__mro__
                behind = mro.index(self.owner) + 1
                self.code.read_method(name, mro[behind:])
            case ast.Attribute(ast.Name(self.itself), name):
                self.code.read_method(name, type(self.code.module).__mro__)
            case ast.Attribute(value, name) if name in SAME_STEPS:
                self.visit(value)
            case ast.Subscript(ast.Name("ACT2FN") as table, key):
                # Transformers' table of gates, of which the module names one
                self._resolve(table)
                self._check_condition(key)
            case _:
                raise _refusal("calls", function)

    def _resolve(self, node: ast.expr):
        """Return the value of a name of the file, or of an attribute of one; None if it
        is neither.
        """
        match node:
            case ast.Attribute(value, name):
                owner = self._resolve(value)
                return None if owner is None else self.code.look_up(owner, name)
            case ast.Name(name) if name not in self.local:
                return self.code.look_up(self.function.__globals__, name)
        return None


def _arguments(node: ast.Call) -> list[ast.expr]:
    """Those of a call, by place and by name."""
    arguments = list(node.args)
    for keyword in node.keywords:
        if keyword.arg in WRITING:
            text = ast.unparse(node.func)
            raise NotPlain(f"its forward calls {text} with {ast.unparse(keyword)}")
        arguments.append(keyword.value)
    return arguments


def _refusal(does: str, node: ast.AST) -> NotPlain:
    """The refusal of a forward for a piece of its source."""
    return NotPlain(f"its forward {does} {ast.unparse(node)}")


def _uses_size(node: ast.expr) -> NotPlain:
    return NotPlain(
        f"its forward computes with {ast.unparse(node)}, a size of its input"
    )
