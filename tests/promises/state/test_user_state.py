"""What users hang on models survives a patch: hooks of both kinds, copies, pickles, other patchers, subclasses."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import types
import weakref

import pytest
import tiny_models
import torch
from accelerate import cpu_offload
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
)
from places import PYTHONPATH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from user_norms import Evenly

from hf_rmsnorm import patch_model, unpatch_model, use_backend


def x8():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def test_forward_hooks_fire_before_and_after(fused_calls):
    norm = LlamaRMSNorm(8)
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    patch_model(norm)
    norm.register_forward_hook(lambda module, args, y: seen.append("post") or y * 2)
    norm.register_full_backward_hook(lambda module, *grads: seen.append("backward"))
    with use_backend("reference"):
        y = norm(x8().requires_grad_())
        assert torch.equal(y, 2 * LlamaRMSNorm.forward(norm, x8()))
        y.sum().backward()
    assert seen == ["pre", "post", "backward"]
    assert len(fused_calls) == 1


class Note(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def run(norm, fused_calls):
    """(whether the fused forward ran, the output)."""
    fused_calls.clear()
    with use_backend("reference"):
        y = norm(x8())
    return bool(fused_calls), y


@pytest.mark.parametrize("order", ["hook first", "patch first"])
def test_accelerate_hook(order, fused_calls):
    norm, hook = LlamaRMSNorm(8), Note()
    if order == "hook first":
        add_hook_to_module(norm, hook)
        patch_model(norm)
    else:
        patch_model(norm)
        add_hook_to_module(norm, hook)
    expected = LlamaRMSNorm.forward(norm, x8())
    fused, y = run(norm, fused_calls)
    assert fused and hook.calls == 1 and torch.equal(y, expected)

    unpatch_model(norm)  # beneath the hook
    fused, y = run(norm, fused_calls)
    assert not fused and hook.calls == 2 and torch.equal(y, expected)

    patch_model(norm)
    remove_hook_from_module(norm)  # leaves a forward on the instance
    fused, y = run(norm, fused_calls)
    assert fused and hook.calls == 2 and torch.equal(y, expected)

    unpatch_model(norm)
    assert type(norm) is LlamaRMSNorm
    assert vars(norm)["forward"] == types.MethodType(LlamaRMSNorm.forward, norm)
    assert not run(norm, fused_calls)[0]

    assert len(patch_model(norm).swapped) == 1  # though a forward is left on the instance
    assert run(norm, fused_calls)[0]


def test_accelerate_hooks_in_a_row(fused_calls):
    norm, first, second = LlamaRMSNorm(8), Note(), Note()
    add_hook_to_module(norm, first)
    patch_model(norm)
    add_hook_to_module(norm, second, append=True)
    assert isinstance(norm._hf_hook, SequentialHook)
    assert run(norm, fused_calls)[0]
    assert (first.calls, second.calls) == (1, 1)
    unpatch_model(norm)
    assert not run(norm, fused_calls)[0]
    assert (first.calls, second.calls) == (2, 2)


@pytest.mark.parametrize("order", ["hook first", "patch first"])
@pytest.mark.parametrize("attach", ["cpu_offload", "align"])
def test_accelerate_offload_of_a_model(attach, order, fused_calls):
    model = tiny_models.build("qwen3")
    ids = tiny_models.token_ids()
    expected = model(ids).logits

    def hook():
        if attach == "cpu_offload":
            cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            weights = dict(model.state_dict())
            attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)

    if order == "hook first":
        hook()
        assert model.model.norm.weight.is_meta and isinstance(model.model.norm._hf_hook, AlignDevicesHook)
    report = patch_model(model, strict=True)
    if order == "patch first":
        hook()
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert len(fused_calls) == len(report.swapped) == len(tiny_models.norms(model))
    assert model.model.norm.weight.is_meta
    fused_calls.clear()
    unpatch_model(model)
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert not fused_calls


def test_deepcopy_is_patched_and_independent(fused_calls):
    model = tiny_models.build("llama")
    add_hook_to_module(model.model.norm, Note())
    patch_model(model)
    copied = copy.deepcopy(model)
    assert type(copied.model.norm) is type(model.model.norm)
    unpatch_model(model)
    with use_backend("reference"):
        assert torch.equal(copied(tiny_models.token_ids()).logits, model(tiny_models.token_ids()).logits)
    assert len(fused_calls) == len(tiny_models.norms(model))
    assert unpatch_model(copied) == len(tiny_models.norms(model))
    assert type(copied.model.norm) is LlamaRMSNorm


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
    norm = Evenly(8)
    patch_model(norm)
    again = pickle.loads(pickle.dumps(norm, protocol))
    assert type(again) is type(norm)
    assert torch.equal(again.gain, norm.gain)
    assert unpatch_model(again) == 1 and type(again) is Evenly


LOAD = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
from hf_rmsnorm import unpatch_model, use_backend
from hf_rmsnorm.fused import norm as layers
calls, real = [], layers.fused_norm
layers.fused_norm = lambda *args: calls.append(1) or real(*args)
x = torch.load(sys.argv[2])
with use_backend("reference"):
    y = model(x)
assert len(calls) == 2, calls
torch.save(y, sys.argv[3])
assert unpatch_model(model) == 2
assert {type(m).__name__ for m in model} == {"LlamaRMSNorm", "Evenly"}
"""


