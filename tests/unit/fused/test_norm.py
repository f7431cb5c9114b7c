"""The forward of a patched norm: which calls it serves, and that every other one runs
the module's own.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hf_rmsnorm import count_launches, patch_model, use_backend
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.fused.norm import patch_of
from hf_rmsnorm.fused.recipe import Recipe
from hf_rmsnorm.operands import of_norm
from hf_rmsnorm.ops import first_use
from hf_rmsnorm.ops.launches import Launches
from hf_rmsnorm.ops.norm_kinds import NormForwardKind
from hf_rmsnorm.patching.swap import fused_class

D = 16
GATED = Recipe(NormSpec(False, 1e-6, rounding="before_weight", gate="silu_after"), weight="weight",
               eps="variance_epsilon", eps_value=1e-6, gate="gate")  # fmt: skip
PLAIN = Recipe(
    NormSpec(False, 1e-6, rounding="before_weight"),
    weight="weight",
    eps="variance_epsilon",
    eps_value=1e-6,
)


class Norm(nn.Module):
    """LLaMA's, with a bias that may be there."""

    def __init__(self, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.bias = nn.Parameter(torch.rand(D)) if bias else None
        self.variance_epsilon = 1e-6
        self.calls = 0

    def forward(self, x, scale=None):
        self.calls += 1
        dtype, x = x.dtype, x.float()
        y = self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        ).to(dtype)
        y = y if self.bias is None else y + self.bias
        return y if scale is None else scale * y


def fused(module, recipe=PLAIN):
    module.__class__ = fused_class(type(module), recipe)
    return module


def launches(function):
    with torch.no_grad(), count_launches() as counted:
        y = function()
    return y, counted.total()


def gated():
    module = Qwen3NextRMSNormGated(D)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return module


@pytest.mark.parametrize(
    "call",
    [
        lambda norm, x, gate: norm(x, gate),
        lambda norm, x, gate: norm(x, gate=gate),
        lambda norm, x, gate: norm(hidden_states=x, gate=gate),
        lambda norm, x, gate: norm(gate=gate, hidden_states=x),
    ],
    ids=["by position", "gate by name", "both by name", "the other way round"],
)
def test_a_gate_is_found_however_it_is_given(call):
    x, gate = torch.randn(2, 3, D), torch.randn(2, 3, D)
    with torch.no_grad():
        expected = call(gated_own := gated(), x, gate)
    norm = fused(gated(), GATED)
    norm.weight = gated_own.weight
    y, count = launches(lambda: call(norm, x, gate))
    assert count == 1
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda norm, x: norm(x, x, x), "positional argument"),
        (lambda norm, x: norm(x, hidden_states=x), "multiple values"),
        (lambda norm, x: norm(x, x, gate=x), "multiple values"),
        (lambda norm, x: norm(gate=x), "hidden_states"),
        (lambda norm, x: norm(x, other=x), "other"),
        (lambda norm, x: norm(), "hidden_states"),
    ],
)
def test_arguments_that_the_module_refuses_are_refused_in_its_words(call, message):
    with pytest.raises(TypeError, match=message):
        call(fused(gated(), GATED), torch.randn(2, D))


def test_a_gate_that_may_be_left_out_is_and_one_that_may_not_runs_the_modules_own_forward(
    uncompared,
):
    class Optional(Norm):
        def forward(self, hidden_states, gate=None):
            y = super().forward(hidden_states)
            return (
                y
                if gate is None
                else (y * nn.functional.silu(gate.float())).to(y.dtype)
            )

    x = torch.randn(2, D)
    for optional, count in ((False, 0), (True, 1)):
        recipe = Recipe(GATED.spec, weight="weight", eps="variance_epsilon", eps_value=1e-6, gate="gate",
                        gate_optional=optional)  # fmt: skip
        norm = fused(Optional(), recipe)
        _, counted = launches(lambda norm=norm: norm(x))
        assert (counted, norm.calls) == (count, 1 - count)


@pytest.fixture
def uncompared(monkeypatch):
    """A module's own forward is not called to be compared with."""
    monkeypatch.setattr(first_use, "is_enabled", False)


def test_a_bias_that_is_gone_or_new_runs_the_modules_own_forward(
    uncompared,
):
    recipe = Recipe(
        NormSpec(False, 1e-6, has_bias=True, rounding="before_weight"),
        weight="weight",
        bias="bias",
    )
    norm, x = fused(Norm(bias=True), recipe), torch.randn(2, D)
    norm.bias = None
    assert launches(lambda: norm(x))[1] == 0 and norm.calls == 1
    norm = fused(Norm(), replace(PLAIN, absent=("bias",)))
    assert launches(lambda: norm(x))[1] == 1
    norm.bias = nn.Parameter(torch.ones(D))
    assert launches(lambda: norm(x))[1] == 0 and norm.calls == 1


def test_a_second_call_takes_the_launch_that_the_first_found(monkeypatch):
    norm, x = fused(Norm()), torch.randn(2, D)
    kept = patch_of(norm).launches.by_key
    kept.clear()
    for call, count in ((x, 1), (x, 1), (x[:1], 2), (x.double(), 3), (x.double(), 3)):
        # float64: kept as not served
        launches(lambda call=call: norm(call))
        assert len(kept) == count
    with use_backend("reference"):
        launches(lambda: norm(torch.randn(3, D)))
    assert len(kept) == 3
    monkeypatch.setattr(
        Launches, "keep", lambda *_: pytest.fail("a launch was made again")
    )
    launches(lambda: norm(x))


def test_a_cache_of_launches_keeps_not_too_many(monkeypatch):
    monkeypatch.setattr(Launches, "MOST", 2)
    kept = Launches(PLAIN.spec)
    kind = NormForwardKind(False)
    for key in "abc":
        kept.keep(key, kind, of_norm(torch.ones(2, D).double(), None, None), True)
    assert list(kept.by_key) == ["c"]


def test_a_call_that_was_left_to_the_module_is_refused_where_the_kernels_are_insisted_on():
    norm, x = fused(Norm()).double(), torch.randn(2, D, dtype=torch.float64)
    expected = norm(x)
    assert all(torch.equal(norm(x), expected) for _ in range(2)) and norm.calls == 3
    with use_backend("triton"), pytest.raises(RuntimeError, match="float64"):
        norm(x)
    with use_backend("reference"):
        # both compute in float32
        torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
    assert norm.calls == 3


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_run_the_modules_own_forward(layout):
    rows = [torch.randn(3, D), torch.randn(5, D)]
    norm = nn.LayerNorm(D)
    with torch.no_grad():
        expected = [norm(row) for row in rows]
        patch_model(nn.Sequential(norm))
        x = torch.nested.nested_tensor(rows, layout=layout)
        with use_backend("triton"), pytest.raises(RuntimeError, match="nested"):
            norm(x)
        found = norm(x).unbind()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("norm", (nn.LayerNorm, nn.RMSNorm))
def test_a_weight_of_two_dimensions_is_refused_as_unpatched(norm):
    module = norm(D, bias=False) if norm is nn.LayerNorm else norm(D)
    model = nn.Sequential(module)
    patch_model(model)
    module.weight = nn.Parameter(torch.ones(4, D))
    with pytest.raises(RuntimeError, match="same shape as normalized_shape"):
        model(torch.rand(2, 3, 4, D))
