"""`patch_model(numerics=...)`: norms, and the sums in front of them, bit for bit as a
server's own code computes them.

Bits are those of one order of summation, which is torch's. What the kernels make of it
is compared by itself.
"""

import copy
import pickle
import warnings
from contextlib import ExitStack

import pytest
import tiny_models
import torch
import transformers.models as hf
from server_norms import RMS, vllm_gated_after, vllm_gated_before
from torch import nn

from hf_rmsnorm import (
    patch_model,
    patched,
    unpatch_model,
    use_backend,
    verify_equivalence,
)
from hf_rmsnorm.patching.numerics import SERVERS


@pytest.fixture(autouse=True)
def in_plain_torch():
    with use_backend("reference"):
        yield


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ZERO_CENTRED = ("gemma", "gemma2", "gemma3_text")
MODULES = {
    "LLaMA": hf.llama.modeling_llama.LlamaRMSNorm,
    "rounds at the end": hf.olmo2.modeling_olmo2.Olmo2RMSNorm,
    "T5": hf.t5.modeling_t5.T5LayerNorm,
    "no weight": hf.llama4.modeling_llama4.Llama4TextL2Norm,
    "Gemma": hf.gemma3.modeling_gemma3.Gemma3RMSNorm,
}


def module(cls, dtype, size=96):
    torch.manual_seed(3)
    norm = cls(size) if cls is not MODULES["no weight"] else cls()
    for p in norm.parameters():
        nn.init.normal_(p, 0.0 if cls is MODULES["Gemma"] else 1.0, 0.3)
    return norm.to(dtype).eval()


def eps_of(norm):
    for name in ("variance_epsilon", "eps", "norm_eps"):
        if hasattr(norm, name):
            return getattr(norm, name)


def rows(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return (values * 1.7).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", list(RMS))
@pytest.mark.parametrize("name", MODULES)
def test_a_norm_by_itself(name, numerics, dtype):
    norm, x = module(MODULES[name], dtype), rows(4, 7, 96, dtype=dtype)
    state, weight = RMS[numerics][name == "Gemma"], getattr(norm, "weight", None)
    if state is None:
        with pytest.raises(
            ValueError,
            match=r"numerics='torch': torch.nn.functional has no RMSNorm\(.*weight \+ 1",
        ):
            patch_model(norm, numerics=numerics)
        return
    report = patch_model(norm, numerics=numerics)
    assert f"as {SERVERS[numerics]} rounds" in str(report)
    expected, _ = state(x, weight, eps_of(norm))
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype):
    norm, x = nn.LayerNorm(96).to(dtype), rows(4, 96, dtype=dtype)
    expected = norm(x)
    for numerics in RMS:
        patch_model(norm, numerics=numerics)
        assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norms_of_vllm(dtype):
    x, gate = rows(3, 5, 96, dtype=dtype), rows(3, 5, 96, dtype=dtype, seed=1)
    norm = module(hf.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated, dtype)
    patch_model(norm, numerics="vllm")
    assert torch.equal(
        norm(x, gate),
        vllm_gated_after(x, gate, norm.weight, eps_of(norm), sigmoid=False),
    )
    norm = hf.zamba2.modeling_zamba2.Zamba2RMSNormGated(96, 32).to(dtype)
    patch_model(norm, numerics="vllm")
    assert torch.equal(
        norm(x, gate), vllm_gated_before(x, gate, norm.weight, eps_of(norm), 32)
    )
    with pytest.raises(ValueError, match="SGLang 0.5.23 has no RMSNorm"):
        patch_model(norm, numerics="sglang")


def served(model, ids, numerics):
    """The last hidden states of a decoder as a server runs it: each norm is given what
    was added, and the residual.
    """
    family = model.config.model_type
    rms = RMS[numerics][family in ZERO_CENTRED]
    body = model.model

    def norm(module, hidden, residual=None):
        """(the norm of the sum, the sum)."""
        total = hidden if residual is None else hidden + residual
        return rms(hidden, module.weight, eps_of(module), residual)[0], total

    hidden, residual = body.embed_tokens(ids), None
    positions, length = torch.arange(ids.shape[1])[None], ids.shape[1]
    mask = torch.full((1, 1, length, length), torch.finfo(hidden.dtype).min)
    mask = mask.to(hidden.dtype).triu(1)
    if family in ZERO_CENTRED and not hasattr(body.embed_tokens, "embed_scale"):
        hidden = hidden * body.config.hidden_size**0.5
    for layer in body.layers:
        hidden, residual = norm(layer.input_layernorm, hidden, residual)
        angles = body.rotary_emb(hidden, positions)
        attention = layer.self_attn
        with ExitStack() as stack:
            if hasattr(attention, "q_norm"):
                stack.enter_context(patched(attention, numerics=numerics))
            inputs = {"position_embeddings": angles, "attention_mask": mask}
            hidden, _ = attention(hidden, **inputs)
        if hasattr(layer, "pre_feedforward_layernorm"):  # norms on both sides
            hidden, _ = norm(layer.post_attention_layernorm, hidden)
            hidden, residual = norm(layer.pre_feedforward_layernorm, hidden, residual)
            hidden, _ = norm(layer.post_feedforward_layernorm, layer.mlp(hidden))
        else:
            hidden, residual = norm(layer.post_attention_layernorm, hidden, residual)
            hidden = layer.mlp(hidden)
    return norm(body.norm, hidden, residual)[0]


