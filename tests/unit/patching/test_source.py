"""Layers whose code is written in odd words, comes from odd places or is not there:
fused rightly, or not at all.
"""

import ast
import functools
import importlib
import linecache
import sys

import pytest
import torch
from fusion_models import Block, fused, row
from torch import nn

from hf_rmsnorm import patch_model, use_backend
from hf_rmsnorm.fused.layer import guarded
from hf_rmsnorm.patching import source

ODD = '''
import functools
import torch
from torch import nn
from fusion_models import Block

FACTOR = 2.0

def scaled(factor):
    def around(forward):
        @functools.wraps(forward)
        def inner(self, *args, **kwargs):
            return forward(self, *args, **kwargs) * factor
        return inner
    return around

def bare(forward):
    return lambda self, x: forward(self, x) * 3

class Walrus(Block):
    def forward(self, x):
        return (h := x + self.a(self.n1(x))) + self.b(self.n2(h))

class Decorated(Block):
    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))

class Unwrapped(Block):
    @bare
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))

class Scaled(Block):
    """Its decorator may keep account of what it was given."""
    @scaled(2.0)
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))

class Supers(Decorated):
    def forward(self, x, *, more=(lambda: 0.5)()):
        """Text."""
        return super().forward(x) + more

class Lambda(Block):
    forward = lambda self, x: x + self.b(self.n2(x + self.a(self.n1(x))))

class Nested(Block):
    def forward(self, x):
        def half(y):
            return y + self.a(self.n1(y))
        return (lambda y: y + self.b(self.n2(y)))(half(x))

def closed(factor):
    class Closed(Block):
        def forward(self, x):
            h = x + self.a(self.n1(x)) * factor
            return h + self.b(self.n2(h))
    return Closed

Closure = closed(FACTOR)
FACTOR = 5.0

class Late(Block):
    """Its decorator is made of a name that means something else by now."""
    @scaled(FACTOR)
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))

FACTOR = 7.0

class Private(Block):
    def forward(self, x):
        return x + self.__mix(self.n1(x))
    def __mix(self, y):
        return self.a(y)

CLASSES = [Walrus, Decorated, Scaled, Unwrapped, Supers, Lambda, Nested, Closure, Late, Private]
'''


def test_code_in_odd_words_computes_the_same_and_a_changed_file_is_not_believed(
    tmp_path, monkeypatch
):
    """As `trust_remote_code` brings it."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "odd_layers.py"
    file.write_text(ODD)
    module = importlib.import_module("odd_layers")
    monkeypatch.delitem(sys.modules, "odd_layers")
    x, found = torch.randn(2, 5, 32), {}
    with torch.no_grad():
        for cls in module.CLASSES:
            model = row(cls(), cls())
            for backend in ("reference", "triton"):
                with use_backend(backend):
                    patch_model(model, fuse_residual=False)
                    expected = model(x)
                    found[cls.__name__] = fused(patch_model(model, fuse_residual=True))[
                        0
                    ]
                    assert torch.equal(model(x), expected), cls
    assert {name for name, what in found.items() if what.startswith("+ n2")} == {
        "Decorated"
    }
    assert (
        "variables of the function around it" in found["Closed"]
        and "private name" in found["Private"]
    )
    # which gives another factor now
    assert "the decorator scaled(FACTOR), which may keep state" in found["Late"]
    assert "the decorator scaled(2.0), which may keep state" in found["Scaled"]
    file.write_text(ODD.replace("return (h := x", "return 2 * (h := x"))
    linecache.checkcache()
    assert (
        "has changed since it was imported"
        in fused(patch_model(row(module.Walrus(), module.Walrus())))[0]
    )


CELL = """
class Cell(Block):
    @torch.{decorator}()
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))
"""


def test_equal_code_with_another_decorator(monkeypatch):
    """As where a notebook's cell is edited and run again."""
    for decorator, graded in {"no_grad": False, "enable_grad": True}.items():
        name = f"/tmp/ipykernel_1/{decorator}.py"
        text = CELL.format(decorator=decorator)
        entry = len(text), None, text.splitlines(True), name
        monkeypatch.setitem(linecache.cache, name, entry)
        space = {"__name__": "__main__", "torch": torch, "Block": Block}
        exec(compile(text, name, "exec"), space)
        model = row(space["Cell"]())[:1]
        assert fused(patch_model(nn.Sequential(model))) == ["+ n2"]
        with use_backend("triton"):
            assert model(torch.randn(2, 5, 32)).requires_grad == graded


