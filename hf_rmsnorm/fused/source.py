"""A forward compiled again from its own source, with a few expressions replaced by calls.

Nothing else changes: the same statements run in the same order, with the globals, defaults, decorators and line numbers
of the original.
"""

import ast
import copy
import functools
import inspect
import linecache
import textwrap
import threading
import types
from collections.abc import Callable, Mapping

from ..ops.backend import left_alone

_FACTORY = "_hf_rmsnorm_make"
_ADD = "_hf_rmsnorm_add"
_GUARD = "stepping_aside"
_syntax_trees = threading.Lock()  # Python 3.11 raises SystemError where two threads make syntax trees at once


class CannotRewrite(Exception):
    """Why a forward cannot be compiled again from its source."""


def forward_source(cls: type) -> tuple[Callable, ast.FunctionDef]:
    """(the innermost function behind `cls.forward`, its definition, which is everybody's: copy it to change it).

    Raises:
        CannotRewrite: the source is not there, or does more than a function compiled alone can.
    """
    function = inspect.unwrap(cls.forward)
    if not inspect.isfunction(function):
        raise CannotRewrite(f"its forward is a {type(function).__name__}")
    return function, definition_of(function.__code__)


@functools.lru_cache(maxsize=1_024)  # the layers of a model are many of the same
def definition_of(code: types.CodeType) -> ast.FunctionDef:
    """Return the syntax of a function, which is everybody's: copy it to change it.

    Raises:
        CannotRewrite: its source is not there, or is not that of a function that stands alone.
    """
    if set(code.co_freevars) - {"__class__"}:
        raise CannotRewrite("its forward uses variables of the function around it")
    try:
        with _syntax_trees:
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        now = _compiled("".join(linecache.getlines(code.co_filename))).get((code.co_name, code.co_firstlineno))
    except (OSError, TypeError, SyntaxError) as error:
        raise CannotRewrite("the source of its forward is not there") from error
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.name != code.co_name:
        raise CannotRewrite("its forward is no plain function definition")
    for node in ast.walk(definition):
        used = getattr(node, "attr", getattr(node, "id", ""))
        if isinstance(used, str) and used.startswith("__") and not used.endswith("__"):
            raise CannotRewrite(f"its forward uses the private name {used}")
        if isinstance(node, ast.Name) and used in ("locals", "vars", "eval", "exec"):
            raise CannotRewrite(f"its forward calls {used}, which may see that it is another")
    if now is None or _gist(now) != _gist(code):
        raise CannotRewrite("the source of its forward has changed since it was imported")
    return definition


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> dict[tuple[str, int], types.CodeType]:
    """The functions of a module's text by name and line. Compiled whole: what it imports decides on some bytecode."""
    found: dict[tuple[str, int], types.CodeType] = {}
    waiting = [compile(text, "", "exec", dont_inherit=True)]
    while waiting:
        for const in waiting.pop().co_consts:
            if isinstance(const, types.CodeType):
                found[const.co_name, const.co_firstlineno] = const
                waiting.append(const)
    return found


def _gist(code) -> tuple:
    consts = tuple(_gist(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, consts


def guarded(forward: Callable, base: type, observers: list | tuple = (), aside: Callable | None = None) -> Callable:
    """A forward that steps aside where somebody gives the class it was made from another; and unless it is observed,
    where no kernel serves its first input, or ``aside(module, first input)`` says so.
    """
    original = own = base.forward
    inner = inspect.unwrap(original)
    code = inner.__code__
    while len(_wrappers(own)) > len(_wrappers(forward)):  # by what wraps each subclass anew, ours as well
        own = own.__wrapped__

    @functools.wraps(forward)
    def stepping_aside(self, *args, **kwargs):
        x = args[0] if args else next(iter(kwargs.values()), None)
        if getattr(x, "is_cpu", False) and not observers and left_alone(x):
            return base.forward(self, *args, **kwargs)
        if base.forward is not original or inner.__code__ is not code:  # autoreload exchanges the code alone
            return base.forward(self, *args, **kwargs)
        if aside is not None and not observers and aside(self, x):
            return own(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return stepping_aside


def changes_itself(definition: ast.FunctionDef) -> bool:
    """Whether a method assigns to what its object holds, or calls something of it for nothing but its effect."""
    itself = definition.args.args[0].arg if definition.args.args else ""

    def held(node: ast.AST) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id == itself

    for node in ast.walk(definition):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        if any(held(t) for target in targets for t in getattr(target, "elts", [target]) if not isinstance(t, ast.Name)):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and held(node.value):
            return True
    return False


def sums(definition: ast.FunctionDef, function: Callable | None = None) -> list[ast.BinOp | ast.Call]:
    """Every ``a + b`` of a function's body in the order of its source; and given the function, calls of an `_adder`."""
    found = [
        node
        for node in _inside(definition)
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add))
        or (function and isinstance(node, ast.Call) and _adder(function, getattr(node.func, "id", "")))
    ]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset, -node.end_lineno, -node.end_col_offset))


