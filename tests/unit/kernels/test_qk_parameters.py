"""Norms of queries and keys with a bias, a weight for each head, or over all heads of a token at once."""

import pytest
import torch
from tolerance import assert_as_accurate
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm, apply_rotary_pos_emb

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_qk_norm
from hf_rmsnorm.ops.backend import why_not_qk
from hf_rmsnorm.reference import as_normed, by_heads
from tests.unit.kernels.test_qk import (
    BF16,
    DEVICE,
    FP32,
    angles,
    assert_strides,
    contiguous,
    doubled,
    packed,
    projected,
    random,
)

OLMO2 = NormSpec(False, 1e-6)
COHERE = NormSpec(True, 1e-5)
PHI = NormSpec(True, 1e-5, has_bias=True, functional=True)
KINDS = {
    "over all heads": (lambda heads, dim: Olmo2RMSNorm(heads * dim, eps=1e-6), OLMO2),
    "a weight for each head": (lambda heads, dim: CohereLayerNorm((heads, dim), eps=1e-5), COHERE),
    "a bias": (lambda heads, dim: nn.LayerNorm(dim, eps=1e-5), PHI),
}
# Heads of q and of k, and their columns: where a tile has gaps, one head, or as many as there are positions.
SIZES = [(4, 2, 16), (5, 1, 48), (3, 7, 72), (1, 3, 48)]
PUBLISHED = {"over all heads": (40, 40, 128), "a weight for each head": (96, 8, 128)}  # OLMo 2 13B, Command R+


def norm_of(kind, heads, head_dim, dtype, seed):
    make, spec = KINDS[kind]
    norm = make(heads, head_dim).to(DEVICE, dtype)
    for i, p in enumerate(norm.parameters()):
        p.data.copy_(random(*p.shape, dtype=dtype, seed=seed + i, scale=0.3, shift=1.0 - i))
    return norm, spec


def fused(q, k, parameters, spec, tables=(None, None)):
    q_weight, k_weight, *biases = parameters
    return fused_qk_norm(q, k, q_weight, k_weight, spec, *tables, biases=tuple(biases))


def case(kind, q_heads, k_heads, head_dim, dtype, turn=False, layout=projected, rows=3):
    (of_q, spec), (of_k, _) = (norm_of(kind, h, head_dim, dtype, s) for h, s in ((q_heads, 20), (k_heads, 30)))
    parameters = [of_q.weight, of_k.weight, getattr(of_q, "bias", None), getattr(of_k, "bias", None)]
    q, k = layout(2, q_heads, rows, head_dim, dtype, 0), layout(2, k_heads, rows, head_dim, dtype, 1)
    tables = angles(2, rows, head_dim, dtype, shared=False) if turn else (None, None)

    def eager(q, k):
        made = [by_heads(norm(as_normed(x, norm.weight)), x, norm.weight) for x, norm in ((q, of_q), (k, of_k))]
        return apply_rotary_pos_emb(*made, *tables) if turn else made

    return q, k, [p if p is None else p.detach() for p in parameters], spec, tables, eager


CASES = [
    (kind, turn, sizes)
    for kind in KINDS
    for sizes in SIZES
    for turn in (False, True)
    if not (turn and kind == "a bias")
] + [pytest.param(kind, True, sizes, marks=pytest.mark.full) for kind, sizes in PUBLISHED.items()]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind, turn, sizes", CASES, ids=str)
def test_the_layers_of_hugging_face(kind, turn, sizes, dtype):
    q, k, parameters, spec, tables, eager = case(kind, *sizes, dtype, turn)
    spans = kind == "over all heads" and 1 not in sizes[:2]
    assert not spans or parameters[0].shape != q.shape[-1:]
    with torch.no_grad():
        expected = eager(q, k)
        with use_backend("reference"):
            reference = fused(q, k, parameters, spec, tables)
            exact = fused(*doubled(q, k), doubled(*parameters), spec, doubled(*tables))
        with use_backend("triton"), count_launches() as launches:
            assert why_not_qk(spec, q, k, tuple(parameters), tuple(tables)) is None
            got = fused(q, k, parameters, spec, tables)
    assert launches == {"qk_norm_forward": 1}
    assert_strides(reference, expected)
    for side, a, r, b, c in zip("qk", got, reference, expected, exact, strict=True):
        assert torch.equal(r, b) and a.dtype == b.dtype
        assert_as_accurate(a, b, c, side)
        if dtype != FP32:
            assert (a != b).sum() <= max(1, 1e-3 * a.numel())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind, turn, sizes", CASES, ids=str)
def test_backward(kind, turn, sizes, dtype):
    """More rows than programs, so that each of them walks several tiles."""
    q, k, parameters, spec, tables, _ = case(kind, *sizes, dtype, turn, packed, rows=9 if sizes[0] < 40 else 3)
    grads = [contiguous(*x.shape, x.dtype, seed) for x, seed in ((q, 7), (k, 8))]

    def run(q, k, parameters, tables, grads):
        leaves = [t if t is None else t.detach().requires_grad_() for t in (q, k, *parameters)]
        outputs = fused(*leaves[:2], leaves[2:], spec, tables)
        return torch.autograd.grad(outputs, [t for t in leaves if t is not None], grads)

    with use_backend("triton"), count_launches() as launches:
        got = run(q, k, parameters, tables, grads)
    reduced = 2 if spec.has_bias else 1
    assert launches == {"qk_norm_forward": 1, "qk_norm_backward": 1, "qk_reduce_partials": reduced}
    with use_backend("reference"):
        plain = run(q, k, parameters, tables, grads)
        orders = []
        for seed in range(3):  # which order adds up best is luck
            order = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            moved = [t[:, :, order] for t in (q, k, *grads)]
            turned = [t if t is None else t[:, order] for t in tables]
            orders.append(run(*moved[:2], parameters, turned, moved[2:]))
        exact = run(*doubled(q, k), doubled(*parameters), doubled(*tables), doubled(*grads))
    for i, (a, b, c) in enumerate(zip(got, plain, exact, strict=True)):
        assert_as_accurate(a, b, c, f"gradient {i}", [o[i] for o in orders] if i > 1 else [])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_their_gradients_in_float64(kind):
    q, k, parameters, spec, tables, _ = case(kind, 2, 1, 6, FP32, kind != "a bias", rows=2)
    leaves = [t.double().requires_grad_() for t in (q, k, *parameters) if t is not None]
    tables = doubled(*tables)
    with use_backend("reference"):
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda q, k, *p: fused(q, k, [*p, None, None][:4], spec, tables), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_take_no_gradient(kind):
    q, k, parameters, spec, tables, _ = case(kind, 4, 2, 16, FP32)
    made = [t for t in (q, k, *parameters) if t is not None]
    with use_backend("triton"):
        for wanted in range(len(made)):
            leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(made)]
            with count_launches() as launches:
                torch.autograd.backward(fused(*leaves[:2], [*leaves[2:], None, None][:4], spec, tables), (q, k))
            assert launches.get("qk_reduce_partials", 0) == (wanted > 1)
            assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(len(made))]


def test_what_one_launch_does_not_take():
    for kind, sizes in {"over all heads": (96, 8, 128), "a bias": (4, 2, 16)}.items():
        q, k, parameters, spec, tables, _ = case(kind, *sizes, BF16, turn=True)
        assert why_not_qk(spec, q, k, tuple(parameters), tuple(tables))  # too wide; and a rotation behind a bias
