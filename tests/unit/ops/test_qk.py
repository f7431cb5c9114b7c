"""The fused q/k norm: its reference's gradients to the second order, and which calls it
serves.
"""

import pytest
import torch
from heads import fused_qk_norm

from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.qk import run_qk
from tests.unit.kernels.test_qk import (
    BF16,
    FP32,
    QWEN3,
    angles,
    contiguous,
    parameters,
    transposed,
)


@pytest.mark.parametrize("way", ["", "once"])
@pytest.mark.parametrize("columns", [6, 4])
def test_gradients_and_their_gradients_in_float64(columns, way):
    q = transposed((2, 2, 3, 6), FP32, 0).double()
    k = contiguous((2, 1, 3, 6), FP32, 1).double()
    leaves = [
        t.requires_grad_()
        for t in (q, k, *(w.double() for w in parameters(QWEN3, 6, FP32)))
    ]
    tables = [t.double() for t in angles(2, 3, columns, FP32, shared=False)]
    with use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda *t: fused_qk_norm(*t, QWEN3, *tables, way), leaves
        )
        assert torch.autograd.gradgradcheck(
            lambda *t: fused_qk_norm(*t, QWEN3, *tables, way), leaves
        )


class Tagged(torch.Tensor):
    pass


def served(*operands, spec=QWEN3):
    """Whether q, k and their weights, cos and sin, are for one launch."""
    return run_qk(launches_of(spec), operands) is not None


def test_what_is_not_provably_the_same_is_left_to_the_model():
    q = transposed((2, 4, 5, 64), BF16, 0)
    k = transposed((2, 2, 5, 64), BF16, 1)
    w, cos, sin = parameters(QWEN3, 64, BF16)[0], *angles(2, 5, 64, BF16)
    none = NormSpec(False, 1e-6, has_weight=False)
    assert served(q, k, w, w, cos, sin)
    assert served(q, k, None, None, cos, sin, spec=none)
    refused = [
        (q, k.float(), w, w, cos, sin),
        (q, k, w, w, cos.float(), sin),
        (q.as_subclass(Tagged), k, w, w, cos, sin),
        (q, k, w, w, cos.clone().requires_grad_(), sin),
        (q.double(), k.double(), w.double(), w.double(), cos, sin),
    ]
    assert not any(served(*operands) for operands in refused)
    with torch.autocast("cpu", BF16):
        assert served(q, k, w, w, cos, sin)
    with use_backend("reference"):
        assert not served(q, k, w, w, cos, sin)
