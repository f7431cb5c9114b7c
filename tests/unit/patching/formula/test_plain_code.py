"""Which forwards are plain arithmetic: each row is the body of a norm's class, and the
word for which it is refused.
"""

import copy
import linecache
import sys
import types

import pytest
import torch
from reports import report_on

from hf_rmsnorm import count_launches, unpatch_model, use_backend
from hf_rmsnorm.fused.norm import patch_of

# The file that each class below stands in. `self.norm(x)` is an RMSNorm.
FILE = """
import functools
import itertools
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

CALLS = {"all": 0}
TICKS = itertools.count()
TENSOR = torch.ones(32)
FACTOR = 1.0
fast_norm = None


def rms(x, eps=1e-6):
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def is_long(x):
    return x.shape[0] > 512


def longer(x):
    return 2 * x if is_long(x) else x


def by_keyword(x, *, eps=1e-6):
    return rms(x, eps)


def is_absent_available():
    return False


def flip(v):
    return not v


def is_autocast_enabled(device):
    return torch.is_autocast_enabled(device)


class Doubling(torch.autocast):
    pass


PARTIAL = functools.partial(rms)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-50, 50)


class Base(nn.LayerNorm):
    floor = 1e-6

    def __init__(self):
        super().__init__(32, eps=1e-6)
        self.gain, self.upcast, self.activation, self.groups = 1.0, True, "silu", 4
        self.sizes = (1.0, 1.0, 2.0)
        self.table, self.post = {"scale": 1.0}, rms
        self.register_buffer("steps", torch.ones((), dtype=torch.int64))

    def norm(self, x):
        return (self.weight * rms(x, self.eps)).to(x.dtype)


class ThingRMSNorm(Base):
"""
TENSOR = torch.ones(32)
# fmt: off
REFUSED = {
    # Sizes of the input
    "branches on x.shape[0] > 512": "return 2 * self.norm(x) if x.shape[0] > 512 else self.norm(x)",
    "branches on is_long(x)": "return longer(self.norm(x))",
    "calls x.numel": "return self.norm(x) * (1 + x.numel() // 1000000)",
    "calls np.prod": "return self.norm(x) * (1 + np.prod(x.shape) // 1000000)",
    "computes with 1 + x.size(0) // 512": "return self.norm(x) * (1 + x.size(0) // 512)",
    "computes with x.shape[0]": "return F.layer_norm(x, (32,), eps=x.shape[0])",
    "calls int(x.sum())": "return self.norm(x) * int(x.sum())",
    "calls len(x)": "return self.norm(x) * (1 + len(x) // 512)",
    "computes with rows": "rows, size = x.shape\nreturn self.norm(x) * rows",
    "calls x.stride": "return self.norm(x) * (1 + x.stride(0) // 1000)",
    "calls {600: 2.0}.get": "return self.norm(x) * {600: 2.0}.get(x.shape[0], 1.0)",
    "uses match": "match self.gain:\n    case _:\n        return self.norm(x)",
    "uses for": "for _ in range(x.shape[0] // 8192):\n    x = 2 * x\nreturn self.norm(x)",
    "calls torch.arange": "return self.norm(x) * torch.arange(x.size(-1))",
    "uses listcomp": "return torch.stack([self.norm(row) for row in x])",
    "reads x[:512]": "return self.norm(x[:512])",
    "reads self.sizes[x.size(0)]": "return self.norm(x) * self.sizes[x.size(0)]",
    "uses assert": "assert x.ndim > 0\nreturn self.norm(x)",
    # Values
    "calls x.abs().max": "return 2 * self.norm(x) if x.abs().max() > 1e18 else self.norm(x)",
    "branches on x < 3": "return self.norm(x * (x < 3))",
    "calls torch.isfinite(x).all": "if not torch.isfinite(x).all():\n    raise\nreturn self.norm(x)",
    "branches on self.weight": "return self.norm(x) if self.weight else x",
    "calls x.sum().item": "return self.norm(x) * x.sum().item()",
    "calls self.weight.clamp": "return self.weight.clamp(max=3) * rms(x)",
    "calls (2 * x).clamp": "return self.norm((2 * x).clamp(max=1e18).to(x.dtype))",
    "calls torch.where": "return torch.where(x > 3, x, self.norm(x))",
    "calls self.norm(x).nan_to_num": "return self.norm(x).nan_to_num()",
    # Modes and devices
    "reads self.training": "return 2 * self.norm(x) if self.training else self.norm(x)",
    "calls torch.is_grad_enabled": "return 2 * self.norm(x) if torch.is_grad_enabled() else self.norm(x)",
    "calls torch.compiler.is_compiling": "return 2 * x if torch.compiler.is_compiling() else self.norm(x)",
    "reads x.requires_grad": "return 2 * self.norm(x) if x.requires_grad else self.norm(x)",
    "reads x.is_cuda": "return 2 * self.norm(x) if x.is_cuda else self.norm(x)",
    "branches on x.device.type == 'cuda'": "return 2 * self.norm(x) if x.device.type == 'cuda' else self.norm(x)",
    "branches on x.device is x.device": "return self.norm(x) if x.device is x.device else x",
    "reads x.device.index": "return self.norm(x) * x.device.index",
    "enters torch.no_grad()": "with torch.no_grad():\n    return self.norm(x)",
    "enters torch.autocast('cpu')": "with torch.autocast('cpu'):\n    return self.norm(x)",
    "enters torch.autocast('cpu', enabled=self.upcast)":
        "with torch.autocast('cpu', enabled=self.upcast):\n    return self.norm(x)",
    "enters Doubling('cpu', enabled=False)": "with Doubling('cpu', enabled=False):\n    return self.norm(x)",
    "reads fast_norm": "return 2 * self.norm(x) if fast_norm == None else self.norm(x)",
    "calls torch.get_autocast_dtype": "return self.norm(x).to(torch.get_autocast_dtype('cpu'))",
    "calls torch.is_autocast_enabled": "return self.norm(x) if torch.is_autocast_enabled() == self.upcast else x",
    "branches on not v": "if flip(torch.is_autocast_enabled()):\n    x = x.flip(0)\nreturn self.norm(x)",
    "calls torch.jit.is_scripting": "if torch.jit.is_scripting():\n    x = fast_norm(x)\nreturn self.norm(x)",
    # What outlives the call
    "writes self.calls": "self.calls = 1\nreturn self.norm(x)",
    "writes self.steps in place": "self.steps += 1\nreturn self.norm(x)",
    "writes CALLS['all'] in place": "CALLS['all'] += 1\nreturn self.norm(x)",
    "uses global": "global FACTOR\nFACTOR = 2.0\nreturn self.norm(x)",
    "calls setattr": "setattr(self, 'calls', 1)\nreturn self.norm(x)",
    "calls next": "next(TICKS)\nreturn self.norm(x)",
    "calls x.clamp_": "return self.norm(x.clamp_(-1e4, 1e4))",
    "writes x in place": "x += 1\nreturn self.norm(x)",
    "calls torch.mul with out=x": "return self.norm(torch.mul(x, 2, out=x))",
    "calls print": "print(end='')\nreturn self.norm(x)",
    "calls time.time": "return self.norm(x) * (time.time() // 1e12)",
    "calls torch.rand_like": "return self.norm(x + 0.0 * torch.rand_like(x))",
    "calls F.dropout": "return F.dropout(self.norm(x), 0.0)",
    # What else it reads
    "reads self.table": "return self.norm(x) * self.table['scale']",
    "calls self.post": "return self.post(x)",
    "calls getattr": "return self.norm(x) * getattr(self, 'bonus', 1.0)",
    "reads self.steps": "return self.norm(x) * self.steps",
    "reads TENSOR": "return self.norm(x) * TENSOR",
    "reads FACTOR": "return self.norm(x) * FACTOR",
    "reads self, which": "return nn.LayerNorm.forward(self, x)",
    "calls PARTIAL": "return self.norm(PARTIAL(x))",
    # Gradients
    "calls x.register_hook": "x.register_hook(print)\nreturn self.norm(x)",
    "calls Backward.apply": "return self.norm(Backward.apply(x))",
    "calls x.detach": "return self.norm(x.detach())",
    "reads self.weight.grad": "return self.norm(x) * self.weight.grad",
    "reads self.weight.data": "return self.weight.data * rms(x)",
    # Plain, and more than a formula: found by the bits
    "its formula is not one that this package knows": "return self.weight.abs() * rms(x)",
}
CLASSES_REFUSED = {
    "no plain function definition": "forward = lambda self, x: self.norm(x)",
    "variables of the function around it": "@torch.no_grad()\ndef forward(self, x):\n    return self.norm(x)",
}
ACCEPTED = {
    "a helper of its class": "return self.norm(x)",
    "torch's own forward": "return super().forward(x)",
    "torch's own function": "return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)",
    "torch's own function with the weight's shape":
        "return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)",
    "its own mean": "h = x - x.mean(-1, keepdim=True)\nreturn self.weight * rms(h) + self.bias",
    "a division by a root": "return self.weight * (x / (x * x).mean(-1, keepdim=True).add(1e-6).sqrt())",
    "plain attributes that decide": "return self.norm(x) if self.upcast and self.gain is not None else x.sum()",
    "a number of its own": "return self.norm(x) * self.gain",
    "dtypes that decide": "d, y = x.dtype, self.norm(x)\nreturn y if x.dtype == torch.float32 else y.to(d)",
    "dimensions that decide":
        "n = len(x.shape)\nx = x.unsqueeze(0) if n == 1 else x\ny = self.norm(x)\nreturn y.squeeze(0) if n == 1 else y",
    "a guard of a size by its name": "n = x.shape[-1]\nif n != 32:\n    raise ValueError(n)\nreturn self.norm(x)",
    "groups":
        "*lead, n = x.shape\nx = x.view(*lead, self.groups, n // self.groups)\nreturn self.weight * rms(x).flatten(-2)",
    "a library that is not there":
        "if is_absent_available():\n    import absent\n    x = absent.norm(x)\nreturn self.norm(x)",
    "a flag of its own": "if not self.upcast:\n    x = fast_norm(x)\nreturn self.norm(x)",
    "a cast to its own device": "return self.norm(x).to(x.device)",
    "autocast switched off": "with torch.autocast(x.device.type, enabled=False):\n    return self.norm(x)",
    "autocast switched off in older code": "with torch.cuda.amp.autocast(enabled=False):\n    return self.norm(x)",
    "autocast switched off, and what follows":
        "with torch.autocast('cuda', enabled=False):\n    x = rms(x, self.eps).to(x.dtype)\nreturn self.weight * x",
    "autocast asked for by a helper of that name":
        "if is_autocast_enabled(x.device.type):\n    x = x.half()\nreturn self.norm(x)",
    "a gate by its name": ("x, gate", "return (self.norm(x) * ACT2FN[self.activation](gate.float())).to(x.dtype)"),
}
# fmt: on


