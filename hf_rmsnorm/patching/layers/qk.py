"""Where an attention normalises and rotates q and k, found in the source of its forward."""

from __future__ import annotations

import ast
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...fused.attention import norm_and_rotate, norm_later, proven_rotary
from ...fused.source import CannotRewrite, call, compiled_again, forward_source
from ...reference import rotated

_LATER, _ROTATE, _HELD = "_hf_rmsnorm_norm_later", "_hf_rmsnorm_norm_and_rotate", "_hf_rmsnorm_held"
_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, int, float, str, type(None))


@dataclass(frozen=True)
class QKFusion:
    """Where an attention normalises q and k.

    Args:
        q, k: names of the norms among its children.
        rotary: name of the function that rotates both; "" where none follows directly.
    """

    q: str
    k: str
    rotary: str = ""

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with the norms put off."""
        return _rewritten(base, self)

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.q, self.k, self.rotary))) + " in one launch"


def find_qk(cls: type, norms: set[str]) -> QKFusion:
    """Where a forward assigns q and k, each normalised by one of these children, and rotates them next.

    Raises:
        CannotRewrite: it does not, in so many words; or its source cannot be compiled again.
    """
    function, definition = forward_source(cls)
    itself = next(iter(inspect.signature(function).parameters))
    place = _find(definition, itself, norms)
    rotary = "" if place.rotary is None else place.rotary.value.func.id
    if rotary and not prove_rotary(function.__globals__.get(rotary)):
        place, rotary = _find(definition, itself, norms, rotates=False), ""
    return QKFusion(*place.names, rotary)


def prove_rotary(function: Callable | None) -> bool:
    """Whether a function computes ``x * cos + rotate_half(x) * sin`` of q and k, to the bit; it is run to see that."""
    if not isinstance(function, types.FunctionType) or not _rotates(function):
        return False
    functions, named = _named(function)
    if any(f.__closure__ for f in functions) or not all(isinstance(value, _FIXED) for *_, value in named):
        return False  # what they hold may change while they stay what they are
    proven_rotary[function] = [(f, f.__code__) for f in functions], named
    return True


def _named(function: types.FunctionType) -> tuple[list[types.FunctionType], list[tuple[dict, str, object]]]:
    """The functions that a function calls by a global name, itself first; each (globals, name, value) of them."""
    functions, found, waiting = [], [], [function]
    while waiting:
        each = waiting.pop()
        functions.append(each)
        for name in each.__code__.co_names:
            if name in each.__globals__ and (each.__globals__, name) not in [(s, n) for s, n, _ in found]:
                value = each.__globals__[name]
                found.append((each.__globals__, name, value))
                if isinstance(value, types.FunctionType):
                    waiting.append(value)
    return functions, found


@torch.no_grad()
def _rotates(function: Callable) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16, torch.float16), (8, 4)):
        q, k, cos, sin = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, columns), (2, 5, columns))
        )
        try:
            given = function(q, k, cos, sin)
        except Exception:  # a function of other arguments, which any error can say
            if columns == 8:
                return False
            continue  # it rotates whole heads only
        expected = [rotated(x, cos, sin) for x in (q, k)]
        if not isinstance(given, tuple) or len(given) != 2:
            return False
        if not all(isinstance(a, torch.Tensor) and torch.equal(a, b) for a, b in zip(given, expected, strict=True)):
            return False
    return True


@dataclass
class _Place:
    """Statements of a forward: `q` and `k` assign normalised rows; `rotary` rotates both, or None."""

    q: ast.Assign
    k: ast.Assign
    rotary: ast.Assign | None
    names: tuple[str, str]


def _find(definition: ast.FunctionDef, itself: str, norms: set[str], rotates: bool = True) -> _Place:
    found = [(at, s, name) for at, s in enumerate(definition.body) if (name := _normalises(s, itself, norms))]
    if len(found) != 2 or found[0][2] == found[1][2]:
        raise CannotRewrite("its forward does not assign a normalised q and a normalised k")
    (first, q, q_norm), (second, k, k_norm) = found
    names = {q.targets[0].id, k.targets[0].id}
    between = [*definition.body[first + 1 : second], k.value]
    if len(names) != 2 or any(_mentions(node, q.targets[0].id) for node in between):
        raise CannotRewrite("its forward uses q before it normalises k")
    after = next((s for s in definition.body[second + 1 :] if any(_mentions(s, name) for name in names)), None)
    rotary = after if rotates and after is not None and _rotates_both(after, q.targets[0].id, k.targets[0].id) else None
    if rotary is None and q.value is _norm_call(q):
        raise CannotRewrite("its forward does not show that it normalises heads")
    last = definition.body.index(rotary or k)
    roots = [_root(_norm_call(statement).args[0], itself) for statement in (q, k)]
    for statement, root in zip((q, k), roots, strict=True):
        rest = definition.body[definition.body.index(statement) + 1 : last + 1]
        views = (rotary, k if roots[1] == root else None)
        if root not in ("", statement.targets[0].id) and any(_mentions(n, root) for n in rest if n not in views):
            raise CannotRewrite(f"its forward goes on with {root}, which it may write to")
    if any(_in_place(node) for statement in definition.body[first : last + 1] for node in ast.walk(statement)):
        raise CannotRewrite("its forward writes in place between q and what rotates it")
    return _Place(q, k, rotary, (q_norm, k_norm))


def _normalises(statement: ast.stmt, itself: str, norms: set[str]) -> str:
    """The norm in ``name = self.norm(rows)`` or ``name = self.norm(rows).transpose(1, 2)``; "" in anything else."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return ""
    value = _norm_call(statement)
    match value:
        case ast.Call(ast.Attribute(ast.Name(owner), name), [_], []) if owner == itself and name in norms:
            return name if isinstance(statement.targets[0], ast.Name) else ""
    return ""


