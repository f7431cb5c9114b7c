"""What a patch asks of a norm, and what the norm computes then."""

import torch
from torch import nn

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.fused.recipe import NOTHING, Asked, Recipe
from hf_rmsnorm.patching.report import saved_for_backward

SPEC = NormSpec(centered=False, eps=1e-6, has_weight=True, rounding="once")
PLAIN = Recipe(SPEC, weight="weight")


def saving(norm, recipe=PLAIN):
    return NOTHING.saving_memory(norm, recipe)


def test_what_keeps_its_output():
    norm = nn.RMSNorm(64)
    assert not NOTHING.keeps_output and saved_for_backward(NOTHING) == ""
    assert saving(norm).keeps_output
    where = "not where one launch rotates or modulates it"
    assert (
        saved_for_backward(saving(norm))
        == f"keeps its output for backward, but {where}"
    )
    outside = Recipe(NormSpec(False, 1e-6, eps_outside=True), weight="weight")
    why = "its formula has eps_outside"
    assert (
        saved_for_backward(saving(norm, outside))
        == f"keeps its input for backward: {why}"
    )
    with torch.no_grad():
        norm.weight[0] = 0.0
    assert not saving(norm).keeps_output
    norm.weight = None
    assert saving(norm).keeps_output


def test_what_was_proven_is_computed_as_it_was_asked():
    layer = Recipe(NormSpec(True, 1e-5, functional=True), weight="weight")
    assert NOTHING.of(layer) == layer and not NOTHING.instead
    converted = Asked(as_rms=True)
    assert not converted.of(layer).spec.centered and layer.spec.centered