def _adder(function: Callable, name: str) -> Callable | None:
    """The function of that name beside another, if it is one that returns a sum, as BLOOM's `dropout_add` is."""
    found = None if name in function.__code__.co_varnames else function.__globals__.get(name)
    if inspect.isfunction(found) and found.__globals__ is function.__globals__ and found.__code__.co_name == name:
        return found if not hasattr(found, "__wrapped__") and _sum_returned(found.__code__) is not None else None
    return None


@functools.lru_cache(maxsize=256)
def _sum_returned(code: types.CodeType) -> tuple[ast.FunctionDef, ast.BinOp] | None:
    """(the definition of a plain function, the ``+`` whose result it returns at its end)."""
    try:
        definition = definition_of(code)
    except CannotRewrite:
        return None
    arguments = definition.args
    literal = all(d is None or isinstance(d, ast.Constant) for d in (*arguments.defaults, *arguments.kw_defaults))
    # Nobody else is to get hold of the sum.
    sharing = any(isinstance(n, (ast.Global, ast.Nonlocal, ast.Lambda, ast.FunctionDef)) for n in _inside(definition))
    if definition.decorator_list or arguments.posonlyargs or not literal or sharing:
        return None
    *_, before, last = (None, *definition.body)
    if isinstance(before, ast.If) and not before.orelse:
        before = before.body[-1]
    match before, last:
        case _, ast.Return(ast.BinOp(op=ast.Add()) as total):
            return definition, total
        case ast.Assign([ast.Name(made)], ast.BinOp(op=ast.Add()) as total), ast.Return(ast.Name(returned)):
            return (definition, total) if returned == made else None
    return None


def _inside(definition: ast.FunctionDef) -> list[ast.AST]:
    return [node for statement in definition.body for node in ast.walk(statement)]


def _stays(function: Callable) -> Callable[[object], bool]:
    """What tells whether something is a function like this one as it is now."""
    code, defaults, keywords = function.__code__, function.__defaults__, dict(function.__kwdefaults__ or {})

    def stays(found) -> bool:
        return (
            getattr(found, "__code__", None) is code
            and found.__defaults__ is defaults
            and (found.__kwdefaults__ or {}) == keywords
        )

    return stays


def with_sums(cls: type, sites: Mapping[int, object], add: Callable) -> Callable:
    """`cls.forward` with its `sums` made by ``add(self, a, b, label)`` at the sites: position -> label."""
    helpers, beside = {_ADD: add}, {}

    def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
        function = inspect.unwrap(cls.forward)
        chosen = {id(node): sites[at] for at, node in enumerate(sums(definition, function)) if at in sites}

        class Replace(ast.NodeTransformer):
            def visit_BinOp(self, node):
                label = chosen.get(id(node))
                self.generic_visit(node)
                return node if label is None else call(_ADD, node, itself, node.left, node.right, label)

            def visit_Call(self, node):
                label = chosen.get(id(node))
                self.generic_visit(node)
                if label is None:
                    return node
                adder, name = _adder(function, node.func.id), f"{_ADD}_by_{node.func.id}"
                beside[name] = _adding(adder, function.__code__.co_firstlineno, name)
                helpers[f"{name}_stays"] = _stays(adder)
                ours = call(name, node, itself, label, *copy.deepcopy(node.args))
                ours.keywords = copy.deepcopy(node.keywords)
                stays = call(f"{name}_stays", node, node.func)
                return ast.copy_location(ast.IfExp(stays, ours, node), node)  # or somebody has exchanged it

        return Replace().visit(definition)

    return compiled_again(cls, change, helpers, beside)


