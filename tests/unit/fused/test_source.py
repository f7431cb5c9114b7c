"""Layers whose code is written in odd words, comes from odd places or is not there: fused rightly, or not at all."""

import importlib
import linecache
import sys

import torch
from fusion_models import fused, row
from torch import nn

from hf_rmsnorm import patch_model, use_backend
from hf_rmsnorm.patching.layers import sums as dataflow

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
    @scaled(2.0)
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))

class Unwrapped(Block):
    @bare
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

CLASSES = [Walrus, Decorated, Unwrapped, Supers, Lambda, Nested, Closure, Late, Private]
'''


def test_code_in_odd_words_computes_the_same_and_a_changed_file_is_not_believed(tmp_path, monkeypatch):
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
                    found[cls.__name__] = fused(patch_model(model))[0]
                    assert torch.equal(model(x), expected), cls
    assert {name for name, what in found.items() if what.startswith("+ n2")} == {"Walrus", "Decorated", "Nested"}
    assert "variables of the function around it" in found["Closed"] and "private name" in found["Private"]
    assert "does not run" in found["Late"], "its decorator gives another factor now"
    file.write_text(ODD.replace("return (h := x", "return 2 * (h := x"))
    linecache.checkcache()
    monkeypatch.setattr(dataflow, "_cache", {})
    assert "has changed since it was imported" in fused(patch_model(row(module.Walrus(), module.Walrus())))[0]


def test_classes_of_a_notebook_are_recognised_as_long_as_it_has_their_source():
    text = "from fusion_models import Block\nclass Cell(Block):\n    def forward(self, x):\n"
    text += "        h = x + self.a(self.n1(x))\n        return h + self.b(self.n2(h))\n"
    name, space = "/tmp/ipykernel_1/2.py", {"__name__": "__main__"}
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    try:
        exec(compile(text, name, "exec"), space)
        sys.modules["__main__"].Cell = space["Cell"]
        assert fused(patch_model(row(space["Cell"](), space["Cell"]()))) == ["+ n2, + the norm behind it", "+ n2"]
    finally:
        del linecache.cache[name]
        vars(sys.modules["__main__"]).pop("Cell", None)


def test_defaults_and_settings_of_the_class_body():
    class Layer(nn.Module):
        SCALE = 2.0

        def __init__(self, kind):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.mix, self.kind = nn.Linear(8, 8), kind

        def forward(self, x, scale=SCALE):
            if self.kind:
                return x + self.mix(self.n1(x) + self.n2(x))
            x = x + self.mix(self.n1(x)) * scale
            return x + self.mix(self.n2(x))

    model = nn.Sequential(Layer(0), Layer(0), Layer(1))
    x = torch.randn(2, 3, 8)
    expected = model(x)
    with use_backend("reference"):
        report = patch_model(model)
        assert torch.equal(model(x), expected)
    assert [layer.fused for layer in report.layers] == ["+ n2, + the norm behind it", "+ n2, + the norm behind it", ""]


def test_layers_of_a_model_without_source_keep_their_forward():
    namespace = {"nn": nn, "torch": torch}
    exec(
        "class Layer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm(8)\n"
        "        self.mix = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        x = x + self.mix(self.a(x))\n"
        "        return x + self.mix(self.b(x))\n",
        namespace,
    )
    model = nn.Sequential(namespace["Layer"](), namespace["Layer"]())
    (first, second) = patch_model(model).layers
    assert not first.fused and "source" in first.reason
    assert "not fused: the source of its forward is not there" in str(patch_model(model))
