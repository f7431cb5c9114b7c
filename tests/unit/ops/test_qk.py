"""The fused q/k norm: its reference's gradients to the second order, and which calls it
serves.
"""

import torch
from heads import ROTARIES

from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.qk import run_qk
from tests.unit.kernels.test_qk_forward import (
    BF16,
    QWEN3,
    angles,
    parameters,
    transposed,
)


class Tagged(torch.Tensor):
    pass


def served(*operands, spec=QWEN3):
    """Whether q, k and their weights, cos and sin, are for one launch."""
    return run_qk(launches_of(spec), operands, ROTARIES[""]) is not None


def test_what_is_not_provably_the_same_is_left_to_the_model():
    q = transposed((2, 4, 5, 64), BF16, 0)
    k = transposed((2, 2, 5, 64), BF16, 1)
    w, _ = parameters(QWEN3, 64, BF16)
    cos, sin = angles(2, 5, 64, BF16)
    none = NormSpec(False, 1e-6, has_weight=False)
    assert served(q, k, w, w, cos, sin)
    assert served(q, k, None, None, cos, sin, spec=none)
    assert not served(q, k.float(), w, w, cos, sin)
    assert not served(q, k, w, w, cos.float(), sin)
    tagged = q.as_subclass(Tagged)
    assert not served(tagged, k, w, w, cos, sin)
    assert not served(q.clone().requires_grad_(), k, w, w, cos, sin)
    assert not served(q, k, w, w.clone().requires_grad_(), cos, sin)
    learned = cos.clone().requires_grad_()
    assert not served(q, k, w, w, learned, sin)
    with torch.autocast("cpu", BF16):
        assert served(q, k, w, w, cos, sin)
    with use_backend("reference"):
        assert not served(q, k, w, w, cos, sin)
