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
from torch import nn
from transformers import AutoModelForCausalLM

from hf_rmsnorm import patch_model, unpatch_model, use_backend

FAMILIES = pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
ids = tiny_models.token_ids()


def empty(family, without_weights):
    with without_weights():
        return AutoModelForCausalLM.from_config(tiny_models.build(family).config).eval()


def assert_computes_as(model, plain, fused_calls):
    fused_calls.clear()
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(fused_calls) == len(tiny_models.norms(plain))


@FAMILIES
@pytest.mark.parametrize(
    "without_weights", [init_empty_weights, lambda: torch.device("meta")]
)
def test_a_model_without_weights_is_patched_then_loaded(
    family, without_weights, fused_calls
):
    plain = tiny_models.build(family)
    model = empty(family, without_weights)
    report = patch_model(model, strict=True)
    assert not report.devices  # meta is none that anything runs on
    there = patch_model(tiny_models.build(family), strict=True)
    assert report == replace(there, devices=())
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(plain.state_dict(), assign=True)
    for path, buffer in plain.named_buffers():
        owner, _, name = path.rpartition(".")
        # not saved: Transformers makes these anew when it loads
        if model.get_buffer(path).is_meta:
            setattr(model.get_submodule(owner), name, buffer)
    assert_computes_as(model, plain, fused_calls)


def tensors_of(model):
    """Each tensor by its name, with what tells that it was not written to."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: (id(t), t.data_ptr(), t._version, t.grad) for n, t in named}


def state_of_generators():
    numbers = numpy.random.get_state()[1].tolist()
    return torch.get_rng_state().tolist(), random.getstate(), numbers


@FAMILIES
def test_memory_and_generators_are_left_alone(family):
    model = tiny_models.build(family)
    # a size that no other test has, so that it is examined
    model.add_module("extra", nn.Sequential(nn.LayerNorm(92), nn.BatchNorm1d(92)))
    before = tensors_of(model)
    generators = state_of_generators()
    report = patch_model(model)
    assert report.swapped and not report.skipped
    unpatch_model(model)
    assert state_of_generators() == generators
    assert tensors_of(model) == before


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_patched_model_runs_on_meta_with_its_sums_and_attentions(family):
    model = tiny_models.build(family).to("meta")
    there = ids.to("meta")
    model.config.pad_token_id = None  # else Transformers looks for it among the ids
    expected = model(there).logits.shape
    patch_model(model, strict=True)
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            assert model(there).logits.shape == expected