def _norm_call(statement: ast.Assign) -> ast.expr:
    match statement.value:
        case ast.Call(ast.Attribute(inner, "transpose"), [ast.Constant(1), ast.Constant(2)], []):
            return inner
    return statement.value


def _rotates_both(statement: ast.stmt, q: str, k: str) -> bool:
    match statement:
        case ast.Assign(
            [ast.Tuple([ast.Name(to_q), ast.Name(to_k)])],
            ast.Call(ast.Name(), [ast.Name(of_q), ast.Name(of_k), cos, sin], []),
        ):
            own = any(_mentions(table, name) for table in (cos, sin) for name in (q, k))
            return (to_q, to_k) == (of_q, of_k) == (q, k) and not own
    return False


def _in_place(node: ast.AST) -> bool:
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        return True
    return (
        isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Attribute) and node.attr.endswith("_"))
        or (isinstance(node, ast.keyword) and node.arg in ("out", "inplace"))
    )


def _root(rows: ast.expr, itself: str) -> str:
    """The variable of which an expression is a view, if it is one: `x` in ``x.view(shape)[..., 0]``."""
    while not isinstance(rows, ast.Name):
        match rows:
            case ast.Subscript(inner) | ast.Call(ast.Attribute(inner)):
                rows = inner
            case _:
                return ""
    return "" if rows.id == itself else rows.id


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _rewritten(cls: type, fusion: QKFusion) -> Callable:
    def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
        place = _find(definition, itself, {fusion.q, fusion.k}, bool(fusion.rotary))
        held = ast.Name(_HELD, ast.Load())
        for statement, name in zip((place.q, place.k), place.names, strict=True):
            old = _norm_call(statement)
            new = call(_LATER, old, itself, held, name, old.args[0])
            if statement.value is old:
                statement.value = new
            else:
                statement.value.func.value = new
        names = ast.Tuple([ast.Constant(name) for name in place.names], ast.Load())
        if place.rotary is not None:
            rotate = place.rotary.value
            rotate.args[:0] = [ast.Name(itself, ast.Load()), held, names, rotate.func]
            rotate.func = ast.Name(_ROTATE, ast.Load())
        else:
            q, k = (s.targets[0].id for s in (place.q, place.k))
            pair = ast.Tuple([ast.Name(n, ast.Store()) for n in (q, k)], ast.Store())
            both = [ast.Name(n, ast.Load()) for n in (q, k)]
            both_normed = ast.Assign([pair], call(_ROTATE, place.k, itself, held, names, None, *both))
            definition.body.insert(definition.body.index(place.k) + 1, ast.copy_location(both_normed, place.k))
        fresh = ast.Assign([ast.Name(_HELD, ast.Store())], ast.Dict([], []))
        definition.body.insert(definition.body.index(place.q), ast.copy_location(fresh, place.q))
        return definition

    return compiled_again(cls, change, {_LATER: norm_later, _ROTATE: norm_and_rotate})
