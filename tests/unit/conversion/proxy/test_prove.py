"""How far outputs are apart in a proof, and which plans it fails."""

import math
from dataclasses import replace

import pytest
import torch
from conversion_models import config_of

from hf_rmsnorm.conversion.errors import ConversionError
from hf_rmsnorm.conversion.plan import Centre
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import difference, prove
from hf_rmsnorm.conversion.proxy.run import run


def apart(expected, outputs):
    """How far the outputs of two models are apart, as a run gives them."""
    return difference(run(lambda: expected, {}), run(lambda: outputs, {}))


def test_outputs_of_other_shapes_are_infinitely_apart():
    x = torch.ones(3)
    for outputs in ([x], [x, x[:1]], [x, x[None]]):
        assert apart([x, x], outputs) == math.inf


def test_a_number_is_far_from_what_is_none():
    x = torch.ones(3)
    odd = torch.tensor([1.0, math.nan, 1.0])
    assert apart([x], [odd]) == 1.0
    assert apart([odd], [x]) == 1.0


def test_logits_of_words_that_are_hidden_count_as_equal():
    logits = torch.tensor([2.0, -math.inf])
    assert apart([logits], [logits]) == 0.0
    for other in ([3.0, -math.inf], [2.0, 1.0]):
        assert apart([logits], [torch.tensor(other)]) == 0.5


def test_the_proof_fails_when_the_plan_is_wrong():
    proxy = make_proxy(config_of("gpt2"))
    plan = discover(proxy)
    first, *rest = plan.centre

    def proof(**changes):
        return prove(replace(plan, **changes), proxy)

    assert proof().passed
    forgotten = proof(centre=tuple(rest))
    assert forgotten.stock <= 1e-12 < forgotten.rms
    assert not forgotten.passed
    qkv = Centre("transformer.h.0.attn.c_attn.weight", 0, 32)
    assert proof(centre=(*plan.centre, qkv)).stock > 1e-6
    assert proof(copy=(), config={}).stock > 1e-6
    lost = replace(first, key="nowhere")
    with pytest.raises(ConversionError, match="nowhere is missing"):
        proof(centre=(*rest, lost))
