"""Where an attention normalises and rotates q and k, found in the source of its forward."""

import ast
import builtins
import copy
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from ...fused.attention import as_pair, norm_and_rotate, norm_and_turn, norm_later
from ...fused.source import CannotRewrite, call, compiled_again, forward_source
from .rotary import prove_rotary
from .values import children_given

_LATER, _ROTATE, _HELD = "_hf_rmsnorm_norm_later", "_hf_rmsnorm_norm_and_rotate", "_hf_rmsnorm_held"
_TURN = "_hf_rmsnorm_norm_and_turn"
_HARMLESS = {bool, enumerate, float, int, isinstance, len, list, max, min, range, slice, tuple, zip}
_NONE: Mapping = types.MappingProxyType({})


@dataclass(frozen=True)
class QKFusion:
    """Where an attention normalises q and k: by which children, and the function that rotates both directly after.

    spans: of all heads at once, which are made of q and of k behind it.
    """

    q: str
    k: str
    rotary: str = ""
    spans: bool = False

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with the norms put off."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            names = {self.q, self.k}
            q, k, rotary, norms, spans = _find(definition, itself, names, () if self.rotary else names)
            held = ast.Name(_HELD, ast.Load())
            for side, (statement, name) in enumerate(zip((q, k), norms, strict=True)):
                old = _norm_call(statement)
                new = call(_LATER, old, itself, held, side, name, old.args[0], *([True] if spans else []))
                holder = statement if statement.value is old else statement.value.func
                holder.value = new
            names = ast.Tuple([ast.Constant(name) for name in norms], ast.Load())
            pair = [statement.targets[0].id for statement in (q, k)]
            both = call(_ROTATE, k, itself, held, names, None, *(ast.Name(n, ast.Load()) for n in pair))
            targets = ast.Tuple([ast.Name(n, ast.Store()) for n in pair], ast.Store())
            unrotated = ast.copy_location(ast.Assign([targets], both), k)
            if rotary is not None:
                rotate = _rotation(rotary)
                rotate.args[:0] = [ast.Name(itself, ast.Load()), held, names, rotate.func]
                rotate.func = ast.Name(_ROTATE, ast.Load())
                if isinstance(rotary, ast.If):
                    rotary.orelse = [ast.copy_location(ast.If(held, [unrotated], []), k)]  # q may not be there
            if rotary is None:
                blocks = (definition.body, *(s.body for s in definition.body if isinstance(s, ast.If)))
                block = next(block for block in blocks if k in block)
                block.insert(block.index(k) + 1, unrotated)
            for aside in _asides(definition.body, (q, k), rotary, pair):
                at_once = ast.copy_location(copy.deepcopy(unrotated), aside)
                aside.body.insert(0, at_once)
            outer = next(s for s in definition.body if q in (s, *getattr(s, "body", ())))
            fresh = ast.Assign([ast.Name(_HELD, ast.Store())], ast.Dict([], []))
            definition.body.insert(definition.body.index(outer), ast.copy_location(fresh, outer))
            return definition

        return compiled_again(base, change, {_LATER: norm_later, _ROTATE: norm_and_rotate})

    def __str__(self) -> str:
        norms = (f"{self.q} twice",) if self.q == self.k else (self.q, self.k)
        return ", ".join(filter(None, (*norms, self.rotary))) + " in one launch"


@dataclass(frozen=True)
class TurnFusion:
    """Where an attention normalises a tensor and rotates it directly after, each by itself, as `Gemma4TextAttention`.

    norms: by which children; rotary: the function, which takes one tensor.
    """

    norms: tuple[str, ...]
    rotary: str

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with each norm and what rotates behind it as one call."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            for body, at, (name, rotary, dim) in reversed(_turns(definition, itself, set(self.norms))):
                rows, (_, cos, sin) = body[at].value.args[0], body[at + 1].value.args
                function = ast.Name(rotary, ast.Load())
                body[at].value = call(_TURN, body[at].value, itself, name, function, dim, rows, cos, sin)
                del body[at + 1]
            return definition

        return compiled_again(base, change, {_TURN: norm_and_turn})

    def __str__(self) -> str:
        return ", ".join(f"{norm} with {self.rotary}" for norm in self.norms) + ", each in one launch"


