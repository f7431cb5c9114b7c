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
from types import CodeType

from ..fused.layer import GUARD
from ..fused.subclass import is_of_library

_FACTORY = "_hf_rmsnorm_make"
# these would see the names that a rewritten forward has besides its own
_LOOKS_AT_VARIABLES = {"locals", "eval", "exec", "currentframe", "_getframe"}
_BUILTINS_THAT_LOOK = {
    *_LOOKS_AT_VARIABLES,
    "vars",
    "dir",
}  # as methods they are others
# Python 3.11 raises SystemError where two threads make syntax trees at once
_syntax_trees = threading.Lock()


class CannotRewrite(Exception):
    """Why a forward cannot be compiled again from its source."""


def forward_source(cls: type) -> tuple[ast.FunctionDef, str]:
    """(the definition of the innermost function behind `cls.forward`, for the caller to
    change; its first parameter, mostly "self", "" if it has none).

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
    parameters = inspect.signature(function).parameters
    return copy.deepcopy(definition), next(iter(parameters), "")


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
        functions = _compiled("".join(lines))
    except SyntaxError as error:
        raise CannotRewrite("the source of its forward is not there") from error
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.name != code.co_name:
        raise CannotRewrite("its forward is no plain function definition")
    for node in ast.walk(definition):
        _check_name(node)
    _check_class(definition)
    now = functions.get((code.co_name, code.co_firstlineno))
    if now is None or _bytecode(now) != _bytecode(code):
        raise CannotRewrite(
            "the source of its forward has changed since it was imported"
        )
    return definition


def _check_name(node: ast.AST) -> None:
    """Raise CannotRewrite where a forward uses a name that means something else in a
    function by itself, or a function that shows its variables.
    """
    match node:
        case ast.Name(used):
            looks = used in _BUILTINS_THAT_LOOK
        case ast.Attribute(_, used):
            looks = used in _LOOKS_AT_VARIABLES
        case _:
            return
    if looks:
        raise CannotRewrite(f"its forward uses {used}(), which shows its variables")
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
    if isinstance(decorator, ast.Call):
        keywords = [keyword.value for keyword in decorator.keywords]
        for argument in decorator.args + keywords:
            if not isinstance(argument, ast.Constant):
                raise CannotRewrite(
                    "its forward has a decorator that is made of more than names and constants"
                )
        named = decorator.func
    text = ast.unparse(named)
    if not is_of_library(_value_of(named, namespace)):
        raise CannotRewrite(
            f"its forward has the decorator {text}, which may keep state"
        )


def _value_of(named: ast.expr, namespace: dict):
    """The value of a dotted name in a namespace; None if it has none."""
    match named:
        case ast.Name(name):
            return namespace.get(name)
        case ast.Attribute(owner, name):
            return getattr(_value_of(owner, namespace), name, None)
    return None


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> dict:
    """The functions of a module's text by name and line. The whole is compiled: its
    imports decide on some bytecode.
    """
    functions = {}
    waiting = [compile(text, "", "exec", dont_inherit=True)]
    while waiting:
        for const in waiting.pop().co_consts:
            if isinstance(const, CodeType):
                functions[const.co_name, const.co_firstlineno] = const
                waiting.append(const)
    return functions


def _bytecode(code: CodeType) -> tuple:
    """The instructions of a function, without its file and lines."""
    consts = []
    for const in code.co_consts:
        if isinstance(const, CodeType):
            consts.append(_bytecode(const))
        else:
            consts.append(repr(const))
    return code.co_code, code.co_names, code.co_varnames, consts


def compiled_again(
    cls: type, definition: ast.FunctionDef, helpers: Mapping[str, Callable]
) -> Callable:
    """`cls.forward`, compiled from a changed definition.

    Args:
        definition: what `forward_source` gave, changed.
        helpers: functions that it calls now, by name.

    Raises:
        CannotRewrite: it cannot be compiled.
    """
    function = inspect.unwrap(cls.forward)
    definition = copy.deepcopy(definition)
    # Defaults may use names of the class's body: the original's are set below, and so
    # are annotations, which this flag leaves alone.
    flags = __future__.annotations.compiler_flag
    parameters = definition.args
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    defaults = parameters.kw_defaults
    parameters.kw_defaults = [d and ast.Constant(None) for d in defaults]
    # A function around it gives `super()` its class, and keeps the new names out of the
    # module's globals.
    names = ["__class__", *helpers]
    arguments = ast.arguments(
        [], [ast.arg(name) for name in names], None, [], [], None, []
    )
    body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    factory = ast.FunctionDef(
        _FACTORY, arguments, body, decorator_list=[], type_params=[]
    )
    tree = ast.fix_missing_locations(ast.Module([factory], []))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    owner = cls
    for ancestor in reversed(cls.__mro__):
        if "forward" not in ancestor.__dict__:
            continue
        if inspect.unwrap(ancestor.forward) is function:
            owner = ancestor
    made = {}
    try:
        with _syntax_trees:
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
