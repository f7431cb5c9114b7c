"""A forward compiled again from its own source, with a few expressions replaced by
calls.

Nothing else changes: the same statements run in the same order, with the globals,
defaults, decorators and line numbers of the original. `layers.fusions` takes a definition
from `forward_source`, changes it, and gives it to `compiled_again`.
"""

import __future__

import ast
import copy
import functools
import inspect
import linecache
import textwrap
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType

from ..fused.layer import GUARD

_FACTORY = "_hf_rmsnorm_make"
# these would see the names that a rewritten forward has besides its own
_LOOK_AT_VARIABLES = {"locals", "eval", "exec", "vars", "dir"}
# What these run for a new class or around a function concerns that one alone. Code of
# others may keep account of it, as a registry of classes does.
_LIBRARIES = {
    "abc", "accelerate", "builtins", "diffusers", "torch", "transformers", "typing",
}  # fmt: skip
# Python 3.11 raises SystemError where two threads make syntax trees at once
_syntax_trees = threading.Lock()


class CannotRewrite(Exception):
    """Why a forward cannot be compiled again from its source."""


def is_of_library(defined) -> bool:
    """Whether a class or a function is torch's or Hugging Face's."""
    module = getattr(defined, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES


def forward_source(cls: type) -> ast.FunctionDef:
    """The definition of the innermost function behind `cls.forward`, for the caller to
    change. In it `self` is the module.

    Raises:
        CannotRewrite: the source is not there, or does more than a function compiled
            alone can.
    """
    function = inspect.unwrap(cls.forward)
    if not inspect.isfunction(function):
        raise CannotRewrite(f"its forward is a {type(function).__name__}")
    definition = definition_of(function.__code__)
    for decorator in definition.decorator_list:
        _check_repeatable(decorator, function.__globals__)
    first, *_ = function.__code__.co_varnames or [""]
    for node in ast.walk(definition):
        match node:
            case ast.Name("self", ast.Store()):
                first = ""
    if first != "self":
        raise CannotRewrite("its forward does not name its module self throughout")
    return copy.deepcopy(definition)


def definition_of(code: CodeType) -> ast.FunctionDef:
    """Return the syntax of a function, which is shared: copy it to change it.

    Raises:
        CannotRewrite: its source is not there, or is not that of a function that stands
            alone.
    """
    if set(code.co_freevars) - {"__class__"}:
        raise CannotRewrite("its forward uses variables of the function around it")
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError) as error:
        raise CannotRewrite("the source of its forward is not there") from error
    return _parsed(code, text)


# The layers of a model are many of the same. Equal code may have other decorators, as
# where a notebook's cell is run again.
@functools.lru_cache(maxsize=1_024)
def _parsed(code: CodeType, text: str) -> ast.FunctionDef:
    try:
        with _syntax_trees:
            tree = ast.parse(textwrap.dedent(text))
        lines = linecache.getlines(code.co_filename)
        functions = _functions_in("".join(lines))
    except SyntaxError as error:
        raise CannotRewrite("the source of its forward is not there") from error
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.name != code.co_name:
        raise CannotRewrite("its forward is no plain function definition")
    for node in ast.walk(definition):
        _check_name(node)
    _check_class(definition)
    if code not in functions:  # they compare by all but their files
        raise CannotRewrite(
            "the source of its forward has changed since it was imported"
        )
    return definition


def _check_name(node: ast.AST) -> None:
    """Raise CannotRewrite where a forward uses a name that means something else in a
    function by itself, or a function that shows its variables.
    """
    match node:
        case ast.Attribute(_, ("currentframe" | "_getframe") as used):
            raise CannotRewrite(f"its forward uses {used}(), which shows its variables")
        case ast.Name(used) if used in _LOOK_AT_VARIABLES:
            raise CannotRewrite(f"its forward uses {used}(), which shows its variables")
        case ast.Name(used) | ast.Attribute(_, used):
            if used.startswith("__") and not used.endswith("__"):
                raise CannotRewrite(f"its forward uses the private name {used}")


