"""Each fused piece in each regime of autograd and functorch: a patched model computes
what the unpatched one does.
"""

import copy
import itertools
from functools import partial

import pytest
import tiny_models
import torch
from fusion_models import layers_of
from torch import nn
from torch.func import functional_call, functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.models.llama import modeling_llama

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

IDS = tiny_models.token_ids(2, 6)
DROPOUT = {"attention_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.3}
# pieces -> family, options of the patch
MODELS = {
    "norm, sum, rotation": ("llama", {}),
    "norm alone": ("llama", {"fuse_residual": False}),
    "q and k": ("qwen3", {}),
    "layer norm, sum": ("gpt2", {}),
    "output kept": ("gpt2", {"memory_efficient": True}),
    "modulation": ("llama", {}),
}


class Modulated(modeling_llama.LlamaDecoderLayer):
    """A layer that scales, shifts and gates, as those of diffusion models do."""

    def forward(self, x, **kwargs):
        mean = x.mean(1, keepdim=True)
        scale, shift, gate = mean.sin(), mean.cos(), mean.tanh()
        x = x + gate * self.mlp(x)
        y = self.post_attention_layernorm(x) * (1 + scale) + shift
        return x + y


def built(pieces):
    family, _ = MODELS[pieces]
    model = tiny_models.build(family, **DROPOUT)
    if pieces == "modulation":
        for layer in model.model.layers:
            layer.__class__ = Modulated
    return model


class Logits(nn.Module):
    """Those of embeddings."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x, use_cache=False).logits


def embeddings(model):
    return model.get_input_embeddings()(IDS).detach()


# Regimes: of a model what it computes, all gradients included.


def training(model, ids=IDS, change=None):
    """
    Args:
        change: what is done with the residual stream between the layers.
    """
    model.zero_grad()
    torch.manual_seed(3)
    output = model(ids, labels=ids, output_hidden_states=True, use_cache=False)
    stream = output.hidden_states[1]
    if change is not None:
        change(stream)
    output.loss.backward()
    found = [output.loss, *output.hidden_states]
    if stream.retains_grad:
        found.append(stream.grad)
    return [*found, *tiny_models.gradients(model).values()]


def of_a_second_step(model):
    """Of as many rows as the first, and then of fewer."""
    training(model)
    return [*training(model), *training(model, IDS[:1])]


def with_dropout(model):
    return training(model.train())


def of_the_upper_half(model):
    for part in (model.get_input_embeddings(), layers_of(model)[0]):
        part.requires_grad_(False)
    return training(model)


def of_one_norm(model):
    model.requires_grad_(False)
    _, norm = tiny_models.norms(model)[1]
    norm.requires_grad_(True)
    return training(model)


def with_the_gradient_of_the_stream(model):
    return training(model, change=lambda stream: stream.retain_grad())


def with_a_hook_in_the_stream(model):
    def stop(stream):
        stream.register_hook(lambda gradient: gradient * 0)

    return training(model, change=stop)


def checkpointed(model, **how):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable(how)
    return of_a_second_step(model)


def in_columns(t):
    """t in other strides, the last one 2."""
    return torch.stack([t, t], -1)[..., 0]


def in_rows(t):
    return t.clone(memory_format=torch.contiguous_format)


def offloaded(model, unpack):
    """What is saved for backward comes back in other memory."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        return of_a_second_step(model)


def double_backward(model):
    x = embeddings(model).requires_grad_()
    model.set_attn_implementation("eager")  # the other has no second derivative
    loss = Logits(model)(x).square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    model.zero_grad()
    dx.square().sum().backward()
    return [dx, x.grad, *tiny_models.gradients(model).values()]


def batched_gradients(model):
    x = embeddings(model)[:1, :2].requires_grad_()
    y = Logits(model)(x).flatten()[:3]
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


def over_batches(model):
    x = embeddings(model)
    return [vmap(Logits(model))(torch.stack((x, 2 * x)))]


def gradients_of_an_ensemble(model):
    logits, x = Logits(model), embeddings(model)
    stacked = {}
    for name, p in logits.named_parameters():
        stacked[name] = torch.stack((p, 1.5 * p)).detach()

    def loss(parameters):
        return functional_call(logits, parameters, (x,)).square().sum()

    return list(vmap(grad(loss))(stacked).values())


def directional_derivative(model):
    model.set_attn_implementation("eager")  # the other has none
    x = embeddings(model)
    return jvp(Logits(model), (x,), (torch.ones_like(x),))


def functionalized(model):
    return [functionalize(Logits(model))(embeddings(model))]


def traced(model):
    x = embeddings(model)
    made = torch.jit.trace(Logits(model), (x,), check_trace=False)
    assert "PythonOp" not in str(made.inlined_graph)
    return [made(3 * x)]


def recorded(model):
    x = embeddings(model)
    graph = make_fx(Logits(model), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    return [graph(2 * x)]


# sums are kept
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])
BY_KERNELS = {
    "training": training,
    "second step": of_a_second_step,
    "dropout": with_dropout,
    "frozen layers": of_the_upper_half,
    "one norm alone": of_one_norm,
    "a gradient within": with_the_gradient_of_the_stream,
    "a hook within": with_a_hook_in_the_stream,
    "checkpoints, reentrant": partial(checkpointed, use_reentrant=True),
    "checkpoints": partial(checkpointed, use_reentrant=False),
    "selective checkpoints": partial(
        checkpointed, use_reentrant=False, context_fn=SELECTIVE
    ),
    "offloaded activations": partial(offloaded, unpack=in_rows),
    "activations in columns": partial(offloaded, unpack=in_columns),
}
REGIMES = BY_KERNELS | {
    "double backward": double_backward,
    "batched gradients": batched_gradients,
    "vmap": over_batches,
    "vmap of grad": gradients_of_an_ensemble,
    "jvp": directional_derivative,
    "functionalize": functionalized,
    "jit.trace": traced,
    "make_fx": recorded,
}


