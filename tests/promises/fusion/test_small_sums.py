"""Sums of few elements: fused where a GPU gains by it, and left alone where the host would lose."""

import copy

import pytest
import torch
from fusion_models import IDS, build

from hf_rmsnorm import count_launches, patch_model, verify_equivalence
from hf_rmsnorm.fused import layer

DEFAULT = layer.LEAST_ELEMENTS
NORMS, SUMS = 7, 6  # of a LLaMA of three layers; each norm but the first reads a sum


@pytest.fixture(autouse=True)
def of_this_size(small_sums_are_fused_too, monkeypatch):
    monkeypatch.setattr(layer, "LEAST_ELEMENTS", DEFAULT)


@pytest.fixture
def fused(monkeypatch):
    """How many sums were fused since: each hands its norm over."""
    made, hand_over = [], layer.hand_over
    monkeypatch.setattr(layer, "hand_over", lambda *args: made.append(args) or hand_over(*args))
    return made


def patched():
    model = build("llama")
    patch_model(model)
    return model


def test_generation_adds_and_normalises_in_two_launches_with_the_same_bits(fused, monkeypatch):
    model = patched()
    with torch.no_grad(), count_launches() as launches:
        logits = model(IDS).logits
    assert not fused and launches["norm_forward"] == NORMS
    monkeypatch.setattr(layer, "LEAST_ELEMENTS", 0)
    with torch.no_grad(), count_launches() as launches:
        assert torch.equal(model(IDS).logits, logits)
    assert len(fused) == SUMS and launches["norm_forward"] == NORMS


def test_sums_of_many_elements_are_fused(fused, monkeypatch):
    monkeypatch.setattr(layer, "LEAST_ELEMENTS", IDS.numel() * 64)
    model = patched()
    with torch.no_grad():
        model(IDS)
        assert len(fused) == (SUMS if model.config.hidden_size >= 64 else 0)
        model(IDS[:, :-1])
    assert len(fused) == (SUMS if model.config.hidden_size >= 64 else 0)


def test_training_fuses_sums_of_any_size(fused):
    patched().train()(IDS).logits.sum().backward()
    assert len(fused) == SUMS


def test_a_captured_graph_fuses_the_sums_inside_of_layers(fused, monkeypatch):
    monkeypatch.setattr(layer, "capturing", lambda tensor: True)
    with torch.no_grad():
        patched()(IDS)
    assert len(fused) == SUMS // 2


def test_verification_runs_the_fused_sums_whatever_their_size():
    """What a short text does not fuse a long one will."""
    report = verify_equivalence(copy.deepcopy(build("llama")), inputs=IDS[:, :4], max_new_tokens=1)
    assert report.passed and sum("+" in check.path for check in report.fused) == SUMS
