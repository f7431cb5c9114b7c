"""The bound of a proof: what rounding makes of a proxy's outputs, and nothing that is wrong."""

import math
from functools import partial

import pytest
import torch
from conversion_models import config_of
from transformers import CohereConfig

from hf_rmsnorm.conversion.proxy import prove as prove_module
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import BOUND, MOST, bound_of, difference, prove


def deep_cohere():
    """Forty layers whose q and k norms read two channels each: roundings become differences of 1e-11."""
    return CohereConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=96, max_position_embeddings=64, use_qk_norm=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        architectures=["CohereForCausalLM"],
    )  # fmt: skip


def wrong_by_1e6(computed, name, made, values):
    """What was computed, with one element of one tensor off."""
    tensors = computed(made, values)
    tensors[name].flatten()[3] += 1e-6
    return tensors


def proofs_with_errors(proxy, plan, monkeypatch, names):
    for name in names:
        with monkeypatch.context() as patch:
            patch.setattr(prove_module, "computed", partial(wrong_by_1e6, prove_module.computed, name))
            yield name, prove(plan, proxy)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "cohere_qk", "persimmon"])
def test_the_noise_of_a_proxy_covers_a_right_plan_and_no_wrong_one(monkeypatch, name):
    proxy = make_proxy(config_of(name))
    plan = discover(proxy)
    assert prove(plan, proxy).bound == BOUND  # nothing was found that asks for more
    monkeypatch.setattr(prove_module, "BOUND", 0.0)
    right = prove(plan, proxy)
    assert right.passed and right.bound < 1e-13
    matrices = [c.key for c in plan.centre if "embed" not in c.key and "wte" not in c.key and "bias" not in c.key]
    for key, proof in proofs_with_errors(proxy, plan, monkeypatch, matrices):
        assert not proof.passed and proof.stock > 100 * proof.bound, key


@pytest.mark.full
def test_a_deep_proxy_may_differ_by_its_own_noise_and_not_by_an_error_of_1e6(monkeypatch):
    proxy = make_proxy(deep_cohere())
    plan = discover(proxy)
    right = prove(plan, proxy)
    assert BOUND < max(right.stock, right.rms) <= right.bound < MOST and right.passed
    names = ["model.layers.0.self_attn.o_proj.weight", "model.layers.39.mlp.down_proj.weight"]
    for key, proof in proofs_with_errors(proxy, plan, monkeypatch, names):
        assert not proof.passed and proof.stock > 10 * proof.bound, key


def test_no_noise_explains_more_than_a_billionth():
    class Amplifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self):
            return ((self.weight - self.weight.detach().round()) * 1e12 + 1,)

    model = Amplifier()
    with torch.no_grad():
        expected = [*model()]
    assert bound_of(model, {}, expected, found=1.0) == MOST
    assert bound_of(model, {}, expected, found=BOUND) == BOUND


def test_outputs_that_are_no_numbers_or_of_other_shapes_are_infinitely_apart():
    x, odd = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, math.nan, 1.0], dtype=torch.float64)
    for outputs in ([x, odd], [odd, x], [x], [x, x[:1]], [x, x[None]]):
        assert difference([x, x], outputs) == math.inf
    assert difference([x, odd], [x, odd]) == math.inf
    masked = torch.tensor([2.0, -math.inf], dtype=torch.float64)  # as logits of words that are hidden
    assert difference([x, masked], [x, masked]) == 0.0 and difference([x, masked], [x + 1, masked]) == 0.5
    assert difference([x, masked], [x, masked.abs()]) == math.inf
