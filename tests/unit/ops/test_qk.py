"""The fused q/k norm: its reference's gradients to the second order, and which calls it serves."""

import pytest
import torch

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_qk_norm
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.qk import run_qk
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


def served(*operands, spec=QWEN3):
    """Whether q, k, their weights, cos and sin are normalised in one launch."""
    q, k, *weights, cos, sin = (*operands, None, None)[:6]
    return run_qk(launches_of(spec), (q, k, *weights, None, None, cos, sin)) is not None


def test_what_is_not_provably_the_same_is_left_to_the_model():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    w, cos, sin = parameters(QWEN3, 64, BF16)[0], *angles(2, 5, 64, BF16)
    none = NormSpec(False, 1e-6, has_weight=False)
    assert served(q, k, w, w, cos, sin) and served(q, k, None, None, spec=none) and served(q, k, w, w, spec=LAYER_NORM)
    refused = [
        (q, k.float(), w, w),
        (q, k, w, w, cos.float(), sin),
        (q.as_subclass(Tagged), k, w, w),
        (q, k, w, w, cos.clone().requires_grad_(), sin),
        (q.double(), k.double(), w.double(), w.double()),
    ]
    assert not any(served(*operands) for operands in refused)
    with torch.autocast(DEVICE, BF16):
        assert served(q, k, w, w) and not served(q, k, w, w, spec=LAYER_NORM)
    with use_backend("reference"):
        assert not served(q, k, w, w)


def test_what_one_launch_cannot_do_takes_a_launch_for_each_norm():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    weights = parameters(QWEN3, 64, BF16)
    with use_backend("triton"), count_launches() as launches:
        got = fused_qk_norm(q, k.float(), *weights, QWEN3)
        gradients(lambda *leaves: fused_qk_norm(*leaves, QWEN3), q, k.float(), weights, *got)
    assert got[1].dtype == FP32 and launches["norm_forward"] == 4 and "qk_norm_forward" not in launches


@pytest.mark.parametrize("at", range(4))
def test_the_operand_alone_that_asks_for_a_gradient(at):
    q, k = projected(1, 2, 3, 8, FP32, 0), projected(1, 1, 3, 8, FP32, 1)
    operands = [q, k, *parameters(QWEN3, 8, FP32), *angles(1, 3, 8, FP32)]
    operands[at] = operands[at].clone().requires_grad_()
    q, k, *weights, cos, sin = operands
    with use_backend("triton"):
        outputs = fused_qk_norm(q, k, *weights, QWEN3, cos, sin)
        with torch.no_grad():
            assert not any(y.requires_grad for y in fused_qk_norm(q, k, *weights, QWEN3, cos, sin))
    (found,) = torch.autograd.grad(sum(y.square().sum() for y in outputs if y.requires_grad), operands[at])
    with use_backend("reference"):
        again = fused_qk_norm(q, k, *weights, QWEN3, cos, sin)
    (expected,) = torch.autograd.grad(sum(y.square().sum() for y in again if y.requires_grad), operands[at])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
