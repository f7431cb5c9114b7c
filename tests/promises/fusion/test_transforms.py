"""Models whose sums and q/k norms are fused, under what runs forwards in other ways than eager, one after another."""

import gc
import threading
import weakref

import pytest
import tiny_models
import torch
from fusion_models import IDS, build, layers_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
    return vmap(lambda e: model(inputs_embeds=e, use_cache=False).logits)(torch.stack((x, 2 * x)))


def gradient_of_the_input(model, x):
    return grad(lambda e: model(inputs_embeds=e, use_cache=False).logits.square().sum())(x)


def gradients_of_an_ensemble(model, x):
    stacked = {name: torch.stack((p, 1.5 * p)).detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return functional_call(model, parameters, (), {"inputs_embeds": x, "use_cache": False}).logits.square().sum()

    return torch.cat([g.flatten() for g in vmap(grad(loss))(stacked).values()])


def directional_derivative(model, x):
    model.set_attn_implementation("eager")  # the other has none
    return jvp(lambda e: model(inputs_embeds=e, use_cache=False).logits, (x,), (torch.ones_like(x),))[1]


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
    "how", [over_batches, gradient_of_the_input, gradients_of_an_ensemble, directional_derivative, traced]
)
def test_transforms_of_a_whole_model(how, family):
    model, plain = both(family)
    x = embedded(model)
    with use_backend("triton"):
        torch.testing.assert_close(how(model, x), how(plain, x))


class Bringing:
    """Brings a layer's weights in for its forward and takes them out again, as offloading does, by `.data`."""

    def __init__(self, model):
        self.slot = torch.zeros_like(model.model.norm.weight)
        for layer in layers_of(model):
            layer.forward = self.around(layer, layer.forward, layer.input_layernorm.weight.detach().clone())
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


def stages(model, cut):
    """The first and the second half of a model, as a pipeline runs them."""
    layers = list(layers_of(model))

    def run(layers, hidden):
        tables = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for layer in layers:
            hidden = layer(hidden, position_embeddings=tables)
        return hidden

    return (
        lambda ids: run(layers[:cut], model.get_input_embeddings()(ids)),
        lambda hidden: model.lm_head(model.model.norm(run(layers[cut:], hidden))),
    )


def exit_early(model):
    first, _ = stages(model, 2)
    return model.lm_head(model.model.norm(first(IDS)))


def in_two_threads(model):
    """Both halves of a pipeline in threads of their own, over two batches."""
    first, second = stages(model, 1)
    found, ready, taken = [], [], threading.Event()

    def send():
        with torch.no_grad(), use_backend(backend):
            ready.extend(first(ids) for ids in (IDS, IDS.flip(1)))
        taken.set()

    def receive():
        taken.wait()
        with torch.no_grad(), use_backend(backend):
            found.extend(second(hidden) for hidden in ready)

    backend = "triton"
    threads = [threading.Thread(target=work) for work in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(found)


@pytest.mark.parametrize("how", [exit_early, in_two_threads])
def test_early_exits_and_pipelines(how):
    model, plain = both()
    with torch.no_grad(), use_backend("triton"):
        assert torch.equal(how(model), how(plain))


def test_fully_shard_trains_with_its_sums_fused(tmp_path, fused_sums):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, plain = both()
        mesh = init_device_mesh("cpu", (1,))
        for part in (*layers_of(model), model.model.norm, model):
            fully_shard(part, mesh=mesh)
        gradients = []
        with use_backend("triton"):
            for each in (model, plain):
                each(IDS, labels=IDS, use_cache=False).loss.backward()
                if each is model:
                    assert len(fused_sums) == 3
                gradients.append([getattr(p.grad, "_local_tensor", p.grad) for p in each.parameters()])
            with torch.no_grad():
                assert torch.equal(model(IDS).logits, plain(IDS).logits)
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    finally:
        torch.distributed.destroy_process_group()


def test_training_steps_keep_nothing_alive():
    model, seen = build("llama"), []
    patch_model(model)
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    for layer in layers_of(model):
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    with use_backend("triton"):
        output = model(IDS, labels=IDS, output_hidden_states=True)
        seen.extend(map(weakref.ref, output.hidden_states))
        output.loss.backward()
        del output
        gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_dropout_in_the_residual_under_the_kernels(family, fused_sums):
    """Its masks are drawn in the same order; what it returns in training is another tensor than it was given."""
    found = []
    for model in both(family, attention_dropout=0.0, resid_pdrop=0.3, embd_pdrop=0.2):
        torch.manual_seed(3)
        with use_backend("triton"):
            loss = model.train()(IDS, labels=IDS).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert len(fused_sums) == 3
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_tokens_of_beams_samples_and_assistants_are_those_of_the_norms_alone():
    models = both("qwen3")
    helper = tiny_models.build("llama", num_hidden_layers=1)
    patch_model(helper)
    ways = {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"assistant_model": helper}
    with use_backend("reference"):
        for how in ways:
            found = []
            for model in models:
                torch.manual_seed(0)
                found.append(model.generate(IDS[:1, :8], max_new_tokens=6, **{"do_sample": False, **how}))
            assert torch.equal(*found), how
