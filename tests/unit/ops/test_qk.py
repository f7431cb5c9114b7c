"""The fused q/k norm: its reference's gradients to the second order, and which calls it serves."""

import pytest
import torch

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_qk_norm, qk_norm_backend
from hf_rmsnorm.ops.gradients import qk_gradients
from hf_rmsnorm.ops.qk import qk_plan_of
from tests.unit.kernels.test_qk import (
    BF16,
    DEVICE,
    FP32,
    QWEN3,
    angles,
    contiguous,
    gradients,
    parameters,
    projected,
)

LAYER_NORM = NormSpec(True, 1e-5, functional=True)


@pytest.mark.parametrize("columns", [None, 6, 4])
@pytest.mark.parametrize("spec", [QWEN3, LAYER_NORM])
def test_gradients_and_their_gradients_in_float64(spec, columns):
    q, k = projected(2, 2, 3, 6, FP32, 0).double(), contiguous(2, 1, 3, 6, FP32, 1).double()
    leaves = [t.requires_grad_() for t in (q, k, *(w.double() for w in parameters(spec, 6, FP32)))]
    tables = () if columns is None else [t.double() for t in angles(2, 3, columns, FP32, shared=False)]
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda *t: fused_qk_norm(*t, spec, *tables), leaves)
        assert torch.autograd.gradgradcheck(lambda *t: fused_qk_norm(*t, spec, *tables), leaves)


class Tagged(torch.Tensor):
    pass


def test_what_is_not_provably_the_same_is_left_to_the_model():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    w, cos, sin = parameters(QWEN3, 64, BF16)[0], *angles(2, 5, 64, BF16)
    none = NormSpec(False, 1e-6, has_weight=False)

    def backend(*args, spec=QWEN3):
        return qk_norm_backend(*args[:4], spec, *args[4:])

    with use_backend("triton"):
        assert backend(q, k, w, w, cos, sin) == backend(q, k, None, None, spec=none) == "triton"
        refused = [
            (q, k.float(), w, w),
            (q, k, w.float(), w),
            (q, k, w, w, cos.float(), sin),
            (q.as_subclass(Tagged), k, w, w),
            (q, k, None, w),
            (q, k, w[:1], w),
            (q, k, w.repeat(4, 1), w.repeat(4, 1)),
            (q, k[:, :, :3], w, w),
            (q[0], k[0], w, w),
            (q, k, w, w, cos[:, :4], sin[:, :4]),
            (q, k, w, w, cos[..., :63], sin[..., :63]),
            (q, k, w, w, cos.requires_grad_(), sin),
            (q.transpose(2, 3), k.transpose(2, 3), w[:5], w[:5]),
            (projected(1, 1, 1, 520, BF16, 0), projected(1, 1, 1, 520, BF16, 0), *parameters(QWEN3, 520, BF16)),
        ]
        assert {backend(*args) for args in refused} == {"original"}
        for change in ({"gate": "silu_after"}, {"has_bias": True}, {"group_size": 32}):
            assert backend(q, k, w, w, spec=NormSpec(False, 1e-6, **change)) == "original"
        assert backend(q, k, w, w, spec=LAYER_NORM) == "triton"
        with torch.autocast(DEVICE, BF16):
            assert backend(q, k, w, w) == "triton"
            assert backend(q, k, w, w, spec=LAYER_NORM) == "original"
    with use_backend("reference"):
        assert backend(q.double(), k.double(), w.double(), w.double()) == "reference"


def test_what_one_launch_cannot_do_takes_a_launch_for_each_norm():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    weights = parameters(QWEN3, 64, BF16)
    with use_backend("triton"), count_launches() as launches:
        got = fused_qk_norm(q, k.float(), *weights, QWEN3, backend="original")
        gradients(lambda *leaves: fused_qk_norm(*leaves, QWEN3, backend="original"), q, k.float(), weights, *got)
    assert got[1].dtype == FP32 and launches["norm_forward"] == 4 and "qk_norm_forward" not in launches


def leaves():
    q, k = projected(1, 2, 3, 8, FP32, 0), projected(1, 1, 3, 8, FP32, 1)
    return [q, k, *parameters(QWEN3, 8, FP32), *angles(1, 3, 8, FP32)]


@pytest.mark.parametrize("at", [4, 5], ids=["cos", "sin"])
def test_tables_that_ask_for_gradients_are_the_models_own_to_apply(at):
    operands = leaves()
    operands[at] = operands[at].clone().requires_grad_()
    q, k, *weights, cos, sin = operands
    with use_backend("triton"):
        assert qk_norm_backend(q, k, *weights, QWEN3, cos, sin) == "original"
        with torch.no_grad():
            assert qk_norm_backend(q, k, *weights, QWEN3, cos, sin) == "triton"


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("planned", [False, True])
def test_the_operand_alone_that_asks_for_a_gradient(at, planned):
    operands = leaves()
    operands[at] = operands[at].clone().requires_grad_()
    q, k, *weights, cos, sin = operands
    plan = qk_plan_of(q, k, weights, QWEN3, cos) if planned else None
    with use_backend("triton"):
        outputs = fused_qk_norm(q, k, *weights, QWEN3, cos, sin, plan=plan)
        with torch.no_grad():
            assert not any(y.requires_grad for y in fused_qk_norm(q, k, *weights, QWEN3, cos, sin, plan=plan))
    (found,) = torch.autograd.grad(sum(y.square().sum() for y in outputs if y.requires_grad), operands[at])
    with use_backend("reference"):
        again = fused_qk_norm(q, k, *weights, QWEN3, cos, sin)
    (expected,) = torch.autograd.grad(sum(y.square().sum() for y in again if y.requires_grad), operands[at])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_gradient_at_all_is_none():
    q, k, *weights, cos, sin = leaves()
    saved = q, k, *weights, None, None, cos, sin, torch.ones(9), None
    assert qk_gradients(None, None, saved, QWEN3, (True,) * 6) == (None,) * 6


@pytest.mark.parametrize("spec, cast", [(LAYER_NORM, True), (QWEN3, False)])
def test_what_autocast_computes_in_float32_is_the_models_own(spec, cast):
    operands = leaves()
    q, k, *weights, cos, sin = operands
    assert qk_norm_backend(q, k, *weights, spec, cos, sin) == "triton"
    with torch.autocast(DEVICE, BF16):
        assert qk_norm_backend(q, k, *weights, spec, cos, sin) == ("original" if cast else "triton")
