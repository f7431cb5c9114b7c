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
    values = torch.randn(shape, generator=generator)
    values = values * scale + shift
    return values.to(DEVICE, dtype)


def projected(batch, heads, length, head_dim, dtype, seed):
    """As after `proj(x).view(batch, length, heads, head_dim).transpose(1, 2)`."""
    rows = random(batch, length, heads, head_dim, dtype=dtype, seed=seed)
    return rows.transpose(1, 2)


def packed(batch, heads, length, head_dim, dtype, seed):
    """A slice of a packed qkv projection."""
    whole = random(batch, length, heads + 3, head_dim, dtype=dtype, seed=seed)
    rows = whole[:, :, 1:-2]
    return rows.transpose(1, 2)


def gated(batch, heads, length, head_dim, dtype, seed):
    """The queries of a projection that holds a gate for every head beside them."""
    whole = random(batch, length, heads, 2 * head_dim, dtype=dtype, seed=seed)
    rows = whole[..., :head_dim]
    return rows.transpose(1, 2)


def contiguous(batch, heads, length, head_dim, dtype, seed):
    return random(batch, heads, length, head_dim, dtype=dtype, seed=seed)


def length_first(batch, heads, length, head_dim, dtype, seed):
    """As the backward of some attention kernels gives gradients."""
    rows = random(length, batch, heads, head_dim, dtype=dtype, seed=seed)
    return rows.permute(1, 2, 0, 3)


def unaligned(batch, heads, length, head_dim, dtype, seed):
    whole = random(batch, heads, length, head_dim + 1, dtype=dtype, seed=seed)
    return whole[..., 1:]


def expanded(batch, heads, length, head_dim, dtype, seed):
    one = random(batch, 1, length, head_dim, dtype=dtype, seed=seed)
    return one.expand(batch, heads, length, head_dim)


def columns_apart(batch, heads, length, head_dim, dtype, seed):
    whole = random(batch, heads, length, 2 * head_dim, dtype=dtype, seed=seed)
    return whole[..., ::2]


LAYOUTS = [projected, packed, gated, contiguous, length_first, unaligned, expanded]


