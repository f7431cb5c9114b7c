"""Whatever is done to a model whose sums and q/k norms are fused, it computes what it
computes without fusion, bit for bit, and what the unpatched one does.
"""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from fusion_models import IDS, build, layers_of
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import patch_model, use_backend

LAYER, NORM = modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm


def both():
    """The same model, fused and with its norms alone."""
    models = build("qwen3"), build("qwen3")
    for model, fuse_residual in zip(models, (True, False), strict=True):
        patch_model(model, fuse_residual=fuse_residual)
    return models


def assert_equal_and_near(ours, theirs, unpatched):
    assert all(map(torch.equal, ours, theirs))
    for a, b in zip(ours, unpatched, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def states(model):
    torch.manual_seed(0)
    output = model(IDS[:, :4], use_cache=False, output_hidden_states=True)
    return [output.logits, *output.hidden_states]


# What a user does to a layer of a model.


def replaced_forward(layer):
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def hook_that_changes_the_input_in_place(layer):
    def change(module, args):
        args[0].mul_(1.5)

    layer.post_attention_layernorm.register_forward_pre_hook(change)


def hook_that_exchanges_the_next_weight(layer):
    norm = layer.post_attention_layernorm

    def change(module, args, output):
        norm.weight = nn.Parameter(norm.weight.detach() * 1.5)

    layer.self_attn.register_forward_hook(change)


def weight_that_is_no_parameter(layer):
    norm = layer.post_attention_layernorm
    weight = norm.weight.detach() * 2
    del norm.weight
    norm.weight = weight


def another_norm(layer):
    layer.post_attention_layernorm = nn.Identity()


class Double(ModelHook):
    def pre_forward(self, module, x):
        return (x * 2,), {}


def other_device_management(layer):
    add_hook_to_module(layer.post_attention_layernorm, Double())


def eps_changed_between(layer):
    def change(module, args, output):
        layer.post_attention_layernorm.variance_epsilon = 0.5

    layer.self_attn.register_forward_hook(change)


class Noise(nn.Module):
    def forward(self, weight):
        return weight + 0.1 * torch.randn_like(weight)


def noisy_weight(layer):
    norm = layer.post_attention_layernorm
    parametrize.register_parametrization(norm, "weight", Noise())


def hook_on_the_norm_of_q(layer):
    def change(module, args, output):
        return output * 1.5

    layer.self_attn.q_norm.register_forward_hook(change)


def another_norm_of_q(layer):
    layer.self_attn.q_norm = nn.Identity()


def other_eps_for_k(layer):
    layer.self_attn.k_norm.variance_epsilon = 0.1


def weight_of_q_in_another_dtype(layer):
    layer.self_attn.q_norm.bfloat16()


def in_columns(t):
    """t in other strides, the last one 2."""
    return torch.stack([t, t], -1)[..., 0]


def weight_in_another_dtype(layer):
    norm = layer.post_attention_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().bfloat16())


def strided_weight(layer):
    norm = layer.post_attention_layernorm
    norm.weight = nn.Parameter(in_columns(norm.weight.detach()))


def data_in_another_dtype(layer):
    layer.input_layernorm.weight.data = torch.rand(64).bfloat16()


def strided_data(layer):
    for norm in (layer.input_layernorm, layer.self_attn.q_norm):
        norm.weight.data = in_columns(torch.rand(norm.weight.shape))


def other_eps(layer):
    layer.input_layernorm.variance_epsilon = 0.5


def float64(layer):
    layer.post_attention_layernorm.double()
    layer.mlp.double()
    layer.register_forward_hook(lambda module, args, output: output.float())


CHANGES = [
    weight_in_another_dtype,
    strided_weight,
    data_in_another_dtype,
    strided_data,
    other_eps,
    float64,
    replaced_forward,
    hook_that_changes_the_input_in_place,
    hook_that_exchanges_the_next_weight,
    weight_that_is_no_parameter,
    another_norm,
    other_device_management,
    eps_changed_between,
    noisy_weight,
    hook_on_the_norm_of_q,
    another_norm_of_q,
    other_eps_for_k,
    weight_of_q_in_another_dtype,
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_done_to_a_model_it_computes_what_the_norms_alone_do(change):
    models = *both(), build("qwen3")
    with torch.no_grad(), use_backend("auto"):
        for model in models:
            states(model)
            torch.manual_seed(0)
            change(layers_of(model)[1])
        for _ in range(2):
            assert_equal_and_near(*map(states, models))


def twice(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def other_rotation(q, k, cos, sin):
    return q * cos[:, None], k


OF_ALL_MODELS = [
    (LAYER, "forward", twice(LAYER.forward)),
    (NORM, "forward", twice(NORM.forward)),
    (modeling_qwen3, "apply_rotary_pos_emb", other_rotation),
]


@pytest.mark.parametrize(("owner", "name", "other"), OF_ALL_MODELS)
def test_so_it_does_after_a_change_to_all_models(owner, name, other, monkeypatch):
    models = both()
    with torch.no_grad(), use_backend("triton"):
        before = states(models[0])
        monkeypatch.setattr(owner, name, other)
        for _ in range(2):
            ours, theirs = map(states, models)
            assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(ours[0], before[0])


def is_norm(module):
    return "Norm" in type(module).__name__


def change_output(module, args, output):
    return output * 2 if is_norm(module) else None


def change_input(module, args):
    return (args[0] * 2 + 1,) if is_norm(module) else None


def change_gradient(module, *gradients):
    return (gradients[0][0] * 2,) if is_norm(module) else None


HOOKS = {
    "forward": change_output,
    "forward_pre": change_input,
    "full_backward": change_gradient,
    "full_backward_pre": change_gradient,
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_every_kind_see_every_norm(kind, everywhere):
    gradients = []
    for model in both():
        registers = [
            getattr(m, f"register_{kind}_hook")
            for m in filter(is_norm, model.modules())
        ]
        if everywhere:
            registers = [getattr(nn.modules.module, f"register_module_{kind}_hook")]
        handles = [register(HOOKS[kind]) for register in registers]
        try:
            with use_backend("triton"):
                model(IDS[:, :4], labels=IDS[:, :4]).loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
