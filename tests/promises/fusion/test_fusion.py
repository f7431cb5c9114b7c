"""Residual sums computed with the norms that read them, in unmodified models: the same bits, and undone exactly."""

import copy
import gc
import pickle
import weakref

import pytest
import tiny_models
import torch
import transformers
from fusion_models import BOTH, IDS, build, layers_of

from hf_rmsnorm import count_launches, patch_model, patched, unpatch_model, use_backend
from hf_rmsnorm.fused import handover as handover_module
from hf_rmsnorm.fused.layer import layer_part

FUSED = {
    "llama": BOTH,
    "qwen2": BOTH,
    "qwen3": BOTH,
    "mistral": BOTH,
    "mixtral": BOTH,
    "gemma": BOTH,
    "phi3": BOTH,
    "gemma2": "+ pre_feedforward_layernorm, + the norm behind it",
    "gemma3_text": "+ pre_feedforward_layernorm, + the norm behind it",
    "gpt2": "+ ln_2, + the norm behind it",
    "olmo2": "+ the norm behind it",
}
UNREAD = {"no patched norm is known to read the sum that it returns"}  # of all layers but the last


def test_a_stream_in_float32_that_norms_read_in_bfloat16_is_computed_ahead_once(taken):
    """Mamba's: each norm is given a copy of the sum, so what was computed with the sum is of no use."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=4)
    model = transformers.MambaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad(), use_backend("triton"), count_launches() as alone:
        patch_model(model, fuse_residual=False)
        expected = model(IDS % 64).logits
    patch_model(model, fuse_residual=True)
    for _ in range(2):
        with torch.no_grad(), use_backend("triton"), count_launches() as launches:
            assert torch.equal(model(IDS % 64).logits, expected)
    assert launches == alone and model.config.residual_in_fp32


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_logits_hidden_states_and_greedy_text_are_those_of_the_norms_alone(family, dtype, backend, taken):
    model = tiny_models.build(family, dtype).eval()
    how = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), use_backend(backend):
        report = patch_model(model, fuse_residual=False)
        assert report.layers == () and not taken["left"]
        expected, text = model(IDS, output_hidden_states=True), model.generate(IDS[:1, :8], **how)
        assert not taken["left"]
        report = patch_model(model, fuse_residual=True)
        of_layers = [r for r in report.layers if not r.class_name.endswith("Attention")]
        assert {r.fused for r in of_layers if r.fused} == {FUSED[family]}
        assert {r.reason for r in of_layers if not r.fused} == (UNREAD if family == "olmo2" else set())
        result = model(IDS, output_hidden_states=True)
        assert taken["left"] == taken["taken"] == (1 if family == "olmo2" else 4)
        # A norm over all heads adds in another order where it is one launch with the other, which float32 shows.
        close = 1e-5 if (family, dtype, backend) == ("olmo2", torch.float32, "triton") else 0.0
        pairs = zip((result.logits, *result.hidden_states), (expected.logits, *expected.hidden_states), strict=True)
        assert all(torch.allclose(a, b, rtol=close, atol=close) for a, b in pairs)
        assert torch.equal(model.generate(IDS[:1, :8], **how), text)


def test_it_is_undone_exactly():
    model = build("llama")
    types = [type(module) for module in model.modules()]
    states = [dict(vars(module)) for module in model.modules()]
    patch_model(model)
    layer = model.model.layers[0]
    assert layer_part(type(layer)) and isinstance(layer, types[4]) and type(layer).__name__ == "LlamaDecoderLayer"
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


def test_nothing_is_kept_alive_beyond_the_step():
    model = build("llama")
    patch_model(model)
    seen = []
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    with torch.no_grad(), use_backend("reference"):
        model(IDS)
        gc.collect()
        assert seen[0]() is None and handover_module.slot.held is None
        # An early exit: the last layer's norm is computed and nobody asks for it.
        hidden = model.get_input_embeddings()(IDS)
        embeddings = model.model.rotary_emb(hidden, torch.arange(IDS.shape[1])[None])
        hidden = layers_of(model)[0](hidden, position_embeddings=embeddings)
        assert handover_module.slot.held is not None
        del hidden
        gc.collect()
        assert handover_module.slot.held is None


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_and_are_patched_anew(how, taken):
    model = build("llama")
    with torch.no_grad():
        expected = model(IDS).logits
        patch_model(model)
        again = how(model)
        layers_of(model)[1].input_layernorm.weight.zero_()  # the copy has weights of its own
        with use_backend("reference"):
            assert torch.equal(again(IDS).logits, expected) and taken["taken"] == 3, "inside of the layers"
            assert patch_model(again).layers == patch_model(model).layers
            assert torch.equal(again(IDS).logits, expected) and taken["taken"] == 3 + 6


def test_inference_mode_fuses_inside_the_layers_only(taken):
    model = build("llama")
    with torch.inference_mode(), use_backend("reference"):
        expected = model(IDS).logits
        patch_model(model)
        assert torch.equal(model(IDS).logits, expected) and taken["taken"] == taken["left"] == 3


@pytest.mark.full
def test_compiled_without_a_graph_break():
    model = build("llama")
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        patch_model(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected)


def test_one_launch_less_per_sum():
    model = build("llama")
    patch_model(model)
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        model(IDS)
    assert launches.total() == 7