def hidden(model, ids):
    return model.model(ids).last_hidden_state


def build(family, dtype):
    torch.manual_seed(0)
    return tiny_models.build(family).to(dtype).eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", list(RMS))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_computes_what_its_server_does(family, numerics, dtype):
    if family in ZERO_CENTRED and numerics == "torch":
        pytest.skip("torch has no norm with an offset")
    model, ids = build(family, dtype), tiny_models.token_ids(2, 9)
    is_own = dtype == torch.float32
    if family in ZERO_CENTRED and numerics == "sglang":
        is_own = True
    with torch.no_grad():
        expected = served(model, ids, numerics)
        own = hidden(model, ids)
        assert torch.equal(own, expected) == is_own, "the orders are not told apart"
        patch_model(model, strict=True, numerics=numerics)
        assert torch.equal(hidden(model, ids), expected)
        patch_model(model, numerics="model")
        assert torch.equal(hidden(model, ids), own), "the value given last holds"
        with patched(model, numerics=numerics):
            assert torch.equal(hidden(model, ids), expected)
        unpatch_model(model)
        assert torch.equal(hidden(model, ids), own)


@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_the_kernels_read_the_unrounded_sum_too(numerics):
    """In Triton's interpreter, whose sums are in another order than torch's: nearly all
    elements are the same.
    """
    model, ids = build("llama", torch.bfloat16), tiny_models.token_ids(2, 9)
    with torch.no_grad():
        expected = served(model, ids, numerics)
        patch_model(model, numerics=numerics)
        with use_backend("triton"):
            got = model.model(ids).last_hidden_state
    assert (got != expected).float().mean() < 0.02
    assert (got - expected).abs().max() <= 0.05 * expected.abs().max()


def gradients(model, run):
    parameters = list(model.parameters())
    outputs = run()
    dy = rows(*outputs.shape, dtype=outputs.dtype, seed=5)
    grads = torch.autograd.grad(outputs, parameters, dy, allow_unused=True)
    return [g for g in grads if g is not None]


def rms_error(gradients, exact):
    squares, count = 0.0, 0
    for a, b in zip(gradients, exact, strict=True):
        squares += (a.double() - b).square().sum()
        count += b.numel()
    return (squares / count).sqrt()


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("numerics", list(RMS))
def test_gradients_are_those_of_that_function(numerics, backend):
    model, ids = build("llama", torch.bfloat16), tiny_models.token_ids(2, 9)
    double = copy.deepcopy(model).double()
    expected = gradients(model, lambda: served(model, ids, numerics))
    exact = gradients(double, lambda: double.model(ids).last_hidden_state)
    patch_model(model, numerics=numerics)
    with use_backend(backend):
        got = gradients(model, lambda: model.model(ids).last_hidden_state)
    assert rms_error(got, exact) <= 1.5 * rms_error(expected, exact)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_reads_the_same_sums(reentrant):
    model, ids = build("llama", torch.bfloat16).train(), tiny_models.token_ids(2, 9)
    patch_model(model, numerics="vllm")
    expected = gradients(model, lambda: model(ids).logits)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    outputs = model(ids).logits
    dy = rows(*outputs.shape, dtype=outputs.dtype, seed=5)
    outputs.backward(dy)
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_sums_are_rounded_first_without_fusion():
    model, ids = build("olmo2", torch.bfloat16), tiny_models.token_ids(2, 9)
    with torch.no_grad():
        patch_model(model, numerics="vllm", fuse_residual=False)
        last = model.model(ids, output_hidden_states=True)
        model.model.norm, norm = nn.Identity(), model.model.norm
        total = model.model(ids).last_hidden_state
        assert torch.equal(
            last.last_hidden_state, RMS["vllm"][0](total, norm.weight, eps_of(norm))[0]
        )