IMPOSSIBLE = (
    ("output kept", "double backward"),  # refused: test_memory_efficient.py
    # torch's own layer norm takes its statistics for contiguous
    ("output kept", "activations in columns"),
    ("layer norm, sum", "activations in columns"),
)
CASES = [c for c in itertools.product(MODELS, REGIMES) if c not in IMPOSSIBLE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("pieces", "regime"), CASES)
def test_a_patched_model_is_the_unpatched_one(pieces, regime):
    plain = built(pieces)
    model = copy.deepcopy(plain)
    patch_model(model, strict=True, **MODELS[pieces][1])
    expected = REGIMES[regime](plain)
    with use_backend("triton"), count_launches() as launches:
        found = REGIMES[regime](model)
    assert launches or regime not in BY_KERNELS
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * largest)


@pytest.mark.parametrize(
    ("forward", "backward"), [("triton", "reference"), ("reference", "auto")]
)
def test_torch_notices_a_recompute_under_another_backend(forward, backward):
    """As `use_backend` says; where torch does not look (reentrant), the gradients are
    those of the recompute.
    """
    model = tiny_models.build("qwen3")
    patch_model(model)
    expected = gradients_of_checkpoint(model, False, "triton", "triton")
    with pytest.raises(CheckpointError):
        gradients_of_checkpoint(model, False, forward, backward)
    found = gradients_of_checkpoint(model, True, forward, backward)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    again = gradients_of_checkpoint(model, False, "triton", "triton")
    assert all(map(torch.equal, again, expected))  # nothing of it is left behind


def gradients_of_checkpoint(model, reentrant, forward, backward):
    model.zero_grad()
    x = embeddings(model).requires_grad_()
    with use_backend(forward):
        y = checkpoint(Logits(model), x, use_reentrant=reentrant)
    with use_backend(backward):
        y.square().sum().backward()
    return [x.grad, *tiny_models.gradients(model).values()]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_plain_torch_has_the_bits_of_the_model_in_bfloat16(family):
    """Gradients too, and what is unpatched again."""
    model = tiny_models.build(family, torch.bfloat16)
    eager = training(model)
    patch_model(model)
    with use_backend("reference"):
        assert all(map(torch.equal, training(model), eager))
    unpatch_model(model)
    assert all(map(torch.equal, training(model), eager))
