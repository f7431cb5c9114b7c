"""`verify_equivalence` compares each fused layer with the same layer unfused: a faulty
fusion is found and named.
"""

from dataclasses import replace

import pytest
import tiny_models
import torch

from hf_rmsnorm import patch_model, use_backend, verify_equivalence
from hf_rmsnorm.fused import attention, sums
from hf_rmsnorm.ops import first_use
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.reference import reference_norm, rotated

BF16 = torch.bfloat16

FP32 = torch.float32

IDS = tiny_models.token_ids()
SUM = "+ post_attention_layernorm"
ROTARY = "apply_rotary_pos_emb in one launch"
PAIR = f"q_norm, k_norm, {ROTARY}"


def verified(model, new_tokens=0):
    with use_backend("triton"):
        return verify_equivalence(
            model, inputs=IDS, max_new_tokens=new_tokens, backward=True
        )


def verify(family="qwen3", dtype=BF16, new_tokens=0, **config):
    config.setdefault("num_hidden_layers", 1)
    model = tiny_models.build(family, dtype, **config)
    return verified(model.eval(), new_tokens)


def failed(checks):
    return [check.path for check in checks if not check.passed]


RIGHT = [
    ("qwen3", BF16, {SUM, PAIR}),
    ("llama", FP32, {SUM, ROTARY}),
    ("starcoder2", FP32, {SUM, ROTARY}),
]


@pytest.mark.parametrize("family, dtype, fusions", RIGHT)
def test_what_is_fused_rightly_passes(family, dtype, fusions):
    report = verify(family, dtype, new_tokens=2, num_hidden_layers=2)
    assert report.passed, str(report)
    assert report.verdict == "PASS"
    judged = {check.path for check in report.gradients}
    named = set()
    for check in report.fused:
        _, _, fusion = check.path.partition(": ")
        named.add(fusion)
        assert f"{check.path}, input" in judged
    assert named == fusions


class Launch:
    """A call of the launch that serves a norm, a fused sum, or q and k."""

    def __init__(self, start, launches, operands, way):
        self.start = start
        self.spec = launches.spec
        self.operands = operands
        self.way = way

    def run(self):
        launches = launches_of(self.spec)
        return self.start(launches, self.operands, *self.way)


def put(monkeypatch, module, wrong):
    """Put a faulty launch where a norm, a fused sum, or q and k are launched."""
    name = "run_norm"
    if module is attention:
        name = "run_qk"
    start = getattr(module, name)

    def faulty(launches, operands, *way):
        return wrong(Launch(start, launches, operands, way))

    monkeypatch.setattr(module, name, faulty)


# Each fault in the way that a kernel or the code around it could have it.


def of_the_unrounded_sum(launch):
    x, weight, bias, *_, residual = launch.operands
    total, _ = launch.run()
    wide = residual.float() + x.float()
    weight = weight.float()
    y = reference_norm(wide, weight, bias, launch.spec)
    return total, y.to(total.dtype)


def rounded_once(launch):
    launch.spec = replace(launch.spec, rounding="once")
    return launch.run()


def ten_eps(launch):
    eps = 10 * launch.spec.eps
    launch.spec = launch.spec.with_eps(eps + 1e-4)
    return launch.run()


def another_sum(launch):
    total, y = launch.run()
    wrong = total * (1 + 2**-7)
    return wrong, y


def dropped_summand(launch):
    _, weight, bias, *_, residual = launch.operands
    y = reference_norm(residual, weight, bias, launch.spec)
    return residual, y


def rotated_back(launch):
    *others, sin = launch.operands
    launch.operands = *others, -sin
    return launch.run()


FAULTS = {
    "a dropped summand": (sums, dropped_summand, BF16, SUM),
    "norm of the unrounded sum": (sums, of_the_unrounded_sum, BF16, SUM),
    "wrong rounding order": (sums, rounded_once, BF16, SUM),
    "ten times eps": (sums, ten_eps, FP32, SUM),
    "another sum": (sums, another_sum, BF16, SUM),
    "ten times eps in q and k": (attention, ten_eps, FP32, PAIR),
    "a rotation the other way": (attention, rotated_back, BF16, PAIR),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_fusion_is_named(fault, monkeypatch):
    module, wrong, dtype, place = FAULTS[fault]
    put(monkeypatch, module, wrong)
    monkeypatch.setattr(first_use, "is_enabled", False)  # which would see it first
    report = verify(dtype=dtype)
    paths = failed(report.fused)
    assert not report.passed
    assert paths
    for path in paths:
        assert place in path
        assert path in str(report)


def unrounded_before_rotating(launch):
    q, k, q_weight, k_weight, cos, sin = launch.operands

    def wide(x, weight):
        y = reference_norm(x.float(), weight.float(), None, launch.spec)
        y = rotated(y, cos.float(), sin.float())
        return y.to(x.dtype)

    q = wide(q, q_weight)
    k = wide(k, k_weight)
    return q, k


def test_q_and_k_that_are_rounded_less_often_pass_by_the_noise_floor(monkeypatch):
    """Their launch promises no bits: it may differ from the norms apart as much as
    these differ from float64.
    """
    put(monkeypatch, attention, unrounded_before_rotating)
    report = verify()
    pairs = [check for check in report.fused if PAIR in check.path]
    (check,) = pairs
    assert check.passed
    assert check.differing
    assert "off by" in check.text


def test_a_layer_that_raises_is_named(monkeypatch):
    model = tiny_models.build("llama").eval()
    patch_model(model)

    def sometimes(launch):
        if torch.is_grad_enabled():
            raise RuntimeError("no such kernel")
        return launch.run()

    put(monkeypatch, sums, sometimes)
    report = verified(model)
    assert not report.passed
    assert "raises RuntimeError: no such kernel" in str(report)


def test_nothing_is_verified_where_no_kernel_ran(no_kernel_here):
    model = tiny_models.build("llama").eval()
    report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert report.nothing_ran
    assert not report.passed
    assert report.verdict == "NOTHING VERIFIED"
    assert report.to_dict()["verdict"] == "NOTHING VERIFIED"
    text = " ".join(str(report).split())
    start = "NOTHING VERIFIED: no kernel ran, as there is no kernel here: set TRITON_INTERPRET=1"
    assert text.startswith(start)
    assert 'use_backend("reference")' in text
    assert "PASS" not in text
    with use_backend("reference"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    # the plain formula is not the model's own forward
    assert report.passed
    assert not report.launches


class Frozen(torch.nn.Module):
    """A layer whose result has no gradient."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(16, 16)
        self.norm = torch.nn.RMSNorm(16, eps=1e-6)

    def forward(self, x):
        h = x + self.lin(x)
        return (self.norm(h) + h).detach()


def test_gradients_of_a_layer_that_gives_none_are_no_difference():
    model = torch.nn.Sequential(Frozen(), torch.nn.Linear(16, 16)).eval()
    with use_backend("triton"):
        report = verify_equivalence(
            model,
            inputs={"input": torch.randn(2, 5, 16)},
            max_new_tokens=0,
            backward=True,
        )
    assert report.passed, str(report)
