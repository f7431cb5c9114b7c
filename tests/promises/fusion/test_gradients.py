"""Gradients of models whose sums are fused: under hooks, checkpoints, dropout and
frozen parts those without fusion.
"""

from functools import partial

import pytest
import tiny_models
import torch
from fusion_models import IDS, build, layers_of
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_rmsnorm import patch_model, use_backend


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_gradients_are_those_of_the_norms_alone(family, fused_sums):
    model = tiny_models.build(family)

    def gradients():
        model.zero_grad()
        with use_backend("triton"):
            model(IDS, labels=IDS).loss.backward()
        return tiny_models.gradients(model)

    patch_model(model, fuse_residual=False)
    expected = gradients()
    patch_model(model, fuse_residual=True)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert len(fused_sums) == 2


def keep_the_gradient(stream):
    stream.retain_grad()


def stop_the_gradient(stream):
    stream.register_hook(lambda grad: grad * 0)


def nothing(model):
    pass


def train_the_upper_half(model):
    for part in (model.model.embed_tokens, layers_of(model)[0]):
        part.requires_grad_(False)


def checkpoint_some_layers(model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers_of(model)[0].gradient_checkpointing = False


WAYS = [
    (nothing, 1, keep_the_gradient),
    (nothing, 1, stop_the_gradient),
    (train_the_upper_half, 2, stop_the_gradient),
    (checkpoint_some_layers, 1, keep_the_gradient),
    (checkpoint_some_layers, 1, stop_the_gradient),
]


@pytest.mark.parametrize(("before", "layer", "act"), WAYS)
def test_gradients_of_the_stream_are_those_of_the_norms_alone(before, layer, act):
    both = []
    for fuse_residual in (True, False):
        model = build("llama")
        patch_model(model, fuse_residual=fuse_residual)
        before(model)
        with use_backend("triton"):
            output = model(IDS, labels=IDS, output_hidden_states=True)
            stream = output.hidden_states[layer]
            act(stream)
            output.loss.backward()
        gradients = tiny_models.gradients(model)
        if stream.retains_grad:
            gradients["stream"] = stream.grad
        both.append(gradients)
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-7)


RATES = {
    "attention_dropout": 0.0,
    "resid_pdrop": 0.3,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.0,
}


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_training_mode_with_dropout_in_the_residual(family, fused_sums):
    losses, gradients = [], []
    for fuse_residual in (False, True):
        model = build(family, **RATES).train()
        patch_model(model, fuse_residual=fuse_residual)
        torch.manual_seed(3)
        with use_backend("triton"):
            loss = model(IDS, labels=IDS).loss
            loss.backward()
        losses.append(loss)
        gradients.append(tiny_models.gradients(model))
    assert torch.equal(*losses)
    assert len(fused_sums) == 3
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# sums are kept
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])
CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_layers_train_from_the_first_step_on(kind):
    """Both runs of a layer are alike: a checkpoint gives the second what the first has
    kept, in order.
    """
    model = build("llama").train()
    patch_model(model)

    def gradients():
        model.zero_grad()
        model(IDS).logits.sum().backward()
        return tiny_models.gradients(model)

    expected = gradients()
    model.gradient_checkpointing_enable(CHECKPOINTS[kind])
    for _ in range(2):
        torch.testing.assert_close(gradients(), expected)
