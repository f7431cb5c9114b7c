"""The fused q/k norm with its rotary embedding, against the attention layers of Hugging
Face.

In half precision the results are bit-equal; in float32 the order of a sum shows, so the
tolerance policy judges.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from computed import compute_norm
from heads import fused_qk_norm
from judged import doubled, leaves_of
from tolerance import assert_as_accurate
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import (
    apply_rotary_pos_emb as partial_rotary,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hf_rmsnorm import NormSpec, count_launches, use_backend
from tests.unit.kernels.test_norm_forward import (
    BF16,
    FP16,
    FP32,
    assert_equal,
    contiguous,
    last_dimension_strided,
    random,
    real_strides,
    rows,
    transposed,
    unaligned,
)

parametrize = pytest.mark.parametrize

QWEN3 = NormSpec(False, 1e-6, rounding="before_weight")
SPECS = {
    "qwen3": QWEN3,
    "gemma3": NormSpec(False, 1e-6, weight_offset=1.0),
    "gemma3n": NormSpec(False, 1e-6),
    "l2": NormSpec(False, 1e-6, has_weight=False),
    "rounded_offset": NormSpec(
        False, 1e-6, weight_offset=1.0, rounding="before_weight"
    ),
}
MODULES = {
    "qwen3": Qwen3RMSNorm,
    "gemma3": Gemma3RMSNorm,
    "gemma3n": Gemma3nRMSNorm,
    "l2": Llama4TextL2Norm,
}


def rotated_once(q, k, cos, sin):
    """In float32, rounded at the end."""
    yq, yk = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
    return yq.to(q.dtype), yk.to(k.dtype)


ROTARY = {
    "": apply_rotary_pos_emb,
    "once": rotated_once,
}


# A shape is (batch, heads, length, head_dim). `transposed` is what a projection gives:
# `proj(x).view(batch, length, heads, head_dim).transpose(1, 2)`.


def packed(shape, dtype, seed):
    """A slice of a packed qkv projection."""
    batch, heads, *inner = shape
    whole = transposed((batch, heads + 3, *inner), dtype, seed)
    return whole[:, 1:-2]


def gated(shape, dtype, seed):
    """The queries of a projection that holds a gate for every head beside them."""
    *outer, head_dim = shape
    whole = transposed((*outer, 2 * head_dim), dtype, seed)
    return whole[..., :head_dim]


def length_first(shape, dtype, seed):
    """As the backward of some attention kernels gives gradients."""
    batch, heads, length, head_dim = shape
    whole = rows(length, batch, heads, head_dim, dtype=dtype, seed=seed)
    return whole.permute(1, 2, 0, 3)


def expanded(shape, dtype, seed):
    batch, _, *inner = shape
    one = rows(batch, 1, *inner, dtype=dtype, seed=seed)
    return one.expand(shape)


LAYOUTS = [
    transposed,
    packed,
    gated,
    contiguous,
    length_first,
    unaligned,
    expanded,
]


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
    """The weights of q and k, None where the formula has none."""
    if not spec.has_weight:
        return [None, None]
    mean = 1.0 - spec.weight_offset
    q_weight = random(head_dim, dtype=dtype, seed=2, scale=0.3, mean=mean)
    k_weight = random(head_dim, dtype=dtype, seed=3, scale=0.3, mean=mean)
    return [q_weight, k_weight]


@dataclass
class Attention:
    """Queries and keys, and what is computed of them."""

    q: torch.Tensor
    k: torch.Tensor
    weights: list
    tables: tuple  # cos and sin
    spec: NormSpec = QWEN3
    way: str = ""

    @property
    def operands(self):
        return [self.q, self.k, *self.weights]

    def compute(self, q, k, *weights):
        return fused_qk_norm(q, k, *weights, self.spec, *self.tables, self.way)

    def apart(self, q, k, *weights):
        """Both by the kernels of one norm, and rotated by Hugging Face's code."""
        q_weight, k_weight = weights
        yq = compute_norm(q, q_weight, None, self.spec)
        yk = compute_norm(k, k_weight, None, self.spec)
        return ROTARY[self.way](yq, yk, *self.tables)

    @torch.no_grad()
    def forward(self):
        return self.compute(*self.operands)

    def gradients(self, dys, function=None):
        """Of everything that takes one; q and k keep their strides."""
        leaves, present = leaves_of(self.operands)
        if function is None:
            function = self.compute
        outputs = function(*leaves)
        of_outputs = []
        for y, dy in zip(outputs, dys, strict=True):
            of_outputs.append(dy.to(y.dtype))
        return torch.autograd.grad(outputs, present, of_outputs)

    def doubled(self):
        q, k, *weights = doubled(*self.operands)
        tables = doubled(*self.tables)
        return Attention(q, k, weights, tables, self.spec, self.way)