class QKRefusal(str):
    """Why a forward that assigns a normalised q and a normalised k is left alone."""


def find_qk(cls: type, norms: set[str], children: Mapping[str, torch.nn.Module] = _NONE, alone: Iterable[str] = ()):
    """Where a forward assigns q and k, each normalised by one of these children; `CannotRewrite` where it does not.

    A `QKRefusal` where a norm is called in a way of its own, or something may write to q or k in between. alone: those
    that one launch computes without a rotation only, of what is not seen otherwise since.
    """
    function, definition = forward_source(cls)
    itself = next(iter(inspect.signature(function).parameters))
    turns = [turn for _, _, turn in _turns(definition, itself, norms)]
    if found := [turn for turn in turns if turn[0] not in alone]:
        names, (rotary, *others), dims = zip(*found, strict=True)
        called = function.__globals__.get(rotary)
        if set(others) <= {rotary} and all(prove_rotary(called, as_pair(called, dim)) for dim in dims):
            return TurnFusion(names, rotary)
    found = q, k, rotates, names, spans = _find(definition, itself, norms, alone)
    if set(names) & set(alone) and any(statement.value is not _norm_call(statement) for statement in (q, k)):
        return QKRefusal("its norms return what is row-major, and heads are made of that")
    for name in names:
        if name in children and type(children[name]).__call__ is not torch.nn.Module.__call__:
            return QKRefusal(f"its {name} has a __call__ of its own")
    rotary = "" if rotates is None else _rotation(rotates).func.id
    proven = rotary and prove_rotary(function.__globals__.get(rotary))
    if proven and not _may_write(function, definition, itself, found, children):
        return QKFusion(*names, rotary, spans)
    if rotary:
        found = _find(definition, itself, norms, norms)
    if writer := _may_write(function, definition, itself, found, children):
        return QKRefusal(f"its forward calls {writer} after q is normalised, which may write to it")
    return QKFusion(*names)


def _may_write(function: Callable, definition: ast.FunctionDef, itself: str, found: tuple, children: Mapping) -> str:
    """What a forward calls, from where q is normalised to what rotates it, that may write to either; "" if nothing."""
    q, k, rotary, norms, _ = found
    body = _flat(definition, itself, set(norms))
    last = body.index(rotary or k)
    pair = [statement.targets[0].id for statement in (q, k)]
    between = [s for s in body[body.index(q) + 1 : last + 1] if s is rotary or not _is_aside(s, pair)]
    known = [_norm_call(k), None if rotary is None else _rotation(rotary)]
    for node in (node for statement in between for node in ast.walk(statement) if isinstance(node, ast.Call)):
        inplace = any(isinstance(each, ast.Constant) and each.value is True for each in node.args)  # perhaps
        if inplace or not (node in known or _is_harmless(node.func, function, itself, children)):
            return ast.unparse(node.func)
    read, own = children_given(definition, body[: last + 1], itself, norms)
    reached = [name for name, values in read if values & own and not isinstance(children.get(name), torch.nn.Linear)]
    return f"{itself}.{reached[0]}" if reached else ""


def _is_harmless(called: ast.expr, function: Callable, itself: str, children: Mapping) -> bool:
    """Whether this is a child, a method of tensors or a function of torch's, but for those that say that they write."""
    match called:
        case ast.Name(name):
            named = function.__globals__.get(name, getattr(builtins, name, None))
            return name not in function.__code__.co_varnames and any(named is each for each in _HARMLESS)
        case ast.Attribute(ast.Name(owner), name) if owner == itself:
            return name in children
        case ast.Attribute(ast.Name(module), _) if module not in function.__code__.co_varnames:
            return any(function.__globals__.get(module) is each for each in (torch, torch.nn.functional))
        case ast.Attribute(value, name):
            while isinstance(value, (ast.Attribute, ast.Subscript)):
                value = value.value
            known = not isinstance(value, ast.Name) or value.id in set(function.__code__.co_varnames) - {itself}
            return known and hasattr(torch.Tensor, name) and not name.startswith("_") and name != "numpy"
    return False