@pytest.mark.full
def test_torch_save_loads_patched_in_a_new_process(tmp_path):
    model = nn.Sequential(LlamaRMSNorm(8), Evenly(8))
    patch_model(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save(x8(), tmp_path / "x.pt")
    paths = [PYTHONPATH]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    files = [str(tmp_path / name) for name in ("model.pt", "x.pt", "y.pt")]
    subprocess.run([sys.executable, "-c", LOAD, *files], check=True, env=environment)
    unpatch_model(model)
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(x8()))


def test_another_patchers_instance_forward_is_named_and_left_alone(fused_calls):
    norm, bound = LlamaRMSNorm(8), LlamaRMSNorm(8)

    def other_forward(self, hidden_states):
        return hidden_states

    norm.forward = types.MethodType(other_forward, norm)
    bound.forward = lambda hidden_states: hidden_states
    add_hook_to_module(bound, Note())
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(nn.Sequential(norm, bound))
    assert not report.swapped
    assert [record.path for record in report.skipped] == ["0", "1"]
    assert all("other_forward" in r.reason or "lambda" in r.reason for r in report.skipped)
    assert type(norm) is LlamaRMSNorm
    fused, y = run(norm, fused_calls)
    assert not fused and torch.equal(y, x8())


@pytest.mark.parametrize("order", ["wrap first", "patch first"])
def test_wrappers_that_hold_the_forward_they_found_run_around_the_fused_one(order, fused_calls):
    norm, seen = LlamaRMSNorm(8), []

    def wrap(factor):
        forward = norm.forward  # as Transformers' tensor parallelism keeps it

        def wrapper(x):
            seen.append(factor)
            return factor * forward(x)

        norm.forward = wrapper

    if order == "patch first":
        patch_model(norm, strict=True)
    wrap(2.0), wrap(3.0)
    expected = 3.0 * (2.0 * LlamaRMSNorm.forward(norm, x8()))
    for _ in range(2):
        assert len(patch_model(norm, strict=True).swapped) == 1
        fused, y = run(norm, fused_calls)
        assert fused and torch.equal(y, expected) and seen == [3.0, 2.0]
        seen.clear()
        unpatch_model(norm)
        fused, y = run(norm, fused_calls)
        assert not fused and torch.equal(y, expected) and seen == [3.0, 2.0]
        seen.clear()


def test_a_wrapper_that_holds_the_forward_of_another_module_is_named_and_left_alone():
    one, other = LlamaRMSNorm(8), LlamaRMSNorm(8)
    forward = other.forward
    one.forward = lambda x: forward(x)
    report = patch_model(nn.Sequential(one, other))
    assert [record.path for record in report.swapped] == ["1"]
    assert "replaced on the instance" in report.skipped[0].reason