def _check_class(definition: ast.FunctionDef) -> None:
    """Raise CannotRewrite where a forward asks for its exact class, which is a subclass
    once it is fused; its name is the same.
    """
    nodes = list(ast.walk(definition))
    named = []
    for node in nodes:
        match node:
            case ast.Attribute(owner, "__name__" | "__qualname__" | "__module__"):
                named.append(owner)
    for node in nodes:
        match node:
            case ast.Attribute(asked, "__class__") | ast.Call(
                ast.Name("type"), [asked]
            ):
                is_own = ast.unparse(asked).partition(".")[0] == "self"
                if is_own and node not in named:
                    raise CannotRewrite("its forward asks for an exact class")


def _check_repeatable(decorator: ast.expr, namespace: dict) -> None:
    """Raise CannotRewrite where a decorator may not be evaluated again: it is no dotted
    name, or call of one with constants, or it is the user's, who may count or keep what
    it is given.
    """
    named = decorator
    arguments = []
    if isinstance(decorator, ast.Call):
        named = decorator.func
        keywords = [keyword.value for keyword in decorator.keywords]
        arguments = decorator.args + keywords
    name, *attributes = ast.unparse(named).split(".")
    value = namespace.get(name)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    constant = all(isinstance(argument, ast.Constant) for argument in arguments)
    if not (constant and is_of_library(value)):
        text = ast.unparse(decorator)
        raise CannotRewrite(
            f"its forward has the decorator {text}, which may keep state"
        )


@functools.lru_cache(maxsize=8)
def _functions_in(text: str) -> set[CodeType]:
    """The code of all functions of a module's text. The whole is compiled: its imports
    decide on some bytecode.
    """
    functions = set()
    waiting = [compile(text, "", "exec", dont_inherit=True)]
    while waiting:
        inner = [c for c in waiting.pop().co_consts if isinstance(c, CodeType)]
        functions.update(inner)
        waiting += inner
    return functions


def compiled_again(
    cls: type, definition: ast.FunctionDef, helpers: Mapping[str, Callable]
) -> Callable:
    """`cls.forward`, compiled from a changed definition.

    Args:
        definition: what `forward_source` gave, changed; its defaults are taken out.
        helpers: functions that it calls now, by name.

    Raises:
        CannotRewrite: it cannot be compiled.
    """
    function = inspect.unwrap(cls.forward)
    # Defaults may use names of the class's body: the original's are set below, and so
    # are annotations, which this flag leaves alone.
    flags = __future__.annotations.compiler_flag
    parameters = definition.args
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    defaults = parameters.kw_defaults
    parameters.kw_defaults = [d and ast.Constant(None) for d in defaults]
    # A function around it gives `super()` its class, and keeps the new names out of the
    # module's globals.
    names = ", ".join(["__class__", *helpers])
    text = f"def {_FACTORY}({names}): return {definition.name}"
    owner = next(c for c in cls.__mro__ if _defines(c, function))
    made = {}
    try:
        with _syntax_trees:
            tree = ast.parse(text)
            tree.body[0].body.insert(0, definition)
            ast.increment_lineno(
                ast.fix_missing_locations(tree), function.__code__.co_firstlineno - 1
            )
            code = compile(tree, function.__code__.co_filename, "exec", flags)
        exec(code, function.__globals__, made)
        forward = made[_FACTORY](owner, *helpers.values())
    except Exception as error:
        # a decorator may use a name of the class's body, and raise anything
        raise CannotRewrite(
            f"its forward cannot be compiled again: {type(error).__name__}: {error}"
        ) from error
    inner = inspect.unwrap(forward)
    for name in ("__defaults__", "__kwdefaults__", "__qualname__", "__annotations__"):
        setattr(inner, name, getattr(function, name))
    return forward


def _defines(cls: type, function: FunctionType) -> bool:
    """Whether a function is in the forward of a class's own body."""
    return "forward" in vars(cls) and inspect.unwrap(cls.forward) is function


def wrapper_codes(forward: Callable) -> list:
    """The code of each function around the innermost one, but for those of `guarded`.

    Each counts once: what `__init_subclass__` wraps around the forward of every subclass
    is around a guarded forward twice.
    """
    codes = {}
    while hasattr(forward, "__wrapped__"):
        code = getattr(forward, "__code__", type(forward))
        if getattr(code, "co_name", "") != GUARD:
            codes[code] = None
        forward = forward.__wrapped__
    return list(codes)
