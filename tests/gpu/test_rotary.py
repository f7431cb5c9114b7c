"""The rotary embedding in one launch on real hardware: the bits of the models' own
functions, forward and backward.

How to run these: tests/helpers/gpu.py.
"""

import pytest
from gpu import BF16, FP16, FP32, GPU, gpu_tests, random
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as of_cohere
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_glm
from transformers.models.gpt_oss.modeling_gpt_oss import (
    apply_rotary_pos_emb as of_gpt_oss,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_llama

from tests.unit.kernels.test_qk_forward_rotary import Rotary, check

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


def projected(shape, dtype, seed):
    """(batch, heads, length, head_dim), as a projection gives them."""
    batch, heads, length, head_dim = shape
    rows = random(batch, length, heads, head_dim, dtype=dtype, seed=seed)
    return rows.transpose(1, 2)


@parametrize("table_dtype", ["same", "float32"])
@parametrize("dtype", [BF16, FP16, FP32])
@parametrize("head_dim", HEAD_DIMS)
@parametrize("name", FUNCTIONS)
def test_queries_and_keys_to_the_bit(name, head_dim, dtype, table_dtype):
    function, share = FUNCTIONS[name]
    q = projected((2, 8, LENGTH, head_dim), dtype, 0)
    k = projected((2, 2, LENGTH, head_dim), dtype, 1)
    angles = random(2, LENGTH, int(share * head_dim), dtype=FP32, seed=2)
    tables = [angles.cos(), angles.sin()]
    if table_dtype == "same":
        tables = [table.to(dtype) for table in tables]
    check(Rotary(q, k, tables, function), (projected, projected))