def forward(body, arguments="x"):
    lines = [
        f"def forward(self, {arguments}):",
        *("    " + line for line in body.split("\n")),
    ]
    return "\n".join(lines)


def made(members):
    """An instance of the class with these members, whose source `inspect` finds as it
    does that of a file.
    """
    text = FILE + "".join(f"    {line}\n" for line in members.split("\n"))
    name = f"crafted_{abs(hash(text))}"
    linecache.cache[f"{name}.py"] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        f"{name}.py",
    )
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    torch.manual_seed(0)
    norm = module.ThingRMSNorm()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("word", [*REFUSED, *CLASSES_REFUSED])
def test_what_is_not_plain_arithmetic_is_left_alone_with_the_word_that_is_the_reason(
    word,
):
    norm = made(forward(REFUSED[word]) if word in REFUSED else CLASSES_REFUSED[word])
    cls = type(norm)
    report = report_on(norm)
    assert not report.swapped, report
    (record,) = report.skipped
    assert word in record.reason
    assert type(norm) is cls


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_plain_arithmetic_is_recognised(name):
    arguments, body = (
        ACCEPTED[name] if isinstance(ACCEPTED[name], tuple) else ("x", ACCEPTED[name])
    )
    norm = made(forward(body, arguments))
    inputs = []
    for _ in range(arguments.count("gate") + 1):
        inputs.append(torch.randn(2, 3, 32))
    expected = norm(*inputs)
    report = report_on(norm)
    assert report.swapped and not report.skipped, report
    with use_backend("reference"):
        torch.testing.assert_close(norm(*inputs), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("attribute", "value"),
    [("eps", 0.5), ("gain", 2.0), ("gain", None), ("gain", TENSOR)],
)
def test_what_its_forward_reads_by_name_and_is_set_later_is_obeyed(
    attribute, value, dtype
):
    norm = made(
        forward(
            "return self.norm(x) if self.gain is None else self.norm(x) * self.gain"
        )
    ).to(dtype)
    assert report_on(norm).swapped
    x = torch.randn(2, 3, 32, dtype=dtype)
    setattr(norm, attribute, value)
    expected = patch_of(norm).forward(norm, x)
    with use_backend("reference"):
        assert torch.equal(norm(x), expected)


