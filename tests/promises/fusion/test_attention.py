"""q norm, k norm and the rotary embedding: in one launch where the rotation is the one
that is known, and by themselves elsewhere.
"""

import copy

import pytest
import tiny_models
import torch
from fusion_models import IDS
from tolerance import assert_as_accurate
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import count_launches, patch_model, use_backend

LLAMA4 = {
    "intermediate_size_mlp": 96,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
# One norm over all heads; LayerNorms with a weight for each head; with a bias; norms
# behind the rotation.
OTHERS = {
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "persimmon": {},
    "llama4_text": LLAMA4,
}


def launched(model):
    """The logits, and how many launches served q and k."""
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        logits = model(IDS, use_cache=False).logits
    return logits, launches["qk_norm_forward"]


@pytest.mark.parametrize("family", OTHERS)
def test_norms_of_other_shapes_are_launched_apart_from_the_rotation(family):
    model = tiny_models.build(family, torch.bfloat16, **OTHERS[family])
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        exact = copy.deepcopy(model)
        exact.config._experts_implementation = "eager"  # the others know no float64
        exact = exact.double()(IDS, use_cache=False).logits
    patch_model(model)
    logits, launches = launched(model)
    assert launches == 0
    assert_as_accurate(logits, expected, exact, "logits")


rotate = modeling_qwen3.apply_rotary_pos_emb


def rotate_and_cast_back(q, k, cos, sin):
    yq, yk = rotate(q, k, cos, sin)
    return yq.to(q.dtype), yk.to(k.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rotary_embedding_that_gives_the_dtype_of_q_back(dtype, monkeypatch):
    """As LFM 3 and OLMo 2 have it: by tables of q's own dtype each operator is rounded,
    by those of float32 the result alone.
    """
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotate_and_cast_back)
    model = tiny_models.build("qwen3", torch.bfloat16)

    def cast(module, args, tables):
        return tuple(table.to(dtype) for table in tables)

    model.model.rotary_emb.register_forward_hook(cast)
    patch_model(model, fuse_residual=False)
    expected, apart = launched(model)
    patch_model(model, fuse_residual=True)
    logits, together = launched(model)
    assert torch.equal(logits, expected)
    assert (apart, together) == (0, 2)
