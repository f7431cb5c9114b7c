"""Gradients of models whose sums are fused: under hooks, checkpoints, dropout and
frozen parts those without fusion.
"""

from functools import partial

import pytest
import tiny_models
import torch
from fusion_models import IDS, build, layers_of
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hf_rmsnorm import patch_model, use_backend


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_gradients_are_those_of_the_norms_alone(family, fused_sums):
    model = tiny_models.build(family).eval()

    def gradients():
        model.zero_grad()
        with use_backend("triton"):
            model(IDS, labels=IDS).loss.backward()
        return {
            name: p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }

    patch_model(model, fuse_residual=False)
    expected = gradients()
    patch_model(model, fuse_residual=True)
    got = gradients()
    assert len(fused_sums) == 2 and got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def run_with(model, act):
    """Gradients of everything, with `act(model, hidden states)` before the loss goes
    back.
    """
    output = model(IDS, labels=IDS, output_hidden_states=True)
    kept = act(model, output)
    if output.loss.requires_grad:
        output.loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [*grads, *(t.grad for t in kept or ())]


def keep_the_gradient_of_the_stream(model, output):
    output.hidden_states[1].retain_grad()
    return [output.hidden_states[1]]


def stop_the_gradient_of_the_stream(model, output):
    output.hidden_states[1].register_hook(lambda grad: grad * 0)


def nothing(model, output=None):
    return None


def train_the_upper_half(model):
    for part in (model.model.embed_tokens, layers_of(model)[0]):
        part.requires_grad_(False)


def checkpoint_some_layers(model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers_of(model)[0].gradient_checkpointing = False


@pytest.mark.parametrize(
    "before", [nothing, train_the_upper_half, checkpoint_some_layers]
)
@pytest.mark.parametrize(
    "act", [nothing, keep_the_gradient_of_the_stream, stop_the_gradient_of_the_stream]
)
def test_gradients_of_the_stream_are_those_of_the_norms_alone(before, act):
    found = []
    for fuse_residual in (True, False):
        model = build("llama")
        patch_model(model, fuse_residual=fuse_residual)
        before(model)
        with use_backend("triton"):
            try:
                found.append(run_with(model, act))
            except RuntimeError as error:  # what needs no gradient keeps none
                found.append(str(error))
    fused, plain = found
    assert type(fused) is type(plain) and (isinstance(fused, list) or fused == plain)
    for a, b in zip(fused, plain, strict=True) if isinstance(fused, list) else ():
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_training_mode_with_dropout_in_the_residual(family, fused_sums):
    rates = {
        "attention_dropout": 0.0,
        "resid_pdrop": 0.3,
        "embd_pdrop": 0.2,
        "attn_pdrop": 0.0,
    }
    model, plain = (build(family, **rates).train() for _ in range(2))
    patch_model(model)
    patch_model(plain, fuse_residual=False)
    losses = []
    for each in (plain, model):
        torch.manual_seed(3)
        with use_backend("triton"):
            loss = each(IDS, labels=IDS).loss
            loss.backward()
        losses.append(loss)
    assert torch.equal(*losses) and len(fused_sums) == 3
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


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
    expected = torch.autograd.grad(model(IDS).logits.sum(), [*model.parameters()])
    model.gradient_checkpointing_enable(CHECKPOINTS[kind])
    for _ in range(2):
        model.zero_grad()
        model(IDS).logits.sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_users_own_checkpoint_around_each_layer(reentrant):
    def gradients(model):
        for layer in layers_of(model):
            forward = type(layer).forward

            def around(x, *args, layer=layer, forward=forward, **kwargs):
                return checkpoint(
                    lambda t: forward(layer, t, *args, **kwargs),
                    x,
                    use_reentrant=reentrant,
                )

            layer.forward = around
        with use_backend("triton"):
            inputs = model.get_input_embeddings()(IDS).detach().requires_grad_()
            model(inputs_embeds=inputs, labels=IDS, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    fused, plain = build("llama"), build("llama")
    patch_model(fused)
    patch_model(plain, fuse_residual=False)
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients(fused), gradients(plain), strict=True)
    )
