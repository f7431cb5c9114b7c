"""The fused q/k norm with its rotary embedding, against the attention layers of Hugging
Face.

In half precision the results are bit-equal; in float32 the order of a sum shows, so the
tolerance policy judges.
"""

import pytest
import torch
from heads import fused_qk_norm
from tolerance import assert_as_accurate
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import (
    apply_rotary_pos_emb as partial_rotary,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_norm
from tests.unit.kernels.test_kernels import doubled, real_strides

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# compiled, products of float32 that nothing rounds are fused into sums
EXACT = FP32 if DEVICE == "cpu" else BF16
QWEN3 = NormSpec(False, 1e-6, rounding="before_weight")
NORMS = {
    "qwen3": (Qwen3RMSNorm, QWEN3),
    "gemma3": (Gemma3RMSNorm, NormSpec(False, 1e-6, weight_offset=1.0)),
    "gemma3n": (Gemma3nRMSNorm, NormSpec(False, 1e-6)),
    "l2": (lambda n: Llama4TextL2Norm(1e-6), NormSpec(False, 1e-6, has_weight=False)),
}
SPECS = {
    **{name: spec for name, (_, spec) in NORMS.items()},
    "rounded_offset": NormSpec(
        False, 1e-6, weight_offset=1.0, rounding="before_weight"
    ),
}


def random(*shape, dtype, seed, scale=1.7, shift=0.25):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale + shift).to(DEVICE, dtype)


def projected(batch, heads, length, head_dim, dtype, seed):
    """As after `proj(x).view(batch, length, heads, head_dim).transpose(1, 2)`."""
    return (
        random(batch, length, heads * head_dim, dtype=dtype, seed=seed)
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
    )


def packed(batch, heads, length, head_dim, dtype, seed):
    """A slice of a packed qkv projection."""
    whole = random(batch, length, (heads + 3) * head_dim, dtype=dtype, seed=seed)
    return (
        whole[..., head_dim : (heads + 1) * head_dim]
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
    )


def gated(batch, heads, length, head_dim, dtype, seed):
    """The queries of a projection that holds a gate for every head beside them."""
    whole = random(batch, length, heads, 2 * head_dim, dtype=dtype, seed=seed)
    return whole[..., :head_dim].transpose(1, 2)


def contiguous(batch, heads, length, head_dim, dtype, seed):
    return random(batch, heads, length, head_dim, dtype=dtype, seed=seed)


def length_first(batch, heads, length, head_dim, dtype, seed):
    """As the backward of some attention kernels gives gradients."""
    return random(length, batch, heads, head_dim, dtype=dtype, seed=seed).permute(
        1, 2, 0, 3
    )


def unaligned(batch, heads, length, head_dim, dtype, seed):
    return random(batch, heads, length, head_dim + 1, dtype=dtype, seed=seed)[..., 1:]


def expanded(batch, heads, length, head_dim, dtype, seed):
    return random(batch, 1, length, head_dim, dtype=dtype, seed=seed).expand(
        batch, heads, length, head_dim
    )


def columns_apart(batch, heads, length, head_dim, dtype, seed):
    return random(batch, heads, length, 2 * head_dim, dtype=dtype, seed=seed)[..., ::2]


LAYOUTS = [projected, packed, gated, contiguous, length_first, unaligned, expanded]


def angles(batch, length, columns, dtype, seed=5, shared=True):
    """cos and sin as a rotary embedding gives them; the two halves differ unless
    `shared`, which no formula forbids.
    """
    freqs = random(
        batch,
        length,
        columns // 2 if shared else columns,
        dtype=FP32,
        seed=seed,
        scale=3.0,
    )
    emb = torch.cat((freqs, freqs), dim=-1) if shared else freqs
    return emb.cos().to(dtype), emb.sin().to(dtype)


def parameters(spec, head_dim, dtype):
    if not spec.has_weight:
        return [None, None]
    return [
        random(head_dim, dtype=dtype, seed=s, scale=0.3, shift=1.0 - spec.weight_offset)
        for s in (2, 3)
    ]


def rotated_once(q, k, cos, sin):
    """In float32, rounded at the end."""
    made = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
    return tuple(y.to(x.dtype) for y, x in zip(made, (q, k), strict=True))


ROTARY = {"": apply_rotary_pos_emb, "once": rotated_once}


