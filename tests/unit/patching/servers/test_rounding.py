"""`patch_model(numerics=...)`: norms, and the sums in front of them, bit for bit as a
server's own code computes them.

Bits are those of one order of summation, which is torch's. What the kernels make of it
is compared by itself.
"""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import tiny_models
import torch
import transformers.models as hf
from server_norms import RMS, vllm_gated_after, vllm_gated_before
from torch import nn

from hf_rmsnorm import (
    count_launches,
    patch_model,
    patched,
    unpatch_model,
    use_backend,
    verify_equivalence,
)
from hf_rmsnorm.patching.servers.rounding import SERVERS


@pytest.fixture(autouse=True)
def in_plain_torch():
    with use_backend("reference"):
        yield


IDS = tiny_models.token_ids(2, 9)
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
    sizes = [size]
    if cls is MODULES["no weight"]:
        sizes = []
    norm = cls(*sizes)
    mean = 1.0
    if cls is MODULES["Gemma"]:
        mean = 0.0
    for p in norm.parameters():
        nn.init.normal_(p, mean, 0.3)
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
    norm = module(MODULES[name], dtype)
    x = rows(4, 7, 96, dtype=dtype)
    state = RMS[numerics][name == "Gemma"]
    weight = getattr(norm, "weight", None)
    if state is None:
        refusal = r"numerics='torch': torch.nn.functional has no RMSNorm\(.*weight \+ 1"
        with pytest.raises(ValueError, match=refusal):
            patch_model(norm, numerics=numerics)
        return
    report = patch_model(norm, numerics=numerics)
    assert f"as {SERVERS[numerics]} rounds" in str(report)
    expected, _ = state(x, weight, eps_of(norm))
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype):
    norm = nn.LayerNorm(96).to(dtype)
    x = rows(4, 96, dtype=dtype)
    expected = norm(x)
    for numerics in RMS:
        patch_model(norm, numerics=numerics)
        assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norms_of_vllm(dtype):
    x = rows(3, 5, 96, dtype=dtype)
    gate = rows(3, 5, 96, dtype=dtype, seed=1)
    norm = module(hf.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated, dtype)
    patch_model(norm, numerics="vllm")
    expected = vllm_gated_after(x, gate, norm.weight, eps_of(norm), sigmoid=False)
    assert torch.equal(norm(x, gate), expected)
    norm = hf.zamba2.modeling_zamba2.Zamba2RMSNormGated(96, 32).to(dtype)
    patch_model(norm, numerics="vllm")
    expected = vllm_gated_before(x, gate, norm.weight, eps_of(norm), 32)
    assert torch.equal(norm(x, gate), expected)
    with pytest.raises(ValueError, match="SGLang 0.5.23 has no RMSNorm"):
        patch_model(norm, numerics="sglang")


def served(model, numerics):
    """The last hidden states of a decoder as a server runs it: each norm is given what
    was added, and the residual.
    """
    family = model.config.model_type
    rms = RMS[numerics][family in ZERO_CENTRED]
    body = model.model

    def norm(module, hidden, residual=None):
        """(the norm of the sum, the sum)."""
        y, _ = rms(hidden, module.weight, eps_of(module), residual)
        if residual is not None:
            hidden = hidden + residual
        return y, hidden

    hidden = body.embed_tokens(IDS)
    dtype = hidden.dtype
    residual = None
    length = IDS.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((1, 1, length, length), torch.finfo(dtype).min)
    mask = mask.to(dtype).triu(1)
    if family in ZERO_CENTRED and not hasattr(body.embed_tokens, "embed_scale"):
        hidden = hidden * body.config.hidden_size**0.5
    for layer in body.layers:
        hidden, residual = norm(layer.input_layernorm, hidden, residual)
        angles = body.rotary_emb(hidden, positions)
        attention = layer.self_attn
        around = nullcontext()
        if hasattr(attention, "q_norm"):
            around = patched(attention, numerics=numerics)
        with around:
            inputs = {"position_embeddings": angles, "attention_mask": mask}
            hidden, _ = attention(hidden, **inputs)
        if hasattr(layer, "pre_feedforward_layernorm"):  # norms on both sides
            hidden, _ = norm(layer.post_attention_layernorm, hidden)
            hidden, residual = norm(layer.pre_feedforward_layernorm, hidden, residual)
            hidden = layer.mlp(hidden)
            hidden, _ = norm(layer.post_feedforward_layernorm, hidden)
        else:
            hidden, residual = norm(layer.post_attention_layernorm, hidden, residual)
            hidden = layer.mlp(hidden)
    y, _ = norm(body.norm, hidden, residual)
    return y


