"""Models whose sums and q/k norms are fused, under what runs forwards in other ways
than eager, one after another.
"""

import gc
import weakref

import pytest
import tiny_models
import torch
from fusion_models import IDS, build, layers_of
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from hf_rmsnorm import patch_model, use_backend


def both(family="llama", **config):
    """The same model, fused and with its norms alone."""
    models = build(family, **config), build(family, **config)
    for model, fuse_residual in zip(models, (True, False), strict=True):
        patch_model(model, fuse_residual=fuse_residual)
    return models


def embedded(model):
    return model.get_input_embeddings()(IDS).detach()


def over_batches(model, x):
    return vmap(lambda e: model(inputs_embeds=e, use_cache=False).logits)(
        torch.stack((x, 2 * x))
    )


def gradients_of_an_ensemble(model, x):
    stacked = {
        name: torch.stack((p, 1.5 * p)).detach() for name, p in model.named_parameters()
    }

    def loss(parameters):
        return (
            functional_call(
                model, parameters, (), {"inputs_embeds": x, "use_cache": False}
            )
            .logits.square()
            .sum()
        )

    return torch.cat([g.flatten() for g in vmap(grad(loss))(stacked).values()])


def directional_derivative(model, x):
    model.set_attn_implementation("eager")  # the other has none
    return jvp(
        lambda e: model(inputs_embeds=e, use_cache=False).logits,
        (x,),
        (torch.ones_like(x),),
    )[1]


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x, use_cache=False).logits


def traced(model, x):
    traced = torch.jit.trace(Logits(model), (x,), check_trace=False)
    assert "PythonOp" not in str(traced.inlined_graph)
    return traced(3 * x)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "how", [over_batches, gradients_of_an_ensemble, directional_derivative, traced]
)
def test_transforms_of_a_whole_model(how, family):
    model, plain = both(family)
    x = embedded(model)
    with use_backend("triton"):
        torch.testing.assert_close(how(model, x), how(plain, x))


class Bringing:
    """Brings a layer's weights in for its forward and takes them out again, as
    offloading does, by `.data`.
    """

    def __init__(self, model):
        self.slot = torch.zeros_like(model.model.norm.weight)
        for layer in layers_of(model):
            layer.forward = self.around(
                layer, layer.forward, layer.input_layernorm.weight.detach().clone()
            )
            layer.input_layernorm.weight.data = self.slot

    def around(self, layer, forward, kept):
        def run(*args, **kwargs):
            layer.input_layernorm.weight.data = kept
            result = forward(*args, **kwargs)
            layer.input_layernorm.weight.data = self.slot
            return result

        return run


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_instance_forward_that_brings_the_weights_in(backend):
    model, plain = both()
    Bringing(model)
    with torch.no_grad(), use_backend(backend):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_training_steps_keep_nothing_alive():
    model, seen = build("llama"), []
    patch_model(model)
    model.model.norm.register_forward_pre_hook(
        lambda module, args: seen.append(weakref.ref(args[0]))
    )
    for layer in layers_of(model):
        layer.mlp.register_forward_pre_hook(
            lambda module, args: seen.append(weakref.ref(args[0]))
        )
    with use_backend("triton"):
        output = model(IDS, labels=IDS, output_hidden_states=True)
        seen.extend(map(weakref.ref, output.hidden_states))
        output.loss.backward()
        del output
        gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)


def test_tokens_of_beams_samples_and_assistants_are_those_of_the_norms_alone():
    models = both("qwen3")
    helper = tiny_models.build("llama", num_hidden_layers=1)
    patch_model(helper)
    ways = (
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"assistant_model": helper},
    )
    with use_backend("reference"):
        for how in ways:
            found = []
            for model in models:
                torch.manual_seed(0)
                found.append(
                    model.generate(
                        IDS[:1, :8], max_new_tokens=6, **{"do_sample": False, **how}
                    )
                )
            assert torch.equal(*found), how
