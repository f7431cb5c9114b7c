"""Sums of few elements: fused where a GPU gains by it, and left alone where the host would lose."""

import copy
from functools import partial

import pytest
import torch
from fusion_models import IDS, build
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_rmsnorm import count_launches, patch_model, verify_equivalence
from hf_rmsnorm.fused import layer
from hf_rmsnorm.kernels.plan import forget

DEFAULT = layer.LEAST_ELEMENTS
NORMS, SUMS = 7, 6  # of a LLaMA of three layers; each norm but the first reads a sum
FIRST = SUMS // 3  # those of one layer, as its class has to run fused once


@pytest.fixture(autouse=True)
def of_this_size(small_sums_are_fused_too, monkeypatch):
    monkeypatch.setattr(layer, "LEAST_ELEMENTS", DEFAULT)
    monkeypatch.setattr(layer, "_ran_fused", set())
    forget()


@pytest.fixture
def fused(monkeypatch):
    """How many sums were fused since: each hands its norm over."""
    made, hand_over = [], layer.hand_over
    monkeypatch.setattr(layer, "hand_over", lambda *args: made.append(args) or hand_over(*args))
    return made


def patched():
    model = build("llama")
    patch_model(model)
    type(model.model.norm)._hf_rmsnorm_plans.clear()  # of the same class in other models
    return model


def test_generation_adds_and_normalises_in_two_launches_with_the_same_bits(fused, monkeypatch):
    model = patched()
    with torch.no_grad(), count_launches() as launches:
        assert torch.equal(model(IDS).logits, logits := model(IDS).logits)
    assert len(fused) == FIRST and launches["norm_forward"] == 2 * NORMS
    fused.clear()
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
        fused.clear()
        model(IDS[:, :-1])
    assert not fused


def test_training_fuses_sums_of_many_elements(fused, monkeypatch):
    model = patched().train()
    for _ in range(2):
        model(IDS).logits.sum().backward()
        assert not fused
    monkeypatch.setattr(layer, "LEAST_ELEMENTS", IDS.numel() * model.config.hidden_size)
    model(IDS).logits.sum().backward()
    assert len(fused) == SUMS


@pytest.mark.parametrize("grad, backward", [(False, False), (True, False), (True, True)])
def test_a_captured_graph_fuses_the_sums_inside_of_layers_for_which_a_step_before_it_loaded_the_kernels(
    fused, monkeypatch, grad, backward
):
    model = patched()

    def step(captured):
        monkeypatch.setattr(layer, "capturing", lambda tensor: captured)
        fused.clear()
        with torch.set_grad_enabled(grad):
            logits = model(IDS).logits
        if backward:
            logits.sum().backward()
        return len(fused)

    # What no step has loaded is not fused; a step loads it, and those behind it wait for no fused sum.
    expected = [0, 0, 0, 0] if grad else [0, FIRST, 0, SUMS // 2]
    assert [step(captured) for captured in (True, False, False, True)] == expected


def test_verification_runs_the_fused_sums_whatever_their_size():
    """What a short text does not fuse a long one will."""
    report = verify_equivalence(copy.deepcopy(build("llama")), inputs=IDS[:, :4], max_new_tokens=1)
    assert report.passed and sum("+" in check.path for check in report.fused) == SUMS


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])  # sums are kept
CHECKPOINTS = {
    "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_layers_train_from_the_first_step_on(fused, kind):
    """Both runs of a layer are alike: a checkpoint gives the second what the first has kept, in order."""
    model = patched().train()
    expected = torch.autograd.grad(model(IDS).logits.sum(), [*model.parameters()])
    model.gradient_checkpointing_enable(CHECKPOINTS[kind])
    layer._ran_fused.clear()
    for _ in range(2):
        model.zero_grad()
        model(IDS).logits.sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
