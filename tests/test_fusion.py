"""Residual sums computed with the norms that read them, in unmodified models: the same bits, whatever happens."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import tiny_models
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, patched, unpatch_model, use_backend
from hf_rmsnorm import handover as handover_module
from hf_rmsnorm.fused_layers import layer_part

layer_class = LlamaDecoderLayer
norm_class = LlamaRMSNorm
BOTH = "+ post_attention_layernorm, + the norm behind it"
FUSED = {
    "llama": BOTH,
    "qwen2": BOTH,
    "qwen3": BOTH,
    "mistral": BOTH,
    "mixtral": BOTH,
    "gemma": BOTH,
    "phi3": BOTH,
    "gemma2": "+ pre_feedforward_layernorm, + the norm behind it",
    "gemma3_text": "+ pre_feedforward_layernorm, + the norm behind it",
    "gpt2": "+ ln_2, + the norm behind it",
    "olmo2": "+ the norm behind it",
}
IDS = tiny_models.token_ids()


@pytest.fixture
def taken(monkeypatch):
    """How many outputs were taken that a sum's launch had left, and how many were left."""
    counts = {"left": 0, "taken": 0}
    from hf_rmsnorm import fused_layers, layers
    from hf_rmsnorm.patching import chain

    def find_fusion(layer, real=chain.find_fusion):
        before = dict(counts)
        found = real(layer)
        counts.update(before)  # not those of its stand-ins
        return found

    def leave(*args):
        counts["left"] += 1
        handover_module.leave(*args)

    def take(*args):
        output = handover_module.take(*args)
        counts["taken"] += output is not None
        return output

    monkeypatch.setattr(fused_layers, "leave", leave)
    monkeypatch.setattr(layers, "take", take)
    monkeypatch.setattr(chain, "find_fusion", find_fusion)
    return counts


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def build(family, dtype=torch.float32, **config):
    return tiny_models.build(family, dtype, num_hidden_layers=3, **config).eval()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_logits_hidden_states_and_greedy_text_are_those_of_the_norms_alone(family, dtype, backend, taken):
    model = tiny_models.build(family, dtype).eval()
    how = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), use_backend(backend):
        report = patch_model(model, fuse_residual=False)
        assert report.layers == () and not taken["left"]
        expected, text = model(IDS, output_hidden_states=True), model.generate(IDS[:1, :8], **how)
        assert not taken["left"]
        report = patch_model(model)
        assert {r.fused for r in report.layers if not r.class_name.endswith("Attention")} == {FUSED[family]}
        result = model(IDS, output_hidden_states=True)
        assert taken["left"] == taken["taken"] == (1 if family == "olmo2" else 4)
        assert torch.equal(result.logits, expected.logits)
        assert all(torch.equal(a, b) for a, b in zip(result.hidden_states, expected.hidden_states, strict=True))
        assert torch.equal(model.generate(IDS[:1, :8], **how), text)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_gradients_are_those_of_the_norms_alone(family, taken):
    model = tiny_models.build(family).eval()

    def gradients():
        model.zero_grad()
        with use_backend("triton"):
            model(IDS, labels=IDS).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    patch_model(model, fuse_residual=False)
    expected = gradients()
    patch_model(model)
    got = gradients()
    assert taken["taken"] == 4 and got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_it_is_undone_exactly():
    model = build("llama")
    types = [type(module) for module in model.modules()]
    states = [dict(vars(module)) for module in model.modules()]
    patch_model(model)
    layer = model.model.layers[0]
    assert layer_part(type(layer)) and isinstance(layer, types[4]) and type(layer).__name__ == "LlamaDecoderLayer"
    assert [vars(module) for module in model.modules()] == states
    patch_model(model, fuse_residual=False)
    assert not any(layer_part(type(module)) for module in model.modules())
    with patched(model):
        assert layer_part(type(model.model.layers[0]))
    assert not any(layer_part(type(module)) for module in model.modules())
    patch_model(model)
    assert unpatch_model(model) == 7
    assert [type(module) for module in model.modules()] == types


