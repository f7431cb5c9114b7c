"""The errors of both models behind each layer, which `verify --plot` draws."""

import copy

import pytest
import tiny_models
import torch

from hf_rmsnorm import is_patched, patch_model, use_backend
from hf_rmsnorm.verification.layer_errors import errors_by_layer

IDS = tiny_models.token_ids(2, 8)


def test_a_wrong_layer_is_seen_where_it_is():
    model = tiny_models.build("llama")
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.model.layers[1].input_layernorm.weight.mul_(1.5)
    with use_backend("reference"):
        first, last = errors_by_layer(model, wrong, IDS)
    assert first.passed and first.reference_rms > 0
    assert last.candidate_rms > 100 * last.reference_rms


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_patched_model_is_as_near_as_the_original_and_keeps_its_classes(family):
    model = tiny_models.build(family, dtype=torch.bfloat16)
    patched = copy.deepcopy(model)
    patch_model(patched)
    with use_backend("reference"):
        floors = errors_by_layer(patched, None, IDS)
        assert errors_by_layer(model, patched, IDS) == floors
    assert is_patched(patched)
    assert len(floors) == 2
    for floor in floors:
        assert floor.reference_rms > 0 and floor.passed


def test_a_model_without_hidden_states_is_refused_in_one_line():
    class Bare(torch.nn.Linear):
        def forward(self, input_ids, output_hidden_states):
            return {"logits": super().forward(input_ids.float())}

    model = torch.nn.Sequential(torch.nn.LayerNorm(8), Bare(8, 8))
    model.forward = model[1].forward
    with pytest.raises(
        ValueError, match="Sequential returns no hidden states: leave out"
    ):
        errors_by_layer(model, model, IDS)
