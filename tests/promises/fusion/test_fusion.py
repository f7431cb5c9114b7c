"""Residual sums computed with the norms that read them, in unmodified models: the same
bits, and undone exactly.
"""

import copy
import pickle

import pytest
import tiny_models
import torch
from fusion_models import IDS, INSIDE, build, layers_of

from hf_rmsnorm import count_launches, patch_model, patched, unpatch_model, use_backend
from hf_rmsnorm.fused.layer import layer_part

FUSED = {
    "llama": INSIDE,
    "qwen2": INSIDE,
    "qwen3": INSIDE,
    "mistral": INSIDE,
    "mixtral": INSIDE,
    "gemma": INSIDE,
    "phi3": INSIDE,
    "gemma2": "+ pre_feedforward_layernorm",
    "gemma3_text": "+ pre_feedforward_layernorm",
    "gpt2": "+ ln_2",
    "olmo2": "",
}
APART = "no sum in its forward is followed directly by a patched norm of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_logits_hidden_states_and_greedy_text_are_those_of_the_norms_alone(
    family, dtype, fused_sums
):
    model = tiny_models.build(family, dtype).eval()
    how = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), use_backend("triton"):
        report = patch_model(model, fuse_residual=False)
        assert report.layers == ()
        expected, text = (
            model(IDS, output_hidden_states=True),
            model.generate(IDS[:1, :8], **how),
        )
        assert not fused_sums
        report = patch_model(model, fuse_residual=True)
        of_layers = [r for r in report.layers if not r.class_name.endswith("Attention")]
        assert {r.fused for r in of_layers} == {FUSED[family]}
        assert {r.reason for r in of_layers} == {"" if FUSED[family] else APART}
        result = model(IDS, output_hidden_states=True)
        assert len(fused_sums) == (0 if family == "olmo2" else 2)
        # A norm over all heads adds in another order where it is one launch with the
        # other, which float32 shows.
        close = 1e-5 if (family, dtype) == ("olmo2", torch.float32) else 0.0
        pairs = zip(
            (result.logits, *result.hidden_states),
            (expected.logits, *expected.hidden_states),
            strict=True,
        )
        assert all(torch.allclose(a, b, rtol=close, atol=close) for a, b in pairs)
        assert torch.equal(model.generate(IDS[:1, :8], **how), text)


def test_it_is_undone_exactly():
    model = build("llama")
    types = [type(module) for module in model.modules()]
    states = [dict(vars(module)) for module in model.modules()]
    patch_model(model)
    layer = model.model.layers[0]
    assert (
        layer_part(type(layer))
        and isinstance(layer, types[4])
        and type(layer).__name__ == "LlamaDecoderLayer"
    )
    assert [vars(module) for module in model.modules()] == states
    patch_model(model, fuse_residual=False)
    assert not any(layer_part(type(module)) for module in model.modules())
    with patched(model, fuse_residual=True):
        assert layer_part(type(model.model.layers[0]))
    assert not any(layer_part(type(module)) for module in model.modules())
    patch_model(model)
    assert unpatch_model(model) == 7
    assert [type(module) for module in model.modules()] == types


def test_patched_without_fusion_gives_the_fusion_back():
    model = build("llama")
    patch_model(model)
    with patched(model, fuse_residual=False):
        assert not any(layer_part(type(module)) for module in model.modules())
    assert all(layer_part(type(layer)) for layer in layers_of(model))


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_compute_the_same(how, fused_sums):
    model = build("llama")
    patch_model(model)
    with torch.no_grad(), use_backend("triton"):
        expected = model(IDS).logits
        again = how(model)
        # the copy has weights of its own
        layers_of(model)[1].input_layernorm.weight.zero_()
        fused_sums.clear()
        assert torch.equal(again(IDS).logits, expected) and len(fused_sums) == 3
        assert patch_model(again).layers == patch_model(model).layers
        assert torch.equal(again(IDS).logits, expected)


def test_one_token_adds_and_normalises_in_one_launch(fused_sums):
    model = build("llama")
    patch_model(model)
    with torch.inference_mode(), use_backend("triton"), count_launches() as launches:
        model(IDS[:1, :1])
    assert len(fused_sums) == 3 and launches["norm_forward"] == 7
