"""Whatever is done to a model whose sums are fused, it computes what it computes
without fusion.
"""

import threading

import pytest
import tiny_models
import torch
from fusion_models import IDS, build, layers_of
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from hf_rmsnorm import patch_model, use_backend

layer_class = LlamaDecoderLayer
norm_class = LlamaRMSNorm


# What a user does to a model; run on a patched and on a plain one.
def replaced_forward(model):
    layer = layers_of(model)[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def hook_that_changes_the_input_in_place(model):
    def change(module, args):
        args[0].mul_(1.5)

    layers_of(model)[1].post_attention_layernorm.register_forward_pre_hook(change)


def hook_behind_the_next_norm(model):
    layers_of(model)[1].post_attention_layernorm.register_forward_hook(
        lambda module, args, output: output * 1.5
    )


def hook_that_exchanges_the_next_weight(model):
    def change(module, args, output):
        norm = layers_of(model)[1].post_attention_layernorm
        norm.weight = nn.Parameter(norm.weight.detach() * 1.5)

    layers_of(model)[0].self_attn.register_forward_hook(change)
    layers_of(model)[0].register_forward_hook(change)


def hook_that_gives_the_next_weight_other_data(model):
    def change(module, args, output):
        weight = layers_of(model)[1].post_attention_layernorm.weight
        weight.data = weight.detach() * 1.5

    layers_of(model)[0].self_attn.register_forward_hook(change)


def weight_that_is_no_parameter(model):
    norm = layers_of(model)[1].post_attention_layernorm
    weight = norm.weight.detach() * 2
    del norm.weight
    norm.weight = weight


def another_norm(model):
    layers_of(model)[1].post_attention_layernorm = nn.Identity()


def other_device_management(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Double(ModelHook):
        def pre_forward(self, module, x):
            return (x * 2,), {}

    add_hook_to_module(layers_of(model)[1].post_attention_layernorm, Double())


def forward_of_the_class(model):
    forward = layer_class.forward
    layer_class.forward = lambda self, *args, **kwargs: (
        forward(self, *args, **kwargs) * 2
    )


def forward_of_the_norms_class(model):
    forward = norm_class.forward
    norm_class.forward = lambda self, x: forward(self, x) * 2


def eps_changed_between(model):
    def change(module, args, output):
        layers_of(model)[1].post_attention_layernorm.variance_epsilon = 0.5

    layers_of(model)[0].register_forward_hook(change)


def noisy_weight(model):
    class Noise(nn.Module):
        def forward(self, weight):
            return weight + 0.1 * torch.randn_like(weight)

    nn.utils.parametrize.register_parametrization(
        layers_of(model)[1].post_attention_layernorm, "weight", Noise()
    )


CHANGES = [
    forward_of_the_class,
    forward_of_the_norms_class,
    eps_changed_between,
    noisy_weight,
    replaced_forward,
    hook_that_changes_the_input_in_place,
    hook_behind_the_next_norm,
    hook_that_exchanges_the_next_weight,
    hook_that_gives_the_next_weight_other_data,
    weight_that_is_no_parameter,
    another_norm,
    other_device_management,
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_done_to_a_patched_model_the_result_is_the_unpatched_models(
    change, fused_sums, monkeypatch
):
    for cls in (layer_class, norm_class):
        monkeypatch.setattr(cls, "forward", cls.forward)  # put back at the end
    model, plain = build("llama"), build("llama")
    patch_model(model)
    with torch.no_grad(), use_backend("triton"):
        model(IDS, use_cache=False)
        # its kernels are held to the original elsewhere
        patch_model(plain, fuse_residual=False)
        of_a_class = change in (forward_of_the_class, forward_of_the_norms_class)
        for each in (model,) if of_a_class else (model, plain):
            change(each)
        for _ in range(2):
            both = []
            for each in (model, plain):
                torch.manual_seed(0)
                both.append(each(IDS, use_cache=False, output_hidden_states=True))
            result, expected = both
            assert torch.equal(result.logits, expected.logits)
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    result.hidden_states, expected.hidden_states, strict=True
                )
            )
    assert len(fused_sums) >= 3


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_global_hooks_see_every_norm(kind):
    hooks = {
        "forward": lambda module, args, output: (
            output * 2 if "Norm" in type(module).__name__ else None
        ),
        "forward_pre": lambda module, args: (
            (args[0] * 2 + 1,) if "Norm" in type(module).__name__ else None
        ),
        "full_backward": lambda module, given, got: (
            (given[0] * 2,) if "Norm" in type(module).__name__ else None
        ),
    }
    gradients = []
    for fuse_residual in (True, False):
        model = tiny_models.build("qwen3")
        patch_model(model, fuse_residual=fuse_residual)
        handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(
            hooks[kind]
        )
        try:
            with use_backend("triton"):
                model(IDS, labels=IDS).loss.backward()
        finally:
            handle.remove()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_threads_in_one_model_do_not_meet():
    model = build("llama")
    inputs = [IDS, IDS.flip(1), IDS.roll(3, 1), IDS.roll(7, 1)]
    with torch.no_grad():
        expected = [model(ids).logits for ids in inputs]
    patch_model(model)
    wrong = []

    def work(number):
        with torch.no_grad(), use_backend("reference"):
            for _ in range(10):
                if not torch.equal(model(inputs[number]).logits, expected[number]):
                    wrong.append(number)

    threads = [
        threading.Thread(target=work, args=(number,)) for number in range(len(inputs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_dtype_that_is_mixed_is_left_to_the_model():
    model, plain = build("llama", torch.bfloat16), build("llama", torch.bfloat16)
    patch_model(model)
    for each in (model, plain):
        # the stream is float32, the branches bfloat16 by way of this hook
        each.model.embed_tokens.float()
        for layer in layers_of(each):
            for part in (layer.self_attn, layer.mlp):
                part.float()
            layer.mlp.register_forward_hook(
                lambda module, args, output: output.bfloat16()
            )
        each.lm_head.float()
    with torch.no_grad(), use_backend("reference"):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