def hidden(model):
    return model.model(IDS).last_hidden_state


def build(family, dtype):
    torch.manual_seed(0)
    return tiny_models.build(family).to(dtype).eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", list(RMS))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_computes_what_its_server_does(family, numerics, dtype):
    if family in ZERO_CENTRED and numerics == "torch":
        pytest.skip("torch has no norm with an offset")
    model = build(family, dtype)
    is_own = dtype == torch.float32
    if family in ZERO_CENTRED and numerics == "sglang":
        is_own = True
    with torch.no_grad():
        expected = served(model, numerics)
        own = hidden(model)
        assert torch.equal(own, expected) == is_own, "the orders are not told apart"
        patch_model(model, strict=True, numerics=numerics)
        assert torch.equal(hidden(model), expected)
        patch_model(model, numerics="model")
        assert torch.equal(hidden(model), own), "the value given last holds"
        with patched(model, numerics=numerics):
            assert torch.equal(hidden(model), expected)
        unpatch_model(model)
        assert torch.equal(hidden(model), own)


@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_the_kernels_read_the_unrounded_sum_too(numerics):
    """In Triton's interpreter, whose sums are in another order than torch's: nearly all
    elements are the same.
    """
    model = build("llama", torch.bfloat16)
    with torch.no_grad():
        expected = served(model, numerics)
        patch_model(model, numerics=numerics)
        with use_backend("triton"):
            got = hidden(model)
    differing = (got != expected).float()
    assert differing.mean() < 0.02
    largest = expected.abs().max()
    assert (got - expected).abs().max() <= 0.05 * largest


def gradients(model, run):
    parameters = list(model.parameters())
    outputs = run()
    dy = rows(*outputs.shape, dtype=outputs.dtype, seed=5)
    grads = torch.autograd.grad(outputs, parameters, dy, allow_unused=True)
    return [g for g in grads if g is not None]


def rms_error(gradients, exact):
    squares = 0.0
    count = 0
    for a, b in zip(gradients, exact, strict=True):
        squares += (a.double() - b).square().sum()
        count += b.numel()
    return (squares / count).sqrt()


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("numerics", list(RMS))
def test_gradients_are_those_of_that_function(numerics, backend):
    model = build("llama", torch.bfloat16)
    double = copy.deepcopy(model).double()
    expected = gradients(model, lambda: served(model, numerics))
    exact = gradients(double, lambda: hidden(double))
    patch_model(model, numerics=numerics)
    with use_backend(backend):
        got = gradients(model, lambda: hidden(model))
    allowed = 1.5 * rms_error(expected, exact)
    assert rms_error(got, exact) <= allowed


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_reads_the_same_sums(reentrant):
    model = build("llama", torch.bfloat16).train()
    patch_model(model, numerics="vllm")
    expected = gradients(model, lambda: model(IDS).logits)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    outputs = model(IDS).logits
    dy = rows(*outputs.shape, dtype=outputs.dtype, seed=5)
    outputs.backward(dy)
    got = []
    for p in model.parameters():
        if p.grad is not None:
            got.append(p.grad)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_sums_are_rounded_first_without_fusion():
    model = build("olmo2", torch.bfloat16)
    norm = model.model.norm
    rms, _ = RMS["vllm"]
    with torch.no_grad():
        patch_model(model, numerics="vllm", fuse_residual=False)
        y = hidden(model)
        model.model.norm = nn.Identity()
        total = hidden(model)
        expected, _ = rms(total, norm.weight, eps_of(norm))
    assert torch.equal(y, expected)


class Decoder(nn.Module):
    """What comes between two layers is `between`."""

    def __init__(self, between):
        super().__init__()
        self.model = build("llama", torch.bfloat16).model
        self.between = between

    def forward(self, ids):
        hidden = self.model.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        angles = self.model.rotary_emb(hidden, positions)
        for layer in self.model.layers:
            hidden = layer(hidden, position_embeddings=angles)
            hidden = self.between(hidden)
        return self.model.norm(hidden)


def test_a_sum_that_is_lost_is_rounded_first_with_one_warning():
    decoder = Decoder(lambda x: x)
    patch_model(decoder, numerics="vllm")
    kept = []

    def copied(x):
        kept.append(x)
        return x.clone()

    with torch.no_grad():
        decoder(IDS)
        decoder.between = copied
        warning = "this LlamaRMSNorm reads residual sums unrounded"
        with pytest.warns(UserWarning, match=warning) as warned:
            got = decoder(IDS)
        # one for each norm that a layer's sum does not reach
        assert len(warned) == len(decoder.model.layers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(decoder(IDS), got)


@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_a_compiled_model_has_the_same_numbers(numerics):
    model = build("llama", torch.bfloat16)
    patch_model(model, numerics=numerics)
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(IDS).logits, expected)


