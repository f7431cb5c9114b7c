"""The rotary embedding in one launch, against the functions of Hugging Face: the same
bits in every dtype, forward and backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from judged import leaves_of
from torch import nn
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
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import (
    apply_rotary_pos_emb as of_hunyuan,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.modernbert.modeling_modernbert import (
    apply_rotary_pos_emb as of_modernbert,
)
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as cast_back

from benchmarks.counting import saved_bytes
from hf_rmsnorm import count_launches, use_backend
from hf_rmsnorm.fused.attention import rotate_together
from hf_rmsnorm.fused.rotary import RotaryCall
from hf_rmsnorm.patching.layers.rotary_code import may_be_rotary
from tests.unit.kernels.test_norm_forward import (
    BF16,
    FP16,
    FP32,
    assert_equal,
    contiguous,
    transposed,
)
from tests.unit.kernels.test_qk_forward import (
    LAYOUTS,
    angles,
    assert_strides,
    length_first,
    packed,
)

parametrize = pytest.mark.parametrize


@dataclass
class Rotary:
    """Queries and keys, their tables, and the function that rotates them."""

    q: torch.Tensor
    k: torch.Tensor
    tables: tuple
    function: Callable = apply_rotary_pos_emb
    named: dict = field(default_factory=dict)

    def fused(self, q, k):
        called = RotaryCall(named=tuple(self.named.items()))
        assert may_be_rotary(self.function, called)
        operands = q, k, *self.tables
        with use_backend("triton"):
            return rotate_together(nn.Module(), self.function, *operands, **self.named)

    def eager(self, q, k):
        return self.function(q, k, *self.tables, **self.named)


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
FUNCTIONS = [  # and of how many columns the tables are
    (apply_rotary_pos_emb, 64),
    (partial_rotary, 64),
    (partial_rotary, 32),
    (partial_rotary, 16),
    (of_cohere, 64),
    (of_blt, 64),
    (of_helium, 64),
    (of_glm, 64),
    (of_glm, 16),
    (of_deepseek, 64),
    (of_gpt_oss, 32),
    (of_ernie, 64),
    (of_modernbert, 64),
    (cast_back, 64),
    (of_hunyuan, 64),
]


@parametrize("dtypes", DTYPES, ids=str)
@parametrize("function, columns", FUNCTIONS)
def test_the_functions_of_hugging_face(function, columns, dtypes):
    check(made(dtypes=dtypes, function=function, columns=columns))


@parametrize("function, columns", FUNCTIONS)
def test_heads_behind_the_tokens(function, columns):
    rotary = made(function=function, columns=columns, named={"unsqueeze_dim": 2})
    rotary.q = rotary.q.transpose(1, 2)
    rotary.k = rotary.k.transpose(1, 2)
    check(rotary)


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
    q, k = (x.detach().requires_grad_() for x in (rotary.q, rotary.k))
    kept = saved_bytes(lambda: rotary.fused(q, k)[0], ())
    assert kept == sum(t.numel() * t.element_size() for t in rotary.tables)


@parametrize("trained", [0, 1])
def test_one_of_them_frozen(trained):
    """As with adapters on q and v alone, in the first layer."""
    rotary = made(shape=(2, 4, 5, 64))
    leaves = [rotary.q.detach(), rotary.k.detach()]
    leaves[trained].requires_grad_()
    with count_launches() as launches:
        outputs = rotary.fused(*leaves)
    assert [y.requires_grad for y in outputs] == [trained == 0, trained == 1]
    assert_equal(outputs, rotary.eager(*leaves))
    assert not launches