def test_an_instance_forward_set_after_the_patch_is_reported_and_survives_unpatching():
    norm = LlamaRMSNorm(8)
    patch_model(norm)
    norm.forward = types.MethodType(lambda self, x: x, norm)
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(norm)
    assert "replaced on the instance" in report.skipped[0].reason
    x = x8()
    unpatch_model(norm)
    assert type(norm) is LlamaRMSNorm and norm(x) is x


def test_parametrizing_a_patched_norm(fused_calls):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    norm = LlamaRMSNorm(8)
    patch_model(norm)
    parametrize.register_parametrization(norm, "weight", Double())
    expected = LlamaRMSNorm.forward(norm, x8())
    assert run(norm, fused_calls)[0]
    assert torch.equal(run(norm, fused_calls)[1], expected)
    assert len(patch_model(norm).swapped) == 1
    unpatch_model(norm)
    fused, y = run(norm, fused_calls)
    assert not fused and torch.equal(y, expected)
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is LlamaRMSNorm


def test_a_parametrized_norm_is_named():
    norm = LlamaRMSNorm(8)
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(nn.Sequential(norm))
    assert "parametrized" in report.skipped[0].reason


def test_a_class_put_on_top_later_keeps_its_own_part(fused_calls):
    norm = LlamaRMSNorm(8)
    patch_model(norm)

    class Mixin:
        def extra(self):
            return "extra"

    norm.__class__ = type("Sharded" + type(norm).__name__, (Mixin, type(norm)), {"__slots__": ()})
    assert run(norm, fused_calls)[0]
    assert len(patch_model(norm).swapped) == 1
    unpatch_model(norm)
    assert not run(norm, fused_calls)[0]
    assert norm.extra() == "extra" and type(norm).__name__ == "ShardedLlamaRMSNorm"
    assert type(norm).__mro__[1:3] == (Mixin, LlamaRMSNorm)
    assert len(patch_model(norm).swapped) == 1
    assert run(norm, fused_calls)[0] and norm.extra() == "extra"


def test_gradient_checkpointing_calls_are_as_many_as_before(monkeypatch):
    model = tiny_models.build("llama").train()
    ids = tiny_models.token_ids()
    calls = []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        real = layer._gradient_checkpointing_func
        monkeypatch.setattr(
            layer, "_gradient_checkpointing_func", lambda *a, real=real, **k: calls.append(1) or real(*a, **k)
        )
    expected = model(ids, labels=ids).loss
    before = len(calls)
    patch_model(model)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert torch.equal(loss, expected)
    assert len(calls) == 2 * before > 0


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("order", ["shard first", "patch first"])
def test_fully_shard(order, mesh, fused_calls):
    model = nn.Sequential(LlamaRMSNorm(8))
    expected = model(x8())
    if order == "patch first":
        patch_model(model)
    fully_shard(model[0], mesh=mesh)
    sharded = type(model[0])
    if order == "shard first":
        patch_model(model)
    assert isinstance(model[0], FSDPModule) and type(model[0]).__name__ == "FSDPLlamaRMSNorm"
    fused, y = run(model, fused_calls)
    assert fused and torch.equal(y, expected)
    y.sum().backward()
    assert isinstance(model[0].weight.grad, DTensor)
    unpatch_model(model)
    assert isinstance(model[0], FSDPModule) and isinstance(model[0], LlamaRMSNorm)
    assert order == "patch first" or type(model[0]) is sharded
    fused, y = run(model, fused_calls)
    assert not fused and torch.equal(y, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_patched_model_is_freed_as_soon_as_nothing_refers_to_it(name):
    model = tiny_models.build(name)
    patch_model(model)
    references = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        alive = [reference for reference in references if reference() is not None]
    finally:
        gc.enable()
    assert not alive