def _turns(definition: ast.FunctionDef, itself: str, norms: set[str]) -> list[tuple[list, int, tuple[str, str, int]]]:
    """(statements, position, (norm, function, dim)) of each ``x = self.norm(rows)`` that is directly rotated.

    That is ``x = function(x, cos, sin, unsqueeze_dim=dim)``, with heads in dimension 1 or 2.
    """
    blocks = [block for node in ast.walk(definition) for _, block in ast.iter_fields(node) if isinstance(block, list)]
    found = []
    for block in blocks:
        for at, (first, second) in enumerate(itertools.pairwise(block)):
            name = _normalises(first, itself, norms) if isinstance(first, ast.stmt) else ""
            if not name or first.value is not _norm_call(first):
                continue
            match second:
                case ast.Assign(
                    [ast.Name(made)],
                    ast.Call(
                        ast.Name(function),
                        [ast.Name(rows), ast.Name(cos), ast.Name(sin)],
                        [ast.keyword("unsqueeze_dim", ast.Constant(1 | 2 as dim))],
                    ),
                ) if made == rows == first.targets[0].id and made not in (cos, sin):
                    found.append((block, at, (name, function, dim)))
    return found


def _find(definition: ast.FunctionDef, itself: str, norms: set[str], alone: Iterable[str] = ()) -> tuple:
    """(the statement that assigns q, that for k, that which rotates both or None, the names of the norms, `spans`)."""
    body = _flat(definition, itself, norms)
    found = [(at, s, name) for at, s in enumerate(body) if (name := _normalises(s, itself, norms))]
    if len(found) != 2:
        raise CannotRewrite("its forward does not assign a normalised q and a normalised k")
    (first, q, q_norm), (second, k, k_norm) = found
    names = q_name, k_name = q.targets[0].id, k.targets[0].id
    if q_name == k_name or any(_mentions(node, q_name) for node in (*body[first + 1 : second], k.value)):
        raise CannotRewrite("its forward uses q before it normalises k")
    using = [s for s in body[second + 1 :] if any(_mentions(s, name) for name in names)]
    using = [s for s in using if not _is_aside(s, names)]
    made = list(itertools.takewhile(bool, ("".join(_makes_heads(s, name, name) for name in names) for s in using)))
    after = using[len(made)] if len(made) < len(using) else None
    rotates = {q_norm, k_norm}.isdisjoint(alone)
    rotary = after if rotates and after is not None and _rotates_both(after, *names) else None
    spans = made == ["of rows"] * 2 and rotary is not None and all(s.value is _norm_call(s) for s in (q, k))
    shown = [_makes_heads(s, q_name) for s in body[:first]] + [_makes_heads(s, q_name, q_name) for s in using]
    bare = rotary is None and q.value is _norm_call(q)
    if ("of rows" in made and not spans) or (bare and "of heads" not in shown):
        raise CannotRewrite("its forward does not show that it normalises heads")
    last = body.index(rotary or k)
    roots = [_root(_norm_call(statement).args[0], itself) for statement in (q, k)]
    for at, name, root in zip((first, second), names, roots, strict=True):
        views = (rotary, k if roots[1] == root else None)
        rest = [s for s in body[at + 1 : last + 1] if s not in views and not _is_aside(s, names)]
        if root not in ("", name) and any(_mentions(statement, root) for statement in rest):
            raise CannotRewrite(f"its forward goes on with {root}, which it may write to")
    between = (s for s in body[first : last + 1] if s is rotary or not _is_aside(s, names))
    if any(_in_place(node) for statement in between for node in ast.walk(statement)):
        raise CannotRewrite("its forward writes in place between q and what rotates it")
    return q, k, rotary, (q_norm, k_norm), spans


