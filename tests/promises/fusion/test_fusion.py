"""Residual sums with the norms that read them, and q and k norms with the rotary
embedding, in unmodified models: the same bits, and undone exactly.
"""

import copy
import gc
import pickle
import weakref

import pytest
import tiny_models
import torch
from fusion_models import IDS, INSIDE, build, layers_of
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import count_launches, patch_model, patched, unpatch_model, use_backend
from hf_rmsnorm.patching.swap import layer_part

QK = "q_norm, k_norm, apply_rotary_pos_emb in one launch"
APART = "no sum in its forward is followed directly by a patched norm of its own"
BEFORE_THE_MLP = "+ pre_feedforward_layernorm"
# What the report says of a decoder layer, and of its attention.
FUSED = {
    "llama": (INSIDE, None),
    "mixtral": (INSIDE, None),
    "phi3": (INSIDE, None),
    "qwen3": (INSIDE, QK),
    "gemma2": (BEFORE_THE_MLP, None),
    "gemma3_text": (BEFORE_THE_MLP, QK),
    "gpt2": ("+ ln_2", None),
    "olmo2": (APART, None),
    "doge": (INSIDE, QK),
    "exaone4": (APART, QK),
    "glm4_moe": (INSIDE, QK),
    "granite": (INSIDE, None),
    "stablelm": (INSIDE, None),
    "nanochat": (INSIDE, None),  # it rotates before it normalises
    "llama4_text": (INSIDE, None),  # it too
    "cohere": (APART, None),  # LayerNorms with a weight for each head
    "persimmon": (INSIDE, None),  # with a bias
}
EXPERTS = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
CONFIGS = {
    # which rotates in its sliding layers alone
    "exaone4": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {"use_qk_norm": True, "partial_rotary_factor": 0.5, **EXPERTS},
    "llama4_text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
    },
    "cohere": {"use_qk_norm": True},
}
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def outcome(model):
    """Logits, hidden states and greedy text."""
    output = model(IDS[:, :5], output_hidden_states=True)
    text = model.generate(IDS[:1, :4], **GREEDY)
    return [output.logits, *output.hidden_states, text]


def said(report, kind):
    """What a report says of the layers of a kind."""
    layers = [r for r in report.layers if r.class_name.endswith(kind)]
    return {layer.fused or layer.reason for layer in layers}


@pytest.mark.parametrize("family", FUSED)
def test_logits_hidden_states_and_greedy_text_are_those_of_the_norms_alone(
    family, fused_sums
):
    of_layers, of_attentions = FUSED[family]
    model = tiny_models.build(family, torch.bfloat16, **CONFIGS.get(family, {}))
    with torch.no_grad(), use_backend("triton"):
        assert patch_model(model, fuse_residual=False).layers == ()
        expected = outcome(model)
        assert not fused_sums
        report = patch_model(model, fuse_residual=True)
        with count_launches() as launches:
            result = outcome(model)
    assert said(report, "Layer") | said(report, "Block") == {of_layers}
    assert (QK in said(report, "Attention")) == (of_attentions is QK)
    assert bool(fused_sums) == (of_layers is not APART)
    assert bool(launches["qk_norm_forward"]) == (of_attentions is QK)
    assert all(map(torch.equal, result, expected))


def test_it_is_undone_exactly():
    model = build("qwen3")
    before = tiny_models.types(model)
    patch_model(model)
    fused = tiny_models.types(model)
    assert sum(layer_part(cls) is not None for cls in fused) == 6
    patch_model(model, fuse_residual=False)
    alone = tiny_models.types(model)
    assert not any(map(layer_part, alone))
    with patched(model, fuse_residual=True):
        assert tiny_models.types(model) == fused
    assert tiny_models.types(model) == alone
    assert unpatch_model(model) == 13
    assert tiny_models.types(model) == before


def through_a_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("how", [copy.deepcopy, through_a_pickle])
def test_copies_compute_the_same(how, fused_sums):
    model = build("qwen3")
    patch_model(model)
    with torch.no_grad(), use_backend("triton"):
        expected = model(IDS[:, :5]).logits
        again = how(model)
        # the copy has weights of its own
        layers_of(model)[1].input_layernorm.weight.zero_()
        fused_sums.clear()
        with count_launches() as launches:
            assert torch.equal(again(IDS[:, :5]).logits, expected)
        assert len(fused_sums) == launches["qk_norm_forward"] == 3
        assert patch_model(again).layers == patch_model(model).layers


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
    results = []
    for fuse_residual, launched in ((False, 0), (True, 2)):
        patch_model(model, fuse_residual=fuse_residual)
        with torch.no_grad(), use_backend("triton"), count_launches() as launches:
            results.append(model(IDS, use_cache=False).logits)
        assert launches["qk_norm_forward"] == launched
    assert torch.equal(*results)


def test_training_steps_keep_nothing_alive():
    model, seen = build("llama"), []
    patch_model(model)

    def note(module, args):
        seen.append(weakref.ref(args[0]))

    for module in (model.model.norm, *(layer.mlp for layer in layers_of(model))):
        module.register_forward_pre_hook(note)
    with use_backend("triton"):
        output = model(IDS, labels=IDS, output_hidden_states=True)
        seen.extend(map(weakref.ref, output.hidden_states))
        output.loss.backward()
        del output
        gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)
