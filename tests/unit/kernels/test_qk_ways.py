"""Other rotary embeddings: of neighbouring columns, and computed in float32, as `CohereAttention` has both."""

import pytest
import torch
from tolerance import assert_as_accurate
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rotary
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as qwen3_rotary

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_qk_norm
from hf_rmsnorm.reference import as_normed, by_heads
from tests.unit.kernels.test_qk import BF16, DEVICE, FP16, FP32, angles, assert_strides, doubled, projected, random

NORMS = {
    "a weight for each head": (lambda heads, dim: CohereLayerNorm((heads, dim), eps=1e-5), NormSpec(True, 1e-5)),
    "one weight": (lambda heads, dim: Qwen3RMSNorm(dim), NormSpec(False, 1e-6, rounding="before_weight")),
}


def pairs_to_halves(x):
    """So that the two halves' rotation is that of neighbouring columns."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def pairs_rotary(q, k, cos, sin):
    """Qwen3's on the columns in another order, and back: every operator rounds."""
    made = qwen3_rotary(*map(pairs_to_halves, (q, k, cos, sin)))
    return tuple(torch.stack(x.chunk(2, -1), -1).flatten(-2) for x in made)


def once_rotary(q, k, cos, sin):
    made = qwen3_rotary(q.float(), k.float(), cos.float(), sin.float())
    return tuple(y.to(x.dtype) for y, x in zip(made, (q, k), strict=True))


ROTARY = {"once pairs": cohere_rotary, "pairs": pairs_rotary, "once": once_rotary}
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)]


def case(name, way, dtype, of_tables, head_dim, columns=None, rows=3):
    make, spec = NORMS[name]
    norms = [make(heads, head_dim).to(DEVICE, dtype) for heads in (4, 2)]
    for seed, norm in enumerate(norms):
        norm.weight.data.copy_(random(*norm.weight.shape, dtype=dtype, seed=20 + seed, scale=0.3, shift=1.0))
    q, k = (projected(2, heads, rows, head_dim, dtype, seed) for seed, heads in enumerate((4, 2)))
    tables = [t.to(of_tables) for t in angles(2, rows, columns or head_dim, dtype, shared=False)]

    def eager(q, k, of_q=None, of_k=None):
        normed = []
        for x, norm, weight in zip((q, k), norms, (of_q, of_k), strict=True):
            read = as_normed(x, norm.weight)
            given = {} if weight is None else {"weight": weight}
            normed.append(by_heads(torch.func.functional_call(norm, given, (read,)), x, norm.weight))
        turned = ROTARY[way](*(y[..., :columns] for y in normed), *tables)
        return [
            t if columns is None else torch.cat((t, y[..., columns:]), -1) for t, y in zip(turned, normed, strict=True)
        ]

    return q, k, [norm.weight.detach() for norm in norms], spec, tables, eager


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("way", ROTARY)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("head_dim, columns", [(16, None), (48, None), (48, 24), (128, None)])
def test_the_layers_of_hugging_face(head_dim, columns, name, way, dtypes):
    if way == "pairs" and dtypes[0] != dtypes[1]:
        pytest.skip("what is promoted is rotated in the wider dtype")
    q, k, weights, spec, tables, eager = case(name, way, *dtypes, head_dim, columns)
    with torch.no_grad():
        expected = eager(q, k)
        with use_backend("reference"):
            reference = fused_qk_norm(q, k, *weights, spec, *tables, way=way)
            exact = fused_qk_norm(*doubled(q, k), *doubled(*weights), spec, *doubled(*tables), way=way)
        with use_backend("triton"), count_launches() as launches:
            got = fused_qk_norm(q, k, *weights, spec, *tables, way=way)
    assert launches == {"qk_norm_forward": 1}
    if columns is None and way != "pairs":
        assert_strides(reference, expected)
    for side, a, r, b, c in zip("qk", got, reference, expected, exact, strict=True):
        assert torch.equal(r, b) and a.dtype == b.dtype
        assert_as_accurate(a, b, c, side)
        if dtypes[0] != FP32:
            assert (a != b).sum() <= max(1, 1e-3 * a.numel())


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("way", ROTARY)
@pytest.mark.parametrize("name", NORMS)
def test_gradients(name, way, dtypes):
    if way == "pairs" and dtypes[0] != dtypes[1]:
        pytest.skip("what is promoted is rotated in the wider dtype")
    q, k, weights, spec, tables, eager = case(name, way, *dtypes, 48, rows=9)
    grads = [random(*x.shape, dtype=x.dtype, seed=7) for x in (q, k)]

    def gradients(function, *given):
        leaves = [t.detach().requires_grad_() for t in given[:4]]
        made = function(*leaves)
        return torch.autograd.grad(made, leaves, [g.to(y.dtype) for g, y in zip(grads, made, strict=True)])

    def ours(*leaves, spec=spec, tables=tables):
        return fused_qk_norm(*leaves, spec, *tables, way=way)

    operands = q, k, *weights
    expected = gradients(eager, *operands)
    with use_backend("reference"):
        exact = gradients(lambda *leaves: ours(*leaves, tables=doubled(*tables)), *doubled(*operands))
    with use_backend("triton"), count_launches() as launches:
        got = gradients(ours, *operands)
    assert launches["qk_norm_forward"] == launches["qk_norm_backward"] == 1
    for side, a, b, c in zip(("dq", "dk", "dw q", "dw k"), got, expected, exact, strict=True):
        assert a.dtype == b.dtype
        assert_as_accurate(a, b, c, side, [b])


@pytest.mark.full
def test_a_compiled_graph_has_the_gradients_of_the_same_rotation():
    q, k, weights, spec, tables, _ = case("one weight", "once pairs", FP32, FP32, 16)

    def gradients(function):
        leaves = [t.detach().requires_grad_() for t in (q, k, *weights)]
        made = function(*leaves)
        return torch.autograd.grad(sum(y.square().mul(y).sum() for y in made), leaves)

    def norms(*leaves):
        return fused_qk_norm(*leaves, spec, *tables, way="once pairs")

    with use_backend("reference"):
        expected = gradients(norms)
    with use_backend("triton"):
        got = gradients(torch.compile(norms, backend="aot_eager", fullgraph=True))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
