"""`verify_equivalence` looks at what runs: every fault in a fused piece is found, and named by its place."""

from dataclasses import replace

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm import patch_model, use_backend, verify_equivalence
from hf_rmsnorm.fused import attention, sums
from hf_rmsnorm.fused import norm as norm_module
from hf_rmsnorm.reference import reference_norm, rotated

IDS = tiny_models.token_ids()
MID = "+ post_attention_layernorm"


def verify(family="qwen3", dtype=torch.bfloat16, new_tokens=2, **config):
    model = tiny_models.build(family, dtype, **config).eval()
    with use_backend("triton"):
        return verify_equivalence(model, inputs=IDS, max_new_tokens=new_tokens, backward=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_what_is_fused_rightly_passes(family, dtype):
    report = verify(family, dtype)
    assert report.passed and report.verdict == "PASS", str(report)
    places = [check.path for check in report.fused]
    norms = {"llama": "+ post_attention_layernorm", "qwen3": "+ post_attention_layernorm", "gpt2": "+ ln_2"}
    assert any(place.endswith(norms[family]) for place in places)
    assert {check.path for check in report.gradients} >= set(places)


# Each fault in the way that a kernel or the code around it could have it: a wrapper around what the layers call.


def of_the_unrounded_sum(real, x, residual, weight, bias, spec, *rest):
    total, _ = real(x, residual, weight, bias, spec, *rest)
    y = reference_norm(residual.float() + x.float(), weight.float(), bias, spec)
    return total, y.to(total.dtype)


def rounded_once(real, x, residual, weight, bias, spec, *rest):
    total, _ = real(x, residual, weight, bias, spec, *rest)
    return total, reference_norm(total, weight, bias, replace(spec, rounding="once"))


def ten_eps(real, x, residual, weight, bias, spec, *rest):
    total, _ = real(x, residual, weight, bias, spec, *rest)
    return total, reference_norm(total, weight, bias, spec.with_eps(10 * spec.eps + 1e-5))


def sum_off(real, *args):
    total, y = real(*args)
    return total * (1 + 2**-7), y


FAULTS = {
    "norm of the unrounded sum": (sums, "fused_add_norm", of_the_unrounded_sum, torch.bfloat16, MID),
    "wrong rounding order": (sums, "fused_add_norm", rounded_once, torch.bfloat16, MID),
    "ten times eps": (sums, "fused_add_norm", ten_eps, torch.float32, MID),
    "another sum": (sums, "fused_add_norm", sum_off, torch.bfloat16, MID),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_is_computed_together_is_named(fault, monkeypatch):
    module, name, wrong, dtype, place = FAULTS[fault]
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: wrong(real, *args, **kwargs))
    report = verify(dtype=dtype)
    failed = [check.path for check in report.fused if not check.passed]
    assert not report.passed and failed and all(place in path for path in failed)
    assert failed[0] in str(report)


def test_an_element_that_the_norm_rounds_the_other_way_may_be_many_ulp_of_what_a_rotation_leaves_of_it(monkeypatch):
    """The two products of a rotation may cancel: they are large where their sum, and its ulp, are small."""
    moved = []

    def rounded_the_other_way(q, k, q_weight, k_weight, spec, cos, sin, **rest):
        normed, k = reference_norm(q, q_weight, None, spec), reference_norm(k, k_weight, None, spec)
        before = rotated(normed, cos, sin)
        left = torch.where(before == 0, torch.inf, before.abs().float() / normed.abs().float())
        where = tuple(i.item() for i in torch.unravel_index(left.argmin(), left.shape))
        normed[where] *= 1 + 2**-10
        after = rotated(normed, cos, sin)
        moved.append(((after - before)[where].float() / (before[where].float() * 2**-10)).abs().item())
        return after, rotated(k, cos, sin)

    monkeypatch.setattr(attention, "fused_qk_norm", rounded_the_other_way)
    report = verify(dtype=torch.float16)
    assert moved[0] > 8 and all(check.passed for check in report.fused), str(report)


class _Losing(torch.autograd.Function):
    """The norm with the gradient that a kernel without the means of dy * weight, or of it times xhat, has."""

    @staticmethod
    def forward(ctx, x, y, weight, bias, spec, lost):
        ctx.save_for_backward(x, weight)
        ctx.spec, ctx.lost = spec, lost
        return y.detach().clone()

    @staticmethod
    def backward(ctx, dy):
        x, weight = (t.float() for t in ctx.saved_tensors)
        x, dy = x - x.mean(-1, keepdim=True) * ctx.spec.centered, dy.float()
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.spec.eps)
        g, xhat = dy * weight, x * rstd
        mean, projection = g.mean(-1, keepdim=True) * ctx.spec.centered, xhat * (g * xhat).mean(-1, keepdim=True)
        dx = rstd * (g - mean * (ctx.lost != "mean") - projection * (ctx.lost != "projection"))
        dtype, of_rows = ctx.saved_tensors[1].dtype, [t.flatten(0, -2).sum(0) for t in (dy * xhat, dy)]
        dbias = of_rows[1].to(dtype) if ctx.spec.has_bias else None
        return dx.to(dtype), None, of_rows[0].to(dtype), dbias, None, None