class Decoder(nn.Module):
    """What comes between two layers is `between`."""

    def __init__(self, between):
        super().__init__()
        self.model, self.between = build("llama", torch.bfloat16).model, between

    def forward(self, ids):
        hidden = self.model.embed_tokens(ids)
        angles = self.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        for layer in self.model.layers:
            hidden = self.between(layer(hidden, position_embeddings=angles))
        return self.model.norm(hidden)


def test_a_sum_that_is_lost_is_rounded_first_with_one_warning():
    decoder, ids = Decoder(lambda x: x), tiny_models.token_ids(2, 9)
    patch_model(decoder, numerics="vllm")
    kept = []
    with torch.no_grad():
        decoder(ids)
        decoder.between = lambda x: (kept.append(x), x.clone())[1]
        with pytest.warns(
            UserWarning, match="this LlamaRMSNorm reads residual sums unrounded"
        ) as warned:
            got = decoder(ids)
        assert len(warned) == len(decoder.model.layers), (
            "one for each norm that a layer's sum does not reach"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(decoder(ids), got)


def test_what_cannot_be_followed_raises():
    model, ids = build("llama", torch.bfloat16), tiny_models.token_ids(2, 9)
    patch_model(model, numerics="vllm")
    with pytest.raises(Exception, match="read residual sums before they are rounded"):
        torch.compile(model, backend="eager", fullgraph=True)(ids)
    with pytest.raises(Exception, match="read residual sums before they are rounded"):
        torch.func.vmap(lambda t: model(inputs_embeds=t).logits)(
            rows(1, 2, 5, 64, dtype=torch.bfloat16)
        )


def test_an_unknown_word():
    model = build("llama", torch.bfloat16)
    types = [type(m) for m in model.modules()]
    with pytest.raises(
        ValueError, match="numerics is 'trt': choose one of model, vllm, sglang, torch"
    ):
        patch_model(model, numerics="trt")
    assert types == [type(m) for m in model.modules()]


def test_a_formula_that_the_server_lacks_changes_nothing():
    model = nn.Sequential(nn.LayerNorm(8), hf.gemma.modeling_gemma.GemmaRMSNorm(8))
    nn.init.normal_(model[1].weight)
    types = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="as '1' is: list it in exclude"):
        patch_model(model, numerics="torch")
    assert types == [type(m) for m in model.modules()]
    assert len(patch_model(model, numerics="torch", exclude="1").swapped) == 1


@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_a_weight_of_another_dtype(numerics):
    norm, x = module(MODULES["LLaMA"], torch.float32), rows(4, 96, dtype=torch.bfloat16)
    patch_model(norm, numerics=numerics)
    rms = RMS[numerics][0]
    for dtype in (torch.bfloat16, torch.float32):
        y = norm(x.to(dtype))
        expected, _ = rms(x.to(dtype), norm.weight, eps_of(norm))
        assert y.dtype == dtype
        assert torch.equal(y, expected)
        norm.bfloat16()


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_verification_compares_with_that_order(numerics):
    model, ids = build("olmo2", torch.bfloat16), tiny_models.token_ids(2, 9)
    how = {"inputs": ids, "max_new_tokens": 2}
    with use_backend("triton"):
        report = verify_equivalence(model, numerics=numerics, backward=True, **how)
    assert report.passed, report
    name = SERVERS[numerics]
    assert report.numerics == name and f"{name}'s order of rounding" in str(report)
    assert report.launches and report.norms
    assert verify_equivalence(model, **how).numerics == ""
    patch_model(model, numerics=numerics)
    assert verify_equivalence(model, **how).numerics == name, "the patch that it has"


def test_copies_read_the_same_sums():
    model, ids = build("llama", torch.bfloat16), tiny_models.token_ids(2, 9)
    patch_model(model, numerics="vllm")
    with torch.no_grad():
        expected = model(ids).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(ids).logits, expected)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        h = self.linear(self.norm(x))
        h += x
        return h


class Stack(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_sums_that_are_not_found_are_warned_of():
    with pytest.warns(
        UserWarning,
        match="numerics='vllm' reads sums unrounded; rounded all the same are those of 3 layers, first 'layers.0'",
    ):
        patch_model(Stack(InPlace), numerics="vllm")
    with pytest.raises(
        ValueError, match="strict: numerics='vllm' reads sums unrounded"
    ):
        patch_model(Stack(InPlace), numerics="vllm", strict=True)