def angles(batch, length, columns, dtype, shared=True):
    """cos and sin as a rotary embedding gives them; the two halves differ unless
    `shared`, which no formula forbids.
    """
    emb = random(batch, length, columns, dtype=FP32, seed=5, scale=3.0)
    if shared:
        half = emb[..., : columns // 2]
        emb = torch.cat((half, half), dim=-1)
    cos = emb.cos()
    sin = emb.sin()
    return cos.to(dtype), sin.to(dtype)


def parameters(spec, head_dim, dtype):
    if not spec.has_weight:
        return [None, None]
    how = {"dtype": dtype, "scale": 0.3, "shift": 1.0 - spec.weight_offset}
    q_weight = random(head_dim, seed=2, **how)
    k_weight = random(head_dim, seed=3, **how)
    return [q_weight, k_weight]


def usual(dtype=BF16, length=5, batch=2):
    """(q, k, weights, tables) of four heads and two, all of one dtype."""
    q = projected(batch, 4, length, 64, dtype, 0)
    k = projected(batch, 2, length, 64, dtype, 1)
    weights = parameters(QWEN3, 64, dtype)
    return q, k, weights, angles(batch, length, 64, dtype)


def rotated_once(q, k, cos, sin):
    """In float32, rounded at the end."""
    yq, yk = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
    return yq.to(q.dtype), yk.to(k.dtype)


def normed(q, k, q_weight, k_weight):
    """Both by the kernels of one norm."""
    yq = fused_norm(q, q_weight, None, QWEN3)
    yk = fused_norm(k, k_weight, None, QWEN3)
    return yq, yk


ROTARY = {"": apply_rotary_pos_emb, "once": rotated_once}


def assert_strides(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert real_strides(a) == real_strides(b)
        assert a.dtype == b.dtype


DTYPES = [BF16, FP16, FP32]
MIXED = [  # q and k, the weights, cos and sin
    (BF16, FP32, FP32),  # autocast
    (FP16, FP32, FP32),
    (BF16, FP32, BF16),
    (FP32, BF16, BF16),
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
    q, k, *_ = usual(of_rows)
    tables = angles(2, 5, 64, of_tables)
    by_modules = []
    for x, weight in zip((q, k), weights, strict=True):
        norm = make(64).to(DEVICE, of_weights)
        for parameter in norm.parameters():
            parameter.data.copy_(weight)
        by_modules.append(norm(x).detach())
    expected = ROTARY[way](*by_modules, *tables)
    wide = doubled(q, k, *weights)
    wide_tables = doubled(*tables)
    with torch.no_grad():
        with use_backend("reference"), count_launches() as launches:
            reference = fused_qk_norm(q, k, *weights, spec, *tables, way)
            exact = fused_qk_norm(*wide, spec, *wide_tables, way)
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
            equal = (a == b).double()
            assert equal.mean() > 0.999


def test_a_rotation_that_ends_in_a_concatenation_is_row_major():
    q, k, weights, tables = usual()
    with torch.no_grad(), use_backend("triton"):
        strided = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        joined = fused_qk_norm(q, k, *weights, QWEN3, *tables, "joined")
    for a, b in zip(joined, strided, strict=True):
        assert a.is_contiguous()
        assert torch.equal(a, b)


def shifted(x):
    """The same values and strides at an address that is no multiple of 16."""
    size = x.untyped_storage().nbytes() // x.element_size()
    apart = x.new_empty(size + 1)
    moved = apart.as_strided(x.shape, x.stride(), 1)
    return moved.copy_(x)


@pytest.mark.parametrize("k_layout", LAYOUTS[:4])
@pytest.mark.parametrize("q_layout", LAYOUTS)
@pytest.mark.parametrize("columns", [48, 16])
def test_any_strides_give_what_two_norms_and_the_rotary_embedding_give(
    columns, q_layout, k_layout
):
    """Bit-equal to what contiguous tensors give, and as accurate as the norms alone.

    Of a pair that holds an unaligned tensor, both are read, and summed, as such.
    """
    weights = parameters(QWEN3, 48, EXACT)
    q = q_layout(2, 4, 5, 48, EXACT, 0)
    k = k_layout(2, 3, 5, 48, EXACT, 1)
    rotary = apply_rotary_pos_emb
    batch = 2
    if columns < 48:
        rotary = partial_rotary
        batch = 1
    tables = angles(batch, 5, columns, EXACT, shared=False)
    whole = [q.contiguous(), k.contiguous()]
    if q.data_ptr() % 16 or k.data_ptr() % 16:
        whole = map(shifted, whole)
    with torch.no_grad(), use_backend("triton"):
        got = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        same = fused_qk_norm(*whole, *weights, QWEN3, *tables)
        apart = rotary(*normed(q, k, *weights), *tables)
    wide = doubled(q, k, *weights)
    wide_tables = doubled(*tables)
    with torch.no_grad(), use_backend("reference"):
        exact = fused_qk_norm(*wide, QWEN3, *wide_tables)
    assert_strides(got, apart)
    assert all(map(torch.equal, got, same))
    for side, a, b, c in zip("qk", got, apart, exact, strict=True):
        assert_as_accurate(a, b, c, side)


def gradients(function, q, k, weights, dq, dk):
    """Outputs and gradients of everything that takes one; q and k keep their strides."""
    leaves = []
    for t in (q, k, *weights):
        leaves.append(t if t is None else t.detach().requires_grad_())
    outputs = function(*leaves)
    dys = []
    for y, d in zip(outputs, (dq, dk), strict=True):
        dys.append(d.to(y.dtype))
    wanted = [t for t in leaves if t is not None]
    grads = torch.autograd.grad(outputs, wanted, dys)
    of_leaves = iter(grads)
    return [None if t is None else next(of_leaves) for t in leaves]


def in_another_order(seed, operands, tables):
    """The same with the positions in another order."""
    generator = torch.Generator().manual_seed(seed)
    length = operands[0].shape[2]
    order = torch.randperm(length, generator=generator).to(DEVICE)
    operands = [t[:, :, order] for t in operands]
    tables = [t[:, order] for t in tables]
    return operands, tables


def check_backward(spec, q, k, weights, dq, dk, tables, way=""):
    """Against float64 under the tolerance policy, with what plain torch errs as the
    measure.
    """
    before = dq.clone(), dk.clone()

    def run(q, k, dq, dk, tables, weights=weights):
        def fused(*leaves):
            return fused_qk_norm(*leaves, spec, *tables, way)

        return gradients(fused, q, k, weights, dq, dk)

    with use_backend("triton"), count_launches() as launches:
        got = run(q, k, dq, dk, tables)
    expected = {"qk_norm_forward": 1, "qk_norm_backward": 1}
    if weights[0] is not None:
        expected["reduce_partials"] = 1
    assert launches == expected
    assert torch.equal(dq, before[0]), "an incoming gradient was overwritten"
    assert torch.equal(dk, before[1]), "an incoming gradient was overwritten"
    with use_backend("reference"):
        plain = run(q, k, dq, dk, tables)
        # Which order adds up best is luck.
        orders = []
        for seed in range(4):
            moved, turned = in_another_order(seed, (q, k, dq, dk), tables)
            orders.append(run(*moved, turned))
        wide = doubled(q, k, dq, dk)
        wide_tables = doubled(*tables)
        exact = run(*wide, wide_tables, doubled(*weights))
    for i, name in enumerate(("dq", "dk", "dq_weight", "dk_weight")):
        assert (got[i] is None) == (plain[i] is None), name
        if got[i] is None:
            continue
        others = []
        if "weight" in name:
            others = [made[i] for made in orders]
        assert_as_accurate(got[i], plain[i], exact[i], name, others)
    return got


ROTATIONS = [
    ("", 80, BF16),
    ("", 32, FP16),
    ("", 32, FP32),
    ("once", 80, BF16),
    ("once", 32, FP16),
]


def nine(dtype):
    """q and k of nine positions."""
    q = projected(2, 4, 9, 80, dtype, 0)
    k = packed(2, 2, 9, 80, dtype, 1)
    return q, k


def gradients_of_nine(dtype):
    dq = length_first(2, 4, 9, 80, dtype, 7)
    dk = contiguous(2, 2, 9, 80, dtype, 8)
    return dq, dk


@pytest.mark.parametrize("way, columns, dtype", ROTATIONS)
@pytest.mark.parametrize("name", SPECS)
def test_backward_of_every_formula(name, way, columns, dtype):
    spec = SPECS[name]
    weights = parameters(spec, 80, dtype)
    tables = angles(2, 9, columns, dtype, shared=False)
    check_backward(spec, *nine(dtype), weights, *gradients_of_nine(dtype), tables, way)


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("way", ROTARY)
def test_backward_on_other_dtypes(way, dtypes):
    of_rows, of_weights, of_tables = dtypes
    weights = parameters(QWEN3, 80, of_weights)
    tables = angles(2, 9, 80, of_tables, shared=False)
    dys = gradients_of_nine(FP32)
    check_backward(QWEN3, *nine(of_rows), weights, *dys, tables, way)


@pytest.mark.parametrize("layout", [*LAYOUTS, columns_apart])
def test_gradients_arrive_in_any_strides(layout):
    shape = (2, 4, 6, 48)
    q = projected(*shape, BF16, 0)
    k = contiguous(*shape, BF16, 1)
    dq = layout(*shape, BF16, 7)
    dk = columns_apart(*shape, BF16, 8)
    weights = parameters(QWEN3, 48, BF16)
    tables = angles(2, 6, 48, BF16)
    got_dq, got_dk, *_ = check_backward(QWEN3, q, k, weights, dq, dk, tables)
    assert got_dq.stride() == q.stride()
    assert got_dk.stride() == k.stride()


@pytest.mark.parametrize("head_dim", [2, 8, 64, 72, 96, 128, 192, 256, 512])
def test_every_head_dim(head_dim):
    weights = parameters(QWEN3, head_dim, BF16)
    q = projected(1, 3, 5, head_dim, BF16, 0)
    k = projected(1, 1, 5, head_dim, BF16, 1)
    dq = contiguous(1, 3, 5, head_dim, BF16, 7)
    dk = contiguous(1, 1, 5, head_dim, BF16, 8)
    tables = angles(1, 5, head_dim, BF16)
    check_backward(QWEN3, q, k, weights, dq, dk, tables)
    with torch.no_grad(), use_backend("triton"):
        got = fused_qk_norm(q, k, *weights, QWEN3, *tables)
        apart = normed(q, k, *weights)
    expected = apply_rotary_pos_emb(*apart, *tables)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("way", ROTARY)
def test_gradients_are_those_of_the_norm_kernels_bit_for_bit(way):
    """The rotary embedding's gradient is rounded where eager rounds it, so that
    training does not drift from it.
    """
    q, k, weights, _ = usual()
    dq = contiguous(2, 4, 5, 64, BF16, 7)
    dk = contiguous(2, 2, 5, 64, BF16, 8)
    tables = angles(2, 5, 64, BF16, shared=False)

    def fused(*leaves):
        return fused_qk_norm(*leaves, QWEN3, *tables, way)

    def apart(*leaves):
        return ROTARY[way](*normed(*leaves), *tables)

    with use_backend("triton"):
        got = gradients(fused, q, k, weights, dq, dk)
        expected = gradients(apart, q, k, weights, dq, dk)
        again = gradients(fused, q, k, weights, dq, dk)
    assert all(map(torch.equal, got[:2], expected[:2]))
    assert all(map(torch.equal, got, again)), "a gradient is not deterministic"


def test_frozen_weights_and_inputs_take_no_gradient():
    q, k, weights, tables = usual()
    dq = torch.ones_like(q)
    dk = torch.ones_like(k)

    def fused(*leaves):
        return fused_qk_norm(*leaves, QWEN3, *tables)

    with use_backend("triton"):
        whole = gradients(fused, q, k, weights, dq, dk)
        for wanted in ([0], [1], [0, 1], [2], [3], [2, 3], [0, 3]):
            leaves = [t.detach().clone() for t in (q, k, *weights)]
            for i in wanted:
                leaves[i].requires_grad_()
            with count_launches() as launches:
                torch.autograd.backward(fused(*leaves), (dq, dk))
            assert launches["reduce_partials"] == (max(wanted) > 1)
            for i, leaf in enumerate(leaves):
                assert (leaf.grad is not None) == (i in wanted)
                if i in wanted:
                    assert torch.equal(leaf.grad, whole[i])


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_one_tensor_alone_is_a_pair_whose_other_has_no_heads(rows):
    q, k, weights, tables = usual(length=rows, batch=1)

    def fused(*leaves):
        return fused_qk_norm(*leaves, QWEN3, *tables)

    leaf = q.detach().requires_grad_()
    weight = weights[0].detach().requires_grad_()
    with use_backend("triton"):
        dq, _, dweight, _ = gradients(fused, q, k, weights, q, k)
        with torch.no_grad():
            expected, _ = fused(q, k, *weights)
        with count_launches() as launches:
            y, none = fused(leaf, q[:, :0], weight, weight)
            y.backward(q)
    once = ["qk_norm_forward", "qk_norm_backward", "reduce_partials"]
    assert launches == dict.fromkeys(once, 1)
    assert none.numel() == 0
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(leaf.grad, dq)
    torch.testing.assert_close(weight.grad, dweight)  # whose rows other programs share


def test_backward_keeps_no_copy():
    """Views of what the projections gave, one float32 a row, and the rotary tables that
    are shared by all layers.
    """
    whole = random(2, 5, 9, 64, dtype=BF16, seed=0).requires_grad_()
    q, k = whole.transpose(1, 2).split((4, 5), dim=1)
    weights = [w.requires_grad_() for w in parameters(QWEN3, 64, BF16)]
    tables = angles(2, 5, 64, BF16)
    kept = {}

    def remember(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t)
    with use_backend("triton"), hooks:
        fused_qk_norm(q, k, *weights, QWEN3, *tables)
    for known in (whole, *weights, *tables):
        storage = known.untyped_storage()
        kept.pop(storage.data_ptr())
    assert sum(kept.values()) == 2 * 5 * (4 + 5) * 4