def _adding(adder: Callable, first_line: int, new_name: str) -> ast.FunctionDef:
    """The definition of an `_adder` that takes, before its own arguments, whose sum it makes and the label of it.

    first_line: of the function in whose source it is to stand.
    """
    definition, total = copy.deepcopy(_sum_returned(adder.__code__))
    layer, label = ast.Name("_hf_rmsnorm_layer", ast.Load()), ast.Name("_hf_rmsnorm_label", ast.Load())

    class Replace(ast.NodeTransformer):
        def visit_BinOp(self, node):
            return node if node is not total else call(_ADD, node, layer, node.left, node.right, label)

    definition = Replace().visit(ast.increment_lineno(definition, adder.__code__.co_firstlineno - first_line))
    definition.name = new_name
    definition.args.args[:0] = [ast.arg(layer.id), ast.arg(label.id)]
    return definition


def call(function: str, where: ast.AST, *arguments) -> ast.Call:
    """``function(*arguments)`` at the place of a node; a string that is an identifier is a name, else a constant."""
    nodes = [a if isinstance(a, ast.AST) else ast.Constant(a) for a in arguments]
    if isinstance(arguments[0], str):
        nodes[0] = ast.Name(arguments[0], ast.Load())
    return ast.copy_location(ast.Call(ast.Name(function, ast.Load()), nodes, []), where)


def compiled_again(cls: type, change: Callable, helpers: Mapping[str, Callable], beside: Mapping | None = None):
    """`cls.forward`, compiled from its own source once ``change(definition, name of self)`` has been made to it.

    Args:
        change: returns the definition to compile.
        helpers: functions that the changed source calls, by name.
        beside: definitions of more such functions, by name, which are there once the change has been made.

    Raises:
        CannotRewrite: as in `forward_source`.
    """
    function, definition = forward_source(cls)
    definition = change(copy.deepcopy(definition), next(iter(inspect.signature(function).parameters)))
    definitions = [*(beside or {}).values(), definition]
    for each in definitions:
        for argument in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs):
            argument.annotation = None  # they may name what only type checkers import
        each.returns = None
    # The function's own are put back below: their expressions may name what is there in the class's body alone.
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [None if d is None else ast.Constant(None) for d in definition.args.kw_defaults]
    # A function around it gives `super()` its class, and keeps the new names out of the module's globals.
    names = ["__class__", *helpers]
    factory = ast.FunctionDef(
        name=_FACTORY, args=ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []),
        body=[*definitions, ast.Return(ast.Name(definition.name, ast.Load()))], decorator_list=[], type_params=[],
    )  # fmt: skip
    tree = ast.fix_missing_locations(ast.Module([factory], []))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    owner = next((c for c in cls.__mro__ if inspect.unwrap(c.__dict__.get("forward")) is function), cls)
    made: dict = {}
    try:
        with _syntax_trees:
            code = compile(tree, function.__code__.co_filename, "exec")
        exec(code, function.__globals__, made)
        forward = made[_FACTORY](owner, *helpers.values())
    except Exception as error:  # a decorator may name what is there in the class's body alone, and raise anything
        raise CannotRewrite(f"its forward cannot be compiled again: {type(error).__name__}: {error}") from error
    inner = inspect.unwrap(forward)
    inner.__defaults__, inner.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    inner.__qualname__, inner.__annotations__ = function.__qualname__, function.__annotations__
    return forward


def wrapped_alike(made: Callable, original: Callable) -> bool:
    """Whether the same functions are around a `guarded` forward as around the original.

    What `__init_subclass__` wraps around the forward of each subclass anew counts once.
    """
    codes, ours = _wrappers(original), _wrappers(made)
    added = ours[: next((i for i, code in enumerate(ours) if _is_guard(code)), 0)]

    def once(codes: list) -> list:
        codes = [code for code in codes if not _is_guard(code)]
        while added and codes[: 2 * len(added)] == 2 * added:
            codes = codes[len(added) :]
        return codes

    return once(ours) == once(codes)


def _wrappers(forward: Callable) -> list:
    """The code of each function around the innermost one."""
    codes = []
    while hasattr(forward, "__wrapped__"):
        codes.append(getattr(forward, "__code__", type(forward)))
        forward = forward.__wrapped__
    return codes


def _is_guard(code) -> bool:
    return getattr(code, "co_name", "") == _GUARD
