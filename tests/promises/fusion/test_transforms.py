"""Models whose sums and q/k norms are fused: weights that come for a forward, tensors
that must not stay alive, tokens of every way to generate.
"""

import gc
import weakref

import pytest
import tiny_models
import torch
from fusion_models import IDS, build, layers_of

from hf_rmsnorm import patch_model, use_backend


def both():
    """The same model, fused and with its norms alone."""
    models = build("qwen3"), build("qwen3")
    for model, fuse_residual in zip(models, (True, False), strict=True):
        patch_model(model, fuse_residual=fuse_residual)
    return models


def bring_weights_in(layer):
    """Only for a layer's forward, by `.data`, as offloading does."""
    weight = layer.input_layernorm.weight
    forward = layer.forward
    kept = weight.detach().clone()
    away = torch.zeros_like(weight)
    weight.data = away

    def run(*args, **kwargs):
        weight.data = kept
        result = forward(*args, **kwargs)
        weight.data = away
        return result

    layer.forward = run


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_instance_forward_that_brings_the_weights_in(backend):
    model, plain = both()
    for layer in layers_of(model):
        bring_weights_in(layer)
    with torch.no_grad(), use_backend(backend):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


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


def test_tokens_of_beams_samples_and_assistants_are_those_of_the_norms_alone():
    models = both()
    helper = tiny_models.build("llama", num_hidden_layers=1)
    patch_model(helper)
    ways = (
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"assistant_model": helper, "do_sample": False},
    )
    for how in ways:
        texts = []
        for model in models:
            torch.manual_seed(0)
            with use_backend("reference"):
                texts.append(model.generate(IDS[:1, :8], max_new_tokens=6, **how))
        assert torch.equal(*texts), how