# What somebody does to a model; run on a patched and on a plain one.
def replaced_forward(model):
    layer = layers_of(model)[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def changed_in_place(model):
    def change(module, args, output):
        output.mul_(1.5)

    layers_of(model)[0].register_forward_hook(change)


def changed_behind_the_version(model):
    layers_of(model)[0].register_forward_hook(lambda module, args, output: output * 1.5)


def hook_before_the_next_norm(model):
    layers_of(model)[1].input_layernorm.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def hook_that_changes_the_input_in_place(model):
    def change(module, args):
        args[0].mul_(1.5)

    layers_of(model)[1].input_layernorm.register_forward_pre_hook(change)


def hook_behind_the_next_norm(model):
    layers_of(model)[1].input_layernorm.register_forward_hook(lambda module, args, output: output * 1.5)


def hook_that_changes_the_next_weight(model):
    def change(module, args):
        with torch.no_grad():
            module.input_layernorm.weight.copy_(torch.linspace(0.5, 1.5, len(module.input_layernorm.weight)))

    layers_of(model)[1].register_forward_pre_hook(change)


def hook_that_exchanges_the_next_weight(model):
    def change(module, args, output):
        norm = layers_of(model)[1].input_layernorm
        norm.weight = nn.Parameter(norm.weight.detach() * 1.5)

    layers_of(model)[0].self_attn.register_forward_hook(change)
    layers_of(model)[0].register_forward_hook(change)


def weight_that_is_no_parameter(model):
    norm = layers_of(model)[1].input_layernorm
    weight = norm.weight.detach() * 2
    del norm.weight
    norm.weight = weight


def parametrized_weight(model):
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layers_of(model)[1].input_layernorm, "weight", Twice())


def other_eps(model):
    layers_of(model)[1].input_layernorm.variance_epsilon = 0.1


def sliced(model):
    model.model.layers = layers_of(model)[:2]


def reversed_order(model):
    model.model.layers = nn.ModuleList(reversed(list(layers_of(model))))


def twice(model):
    first, second, third = layers_of(model)
    model.model.layers = nn.ModuleList([first, second, second, first, third])
    model.config.num_hidden_layers = 5


def shared_norm(model):
    for layer in layers_of(model):
        layer.input_layernorm = model.model.norm


def another_norm(model):
    layers_of(model)[1].input_layernorm = nn.Identity()


