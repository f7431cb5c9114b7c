"""A sum and the norm behind it: whatever manages, watches or replaces the norm keeps
the two apart.
"""

import pytest
import torch
from remote_norms import SIZE, MptLPLayerNorm
from torch import nn
from torch.nn.utils import parametrize

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused.sums import add_and_norm

D = 16


@pytest.fixture
def norm():
    norm = nn.RMSNorm(D, eps=1e-6)
    patch_model(norm)
    return norm


@pytest.fixture
def fused(fused_sums):
    """What adds and normalises, checks both results, and says whether that was one
    launch.
    """

    def run(norm, left=None, right=None, shared=False):
        left = (
            torch.randn(2, D, requires_grad=torch.is_grad_enabled())
            if left is None
            else left
        )
        right = torch.randn(2, D) if right is None else right
        fused_sums.clear()
        total, y = add_and_norm(left, right, norm, shared)
        torch.testing.assert_close(total, left + right, rtol=0, atol=0)
        torch.testing.assert_close(y, norm(left + right))
        assert type(total) is type(left + right)
        return bool(fused_sums)

    return run


def test_a_sum_is_computed_with_the_norm_that_reads_it(norm, fused):
    assert fused(norm)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), count_launches() as launches:
            add_and_norm(torch.ones(2, D), torch.ones(2, D), norm)
        assert launches.total() == 1
    with use_backend("reference"):
        assert not fused(norm)


def test_a_shared_sum_is_fused_without_gradients_alone(norm, fused):
    assert not fused(norm, shared=True)
    with torch.no_grad():
        assert fused(norm, shared=True)


def hook(*args):
    return None


def calls(forward):
    return lambda x: forward(x)


class CallsTwice(nn.RMSNorm):
    def __call__(self, x):
        return super().__call__(super().__call__(x))


NORM_CHANGES = {
    "is not patched": unpatch_model,
    "class has another forward": lambda norm: setattr(
        nn.RMSNorm, "forward", lambda self, x: x
    ),
    "weight is computed": lambda norm: parametrize.register_parametrization(
        norm, "weight", nn.Identity()
    ),
    "pre-hook": lambda norm: norm.register_forward_pre_hook(hook),
    "hook": lambda norm: norm.register_forward_hook(hook),
    "backward hook": lambda norm: norm.register_full_backward_hook(hook),
    "backward pre-hook": lambda norm: norm.register_full_backward_pre_hook(hook),
    "forward of its own": lambda norm: setattr(norm, "forward", calls(norm.forward)),
    "no weight": lambda norm: setattr(norm, "weight", None),
    "weight in float64": lambda norm: norm.double(),
    "weight of another size": lambda norm: setattr(
        norm, "weight", nn.Parameter(torch.ones(D + 1))
    ),
    "another class": lambda norm: setattr(norm, "__class__", nn.Identity),
    "no eps": lambda norm: setattr(norm, "eps", -1.0),
}


@pytest.mark.parametrize("change", NORM_CHANGES)
def test_a_norm_that_is_not_run_as_it_was_patched_is_left_apart(
    norm, fused_sums, change, monkeypatch
):
    if change == "class has another forward":
        # as it is after this test
        monkeypatch.setattr(nn.RMSNorm, "forward", nn.RMSNorm.forward)
    NORM_CHANGES[change](norm)
    if change == "weight of another size":
        with pytest.raises(RuntimeError):
            add_and_norm(torch.ones(2, D), torch.ones(2, D), norm)
    else:
        total, y = add_and_norm(
            torch.ones(2, D, requires_grad=True), torch.ones(2, D), norm
        )
        torch.testing.assert_close(y, norm(total), equal_nan=True)
    assert not fused_sums


def test_a_call_of_its_own_is_called(fused):
    norm = CallsTwice(D, eps=1e-6)
    nn.init.constant_(norm.weight, 2.0)
    patch_model(norm)
    assert not fused(norm)


def test_a_norm_that_casts_its_input_under_autocast_is_called_there(fused):
    norm = MptLPLayerNorm().requires_grad_(False)
    patch_model(norm)
    left, right = torch.randn(2, 2, SIZE)
    assert fused(norm, left, right)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused(norm, left, right)


def test_what_is_called_may_be_no_norm(fused):
    assert not fused(nn.Linear(D, D)) and not fused(torch.neg)
    with pytest.raises(TypeError, match="not callable"):
        add_and_norm(torch.ones(2, D), torch.ones(2, D), None)


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of a sum."""


@pytest.mark.parametrize("at", [0, 1])
def test_sums_of_anything_but_plain_tensors_are_torchs(norm, fused, at):
    for other in (torch.randn(2, D).as_subclass(Tagged), 2.0):
        operands = [
            torch.randn(2, D, requires_grad=True),
            torch.randn(2, D, requires_grad=True),
        ]
        operands[at] = other
        assert not fused(norm, *operands)


@pytest.mark.parametrize("which", ["left", "right", "weight", "none"])
def test_the_operand_alone_that_asks_for_it_has_its_gradient(norm, which):
    left, right = torch.randn(2, D), torch.randn(2, D)
    norm.weight.requires_grad_(which == "weight")
    leaf = {"left": left, "right": right, "weight": norm.weight, "none": None}[which]
    if which in ("left", "right"):
        leaf.requires_grad_()
    (total, y), own_total = add_and_norm(left, right, norm), left + right
    own_y = norm(own_total)
    assert (total.requires_grad, y.requires_grad) == (
        own_total.requires_grad,
        own_y.requires_grad,
    )
    if leaf is not None:
        ours, theirs = (
            torch.autograd.grad(each.square().sum(), leaf)[0] for each in (y, own_y)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "left, right", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_wider_operand_decides_what_torchs_own_norm_takes(left, right, fused_sums):
    """The weights are float32, which torch's own norm takes of rows in float32 alone."""
    norm = nn.LayerNorm(D)
    patch_model(norm)
    with torch.no_grad():
        add_and_norm(torch.randn(2, D).to(left), torch.randn(2, D).to(right), norm)
    assert len(fused_sums) == 1