class Placed(nn.Module):
    def forward(self, x, *, scale: "NotThere" = 2.0) -> "NotThere":  # noqa: F821
        """Adds."""
        first = x + (x * scale)
        return [first + x, first - 1.0]


def doubled(definition):
    """Makes a call of the last sum."""
    returned = definition.body[-1].value
    total = returned.elts[0]
    operands = total.left, total.right, ast.Name("self", ast.Load())
    call = ast.Call(ast.Name("other", ast.Load()), list(operands), [])
    returned.elts[0] = ast.copy_location(call, total)


def compiled_again(other):
    """`Placed.forward` with `other` in the place of its last sum."""
    definition = source.forward_source(Placed)
    doubled(definition)
    return source.compiled_again(Placed, definition, {"other": other})


class Ambient(nn.Module):
    def vars(self, x):
        return x

    def forward(self, x):
        return x + self.vars(x)


class Mangled(nn.Module):
    def forward(self, x):
        return x + self.__hidden  # noqa: B009


class Dunder(nn.Module):
    def forward(self, x):
        return x + len(self.__dict__)


def test_a_forward_compiled_again_is_known_by_its_own_name_defaults_and_annotations():
    forward, own = compiled_again(None), Placed.forward
    for name in (
        "__name__",
        "__qualname__",
        "__doc__",
        "__annotations__",
        "__defaults__",
        "__kwdefaults__",
        "__module__",
    ):
        assert getattr(forward, name) == getattr(own, name), name
    assert (
        forward.__globals__ is own.__globals__
        and forward.__code__.co_filename == own.__code__.co_filename
    )
    assert forward.__code__.co_firstlineno == own.__code__.co_firstlineno


class AsksForLocals(nn.Module):
    def forward(self, x):
        return list(locals())


class AsksForVars(nn.Module):
    def forward(self, x):
        return len(vars())


class AsksForDir(nn.Module):
    def forward(self, x):
        return dir()


@pytest.mark.parametrize("cls", [AsksForLocals, AsksForVars, AsksForDir])
def test_a_forward_that_looks_at_its_variables_is_not_compiled_again(cls):
    with pytest.raises(source.CannotRewrite, match="shows its variables"):
        source.forward_source(cls)


def test_names_by_which_a_forward_may_see_that_it_is_another():
    assert source.forward_source(Ambient) and source.forward_source(Dunder)
    with pytest.raises(source.CannotRewrite, match="private name"):
        source.forward_source(Mangled)


@pytest.mark.parametrize(
    "forward, reason",
    [
        (len, "builtin_function"),
        (
            eval("lambda self, x: x + x"),
            "source of its forward is not there|no plain function",
        ),
        (lambda self, x: x + x, "no plain function"),
    ],
    ids=["built in", "without source", "a lambda"],
)
def test_what_is_no_function_definition_is_not_compiled_again(forward, reason):
    with pytest.raises(source.CannotRewrite, match=reason):
        source.forward_source(type("Odd", (nn.Module,), {"forward": forward}))


def wrapped(forward):
    @functools.wraps(forward)
    def outer(*args, **kwargs):
        return forward(*args, **kwargs)

    return outer


def test_wrappers_that_the_source_does_not_show():
    class Wrapped(Block):
        def forward(self, x):
            h = x + self.a(self.n1(x))
            return h + self.b(self.n2(h))

    Wrapped.forward = wrapped(Wrapped.forward)
    (first, _) = fused(patch_model(row(Wrapped(), Wrapped())))
    assert "something has wrapped its forward" in first


def test_a_guarded_forward_steps_aside_for_another():
    class Guarded(nn.Module):
        def forward(self, x):
            return x

    forward = guarded(lambda self, x: "rewritten", Guarded, [])
    assert forward(Guarded(), 1) == "rewritten"
    own = Guarded.forward
    Guarded.forward = lambda self, x: "another"
    assert forward(Guarded(), 1) == "another"
    Guarded.forward = own
    assert forward(Guarded(), 1) == "rewritten"
    own.__code__ = (lambda self, x: "other code").__code__
    assert forward(Guarded(), 1) == "other code"
