"""What is handed over is returned once, for the very tensors that it was computed from, unchanged."""

import gc
import threading

import pytest
import torch
from torch import nn

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.fused import handover
from hf_rmsnorm.fused.handover import hand_over, handed_over

SPEC = NormSpec(centered=False, eps=1e-6, rounding="once")


@pytest.fixture
def given():
    norm, total = nn.RMSNorm(4), torch.ones(2, 4)
    return norm, total, norm.weight, None, SPEC, "triton"


def keep(norm, total, weight, bias, spec, backend):
    hand_over(norm, total, "computed", weight, bias, spec, backend)


def test_it_is_returned_once(given):
    keep(*given)
    assert handed_over(*given) == "computed"
    assert handed_over(*given) is None


@pytest.mark.parametrize("at", range(6), ids=["norm", "sum", "weight", "bias", "formula", "backend"])
def test_anything_else_is_computed(given, at):
    others = nn.RMSNorm(4), given[1].clone(), nn.Parameter(torch.ones(4)), torch.ones(4), SPEC.with_eps(1.0), "original"
    keep(*given)
    assert handed_over(*given[:at], others[at], *given[at + 1 :]) is None


@pytest.mark.parametrize("written", [1, 2], ids=["sum", "weight"])
def test_what_was_written_to_is_computed(given, written):
    keep(*given)
    with torch.no_grad():
        given[written].add_(1.0)
    assert handed_over(*given) is None


def test_what_is_computed_with_gradients_is_not_what_is_computed_without(given):
    keep(*given)
    with torch.no_grad():
        assert handed_over(*given) is None


def test_an_output_in_the_graph_does_not_pass_by_a_hook_on_the_sum(given):
    norm, total, *rest = given
    total.requires_grad_()
    hand_over(norm, total, total * 2, *rest)
    total.register_hook(lambda grad: grad)
    assert handed_over(*given) is None


def test_another_thread_has_its_own(given):
    keep(*given)
    found = []
    thread = threading.Thread(target=lambda: found.append(handed_over(*given)))
    thread.start()
    thread.join()
    assert found == [None] and handed_over(*given) == "computed"


def test_it_goes_with_the_sum():
    norm, total = nn.RMSNorm(4), torch.ones(2, 4)
    hand_over(norm, total, "computed", None, None, SPEC, "triton")
    assert handover.slot.held is not None
    del total
    gc.collect()
    assert handover.slot.held is None


@pytest.mark.parametrize("hooked", ["not", "hook", "retained"])
@pytest.mark.parametrize("kind", ["in the graph", "out of it", "in parts"])
def test_what_hangs_on_the_sum_is_passed_by_by_no_output_in_the_graph(given, kind, hooked):
    norm, total, *rest = given
    total.requires_grad_()
    total = total * 1
    output = {"in the graph": total * 2, "out of it": total.detach() * 2, "in parts": (total.detach(),)}[kind]
    hand_over(norm, total, output, *rest)
    if hooked == "hook":
        total.register_hook(lambda grad: grad)
    elif hooked == "retained":
        total.retain_grad()
    found = handed_over(norm, total, *rest)
    assert (found is output) == (kind != "in the graph" or hooked == "not")


def test_the_bias_is_watched_too(given):
    norm, total, weight, _, spec, backend = given
    bias = nn.Parameter(torch.ones(4))
    given = norm, total, weight, bias, spec, backend
    keep(*given)
    assert handed_over(*given) == "computed"
    keep(*given)
    with torch.no_grad():
        bias.add_(1.0)
    assert handed_over(*given) is None


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_other_data_of_a_parameter_is_seen_though_its_version_stays(name):
    norm, total = nn.LayerNorm(4), torch.ones(2, 4)
    given = norm, total, norm.weight, norm.bias, SPEC, "triton"
    keep(*given)
    getattr(norm, name).data = torch.full((4,), 3.0)
    assert handed_over(*given) is None


def test_a_later_sum_replaces_what_nobody_took(given):
    norm, total, *rest = given
    keep(*given)
    later = total.clone()
    hand_over(norm, later, "later", *rest)
    del total, given
    gc.collect()
    assert handed_over(norm, later, *rest) == "later"


def test_inference_tensors_have_no_version_and_are_handed_over(given):
    norm, _, *rest = given
    with torch.inference_mode():
        total = torch.ones(2, 4)
        hand_over(norm, total, "computed", *rest)
        assert handed_over(norm, total, *rest) == "computed"


def test_what_was_computed_for_a_captured_graph_is_for_that_alone(given, monkeypatch):
    keep(*given)
    monkeypatch.setattr(handover, "capturing", lambda t: True)
    assert handed_over(*given) is None
    keep(*given)
    assert handed_over(*given) == "computed"
