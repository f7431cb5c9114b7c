"""Gradients of what asks for one, alone or together, in whatever strides they come."""

import itertools

import pytest
import torch

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.ops import gradients as gradients_of_norms
from hf_rmsnorm.reference import reference_norm

D = 8
GATED = NormSpec(False, 1e-3, has_bias=True, gate="silu_after")
BIASED = NormSpec(False, 1e-3, has_bias=True)


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, operands, asked, dys):
    leaves = [
        t.detach().requires_grad_(wanted)
        for t, wanted in zip(operands, asked, strict=True)
    ]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    assert all(y.requires_grad == any(asked) for y in outputs)
    given = [
        (y, dy)
        for y, dy in zip(outputs, dys, strict=True)
        if y.requires_grad and dy is not None
    ]
    outputs, dys = zip(*given, strict=True)
    return torch.autograd.grad(
        outputs, [t for t in leaves if t.requires_grad], dys, allow_unused=True
    )


def compare(ours, theirs):
    for got, right in zip(ours, theirs, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "asked", [a for a in itertools.product((True, False), repeat=4) if any(a)]
)
def test_operands_of_a_norm(asked):
    operands = (rows(2, 3, D), rows(D) + 2.0, rows(D, seed=1), rows(2, 3, D, seed=2))
    dy = rows(2, 3, D, seed=3)
    ours, theirs = (
        gradients(
            lambda x, w, b, g, of=of: of(x, w, b, GATED, gate=g), operands, asked, [dy]
        )
        for of in (fused_norm, reference_norm)
    )
    compare(ours, theirs)


class Tagged(torch.Tensor):
    """What nobody may read directly."""


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_backwards_that_are_compiled_or_given_another_class_go_by_the_operators(
    centered, compiling, monkeypatch
):
    spec = NormSpec(centered, 1e-3)
    operands = (rows(2, 4, 3, D), rows(D) + 2.0)
    dy = rows(2, 4, 3, D, seed=5)
    with monkeypatch.context() as patch:
        patch.setattr(gradients_of_norms, "is_compiling", lambda: compiling)
        given = dy if compiling else dy.as_subclass(Tagged)
        ours = gradients(
            lambda x, w: fused_norm(x, w, None, spec), operands, (True, True), [given]
        )
    compare(
        ours,
        gradients(
            lambda x, w: reference_norm(x, w, None, spec), operands, (True, True), [dy]
        ),
    )
