"""The rotary embedding in one launch on real hardware: the bits of the models' own
functions, forward and backward.

How to run these: tests/helpers/gpu.py.
"""

from functools import partial

import pytest
import torch
from gpu import BF16, FP16, FP32, GPU, gpu_tests, random
from torch import nn
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as of_cohere
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_glm
from transformers.models.gpt_oss.modeling_gpt_oss import (
    apply_rotary_pos_emb as of_gpt_oss,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_llama

from hf_rmsnorm import count_launches
from hf_rmsnorm.fused.attention import rotate_together
from hf_rmsnorm.patching.layers.rotary_code import may_be_rotary

pytestmark = gpu_tests
parametrize = pytest.mark.parametrize

FUNCTIONS = {  # with the share of the columns that the tables have
    "llama": (of_llama, 1),
    "cohere": (of_cohere, 1),
    "glm": (of_glm, 0.5),
    "gpt_oss": (of_gpt_oss, 0.5),
}
HEAD_DIMS = [64]
LENGTH = 5
if GPU:
    HEAD_DIMS += [80, 128]
    LENGTH = 1000


def heads(count, head_dim, dtype, seed):
    """(batch, heads, length, head_dim), as a projection gives them."""
    return random(2, LENGTH, count, head_dim, dtype=dtype, seed=seed).transpose(1, 2)


def run(rotate, operands, tables, dys):
    """Both outputs, and the gradients of q and k."""
    leaves = [x.detach().requires_grad_() for x in operands]
    outputs = rotate(*leaves, *tables)
    return [*outputs, *torch.autograd.grad(outputs, leaves, dys)]


@parametrize("table_dtype", ["same", "float32"])
@parametrize("dtype", [BF16, FP16, FP32])
@parametrize("head_dim", HEAD_DIMS)
@parametrize("name", FUNCTIONS)
def test_queries_and_keys_to_the_bit(name, head_dim, dtype, table_dtype):
    function, share = FUNCTIONS[name]
    assert may_be_rotary(function)
    operands = heads(8, head_dim, dtype, 0), heads(2, head_dim, dtype, 1)
    angles = random(2, LENGTH, int(share * head_dim), dtype=FP32, seed=2)
    tables = [angles.cos(), angles.sin()]
    if table_dtype == "same":
        tables = [table.to(dtype) for table in tables]
    outputs = function(*operands, *tables)
    dys = [random(*y.shape, dtype=y.dtype, seed=3) for y in outputs]
    expected = run(function, operands, tables, dys)
    fused = partial(rotate_together, nn.Module(), function)
    with count_launches() as launches:
        got = run(fused, operands, tables, dys)
    assert launches == {"rotary_forward": 1, "rotary_backward": 1}
    for result, right in zip(got, expected, strict=True):
        assert torch.equal(result, right)
    for y, right in zip(got[:2], outputs, strict=True):
        assert y.stride() == right.stride()
