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
    assert handover._slot.held != [None]
    del total
    gc.collect()
    assert handover._slot.held == [None]