def centred(x, eps=1e-6):
    h = x - x.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def unchanged(x):
    return x


def norm_by_its_variance(self, x):
    return self.weight * (x / x.var(-1, keepdim=True))


def hold(place, **names):
    """An edit that gives a part of the file, which a path names, other attributes."""

    def edit(file):
        part = file
        for name in filter(None, place.split(".")):
            part = getattr(part, name)
        for name, value in names.items():
            setattr(part, name, value)

    return edit


def another_keyword(file):
    file.by_keyword.__kwdefaults__["eps"] = 0.5


BY_HELPER = "return self.weight * rms(x)"
EDITS = {
    "a helper": (BY_HELPER, hold("", rms=centred)),
    "a helper's code": (BY_HELPER, hold("rms", __code__=centred.__code__)),
    "a helper's defaults": (BY_HELPER, hold("rms", __defaults__=(0.5,))),
    "a helper's keywords": ("return by_keyword(x)", another_keyword),
    "a helper's helper": ("return by_keyword(x)", hold("", rms=centred)),
    "a question for a library": (
        "if is_absent_available():\n    return centred(x)\nreturn rms(x)",
        hold("", is_absent_available=lambda: True, centred=centred),
    ),
    "a method of its base": (
        "return self.norm(x)",
        hold("Base", norm=norm_by_its_variance),
    ),
    "a method of its own": (
        "return self.norm(x)",
        hold("ThingRMSNorm", norm=norm_by_its_variance),
    ),
    "an attribute of its base": ("return rms(x, self.floor)", hold("Base", floor=0.5)),
    "a property": (
        "return rms(x, self.floor)",
        hold("Base", floor=property(lambda self: 0.5)),
    ),
    "a property before a parameter": (
        BY_HELPER,
        hold("Base", weight=property(lambda self: 2.0)),
    ),
    "its forward's code": (
        "return self.norm(x)",
        hold("ThingRMSNorm.forward", __code__=norm_by_its_variance.__code__),
    ),
    "a base of its base": (
        "return super().forward(x)",
        hold("Base", forward=norm_by_its_variance),
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_is_read_again(name):
    body, edit = EDITS[name]
    norm = made(forward(body))
    assert report_on(norm).swapped
    unpatch_model(norm)
    edit(sys.modules[type(norm).__module__])
    x = torch.randn(2, 3, 32)
    for each in (norm, copy.deepcopy(norm)):
        expected = each(x)
        report_on(each)
        with use_backend("reference"):
            assert torch.equal(each(x), expected)


def test_a_forward_with_other_code_for_the_same_formula_is_fused_again():
    norm = made(forward("return self.norm(x)"))
    assert report_on(norm).swapped
    unpatch_model(norm)
    again = made(forward("h = self.norm(x)\nreturn h"))
    type(norm).forward.__code__ = type(again).forward.__code__
    assert report_on(norm).swapped
    with count_launches() as launches:
        norm(torch.randn(3, 32))
    assert launches.total() == 1


def test_what_was_refused_is_read_again_when_it_was_edited():
    norm = made(forward("return longer(self.norm(x))"))
    assert report_on(norm).skipped
    sys.modules[type(norm).__module__].longer = unchanged
    assert report_on(norm).swapped


def test_a_method_on_the_instance_is_not_read():
    alike, norm = [made(forward("return self.norm(x)")) for _ in range(2)]
    assert report_on(alike).swapped
    norm.norm = lambda x: 2 * x
    assert "calls self.norm" in report_on(norm).skipped[0].reason


def test_a_class_without_source_is_left_alone():
    norm = made(forward("y = self.norm(x)\nreturn y"))
    linecache.cache.clear()
    assert "the source of its forward is not there" in report_on(norm).skipped[0].reason
