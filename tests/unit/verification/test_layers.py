"""`verify_equivalence` compares each fused layer with the same layer unfused: a faulty
fusion is found and named.
"""

from dataclasses import replace

import pytest
import tiny_models
import torch

from hf_rmsnorm import patch_model, use_backend, verify_equivalence
from hf_rmsnorm.fused import attention, sums
from hf_rmsnorm.fused import norm as norm_module
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.reference import reference_norm, rotated

BF16, FP32 = torch.bfloat16, torch.float32

IDS = tiny_models.token_ids()
SUM = "+ post_attention_layernorm"
PAIR = "q_norm, k_norm, apply_rotary_pos_emb in one launch"


def verify(family="qwen3", dtype=BF16, new_tokens=2, **config):
    model = tiny_models.build(family, dtype, **config).eval()
    with use_backend("triton"):
        return verify_equivalence(
            model, inputs=IDS, max_new_tokens=new_tokens, backward=True
        )


@pytest.mark.parametrize(
    "family, dtype",
    [("qwen3", BF16), ("llama", FP32), ("gpt2", FP32)],
)
def test_what_is_fused_rightly_passes(family, dtype):
    report = verify(family, dtype)
    assert report.passed and report.verdict == "PASS", str(report)
    fusions = {"qwen3": {SUM, PAIR}, "llama": {SUM}, "gpt2": {"+ ln_2"}}[family]
    assert {check.path.split(": ")[1] for check in report.fused} == fusions
    inputs = {f"{check.path}, input" for check in report.fused}
    assert {check.path for check in report.gradients} >= inputs


# Each fault in the way that a kernel or the code around it could have it: a wrapper
# around what the layers call.


def of_the_unrounded_sum(real, x, residual, weight, bias, spec, *rest):
    total, _ = real(x, residual, weight, bias, spec, *rest)
    wide = residual.float() + x.float()
    y = reference_norm(wide, weight.float(), bias, spec)
    return total, y.to(total.dtype)


def rounded_once(real, x, residual, weight, bias, spec, *rest):
    total, _ = real(x, residual, weight, bias, spec, *rest)
    spec = replace(spec, rounding="once")
    return total, reference_norm(total, weight, bias, spec)


def ten_eps(real, x, residual, weight, bias, spec, *rest):
    total, _ = real(x, residual, weight, bias, spec, *rest)
    spec = spec.with_eps(10 * spec.eps + 1e-5)
    return total, reference_norm(total, weight, bias, spec)


def another_sum(real, *args):
    total, y = real(*args)
    return total * (1 + 2**-7), y


def dropped_summand(real, x, residual, weight, bias, spec, *rest):
    return residual, reference_norm(residual, weight, bias, spec)


def unrounded_before_rotating(real, q, k, q_weight, k_weight, spec, cos, sin, **rest):
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = reference_norm(x.float(), weight.float(), None, spec)
        y = rotated(y, cos.float(), sin.float())
        made.append(y.to(x.dtype))
    return tuple(made)


def rotated_back(real, q, k, q_weight, k_weight, spec, cos, sin, **rest):
    return real(q, k, q_weight, k_weight, spec, cos, -sin, **rest)


def ten_eps_in_both(real, q, k, q_weight, k_weight, spec, *tables, **rest):
    spec = spec.with_eps(10 * spec.eps + 1e-4)
    return real(q, k, q_weight, k_weight, spec, *tables, **rest)


FAULTS = {
    "a dropped summand": (sums, dropped_summand, BF16, SUM),
    "norm of the unrounded sum": (sums, of_the_unrounded_sum, BF16, SUM),
    "wrong rounding order": (sums, rounded_once, BF16, SUM),
    "ten times eps": (sums, ten_eps, FP32, SUM),
    "another sum": (sums, another_sum, BF16, SUM),
    "ten times eps in q and k": (attention, ten_eps_in_both, FP32, PAIR),
    "a rotation the other way": (attention, rotated_back, BF16, PAIR),
}


def put(monkeypatch, module, wrong):
    """Put a faulty launch where a fused sum, or q and k, are launched."""
    if module is attention:
        run = attention.run_qk

        def of_heads(launches, operands, way):
            q, k, q_weight, k_weight, *tables = operands

            def real(q, k, q_weight, k_weight, spec, *tables):
                return run(launches_of(spec), (q, k, q_weight, k_weight, *tables), way)

            return wrong(real, q, k, q_weight, k_weight, launches.spec, *tables)

        monkeypatch.setattr(attention, "run_qk", of_heads)
        return
    start = sums.run

    def of_sums(launches, operands, keep_output):
        x, weight, bias, *others, residual = operands

        def real(x, residual, weight, bias, spec):
            operands = x, weight, bias, *others, residual
            return start(launches_of(spec), operands, keep_output)

        return wrong(real, x, residual, weight, bias, launches.spec)

    monkeypatch.setattr(sums, "run", of_sums)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_fusion_is_named(fault, monkeypatch):
    module, wrong, dtype, place = FAULTS[fault]
    put(monkeypatch, module, wrong)
    report = verify(dtype=dtype, new_tokens=0, num_hidden_layers=1)
    failed = [check.path for check in report.fused if not check.passed]
    assert not report.passed
    assert failed
    assert all(place in path for path in failed)
    assert failed[0] in str(report)


