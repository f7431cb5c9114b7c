"""The rotary embedding in one launch, against the functions of Hugging Face: the same
bits in every dtype, forward and backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from heads import WAYS
from transformers.models.blt.modeling_blt import apply_rotary_pos_emb as of_blt
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as of_cohere
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as of_deepseek,
)
from transformers.models.ernie4_5.modeling_ernie4_5 import (
    apply_rotary_pos_emb as of_ernie,
)
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_glm
from transformers.models.glm4_moe.modeling_glm4_moe import (
    apply_rotary_pos_emb as partial_rotary,
)
from transformers.models.gpt_oss.modeling_gpt_oss import (
    apply_rotary_pos_emb as of_gpt_oss,
)
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as of_helium
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.modernbert.modeling_modernbert import (
    apply_rotary_pos_emb as of_modernbert,
)
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as cast_back

from benchmarks.counting import saved_bytes
from hf_rmsnorm import count_launches, use_backend
from hf_rmsnorm.formula import Rotation
from hf_rmsnorm.ops.qk import run_rotary
from tests.unit.kernels.test_norm_forward import (
    BF16,
    FP16,
    FP32,
    assert_equal,
    contiguous,
    leaves_of,
    random,
    transposed,
)
from tests.unit.kernels.test_qk_forward import (
    LAYOUTS,
    angles,
    assert_strides,
    length_first,
    packed,
    rotated_once,
)

parametrize = pytest.mark.parametrize


@dataclass
class Rotary:
    """Queries and keys, their tables, and the function that rotates them."""

    q: torch.Tensor
    k: torch.Tensor
    tables: tuple
    function: Callable = apply_rotary_pos_emb
    way: str | Rotation = ""

    def fused(self, q, k):
        with use_backend("triton"):
            return run_rotary((q, k, *self.tables), WAYS.get(self.way, self.way))

    def eager(self, q, k):
        return self.function(q, k, *self.tables)


def made(
    layouts=(transposed, transposed), shape=(2, 4, 5, 64), dtypes=(BF16, BF16), **how
):
    """Queries of a shape and half as many keys; `dtypes`: of both, and of the tables."""
    q_layout, k_layout = layouts
    batch, heads, length, head_dim = shape
    dtype, table_dtype = dtypes
    q = q_layout(shape, dtype, 0)
    k = k_layout((batch, heads // 2, length, head_dim), dtype, 1)
    columns = how.pop("columns", head_dim)
    tables = angles(
        how.pop("tables", batch), length, columns, table_dtype, shared=False
    )
    return Rotary(q, k, tables, **how)


def gradients(function, rotary, dys):
    leaves, present = leaves_of([rotary.q, rotary.k])
    outputs = function(*leaves)
    dys = [dy.to(y.dtype) for dy, y in zip(dys, outputs, strict=True)]
    return torch.autograd.grad(outputs, present, dys)


def check(rotary, layouts=(contiguous, length_first)):
    """All bits, strides and dtypes of the function, and one launch either way."""
    dys = []
    for seed, (layout, x) in enumerate(zip(layouts, (rotary.q, rotary.k), strict=True)):
        dys.append(layout(x.shape, x.dtype, 7 + seed))
    with count_launches() as launches:
        outputs = rotary.fused(rotary.q, rotary.k)
        fused = gradients(rotary.fused, rotary, dys)
    expected = rotary.eager(rotary.q, rotary.k)
    assert_equal(outputs, expected)
    assert_strides(outputs, expected)
    assert_equal(fused, gradients(rotary.eager, rotary, dys))
    for gradient, x in zip(fused, (rotary.q, rotary.k), strict=True):
        assert gradient.stride() == torch.empty_like(x).stride()
    assert launches == {"rotary_forward": 2, "rotary_backward": 1}


DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP32, BF16)]
FUNCTIONS = [
    (apply_rotary_pos_emb, "", 64),
    (partial_rotary, "joined", 64),
    (partial_rotary, "", 32),
    (partial_rotary, "", 16),
]


@parametrize("dtypes", DTYPES, ids=str)
@parametrize("function, way, columns", FUNCTIONS)
def test_the_functions_of_hugging_face(function, way, columns, dtypes):
    check(made(dtypes=dtypes, function=function, way=way, columns=columns))


PAIRS = Rotation(reads_pairs=True, writes_pairs=True)
FIRST = PAIRS._replace(tables="first")
TURNS = [
    (of_cohere, PAIRS._replace(once=True), 64),
    (of_blt, PAIRS, 64),
    (of_helium, FIRST, 64),
    (of_glm, FIRST._replace(joined=True), 64),
    (of_glm, FIRST, 16),
    (of_deepseek, Rotation(reads_pairs=True, tables="first"), 64),
    (of_gpt_oss, Rotation(joined=True, tables="half"), 32),
]


@parametrize("dtype", [BF16, FP16, FP32], ids=str)
@parametrize("transposed", [False, True])
@parametrize("function, way, columns", TURNS)
def test_other_ways_to_turn(function, way, columns, transposed, dtype):
    rotary = made(dtypes=(dtype, dtype), columns=columns, function=function, way=way)
    if transposed:
        rotary.q = rotary.q.transpose(1, 2)
        rotary.k = rotary.k.transpose(1, 2)
        rotary.way = way._replace(transposed=True)
        rotary.function = partial(function, unsqueeze_dim=2)
    check(rotary)


TWICE = Rotation(once=True, casts_twice=True)
CASTING = [  # what is cast back, and what is computed in float32
    (cast_back, TWICE, (BF16, FP32)),
    (cast_back, "", (BF16, BF16)),
    (rotated_once, "once", (BF16, BF16)),
    (rotated_once, "once", (FP16, FP32)),
    (of_cohere, PAIRS._replace(once=True), (BF16, FP32)),
    (of_ernie, FIRST._replace(once=True, casts_twice=True), (BF16, BF16)),
    (of_modernbert, TWICE, (FP16, FP16)),
    (of_modernbert, TWICE, (BF16, FP32)),
]


@parametrize("function, way, dtypes", CASTING)
def test_functions_that_give_the_dtype_of_q_back(function, way, dtypes):
    check(made(dtypes=dtypes, function=function, way=way))


@parametrize("k_layout", [transposed, packed])
@parametrize("q_layout", LAYOUTS)
def test_any_strides(q_layout, k_layout):
    check(made((q_layout, k_layout), (2, 4, 5, 48)))


@parametrize("head_dim", [80, 64, 96, 112, 128, 256, 512, 2, 72])
def test_every_head_dim(head_dim):
    check(made(shape=(1, 4, 3, head_dim)))


@parametrize("length, tables", [(1, 1), (300, 1), (300, 2)])
def test_one_token_and_long_prompts_with_tables_for_all_or_for_each(length, tables):
    check(made(shape=(2, 4, length, 64), tables=tables))


def test_the_backward_keeps_the_tables_alone():
    rotary = made()
    q = rotary.q.detach().requires_grad_()
    kept = saved_bytes(lambda: rotary.fused(q, rotary.k)[0], ())
    assert kept == sum(t.numel() * t.element_size() for t in rotary.tables)


@parametrize("columns", [64, 32])
def test_gradients_of_gradients(columns):
    rotary = made(dtypes=(FP32, FP32), columns=columns, function=partial_rotary)
    weights = [random(*x.shape, dtype=FP32, seed=9) for x in (rotary.q, rotary.k)]

    def second(function):
        leaves, present = leaves_of([rotary.q, rotary.k])
        outputs = function(*leaves)
        dys = [(y * y * w) for y, w in zip(outputs, weights, strict=True)]
        first = torch.autograd.grad(outputs, present, dys, create_graph=True)
        total = sum(g.square().sum() for g in first)
        return torch.autograd.grad(total, present)

    for ours, theirs in zip(second(rotary.fused), second(rotary.eager), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_of_them_frozen():
    rotary = made()
    q = rotary.q.detach().requires_grad_()
    expected = made()
    with use_backend("triton"):
        yq, yk = rotary.fused(q, rotary.k)
        (dq,) = torch.autograd.grad(yq.float().sum() + yk.float().sum(), q)
    yq, yk = expected.eager(q, expected.k)
    (theirs,) = torch.autograd.grad(yq.float().sum() + yk.float().sum(), q)
    assert torch.equal(dq, theirs)


def test_gradients_and_tables_that_come_back_in_other_strides():
    """As from hooks of saved tensors, and of a sum: the formula takes over."""
    rotary = made()

    def unpack(t):
        return t.mT.contiguous().mT

    def sums(function):
        leaves, present = leaves_of([rotary.q, rotary.k])
        outputs = function(*leaves)
        total = sum(y.sum() for y in outputs)
        return torch.autograd.grad(total, present)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        ours = sums(rotary.fused)
    assert_equal(ours, sums(rotary.eager))


def learned(rotary):
    cos, sin = rotary.tables
    rotary.tables = cos.requires_grad_(), sin
    rotary.q.requires_grad_()


def of_two_dtypes(rotary):
    rotary.k = rotary.k.float()


def in_float64(rotary):
    rotary.q, rotary.k = rotary.q.double(), rotary.k.double()


def too_short(rotary):
    rotary.tables = tuple(t[:, :-1] for t in rotary.tables)


def broadcast(rotary):
    rotary.tables = tuple(t[:, :1] for t in rotary.tables)


def of_heads(rotary):
    rotary.tables = tuple(t[:, None] for t in rotary.tables)


@parametrize(
    "change", [learned, of_two_dtypes, in_float64, too_short, broadcast, of_heads]
)
def test_what_no_launch_rotates(change):
    rotary = made()
    change(rotary)
    assert rotary.fused(rotary.q, rotary.k) is None