@pytest.mark.parametrize(
    "family, lost",
    [("qwen3", "projection"), ("starcoder2", "projection"), ("starcoder2", "mean"), ("starcoder2", None)],
)
@pytest.mark.parametrize("dtype, hidden_size", [(torch.float32, 64), (torch.bfloat16, 1024)], ids=str)
def test_a_gradient_that_loses_a_mean_is_named(family, lost, dtype, hidden_size, monkeypatch):
    real = sums.fused_add_norm

    def wrong(x, residual, weight, bias, spec, *rest):
        total, y = real(x, residual, weight, bias, spec, *rest)
        return total, _Losing.apply(total, y, weight, bias, spec, lost)

    monkeypatch.setattr(sums, "fused_add_norm", wrong)
    report = verify(family, dtype, new_tokens=0, hidden_size=hidden_size, num_hidden_layers=1)
    failed = {(check.path.split(": ")[-1], check.gradient) for check in report.gradients if not check.passed}
    assert failed == ({(MID, "operand 0"), (MID, "operand 1")} if lost else set())
    assert all(check.passed for check in report.fused), "the forward is right"


def test_a_mask_that_is_dropped_is_named(monkeypatch):
    """The columns of the next row count among those of this one, as without a mask where a tile is wider than a row."""

    def widened(y, x, spec):
        columns = x.shape[-1]
        rows = x.reshape(-1, columns).float()
        wide = torch.cat([rows, rows.roll(-1, 0)[:, : columns // 2]], -1)
        factor = (rows.square().mean(-1) + spec.eps).sqrt() / (wide.square().sum(-1) / columns + spec.eps).sqrt()
        return (y.float() * factor.view(*x.shape[:-1], 1)).to(y.dtype)

    launched, fused = norm_module.launched_norm, norm_module.fused_norm
    monkeypatch.setattr(norm_module, "launched_norm", lambda x, *a: widened(launched(x, *a), x, a[3]))
    monkeypatch.setattr(norm_module, "fused_norm", lambda x, *a: widened(fused(x, *a), x, a[2]))
    report = verify("llama", torch.float32)
    assert [check for check in report.norms if not check.passed] and not report.passed


def test_a_piece_that_raises_is_named(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    model = tiny_models.build("llama").eval()
    patch_model(model)
    real = sums.fused_add_norm
    calls = []

    def sometimes(*args, **kwargs):
        calls.append(args)
        return broken() if torch.is_grad_enabled() else real(*args, **kwargs)

    monkeypatch.setattr(sums, "fused_add_norm", sometimes)
    with use_backend("triton"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=0, backward=True)
    assert not report.passed and "raises RuntimeError: no such kernel" in str(report)


def test_nothing_is_verified_where_no_kernel_ran(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    from hf_rmsnorm.ops import backend

    monkeypatch.setattr(backend, "device_refusal", lambda *_: "there is no kernel here")
    model = tiny_models.build("llama", hidden_size=72).eval()  # of a size that no launch is kept for
    report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert report.nothing_ran and not report.passed and report.verdict == report.to_dict()["verdict"]
    assert report.verdict == "NOTHING VERIFIED"
    told = " ".join(str(report).split())
    assert told.startswith("NOTHING VERIFIED: no kernel ran, as there is no kernel here: set TRITON_INTERPRET=1")
    assert 'or pass backend="reference"' in told and "PASS" not in told
    report = verify_equivalence(model, inputs=IDS, max_new_tokens=2, backend="reference")
    assert report.passed and not report.launches, "the plain formula is not the model's own forward"


def test_models_without_a_patch_are_compared_as_ever():
    model, other = (tiny_models.build("llama").eval() for _ in range(2))
    assert verify_equivalence(model, other, IDS, max_new_tokens=2).passed
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    report = verify_equivalence(model, other, IDS, max_new_tokens=2)
    assert report.verdict == "FAIL" and report.fused == ()


@pytest.mark.full
def test_nothing_is_left_behind():
    from hf_rmsnorm.fused.layer import observers

    model = nn.Module.requires_grad_(tiny_models.build("qwen3").eval(), False)
    patch_model(model)
    with use_backend("triton"):
        verify_equivalence(model, inputs=IDS, max_new_tokens=2, backward=True)
    assert not observers and not any(p.requires_grad or p.grad is not None for p in model.parameters())
