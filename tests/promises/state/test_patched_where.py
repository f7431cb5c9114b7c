"""Where patch_model is called, in which mode or transform, does not matter: not for the
model, and not for later ones of the process.
"""

import contextlib
import importlib.util
import itertools
import sys

import pytest
import tiny_models
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import patch_model

COPIES = itertools.count()


class DoesNothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Refuses(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.cat, torch.ones, torch.rsqrt):
            raise RuntimeError("not here")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def within(context):
    def call(patch):
        with context() as _:
            return patch()

    return call


def transformed(transform):
    """Call a function inside of a functorch transform."""

    def call(patch):
        reports = []

        def function(x):
            reports.append(patch())
            return x.sum()

        transform(function)(torch.ones(3))
        return reports[0]

    return call


WHERE = {
    "default device": within(lambda: torch.device("meta")),
    "set_default_device": within(lambda: default_device("meta")),
    "default dtype": within(lambda: default_dtype(torch.float16)),
    "inference mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "fake tensors": within(FakeTensorMode),
    "a dispatch mode": within(DoesNothing),
    "a function mode": within(Refuses),
    "no saved tensors": within(
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here")
    ),
    "forward AD": within(forward_ad.dual_level),
    "vmap": transformed(lambda f: torch.func.vmap(lambda x: f(x[None]))),
    "grad": transformed(torch.func.grad),
    "jvp": transformed(lambda f: lambda x: torch.func.jvp(f, (x,), (x,))),
    "functionalize": transformed(torch.func.functionalize),
}


@pytest.fixture
def build(monkeypatch):
    """Builds a Qwen3 of classes and functions that are new to the process."""
    name = f"{modeling_qwen3.__name__}_{next(COPIES)}"
    spec = importlib.util.spec_from_file_location(name, modeling_qwen3.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    config = tiny_models.build("qwen3").config

    def build():
        return module.Qwen3ForCausalLM(config)

    return build


def outcome(report):
    return len(report.swapped), [layer.fused for layer in report.layers], report.skipped


@pytest.mark.parametrize("where", WHERE)
def test_the_same_is_fused_in_this_model_and_in_later_ones(where, build):
    expected = outcome(patch_model(tiny_models.build("qwen3")))
    model = build()
    report = WHERE[where](lambda: patch_model(model, memory_efficient=True))
    assert outcome(report) == expected
    assert outcome(patch_model(build())) == expected


def test_what_an_exception_prevented_is_tried_again(build, monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError("for now")

    expected = outcome(patch_model(tiny_models.build("qwen3")))
    model = build()
    with monkeypatch.context() as now:
        now.setattr(torch, "ones", fails)  # by which norms are copied
        now.setattr(torch, "cat", fails)  # in the rotary embedding
        with pytest.warns(UserWarning, match="changed no norm"):
            assert "for now" in patch_model(model).skipped[0].reason
    assert outcome(patch_model(model)) == expected