def assert_strides(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert real_strides(a) == real_strides(b) and a.dtype == b.dtype


DTYPES = [BF16, FP16, FP32]
MIXED = [  # q and k, the weights, cos and sin
    (BF16, FP32, FP32),  # autocast
    (FP16, FP32, FP32),
    (BF16, BF16, FP32),
    (BF16, FP32, BF16),
    (FP32, BF16, BF16),
    (BF16, FP16, BF16),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ROTARY)
@pytest.mark.parametrize("name", NORMS)
def test_the_layers_of_hugging_face(name, way, dtype):
    check_forward(name, way, dtype, dtype, dtype)


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("way", ROTARY)
def test_the_layers_of_hugging_face_on_other_dtypes(way, dtypes):
    check_forward("qwen3", way, *dtypes)


def check_forward(name, way, of_rows, of_weights, of_tables):
    """The reference is theirs bit for bit; the kernel adds in another order, which a
    rounding may show.
    """
    make, spec = NORMS[name]
    weights = parameters(spec, 64, of_weights)
    pair = [make(64).to(DEVICE, of_weights) for _ in range(2)]
    for norm, weight in zip(pair, weights, strict=True):
        for parameter in norm.parameters():
            parameter.data.copy_(weight)
    q, k = projected(2, 4, 5, 64, of_rows, 0), projected(2, 2, 5, 64, of_rows, 1)
    tables = angles(2, 5, 64, of_tables)
    with torch.no_grad():
        expected = ROTARY[way](pair[0](q), pair[1](k), *tables)
        with use_backend("reference"), count_launches() as launches:
            reference = fused_qk_norm(q, k, *weights, spec, *tables, way)
            exact = fused_qk_norm(
                *doubled(q, k, *weights), spec, *doubled(*tables), way
            )
        assert not launches
        with use_backend("triton"), count_launches() as launches:
            fused = fused_qk_norm(q, k, *weights, spec, *tables, way)
        assert launches == {"qk_norm_forward": 1}
    assert_strides(reference, expected)
    assert_strides(fused, expected)
    for side, a, r, b, c in zip("qk", fused, reference, expected, exact, strict=True):
        assert torch.equal(r, b)
        assert_as_accurate(a, b, c, side)
        if a.dtype == BF16 and way == "" and DEVICE == "cpu":
            assert torch.equal(a, b)
        elif a.dtype != FP32:
            assert (a == b).double().mean() > 0.999


def test_a_rotation_that_ends_in_a_concatenation_is_row_major():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    weights, tables = parameters(QWEN3, 64, BF16), angles(2, 5, 64, BF16)
    with torch.no_grad(), use_backend("triton"):
        usual = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        joined = fused_qk_norm(q, k, *weights, QWEN3, *tables, "joined")
    assert all(y.is_contiguous() for y in joined) and all(
        map(torch.equal, joined, usual)
    )


def shifted(x):
    """The same values and strides at an address that is no multiple of 16."""
    apart = torch.empty(
        x.untyped_storage().nbytes() // x.element_size() + 1,
        dtype=x.dtype,
        device=x.device,
    )
    return apart[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


@pytest.mark.parametrize("k_layout", LAYOUTS[:4])
@pytest.mark.parametrize("q_layout", LAYOUTS)
@pytest.mark.parametrize("columns", [48, 16])
def test_any_strides_give_what_two_norms_and_the_rotary_embedding_give(
    columns, q_layout, k_layout
):
    """Bit-equal to what contiguous tensors give, and as accurate as the norms alone.

    Of a pair that holds an unaligned tensor, both are read, and summed, as such.
    """
    weights = [random(48, dtype=EXACT, seed=s, shift=1.0) for s in (2, 3)]
    q, k = q_layout(2, 4, 5, 48, EXACT, 0), k_layout(2, 3, 5, 48, EXACT, 1)
    rotary = partial_rotary if columns < 48 else apply_rotary_pos_emb
    tables = angles(1 if columns < 48 else 2, 5, columns, EXACT, shared=False)
    whole = [t.contiguous() for t in (q, k)]
    if any(t.data_ptr() % 16 for t in (q, k)):
        whole = map(shifted, whole)
    with torch.no_grad(), use_backend("triton"):
        got = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        same = fused_qk_norm(*whole, *weights, QWEN3, *tables)
        apart = [
            fused_norm(x, w, None, QWEN3) for x, w in zip((q, k), weights, strict=True)
        ]
        apart = rotary(*apart, *tables)
    with torch.no_grad(), use_backend("reference"):
        exact = fused_qk_norm(*doubled(q, k, *weights), QWEN3, *doubled(*tables))
    assert_strides(got, apart)
    assert all(map(torch.equal, got, same))
    for side, a, b, c in zip("qk", got, apart, exact, strict=True):
        assert_as_accurate(a, b, c, side)


def gradients(function, q, k, weights, dq, dk):
    """Outputs and gradients of everything that takes one; q and k keep their strides."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in (q, k, *weights)]
    outputs = function(*leaves)
    dys = [d.to(y.dtype) for y, d in zip(outputs, (dq, dk), strict=True)]
    wanted = [t for t in leaves if t is not None]
    grads = torch.autograd.grad(outputs, wanted, dys)
    of_leaves = iter(grads)
    return [None if t is None else next(of_leaves) for t in leaves]


def in_another_order(seed, operands, tables):
    """The same with the positions in another order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(operands[0].shape[2], generator=generator).to(DEVICE)
    operands = [t[:, :, order] for t in operands]
    return operands, [t[:, order] for t in tables]


def check_backward(spec, q, k, weights, dq, dk, tables, way=""):
    """Against float64 under the tolerance policy, with what plain torch errs as the
    measure.
    """
    before = [d.clone() for d in (dq, dk)]

    def run(q, k, dq, dk, tables, weights=weights):
        def fused(*leaves):
            return fused_qk_norm(*leaves, spec, *tables, way)

        return gradients(fused, q, k, weights, dq, dk)

    with use_backend("triton"), count_launches() as launches:
        got = run(q, k, dq, dk, tables)
    reduced = {} if weights[0] is None else {"reduce_partials": 1}
    assert launches == {"qk_norm_forward": 1, "qk_norm_backward": 1, **reduced}
    for d, kept in zip((dq, dk), before, strict=True):
        assert torch.equal(d, kept), "an incoming gradient was overwritten"
    with use_backend("reference"):
        plain = run(q, k, dq, dk, tables)
        # Which order adds up best is luck.
        orders = []
        for seed in range(4):
            moved, turned = in_another_order(seed, (q, k, dq, dk), tables)
            orders.append(run(*moved, turned))
        exact = run(*doubled(q, k, dq, dk), doubled(*tables), doubled(*weights))
    for i, name in enumerate(("dq", "dk", "dq_weight", "dk_weight")):
        assert (got[i] is None) == (plain[i] is None), name
        if got[i] is not None:
            others = [made[i] for made in orders] if i > 1 else []
            assert_as_accurate(got[i], plain[i], exact[i], name, others)
    return got


ROTATIONS = [
    ("", 80, BF16),
    ("", 32, FP16),
    ("", 32, FP32),
    ("once", 80, BF16),
    ("once", 32, FP16),
]


@pytest.mark.parametrize("way, columns, dtype", ROTATIONS)
@pytest.mark.parametrize("name", SPECS)
def test_backward_of_every_formula(name, way, columns, dtype):
    spec = SPECS[name]
    q, k = projected(2, 4, 9, 80, dtype, 0), packed(2, 2, 9, 80, dtype, 1)
    dq, dk = length_first(2, 4, 9, 80, dtype, 7), contiguous(2, 2, 9, 80, dtype, 8)
    tables = angles(2, 9, columns, dtype, shared=False)
    check_backward(spec, q, k, parameters(spec, 80, dtype), dq, dk, tables, way)


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("way", ROTARY)
def test_backward_on_other_dtypes(way, dtypes):
    of_rows, of_weights, of_tables = dtypes
    q, k = projected(2, 4, 9, 80, of_rows, 0), packed(2, 2, 9, 80, of_rows, 1)
    dq, dk = length_first(2, 4, 9, 80, FP32, 7), contiguous(2, 2, 9, 80, FP32, 8)
    tables = angles(2, 9, 80, of_tables, shared=False)
    check_backward(QWEN3, q, k, parameters(QWEN3, 80, of_weights), dq, dk, tables, way)


@pytest.mark.parametrize("layout", [*LAYOUTS, columns_apart])
def test_gradients_arrive_in_any_strides(layout):
    shape = (2, 4, 6, 48)
    q, k = projected(*shape, BF16, 0), contiguous(*shape, BF16, 1)
    dq, dk = layout(*shape, BF16, 7), columns_apart(*shape, BF16, 8)
    got = check_backward(
        QWEN3, q, k, parameters(QWEN3, 48, BF16), dq, dk, angles(2, 6, 48, BF16)
    )
    assert [g.stride() for g in got[:2]] == [q.stride(), k.stride()]


@pytest.mark.parametrize("head_dim", [2, 8, 64, 72, 96, 128, 192, 256, 512])
def test_every_head_dim(head_dim):
    weights = parameters(QWEN3, head_dim, BF16)
    q, k = projected(1, 3, 5, head_dim, BF16, 0), projected(1, 1, 5, head_dim, BF16, 1)
    dq, dk = (
        contiguous(1, 3, 5, head_dim, BF16, 7),
        contiguous(1, 1, 5, head_dim, BF16, 8),
    )
    tables = angles(1, 5, head_dim, BF16)
    check_backward(QWEN3, q, k, weights, dq, dk, tables)
    with torch.no_grad(), use_backend("triton"):
        got = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        normed = [
            fused_norm(x, w, None, QWEN3) for x, w in zip((q, k), weights, strict=True)
        ]
    assert all(map(torch.equal, got, apply_rotary_pos_emb(*normed, *tables)))


@pytest.mark.parametrize("way", ROTARY)
def test_gradients_are_those_of_the_norm_kernels_bit_for_bit(way):
    """The rotary embedding's gradient is rounded where eager rounds it, so that
    training does not drift from it.
    """
    weights = parameters(QWEN3, 64, BF16)
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    dq, dk = contiguous(2, 4, 5, 64, BF16, 7), contiguous(2, 2, 5, 64, BF16, 8)
    tables = angles(2, 5, 64, BF16, shared=False)

    def fused(*leaves):
        return fused_qk_norm(*leaves, QWEN3, *tables, way)

    def apart(q, k, q_weight, k_weight):
        normed = (
            fused_norm(q, q_weight, None, QWEN3),
            fused_norm(k, k_weight, None, QWEN3),
        )
        return ROTARY[way](*normed, *tables)

    with use_backend("triton"):
        got = gradients(fused, q, k, weights, dq, dk)
        expected = gradients(apart, q, k, weights, dq, dk)
        again = gradients(fused, q, k, weights, dq, dk)
    assert all(map(torch.equal, got[:2], expected[:2]))
    assert all(map(torch.equal, got, again)), "a gradient is not deterministic"


def test_frozen_weights_and_inputs_take_no_gradient():
    q, k = projected(2, 4, 5, 64, BF16, 0), projected(2, 2, 5, 64, BF16, 1)
    weights, tables = parameters(QWEN3, 64, BF16), angles(2, 5, 64, BF16)
    dq, dk = torch.ones_like(q), torch.ones_like(k)
    with use_backend("triton"):
        whole = gradients(
            lambda *t: fused_qk_norm(*t, QWEN3, *tables), q, k, weights, dq, dk
        )
        for wanted in ([0], [1], [0, 1], [2], [3], [2, 3], [0, 3]):
            leaves = [
                t.detach().requires_grad_(i in wanted)
                for i, t in enumerate((q, k, *weights))
            ]
            with count_launches() as launches:
                outputs = fused_qk_norm(*leaves, QWEN3, *tables)
                torch.autograd.backward(outputs, (dq, dk))
            assert launches["reduce_partials"] == (max(wanted) > 1)
            for i, leaf in enumerate(leaves):
                assert (leaf.grad is not None) == (i in wanted)
                assert leaf.grad is None or torch.equal(leaf.grad, whole[i])


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_one_tensor_alone_is_a_pair_whose_other_has_no_heads(rows):
    q, k = (
        projected(1, 4, rows, 64, BF16, seed=0),
        projected(1, 2, rows, 64, BF16, seed=1),
    )
    weights, tables = parameters(QWEN3, 64, BF16), angles(1, rows, 64, BF16)

    def alone(q, weight):
        return fused_qk_norm(q, q.detach()[:, :0], weight, weight, QWEN3, *tables)

    with use_backend("triton"):
        both = gradients(
            lambda *t: fused_qk_norm(*t, QWEN3, *tables), q, k, weights, q, k
        )
        with torch.no_grad():
            expected = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        leaf, weight = q.detach().requires_grad_(), weights[0].detach().requires_grad_()
        with count_launches() as launches:
            y, none = alone(leaf, weight)
            y.backward(q)
    assert launches == {
        "qk_norm_forward": 1,
        "qk_norm_backward": 1,
        "reduce_partials": 1,
    }
    assert (
        none.numel() == 0
        and torch.equal(y, expected[0])
        and y.stride() == expected[0].stride()
    )
    assert torch.equal(leaf.grad, both[0])
    torch.testing.assert_close(weight.grad, both[2])  # whose rows other programs share


def test_backward_keeps_no_copy():
    """Views of what the projections gave, one float32 a row, and the rotary tables that
    are shared by all layers.
    """
    whole = random(2, 5, 9 * 64, dtype=BF16, seed=0).requires_grad_()
    q, k = (
        part.unflatten(-1, (-1, 64)).transpose(1, 2)
        for part in whole.split((4 * 64, 5 * 64), dim=-1)
    )
    weights = [w.requires_grad_() for w in parameters(QWEN3, 64, BF16)]
    tables = angles(2, 5, 64, BF16)
    kept = {}

    def remember(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with (
        use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t),
    ):
        fused_qk_norm(q, k, *weights, QWEN3, *tables)
    for known in (whole, *weights, *tables):
        kept.pop(known.untyped_storage().data_ptr())
    assert sum(kept.values()) == 2 * 5 * (4 + 5) * 4
