"""q norm, k norm and the rotary embedding in one launch, in unmodified models: the same
bits, whatever happens.
"""

import copy
import pickle

import pytest
import tiny_models
import torch
from tolerance import assert_as_accurate
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

IDS = tiny_models.token_ids()
FUSED = "q_norm, k_norm, apply_rotary_pos_emb in one launch"


def attentions(report):
    return {
        layer.fused for layer in report.layers if layer.class_name.endswith("Attention")
    }


def launched(model):
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        logits = model(IDS, use_cache=False).logits
    return logits, launches["qk_norm_forward"]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_logits_and_greedy_text_are_those_of_the_norms_alone(family, dtype, backend):
    model = tiny_models.build(family, dtype)
    how = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), use_backend(backend):
        patch_model(model, fuse_residual=False)
        expected, text = model(IDS).logits, model.generate(IDS[:1, :8], **how)
        assert attentions(patch_model(model, fuse_residual=True)) == {FUSED}
        with count_launches() as launches:
            assert torch.equal(model(IDS).logits, expected)
        assert launches["qk_norm_forward"] == (2 if backend == "triton" else 0)
        assert torch.equal(model.generate(IDS[:1, :8], **how), text)


# One norm over all heads; LayerNorms with a weight for each head; with a bias; norms
# behind the rotation.
OTHERS = {
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "persimmon": {},
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@pytest.mark.parametrize("family", OTHERS)
def test_norms_of_other_shapes_are_launched_apart_from_the_rotation(family):
    model = tiny_models.build(family, torch.bfloat16, **OTHERS[family])
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        exact = copy.deepcopy(model)
        exact.config._experts_implementation = "eager"  # the others know no float64
        exact = exact.double()(IDS, use_cache=False).logits
        assert FUSED not in attentions(patch_model(model))
    logits, launches = launched(model)
    assert launches == 0
    assert_as_accurate(logits, expected, exact, "logits")


rotate = modeling_qwen3.apply_rotary_pos_emb


def rotate_and_cast_back(q, k, cos, sin):
    turned = rotate(q, k, cos, sin)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_rotary_embedding_in_float32_that_gives_the_dtype_of_q_back(
    backend, monkeypatch
):
    """As LFM 3 and OLMo 2 have it: by tables of q's own dtype each operator is rounded,
    by these the result alone.
    """
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotate_and_cast_back)
    model = tiny_models.build("qwen3", torch.bfloat16)
    with torch.no_grad(), use_backend(backend):
        for tables in (torch.bfloat16, torch.float32):
            hook = model.model.rotary_emb.register_forward_hook(
                lambda module, given, out, dtype=tables: tuple(t.to(dtype) for t in out)
            )
            patch_model(model, fuse_residual=False)
            expected = model(IDS).logits
            patch_model(model, fuse_residual=True)
            with count_launches() as launched:
                assert torch.equal(model(IDS).logits, expected)
            assert launched["qk_norm_forward"] == (2 if backend == "triton" else 0)
            hook.remove()


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_gradients_stay_within_the_rounding_of_the_norms_alone(family):
    model = tiny_models.build(family)

    def gradients():
        model.zero_grad()
        with use_backend("triton"), count_launches() as launches:
            model(IDS, labels=IDS).loss.backward()
        return {
            name: p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }, launches

    patch_model(model, fuse_residual=False)
    expected, _ = gradients()
    patch_model(model, fuse_residual=True)
    got, launches = gradients()
    assert launches["qk_norm_backward"] == 2 and got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


# What somebody does to a patched model's attention, and how many launches then serve
# both norms.
def hook_on_a_norm(model):
    model.model.layers[0].self_attn.q_norm.register_forward_hook(
        lambda module, args, output: output * 1.5
    )
    return 1


def other_eps(model):
    model.model.layers[0].self_attn.k_norm.variance_epsilon = 0.1
    return 1


def no_norm(model):
    model.model.layers[0].self_attn.q_norm = nn.Identity()
    return 1


def weight_of_another_dtype(model):
    model.model.layers[0].self_attn.q_norm.bfloat16()
    return 1


def replaced_forward(model):
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (forward(*args, **kwargs)[0] * 2, None)
    return 2


@pytest.mark.parametrize(
    "change",
    [hook_on_a_norm, other_eps, no_norm, weight_of_another_dtype, replaced_forward],
)
def test_whatever_is_done_to_a_patched_model_the_result_is_the_unpatched_models(change):
    model, plain = tiny_models.build("qwen3"), tiny_models.build("qwen3")
    patch_model(model)
    # its kernels are held to the original elsewhere
    patch_model(plain, fuse_residual=False)
    count = change(model)
    change(plain)
    logits, launches = launched(model)
    assert torch.equal(logits, launched(plain)[0])
    assert launches == count


def test_another_rotary_embedding_put_in_the_place_of_the_proven_one(monkeypatch):
    model, plain = tiny_models.build("qwen3"), tiny_models.build("qwen3")
    patch_model(model)
    patch_model(plain, fuse_residual=False)
    monkeypatch.setattr(
        modeling_qwen3,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin: (q * cos[:, None], k),
    )
    logits, launches = launched(model)
    assert launches == 0 and torch.equal(logits, launched(plain)[0])


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_and_undoing(how):
    model = tiny_models.build("qwen3")
    types = [type(module) for module in model.modules()]
    expected = launched(model)[0]
    patch_model(model)
    logits, launches = launched(how(model))
    torch.testing.assert_close(logits, expected)
    assert launches == 2
    unpatch_model(model)
    assert [type(module) for module in model.modules()] == types