def _is_aside(statement: ast.stmt, pair: Iterable[str]) -> bool:
    """Whether this is a condition that is not about q or k, under which something is done with them.

    They are normalised before that, if it comes to pass: `OlmoeAttention` clips them where its configuration says so.
    """
    if not isinstance(statement, ast.If) or statement.orelse or any(_mentions(statement.test, name) for name in pair):
        return False
    return not _rotates_both(statement, *pair) and any(_mentions(statement, name) for name in pair)


def _asides(body: list[ast.stmt], pair: tuple, rotary: ast.stmt | None, names: list[str]) -> list[ast.If]:
    """Those between the norm of k and what rotates both."""
    if rotary not in body or pair[1] not in body:
        return []
    return [s for s in body[body.index(pair[1]) + 1 : body.index(rotary)] if _is_aside(s, names)]


def _normalises(statement: ast.stmt, itself: str, norms: set[str]) -> str:
    """The norm in ``name = self.norm(rows)`` or ``name = self.norm(rows).transpose(1, 2)``; "" in anything else."""
    match statement:
        case ast.Assign([ast.Name()]):
            match _norm_call(statement):
                case ast.Call(ast.Attribute(ast.Name(owner), name), [_], []) if owner == itself and name in norms:
                    return name
    return ""


def _norm_call(statement: ast.Assign) -> ast.expr:
    match statement.value:
        case ast.Call(ast.Attribute(inner, "transpose"), [ast.Constant(1), ast.Constant(2)], []):
            return inner
    return statement.value


def _flat(definition: ast.FunctionDef, itself: str, norms: set[str]) -> list[ast.stmt]:
    """The statements of a forward; in the place of a condition, as `Glm4MoeAttention` has, what normalises under it.

    Both norms are: of one alone nobody would know later.
    """
    statements: list[ast.stmt] = []
    for statement in definition.body:
        inside = statement.body if isinstance(statement, ast.If) and not statement.orelse else []
        both = sum(bool(_normalises(s, itself, norms)) for s in inside) == 2
        statements += inside if both else [statement]
    return statements


def _makes_heads(statement: ast.stmt, name: str, of: str = "") -> str:
    """``"of heads"`` for ``name = x.transpose(1, 2)``, ``"of rows"`` for a view of x there; of: the name of x."""
    match statement:
        case ast.Assign(
            [ast.Name(made)], ast.Call(ast.Attribute(x, "transpose"), [ast.Constant(1), ast.Constant(2)])
        ) if made == name:
            match x:
                case _ if of in ("", getattr(x, "id", None)):
                    return "of heads"
                case ast.Call(ast.Attribute(ast.Name(rows), "view" | "reshape"), _, []) if rows == of:
                    return "of rows"
    return ""


def _rotation(statement: ast.Assign | ast.If) -> ast.Call:
    """The call in what `_rotates_both`."""
    return (statement.body[-1] if isinstance(statement, ast.If) else statement).value


def _rotates_both(statement: ast.stmt, q: str, k: str) -> bool:
    """Whether this is ``q, k = function(q, k, cos, sin)``, if need be under a condition, as `Exaone4Attention` has."""
    match statement:
        case ast.If(test, [*before, inner], []):
            about = any(_mentions(node, name) for node in (test, *before) for name in (q, k))
            return not about and _rotates_both(inner, q, k)
        case ast.Assign(
            [ast.Tuple([ast.Name(to_q), ast.Name(to_k)])],
            ast.Call(ast.Name(), [ast.Name(of_q), ast.Name(of_k), cos, sin], []),
        ):
            own = any(_mentions(table, name) for table in (cos, sin) for name in (q, k))
            return (to_q, to_k) == (of_q, of_k) == (q, k) and not own
    return False


def _in_place(node: ast.AST) -> bool:
    return (
        (isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load))
        or isinstance(node, ast.AugAssign)
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