def attention(layouts, shape, dtypes=(BF16, BF16, BF16), columns=None, **options):
    """Queries of a shape and half as many keys, in two layouts; `dtypes`: of q and k,
    their weights, cos and sin; `columns`: how many are rotated.
    """
    q_layout, k_layout = layouts
    batch, heads, length, head_dim = shape
    of_rows, of_weights, of_tables = dtypes
    spec = options.pop("spec", QWEN3)
    way = options.pop("way", "")
    q = q_layout(shape, of_rows, 0)
    k = k_layout((batch, heads // 2, length, head_dim), of_rows, 1)
    weights = parameters(spec, head_dim, of_weights)
    tables = angles(batch, length, columns or head_dim, of_tables, **options)
    return Attention(q, k, weights, tables, spec, way)


def usual(**options):
    """Four heads of queries and two of keys, as projections give them."""
    return attention((transposed, transposed), (2, 4, 5, 64), **options)


def gradients_like(made, layouts=(contiguous, contiguous)):
    """Gradients of both outputs, in two layouts."""
    q_layout, k_layout = layouts
    dq = q_layout(made.q.shape, made.q.dtype, 7)
    dk = k_layout(made.k.shape, made.k.dtype, 8)
    return dq, dk


def assert_strides(outputs, expected):
    for a, b in zip(outputs, expected, strict=True):
        assert real_strides(a) == real_strides(b)
        assert a.dtype == b.dtype


DTYPES = [  # q and k, the weights, cos and sin
    (BF16, BF16, BF16),
    (FP16, FP16, FP16),
    (FP32, FP32, FP32),
    (BF16, FP32, FP32),  # autocast
    (BF16, FP32, BF16),
    (FP32, BF16, BF16),
]


def by_modules(name, made):
    """What the modules and the function of Hugging Face make of q and k."""
    outputs = []
    for x, weight in zip((made.q, made.k), made.weights, strict=True):
        if weight is None:
            norm = MODULES[name](1e-6)
        else:
            norm = MODULES[name](len(weight))
            norm.weight = torch.nn.Parameter(weight)
        outputs.append(norm(x).detach())
    return ROTARY[made.way](*outputs, *made.tables)


@parametrize("dtypes", DTYPES, ids=str)
@parametrize("way", ROTARY)
@parametrize("name", MODULES)
def test_the_layers_of_hugging_face(name, way, dtypes):
    """The reference is theirs bit for bit; the kernel adds in another order, which a
    rounding may show.
    """
    made = usual(dtypes=dtypes, spec=SPECS[name], way=way)
    expected = by_modules(name, made)
    with use_backend("reference"):
        reference = made.forward()
        exact = made.doubled().forward()
    with use_backend("triton"), count_launches() as launches:
        fused = made.forward()
    assert launches == {"qk_norm_forward": 1}
    assert_strides(reference, expected)
    assert_strides(fused, expected)
    assert_equal(reference, expected)
    for i, side in enumerate("qk"):
        assert_as_accurate(fused[i], expected[i], exact[i], side)
        if fused[i].dtype != FP32:
            differ = fused[i] != expected[i]
            assert differ.sum() <= max(2, 0.001 * differ.numel())


def test_a_rotation_that_ends_in_a_concatenation_is_row_major():
    made = usual()
    with use_backend("triton"):
        strided = made.forward()
        joined = replace(made, way="joined").forward()
    assert_equal(joined, strided)
    for y in joined:
        assert y.is_contiguous()


def shifted(x):
    """The same values and strides at an address that is no multiple of 16."""
    size = x.untyped_storage().nbytes() // x.element_size()
    memory = x.new_empty(size + 1)
    moved = memory.as_strided(x.shape, x.stride(), 1)
    return moved.copy_(x)


@parametrize("k_layout", [transposed, packed])
@parametrize("q_layout", LAYOUTS)
def test_any_strides_give_the_bits_of_contiguous_tensors(q_layout, k_layout):
    """Of a pair that holds an unaligned tensor, both are read, and summed, as such."""
    made = attention((q_layout, k_layout), (2, 4, 5, 48), shared=False)
    q = made.q.contiguous()
    k = made.k.contiguous()
    if made.q.data_ptr() % 16:
        q = shifted(q)
        k = shifted(k)
    whole = replace(made, q=q, k=k)
    with use_backend("triton"):
        outputs = made.forward()
        expected = whole.forward()
        apart = made.apart(*made.operands)
    assert_equal(outputs, expected)
    assert_strides(outputs, apart)


def test_a_part_of_the_columns_is_rotated():
    made = attention((transposed, packed), (1, 4, 5, 48), columns=16, shared=False)
    q_weight, k_weight = made.weights
    with use_backend("triton"):
        outputs = made.forward()
        q = compute_norm(made.q, q_weight, None, QWEN3)
        k = compute_norm(made.k, k_weight, None, QWEN3)
    assert_equal(outputs, partial_rotary(q, k, *made.tables))


def in_another_order(made, dys, seed):
    """The same with the positions in another order."""
    generator = torch.Generator().manual_seed(seed)
    length = made.q.shape[2]
    order = torch.randperm(length, generator=generator)
    q = made.q[:, :, order]
    k = made.k[:, :, order]
    tables = [t[:, order] for t in made.tables]
    moved_dys = [dy[:, :, order] for dy in dys]
    return replace(made, q=q, k=k, tables=tables), moved_dys


def check_backward(made, dys):
    """Against float64 under the tolerance policy, with what plain torch errs as the
    measure.
    """
    before = [dy.clone() for dy in dys]
    with use_backend("triton"), count_launches() as launches:
        fused = made.gradients(dys)
    expected = {"qk_norm_forward": 1, "qk_norm_backward": 1}
    if made.spec.has_weight:
        expected["reduce_partials"] = 1
    assert launches == expected
    assert_equal(dys, before)
    orders = []
    with use_backend("reference"):
        plain = made.gradients(dys)
        exact = made.doubled().gradients(doubled(*dys))
        # Which order adds up best is luck.
        for seed in range(4):
            moved, moved_dys = in_another_order(made, dys, seed)
            orders.append(moved.gradients(moved_dys))
    names = ("dq", "dk", "dq_weight", "dk_weight")
    for i, gradient in enumerate(fused):
        others = []
        if "weight" in names[i]:
            others = [gradients[i] for gradients in orders]
        assert_as_accurate(gradient, plain[i], exact[i], names[i], others)
    return fused


ROTATIONS = [
    ("", 80, (BF16, BF16, BF16)),
    ("", 32, (FP16, FP16, FP16)),
    ("", 32, (FP32, FP32, FP32)),
    ("", 80, (BF16, FP32, FP32)),
    ("", 80, (FP32, BF16, BF16)),
    ("once", 80, (BF16, FP32, BF16)),
    ("once", 32, (FP16, FP16, FP16)),
]


@parametrize("way, columns, dtypes", ROTATIONS)
@parametrize("name", SPECS)
def test_backward_of_every_formula(name, way, columns, dtypes):
    options = {"spec": SPECS[name], "way": way, "shared": False}
    layouts = transposed, packed
    made = attention(layouts, (2, 4, 9, 80), dtypes, columns, **options)
    check_backward(made, gradients_like(made, (length_first, contiguous)))


@parametrize("layout", [*LAYOUTS, last_dimension_strided])
def test_gradients_arrive_in_any_strides(layout):
    made = attention((transposed, contiguous), (2, 4, 6, 48))
    dys = gradients_like(made, (layout, last_dimension_strided))
    dq, dk, *_ = check_backward(made, dys)
    assert dq.stride() == made.q.stride()
    assert dk.stride() == made.k.stride()


@parametrize("head_dim", [64, 2, 8, 72, 96, 192, 256, 512, 128])
def test_every_head_dim(head_dim):
    made = attention((transposed, transposed), (1, 4, 5, head_dim))
    check_backward(made, gradients_like(made))
    with use_backend("triton"):
        outputs = made.forward()
        apart = made.apart(*made.operands)
    assert_equal(outputs, apart)


@parametrize("way", ROTARY)
def test_gradients_are_those_of_the_norm_kernels_bit_for_bit(way):
    """The rotary embedding's gradient is rounded where eager rounds it, so that
    training does not drift from it.
    """
    made = usual(way=way, shared=False)
    dys = gradients_like(made)
    with use_backend("triton"):
        gradients = made.gradients(dys)
        again = made.gradients(dys)
        expected = made.gradients(dys, made.apart)
    assert_equal(gradients, again)
    assert_equal(gradients[:2], expected[:2])


@parametrize("wanted", [[0, 1], [2, 3], [0, 3], [1, 2]], ids=str)
def test_what_is_frozen_takes_no_gradient(wanted):
    made = usual()
    dys = gradients_like(made)
    leaves = [t.detach().clone() for t in made.operands]
    for i in wanted:
        leaves[i].requires_grad_()
    with use_backend("triton"):
        expected = made.gradients(dys)
        with count_launches() as launches:
            torch.autograd.backward(made.compute(*leaves), dys)
    of_weights = max(wanted) > 1
    assert launches["reduce_partials"] == of_weights
    for i, leaf in enumerate(leaves):
        if i in wanted:
            assert torch.equal(leaf.grad, expected[i])
        else:
            assert leaf.grad is None


def test_backward_keeps_no_copy():
    """Views of what the projections gave, one float32 a row, and the rotary tables that
    are shared by all layers.
    """
    whole = rows(2, 5, 9, 64, dtype=BF16).requires_grad_()
    q, k = whole.transpose(1, 2).split((4, 5), dim=1)
    weights = parameters(QWEN3, 64, BF16)
    for weight in weights:
        weight.requires_grad_()
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