def test_sums_that_are_rounded_since_a_second_patch_need_no_warning():
    model = build("llama", torch.bfloat16)
    patch_model(model, numerics="vllm")
    model(IDS)
    patch_model(model, fuse_residual=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)


def test_what_cannot_be_followed_raises():
    model = build("llama", torch.bfloat16)
    patch_model(model, numerics="vllm")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="torch.compiler.disable"):
        compiled(IDS)
    error = "read residual sums before they are rounded"
    x = rows(1, 2, 5, 64, dtype=torch.bfloat16)
    mapped = torch.func.vmap(lambda t: model(inputs_embeds=t).logits)
    with pytest.raises(Exception, match=error):
        mapped(x)


def types_of(model):
    return [type(module) for module in model.modules()]


def test_an_unknown_word():
    model = build("llama", torch.bfloat16)
    types = types_of(model)
    error = "numerics is 'trt': choose one of model, vllm, sglang, torch"
    with pytest.raises(ValueError, match=error):
        patch_model(model, numerics="trt")
    assert types == types_of(model)


def test_a_formula_that_the_server_lacks_changes_nothing():
    model = nn.Sequential(nn.LayerNorm(8), hf.gemma.modeling_gemma.GemmaRMSNorm(8))
    nn.init.normal_(model[1].weight)
    types = types_of(model)
    with pytest.raises(ValueError, match="as '1' is: list it in exclude"):
        patch_model(model, numerics="torch")
    assert types == types_of(model)
    report = patch_model(model, numerics="torch", exclude="1")
    assert len(report.swapped) == 1


@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_a_weight_of_another_dtype(numerics):
    norm = module(MODULES["LLaMA"], torch.float32)
    x = rows(4, 96, dtype=torch.bfloat16)
    patch_model(norm, numerics=numerics)
    rms, _ = RMS[numerics]
    compiled = torch.compile(norm, backend="eager")
    for dtype in (torch.bfloat16, torch.float32):
        x = x.to(dtype)
        y = norm(x)
        in_compiled_code = compiled(x)
        expected, _ = rms(x, norm.weight, eps_of(norm))
        for result in (y, in_compiled_code):
            assert result.dtype == dtype
            assert torch.equal(result, expected)
        norm.bfloat16()


def test_q_and_k_norms_of_another_dtype_are_not_joined_with_their_rotation():
    model = build("qwen3", torch.bfloat16)
    patch_model(model, numerics="vllm")
    for dtype in (torch.bfloat16, torch.float32):
        for layer in model.model.layers:
            layer.self_attn.q_norm.to(dtype)
            layer.self_attn.k_norm.to(dtype)
        with torch.no_grad(), use_backend("triton"), count_launches() as launches:
            model(IDS)
        assert bool(launches["qk_norm_forward"]) == (dtype == torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["vllm", "sglang"])
def test_verification_compares_with_that_order(numerics):
    model = build("olmo2", torch.bfloat16)
    report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert report.rounding == ""
    patch_model(model, numerics=numerics)
    with use_backend("triton"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=2, backward=True)
    assert report.passed, report
    name = SERVERS[numerics]
    assert report.rounding == name
    assert f"{name}'s order of rounding" in str(report)
    assert report.launches
    assert report.norms


def test_copies_read_the_same_sums():
    model = build("llama", torch.bfloat16)
    patch_model(model, numerics="vllm")
    with torch.no_grad():
        expected = model(IDS).logits
        copied = copy.deepcopy(model)
        assert torch.equal(copied(IDS).logits, expected)
        pickled = pickle.dumps(model)
        loaded = pickle.loads(pickled)
        assert torch.equal(loaded(IDS).logits, expected)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        h = self.norm(x)
        h = self.linear(h)
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
    text = "numerics='vllm' reads sums unrounded"
    layers = "rounded all the same are those of 3 layers, first 'layers.0'"
    with pytest.warns(UserWarning, match=f"{text}; {layers}"):
        patch_model(Stack(InPlace), numerics="vllm")
    with pytest.raises(ValueError, match=f"strict: {text}"):
        patch_model(Stack(InPlace), numerics="vllm", strict=True)