def test_q_and_k_that_are_rounded_less_often_pass_by_the_noise_floor(monkeypatch):
    """Their launch promises no bits: it may differ from the norms apart as much as
    these differ from float64.
    """
    put(monkeypatch, attention, unrounded_before_rotating)
    report = verify(new_tokens=0, num_hidden_layers=1)
    (check,) = [check for check in report.fused if PAIR in check.path]
    assert check.passed and check.differing and "off by" in check.text, report


class _Losing(torch.autograd.Function):
    """The norm with the gradient that a kernel without the means of dy * weight, or of
    it times xhat, has.
    """

    @staticmethod
    def forward(ctx, x, y, weight, bias, spec, lost):
        ctx.save_for_backward(x, weight)
        ctx.spec = spec
        ctx.lost = lost
        return y.detach().clone()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        spec = ctx.spec
        wide = x.float()
        dy = dy.float()
        if spec.centered:
            wide = wide - wide.mean(-1, keepdim=True)
        variance = wide.square().mean(-1, keepdim=True)
        rstd = torch.rsqrt(variance + spec.eps)
        xhat = wide * rstd
        g = dy * weight.float()
        dx = g
        if spec.centered and ctx.lost != "mean":
            dx = dx - g.mean(-1, keepdim=True)
        if ctx.lost != "projection":
            along = (g * xhat).mean(-1, keepdim=True)
            dx = dx - xhat * along
        dx = rstd * dx
        dweight = (dy * xhat).flatten(0, -2)
        dweight = dweight.sum(0)
        dweight = dweight.to(weight.dtype)
        dbias = None
        if spec.has_bias:
            dbias = dy.flatten(0, -2).sum(0)
            dbias = dbias.to(weight.dtype)
        return dx.to(x.dtype), None, dweight, dbias, None, None


@pytest.mark.parametrize(
    "family, lost, dtype, hidden_size",
    [
        ("starcoder2", "mean", FP32, 64),
        ("qwen3", "projection", BF16, 1024),
    ],
)
def test_a_gradient_that_loses_a_mean_is_named(
    family, lost, dtype, hidden_size, monkeypatch
):
    def wrong(real, x, residual, weight, bias, spec):
        total, y = real(x, residual, weight, bias, spec)
        return total, _Losing.apply(total, y, weight, bias, spec, lost)

    put(monkeypatch, sums, wrong)
    report = verify(
        family, dtype, new_tokens=0, hidden_size=hidden_size, num_hidden_layers=1
    )
    failed = [check.path for check in report.gradients if not check.passed]
    assert failed and all(SUM in path for path in failed), report
    assert all(check.passed for check in report.fused), "the forward is right"


def test_a_mask_that_is_dropped_is_named(monkeypatch):
    """The columns of the next row count among those of this one, as without a mask
    where a tile is wider than a row.
    """

    def widened(y, x, spec):
        columns = x.shape[-1]
        rows = x.reshape(-1, columns).float()
        behind = rows.roll(-1, 0)[:, : columns // 2]
        wide = torch.cat([rows, behind], -1)
        right = rows.square().mean(-1) + spec.eps
        wrong = wide.square().sum(-1) / columns + spec.eps
        factor = right.sqrt() / wrong.sqrt()
        factor = factor.view(*x.shape[:-1], 1)
        return (y.float() * factor).to(y.dtype)

    run = norm_module.run
    fused = norm_module.fused_norm

    def widened_run(launches, operands, keep_output):
        y = run(launches, operands, keep_output)
        if y is None:
            return None
        return widened(y, operands[0], launches.spec)

    def widened_norm(x, weight, bias, spec, *rest):
        y = fused(x, weight, bias, spec, *rest)
        return widened(y, x, spec)

    monkeypatch.setattr(norm_module, "run", widened_run)
    monkeypatch.setattr(norm_module, "fused_norm", widened_norm)
    report = verify("llama", FP32)
    assert [check for check in report.norms if not check.passed]
    assert not report.passed


def test_a_layer_that_raises_is_named(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    model = tiny_models.build("llama").eval()
    patch_model(model)

    def sometimes(real, *args):
        if torch.is_grad_enabled():
            return broken()
        return real(*args)

    put(monkeypatch, sums, sometimes)
    with use_backend("triton"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=0, backward=True)
    assert not report.passed
    assert "raises RuntimeError: no such kernel" in str(report)


def test_nothing_is_verified_where_no_kernel_ran(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    from hf_rmsnorm.ops import backend

    monkeypatch.setattr(backend, "device_refusal", lambda *_: "there is no kernel here")
    # of a size that no launch is kept for
    model = tiny_models.build("llama", hidden_size=72).eval()
    report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert report.nothing_ran
    assert not report.passed
    assert report.verdict == report.to_dict()["verdict"] == "NOTHING VERIFIED"
    told = " ".join(str(report).split())
    assert told.startswith(
        "NOTHING VERIFIED: no kernel ran, as there is no kernel here: set TRITON_INTERPRET=1"
    )
    assert 'use_backend("reference")' in told
    assert "PASS" not in told
    with use_backend("reference"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert report.passed and not report.launches, (
        "the plain formula is not the model's own forward"
    )


@pytest.mark.full
def test_nothing_is_left_behind():
    model = tiny_models.build("qwen3").eval().requires_grad_(False)
    patch_model(model)
    classes = [type(module) for module in model.modules()]
    with use_backend("triton"):
        verify_equivalence(model, inputs=IDS, max_new_tokens=2, backward=True)
    assert [type(module) for module in model.modules()] == classes
    for module in model.modules():
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None