def other_device_management(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Double(ModelHook):
        def pre_forward(self, module, x):
            return (x * 2,), {}

    add_hook_to_module(layers_of(model)[1].input_layernorm, Double())


def forward_of_the_class(model):
    forward = layer_class.forward
    layer_class.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 2


def forward_of_the_norms_class(model):
    forward = norm_class.forward
    norm_class.forward = lambda self, x: forward(self, x) * 2


def eps_changed_between(model):
    def change(module, args, output):
        layers_of(model)[1].input_layernorm.variance_epsilon = 0.5

    layers_of(model)[0].register_forward_hook(change)


def noisy_weight(model):
    class Noise(nn.Module):
        def forward(self, weight):
            return weight + 0.1 * torch.randn_like(weight)

    nn.utils.parametrize.register_parametrization(layers_of(model)[1].post_attention_layernorm, "weight", Noise())


CHANGES = [
    forward_of_the_class, forward_of_the_norms_class, eps_changed_between, noisy_weight, replaced_forward,
    changed_in_place, changed_behind_the_version, hook_before_the_next_norm,
    hook_that_changes_the_input_in_place, hook_behind_the_next_norm, hook_that_changes_the_next_weight,
    hook_that_exchanges_the_next_weight, weight_that_is_no_parameter, parametrized_weight, other_eps, sliced,
    reversed_order, twice, shared_norm, another_norm, other_device_management,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_done_to_a_patched_model_the_result_is_the_unpatched_models(change, backend, taken, monkeypatch):
    for cls in (layer_class, norm_class):
        monkeypatch.setattr(cls, "forward", cls.forward)  # put back at the end
    model, plain = build("llama"), build("llama")
    patch_model(model)
    with torch.no_grad(), use_backend(backend):
        model(IDS, use_cache=False)
        patch_model(plain, fuse_residual=False)  # its kernels are held to the original elsewhere
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
            assert all(torch.equal(a, b) for a, b in zip(result.hidden_states, expected.hidden_states, strict=True))
    assert taken["taken"] >= 3


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_global_hooks_see_every_norm(kind, family):
    hooks = {
        "forward": lambda module, args, output: output * 2 if "Norm" in type(module).__name__ else None,
        "forward_pre": lambda module, args: (args[0] * 2 + 1,) if "Norm" in type(module).__name__ else None,
        "full_backward": lambda module, given, got: (given[0] * 2,) if "Norm" in type(module).__name__ else None,
    }
    gradients = []
    for fuse_residual in (True, False):
        model = tiny_models.build(family)
        patch_model(model, fuse_residual=fuse_residual)
        handle = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(hooks[kind])
        try:
            with use_backend("triton"):
                model(IDS, labels=IDS).loss.backward()
        finally:
            handle.remove()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def run_with(model, act):
    """Gradients of everything, with `act(model, hidden states)` before the loss goes back."""
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


def nothing(model, output):
    return None


def train_the_upper_half(model):
    for part in (model.model.embed_tokens, layers_of(model)[0]):
        part.requires_grad_(False)


def ask_for_the_stream(model):
    model.requires_grad_(False)
    layers_of(model)[0].register_forward_hook(lambda module, args, output: [output.requires_grad_(), None][1])


def thaw_the_next_layer(model):
    model.requires_grad_(False)
    layers_of(model)[0].register_forward_hook(lambda *_: [layers_of(model)[1].requires_grad_(), None][1])


def checkpoint_some_layers(model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers_of(model)[0].gradient_checkpointing = False


@pytest.mark.parametrize("before", [nothing, train_the_upper_half, ask_for_the_stream, thaw_the_next_layer,
                                    checkpoint_some_layers])  # fmt: skip
@pytest.mark.parametrize("act", [nothing, keep_the_gradient_of_the_stream, stop_the_gradient_of_the_stream])
def test_gradients_of_the_stream_are_those_of_the_norms_alone(before, act):
    found = []
    for fuse_residual in (True, False):
        model = build("llama")
        patch_model(model, fuse_residual=fuse_residual)
        before(model) if before is not nothing else None
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


def test_a_users_checkpoint_around_the_last_norm_and_the_head():
    from torch.utils.checkpoint import checkpoint

    found = []
    for fuse_residual in (True, False):
        model = build("llama")
        patch_model(model, fuse_residual=fuse_residual)
        norm, model.model.norm = model.model.norm, nn.Identity()
        link_kept = model.model
        with use_backend("triton"):
            hidden = link_kept(IDS).last_hidden_state
            model.model.norm = norm
            logits = checkpoint(lambda h, m=model: m.lm_head(m.model.norm(h)), hidden, use_reentrant=False)
            logits.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_patching_changes_nothing_that_a_forward_changes():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.mix, self.seen = nn.Linear(8, 8), []
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.seen.append(len(x))
            self.mean.mul_(0.9)
            x = x + self.mix(self.n1(x))
            return x + self.mix(self.n2(x))

    model = nn.Sequential(Layer(), Layer())
    with torch.no_grad():
        model[0].mean.fill_(1)
    report = patch_model(model)
    assert "changes what the layer holds" in report.layers[0].reason
    assert model[0].seen == [] and bool((model[0].mean == 1).all())


def test_patched_without_fusion_gives_the_fusion_back():
    model = build("llama")
    patch_model(model)
    with patched(model, fuse_residual=False):
        assert not any(layer_part(type(module)) for module in model.modules())
    assert all(layer_part(type(layer)) for layer in layers_of(model))


def test_defaults_and_settings_of_the_class_body():
    class Layer(nn.Module):
        SCALE = 2.0

        def __init__(self, kind):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.mix, self.kind = nn.Linear(8, 8), kind

        def forward(self, x, scale=SCALE):
            if self.kind:
                return x + self.mix(self.n1(x) + self.n2(x))
            x = x + self.mix(self.n1(x)) * scale
            return x + self.mix(self.n2(x))

    model = nn.Sequential(Layer(0), Layer(0), Layer(1))
    x = torch.randn(2, 3, 8)
    expected = model(x)
    with use_backend("reference"):
        report = patch_model(model)
        assert torch.equal(model(x), expected)
    assert [layer.fused for layer in report.layers] == ["+ n2, + the norm behind it", "+ n2, + the norm behind it"]


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_training_mode_with_dropout_in_the_residual(family, taken):
    rates = {"attention_dropout": 0.0, "resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.0}
    model, plain = (build(family, **rates).train() for _ in range(2))
    patch_model(model)
    losses = []
    for each in (plain, model):
        torch.manual_seed(3)
        with use_backend("reference"):
            loss = each(IDS, labels=IDS).loss
            loss.backward()
        losses.append(loss)
    assert torch.equal(*losses) and taken["taken"] == 3, "the plain formula hands nothing over where gradients flow"
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_fuses_inside_the_layers_only(reentrant, taken):
    def gradients(model, checkpointing):
        model.train().zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        else:
            model.gradient_checkpointing_disable()
        with use_backend("triton"):
            inputs = model.get_input_embeddings()(IDS).detach().requires_grad_()
            model(inputs_embeds=inputs, labels=IDS, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = build("llama")
    patch_model(model)
    expected = gradients(model, False)
    assert taken["taken"] == taken["left"] == 6
    taken.update(left=0, taken=0)
    got = gradients(model, True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert taken["left"] == taken["taken"] == 6, "three layers, run twice each"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_users_own_checkpoint_around_each_layer(reentrant):
    from torch.utils.checkpoint import checkpoint

    def gradients(model):
        for layer in layers_of(model):
            forward = type(layer).forward

            def around(x, *args, layer=layer, forward=forward, **kwargs):
                return checkpoint(lambda t: forward(layer, t, *args, **kwargs), x, use_reentrant=reentrant)

            layer.forward = around
        with use_backend("triton"):
            inputs = model.get_input_embeddings()(IDS).detach().requires_grad_()
            model(inputs_embeds=inputs, labels=IDS, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    fused, plain = build("llama"), build("llama")
    patch_model(fused)
    patch_model(plain, fuse_residual=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(fused), gradients(plain), strict=True))


def test_an_exception_in_the_middle_leaves_nothing_behind(taken):
    model = build("llama")
    expected = model(IDS).logits
    patch_model(model)

    def fail(module, args):
        raise RuntimeError("out of memory")

    handle = layers_of(model)[1].mlp.register_forward_pre_hook(fail)
    with use_backend("reference"):
        with pytest.raises(RuntimeError, match="out of memory"):
            model(IDS)
        handle.remove()
        assert torch.equal(model(IDS).logits, expected)


def test_nothing_is_kept_alive_beyond_the_step():
    model = build("llama")
    patch_model(model)
    seen = []
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    with torch.no_grad(), use_backend("reference"):
        model(IDS)
        gc.collect()
        assert seen[0]() is None and handover_module._slot.left == [None]
        # An early exit: the last layer's norm is computed and nobody asks for it.
        hidden = model.get_input_embeddings()(IDS)
        embeddings = model.model.rotary_emb(hidden, torch.arange(IDS.shape[1])[None])
        hidden = layers_of(model)[0](hidden, position_embeddings=embeddings)
        assert handover_module._slot.left != [None]
        del hidden
        gc.collect()
        assert handover_module._slot.left == [None]


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

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_and_are_patched_anew(how, taken):
    model = build("llama")
    with torch.no_grad():
        expected = model(IDS).logits
        patch_model(model)
        again = how(model)
        layers_of(model)[1].input_layernorm.weight.zero_()  # the copy has weights of its own
        with use_backend("reference"):
            assert torch.equal(again(IDS).logits, expected) and taken["taken"] == 3, "inside of the layers"
            assert patch_model(again).layers == patch_model(model).layers
            assert torch.equal(again(IDS).logits, expected) and taken["taken"] == 3 + 6


def test_inference_mode_fuses_inside_the_layers_only(taken):
    model = build("llama")
    with torch.inference_mode(), use_backend("reference"):
        expected = model(IDS).logits
        patch_model(model)
        assert torch.equal(model(IDS).logits, expected) and taken["taken"] == taken["left"] == 3


def test_compiled_without_a_graph_break():
    model = build("llama")
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        patch_model(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected)


def test_every_dtype_that_is_mixed_is_left_to_the_model(taken):
    model, plain = build("llama", torch.bfloat16), build("llama", torch.bfloat16)
    patch_model(model)
    for each in (model, plain):
        each.model.embed_tokens.float()  # the stream is float32, the branches bfloat16 by way of this hook
        for layer in layers_of(each):
            for part in (layer.self_attn, layer.mlp):
                part.float()
            layer.mlp.register_forward_hook(lambda module, args, output: output.bfloat16())
        each.lm_head.float()
    with torch.no_grad(), use_backend("reference"):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_one_launch_less_per_sum():
    model = build("llama")
    patch_model(model)
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        model(IDS)
    assert launches.total() == 7


def test_layers_of_a_model_without_source_keep_their_forward():
    namespace = {"nn": nn, "torch": torch}
    exec(
        "class Layer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm(8)\n"
        "        self.mix = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        x = x + self.mix(self.a(x))\n"
        "        return x + self.mix(self.b(x))\n",
        namespace,
    )
    model = nn.Sequential(namespace["Layer"](), namespace["Layer"]())
    (first, second) = patch_model(model).layers
    assert not first.fused and "source" in first.reason
    assert "not fused: the source of its forward is not there" in str(patch_model(model))


def test_auto_config_of_many_types_is_recognised_by_its_source():
    """Other words for the same: dropout in the sum, a multiplier, a tuple returned, modules of other names."""
    small = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    for model_type in ("granite", "starcoder2", "cohere2", "smollm3", "olmo3", "glm4", "stablelm", "ernie4_5"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small)).eval()
        ids = torch.arange(3, 19)[None]
        with torch.no_grad(), use_backend("reference"):
            expected = model(ids).logits
            report = patch_model(model)
            assert report.layers and all(layer.fused for layer in report.layers), model_type
            assert torch.equal(model(ids).logits, expected), model_type
