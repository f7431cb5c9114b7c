"""Models without their weights yet: recognised from classes, attributes and shapes, and
exact once they are loaded.
"""

import random
from dataclasses import replace

import numpy
import pytest
import tiny_models
import torch
from accelerate import init_empty_weights
from reports import report_on
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
ids = tiny_models.token_ids()


def empty(family):
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(tiny_models.build(family).config).eval()


def assert_computes_as(model, plain, fused_calls):
    fused_calls.clear()
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(fused_calls) == len(tiny_models.norms(plain))


@FAMILIES
def test_init_empty_weights_then_patch_then_load(family, fused_calls):
    plain, model = tiny_models.build(family), empty(family)
    assert all(parameter.is_meta for parameter in model.parameters())
    report = patch_model(model, strict=True)
    assert not report.devices  # meta is none that anything runs on
    assert report == replace(
        patch_model(tiny_models.build(family), strict=True), devices=()
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(plain.state_dict(), assign=True)
    for (path, buffer), (_, there) in zip(
        model.named_buffers(), plain.named_buffers(), strict=True
    ):
        if buffer.is_meta:  # not saved: Transformers makes these anew when it loads
            model.get_submodule(path.rpartition(".")[0])._buffers[
                path.rpartition(".")[2]
            ] = there
    assert_computes_as(model, plain, fused_calls)


@FAMILIES
def test_from_pretrained_and_a_state_dict_loaded_into_the_patched_model(
    family, tmp_path, fused_calls
):
    """`from_pretrained` makes the model on meta and puts its weights in one by one."""
    plain = tiny_models.build(family)
    plain.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, low_cpu_mem_usage=True, dtype=torch.float32
    )
    patch_model(model, strict=True)
    assert_computes_as(model, plain, fused_calls)
    other = tiny_models.build(family, seed=1)
    model.load_state_dict(other.state_dict())
    assert_computes_as(model, other, fused_calls)


def test_a_patched_class_is_not_what_from_pretrained_makes_later(tmp_path):
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    patch_model(model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again.model.norm) is LlamaRMSNorm
    assert (
        type(
            AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(tmp_path)
            ).model.norm
        )
        is LlamaRMSNorm
    )


def partition(norm, with_shape):
    """What DeepSpeed ZeRO-3 does to a parameter: an empty tensor, its shape beside it,
    gathered around a forward.
    """
    full = {
        name: p.detach().clone() for name, p in norm.named_parameters(recurse=False)
    }
    for name, p in norm.named_parameters(recurse=False):
        if with_shape:
            p.ds_shape, p.ds_numel = full[name].shape, full[name].numel()
        p.data = torch.empty(0)

    def gather(module, args):
        for name, p in module.named_parameters(recurse=False):
            p.data = full[name]

    def release(module, args, output):
        for p in module.parameters(recurse=False):
            p.data = torch.empty(0)

    norm.register_forward_pre_hook(gather)
    norm.register_forward_hook(release)


@FAMILIES
@pytest.mark.parametrize("with_shape", [True, False], ids=["ds_shape", "no shape"])
def test_zero3_like_empty_parameters(family, with_shape, fused_calls):
    plain, model = tiny_models.build(family), tiny_models.build(family)
    norms = [norm for _, norm in tiny_models.norms(model)]
    for norm in norms:
        partition(norm, with_shape)
    shapes = [tuple(p.shape) for norm in norms for p in norm.parameters()]
    assert set(shapes) == {(0,)}
    report = patch_model(model, strict=True)
    assert report == patch_model(tiny_models.build(family), strict=True)
    assert [tuple(p.shape) for norm in norms for p in norm.parameters()] == shapes
    with torch.no_grad():
        assert_computes_as(model, plain, fused_calls)
    model.to(DEVICE)
    unpatch_model(model)
    assert [tuple(p.shape) for norm in norms for p in norm.parameters()] == shapes


def test_a_parameter_still_empty_at_its_call_fails_as_in_the_original():
    model = LlamaRMSNorm(8)
    model.weight.data = torch.empty(0)
    patch_model(model)
    with count_launches() as launches, pytest.raises(RuntimeError) as ours:
        model(torch.randn(2, 8))
    with pytest.raises(RuntimeError) as theirs:
        LlamaRMSNorm.forward(model, torch.randn(2, 8))
    assert str(ours.value) == str(theirs.value) and not launches


class Untouchable(torch.Tensor):
    """A tensor that only tells its shape, dtype and device: any operator on it, or look
    at its memory, fails.
    """

    allowed = {
        torch.Tensor.shape.__get__,
        torch.Tensor.dtype.__get__,
        torch.Tensor.requires_grad.__get__,
    }
    allowed |= {torch.Tensor.device.__get__, torch.Tensor.is_meta.__get__}
    allowed |= {
        torch.Tensor.is_floating_point,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.size,
    }
    armed = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert not cls.armed or func in cls.allowed, (
            f"the model's memory was touched by {func}"
        )
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert not cls.armed, f"the model's memory was touched by {func}"
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def test_recognition_reads_of_parameters_only_their_shapes(monkeypatch):
    # sizes of their own, so that no earlier verdict is reused
    model = nn.Sequential(
        LlamaRMSNorm(84), nn.LayerNorm(84), GemmaRMSNorm(84), nn.RMSNorm(84)
    )
    for norm in model:
        for name, parameter in norm.named_parameters():
            norm._parameters[name] = (
                parameter.detach().as_subclass(Untouchable).requires_grad_()
            )
    monkeypatch.setattr(Untouchable, "armed", True)
    report = patch_model(model, strict=True)
    assert len(report.swapped) == 4
    with pytest.raises(AssertionError, match="touched"):
        model[0].weight + 1
    unpatch_model(model)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_memory_and_generators_are_left_alone(family):
    model = (
        tiny_models.build(family, hidden_size=88, head_dim=22)
        if family != "gpt2"
        else tiny_models.build(family)
    )
    extra = nn.Sequential(nn.Dropout(), nn.LayerNorm(92), nn.BatchNorm1d(92))
    model.add_module("extra", extra)
    tensors = {
        name: t for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    before = {
        name: (t.data_ptr(), t._version, t.detach().clone(), t.grad)
        for name, t in tensors.items()
    }
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    states = (
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state()[1].copy(),
        torch.initial_seed(),
    )
    report = report_on(model)
    assert report.swapped and not report.skipped
    unpatch_model(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert torch.initial_seed() == states[3]
    after = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert list(after) == list(before)
    for name, (pointer, version, value, grad) in before.items():
        assert after[name] is tensors[name] and after[name].data_ptr() == pointer
        assert (
            after[name]._version == version
            and torch.equal(after[name], value)
            and after[name].grad is grad
        )


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_patched_model_runs_on_meta_with_its_sums_and_attentions(family):
    model, there = tiny_models.build(family).to("meta"), ids.to("meta")
    model.config.pad_token_id = None  # else Transformers looks for it among the ids
    expected = model(there).logits.shape
    patch_model(model, strict=True)
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            assert model(there).logits.shape == expected
