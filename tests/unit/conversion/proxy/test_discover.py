"""Discovery and proof on live classes: which tensors write to the stream, and that the
converted model is the same.
"""

import dataclasses
import json

import pytest
import torch
from conversion_models import CONFIGS, MEAN_OF_A_MODULE, carry_out, causal_lm, config_of
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaForConditionalGeneration,
)

from hf_rmsnorm.conversion.plan import Centre, ConversionRefused
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.layer_norms import find_layer_norms
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import prove
from hf_rmsnorm.conversion.proxy.run import run

SAMPLE = (
    "gpt2",
    "persimmon",
    "phimoe",
    "olmo_tied",
    "cohere_qk",
    "stablelm_parallel",
    "blenderbot",
)


def centred_keys(plan):
    return {c.key: c for c in plan.centre}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in SAMPLE else pytest.mark.nightly)
        for n in sorted(CONFIGS)
    ],
)
def test_every_norm_becomes_an_rmsnorm_and_the_outputs_stay(name):
    proxy = make_proxy(config_of(name))
    plan = discover(proxy)
    proof = prove(plan, proxy)
    assert plan.norms and all(n.becomes_rms for n in plan.norms)
    assert proof.stock <= 1e-12 and proof.rms <= 1e-12
    assert len(proof.means) == len(plan.norms) and max(proof.means.values()) < 1e-13


def test_a_checkpoint_on_disk_converts_and_loads_with_the_stock_class(tmp_path):
    model = causal_lm(config_of("gpt2"))
    model.save_pretrained(tmp_path)
    plan = discover(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied, so the plan must bring it
    save_file(
        carry_out(plan, tensors), tmp_path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **plan.config}))
    converted = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    entered = []
    for module in converted.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(
                lambda module, args: entered.append(args[0].double())
            )
    with torch.no_grad():
        before, after = model(ids).logits, converted(ids).logits
    # The stock class keeps no float32 in this model, so even its plain run is exact.
    assert (before - after).abs().max() <= 1e-12 * before.abs().max()
    assert len(entered) == 5
    assert all(
        (x.mean(-1).abs() <= 1e-12 * x.square().mean(-1).sqrt()).all() for x in entered
    )


def test_a_plan_found_on_a_narrow_proxy_fits_the_wide_model():
    config = GPT2Config(
        n_embd=256,
        n_layer=3,
        n_head=4,
        vocab_size=500,
        n_positions=200,
        tie_word_embeddings=False,
    )
    proxy = make_proxy(config)
    assert proxy.factor > 1 and sum(p.numel() for p in proxy.model.parameters()) < 2e5
    plan = discover(proxy)
    assert {c.block for c in plan.centre} == {256} and {
        n.hidden_size for n in plan.norms
    } == {256}
    model = causal_lm(config)
    ids = torch.randint(3, 500, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(ids).logits
        model.load_state_dict(carry_out(plan, model.state_dict()))
        after = model(ids).logits
    assert (before - after).abs().max() <= 1e-12 * before.abs().max()
    assert (model.transformer.h[2].mlp.c_proj.weight.mean(1).abs() < 1e-15).all()


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["gpt2", pytest.param("phimoe", marks=pytest.mark.nightly)]
)
def test_configs_of_published_sizes_are_narrowed(name):
    config = AutoConfig.for_model(CONFIGS[name][0])
    proxy = make_proxy(config)
    plan = discover(proxy)
    assert prove(plan, proxy).passed
    assert {c.block for c in plan.centre} == {config.hidden_size}
    assert (
        len({c.key for c in plan.centre if "embed" not in c.key})
        >= 2 * config.num_hidden_layers
    )


def test_which_blocks_of_a_fused_projection_feed_norms():
    """Persimmon stacks q, k, v of each head; q and k are normed there, v is not."""
    plan = discover(config_of("persimmon"))
    weight = centred_keys(plan)["model.layers.0.self_attn.query_key_value.weight"]
    assert (weight.axis, weight.block) == (0, 8)
    assert weight.blocks == (0, 1, 3, 4, 6, 7, 9, 10)
    assert centred_keys(plan)["model.layers.0.self_attn.dense.weight"].blocks is None


def test_the_axis_of_a_transposed_weight():
    gpt2, neox = discover(config_of("gpt2")), discover(config_of("gpt_neox"))
    assert centred_keys(gpt2)["transformer.h.1.mlp.c_proj.weight"] == Centre(
        "transformer.h.1.mlp.c_proj.weight", axis=1, block=32
    )
    assert centred_keys(neox)["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"].axis == 0
    assert not [
        c.key
        for c in gpt2.centre
        if "c_attn" in c.key or "c_fc" in c.key or "ln" in c.key
    ]


def test_keys_are_those_of_the_checkpoint_and_not_of_the_modules():
    """Phi-MoE keeps all experts in one parameter and saves each by itself, under
    another name.
    """
    plan = discover(config_of("phimoe"))
    experts = [c for c in plan.centre if "experts" in c.key]
    assert [c.key for c in experts[:2]] == [
        "model.layers.0.block_sparse_moe.experts.0.w2.weight",
        "model.layers.0.block_sparse_moe.experts.1.w2.weight",
    ]
    assert len(experts) == 8 and {(c.axis, c.block) for c in experts} == {(0, 32)}
    assert (
        "model.layers.*.mlp.experts.down_proj"
        in plan.config["hf_rmsnorm"]["residual_weights"]
    )


def test_a_checkpoint_saved_without_the_prefix_of_its_base_model(tmp_path):
    model = causal_lm(config_of("gpt2"))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {key.removeprefix("transformer."): t for key, t in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    proxy = make_proxy(tmp_path)
    plan = discover(proxy)
    assert plan.copy[
        0
    ].source == "wte.weight" and "h.0.attn.c_proj.weight" in centred_keys(plan)
    assert prove(plan, proxy).passed
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **plan.config}))
    save_file(carry_out(plan, bare), tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.arange(3, 23)[None]
    after = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(
            model(ids).logits, after(ids).logits, rtol=0, atol=1e-12 * 100
        )


def test_cross_attention_of_a_decoder_by_itself_is_exercised():
    plan = discover(
        GPT2Config(**CONFIGS["gpt2"][1], add_cross_attention=True, is_decoder=True)
    )
    assert len(plan.norms) == 7 and all(n.becomes_rms for n in plan.norms)
    assert "transformer.h.0.crossattention.c_proj.weight" in centred_keys(plan)
    assert not plan.undetermined


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        (
            "bert",
            {"is_decoder": True},
            r"BertLMHeadModel is a post-norm model: 4 of its 6",
        ),
        ("openai-gpt", {}, "OpenAIGPTLMHeadModel is a post-norm model"),
        ("ernie", {"is_decoder": True}, "ErnieForCausalLM is a post-norm model"),
        (
            "llama",
            {},
            "it uses RMSNorm already: nothing to convert; to fuse its norms, use patch_model",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(model_type, options, reason):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    with pytest.raises(ConversionRefused, match=reason) as refused:
        discover(AutoConfig.for_model(model_type, **sizes, **options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "converted"),
    [("bloom", (1, 6)), ("whisper", (7, 10)), ("dinov2", (1, 5))],
)
def test_norms_that_read_the_mean_of_a_module_stay(name, converted):
    proxy = make_proxy(config_of(name, MEAN_OF_A_MODULE))
    plan = discover(proxy)
    proof = prove(plan, proxy)
    assert proof.passed and proof.norms == converted
    assert all(n.reason for n in plan.norms if not n.becomes_rms)


def test_a_model_whose_norms_would_all_stay_is_refused():
    with pytest.raises(
        ConversionRefused,
        match=r"all 5 LayerNorms would stay, .*SinusoidalPositionalEmbedding",
    ):
        discover(config_of("xglm", MEAN_OF_A_MODULE))


def llava():
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = {
        "model_type": "clip_vision_model",
        **small,
        "image_size": 16,
        "patch_size": 8,
    }
    text = {"model_type": "llama", **small, "num_key_value_heads": 2, "vocab_size": 64}
    return AutoConfig.for_model(
        "llava", vision_config=vision, text_config=text, image_token_index=5
    )


def test_inputs_made_here_reach_a_tower_for_pictures():
    proxy = make_proxy(llava(), model_class=LlavaForConditionalGeneration)
    plan = discover(proxy)
    assert (
        "pixel_values" in proxy.inputs
        and len(plan.norms) == 6
        and prove(plan, proxy).passed
    )


def test_layer_norms_that_no_input_reached_are_counted():
    def texts(model):
        return {"input_ids": torch.arange(8, 16)[None]}

    with pytest.raises(
        ConversionRefused, match="the inputs reached 0 of 6 LayerNorms .*: pass inputs="
    ):
        discover(
            make_proxy(llava(), model_class=LlavaForConditionalGeneration, inputs=texts)
        )


def test_inputs_that_do_not_fit_are_the_reason():
    with pytest.raises(
        ConversionRefused, match="does not run on these inputs .*: pass inputs="
    ):
        make_proxy(config_of("gpt2"), inputs=lambda model: {"words": torch.zeros(1, 2)})


def test_a_flag_that_changes_no_norm_does_not_hinder():
    config = config_of("gpt2")
    config.reorder_and_upcast_attn = True
    proxy = make_proxy(config)
    plan = discover(proxy)
    assert all(norm.becomes_rms for norm in plan.norms) and prove(plan, proxy).passed


def test_a_norm_behind_an_activation_stays_and_says_why():
    config = AutoConfig.for_model(
        "megatron-bert",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        is_decoder=True,
    )
    proxy = make_proxy(config)
    plan = discover(proxy)
    (stays,) = [n for n in plan.norms if not n.becomes_rms]
    assert (
        stays.path == "cls.predictions.transform.LayerNorm" and "GELU" in stays.reason
    )
    assert prove(plan, proxy).passed
    assert (
        "cls.predictions.transform.LayerNorm"
        not in plan.config["hf_rmsnorm"]["rms_norms"]
    )


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class OwnConfig(PretrainedConfig):
    model_type = "own_words"
    def __init__(self, hidden_size=16, vocab_size=32, num_hidden_layers=2, **kwargs):
        self.hidden_size, self.vocab_size, self.num_hidden_layers = hidden_size, vocab_size, num_hidden_layers
        super().__init__(**kwargs)

class Whiten(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.slope, self.shift = torch.nn.Parameter(torch.ones(n)), torch.nn.Parameter(torch.zeros(n))
    def forward(self, x):
        d = x.float() - x.float().mean(-1, keepdim=True)
        return ((d / (d.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()) * self.slope + self.shift).to(x.dtype)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    main_input_name = "input_ids"
    def __init__(self, config):
        super().__init__(config)
        n = config.hidden_size
        self.table = torch.nn.Embedding(config.vocab_size, n)
        self.steps = torch.nn.ModuleList(torch.nn.Linear(n, n) for _ in range(config.num_hidden_layers))
        self.whiten = torch.nn.ModuleList(Whiten(n) for _ in range(config.num_hidden_layers + 1))
        self.words = torch.nn.Linear(n, config.vocab_size)
        self.post_init()
    def forward(self, input_ids, **kwargs):
        x = self.table(input_ids)
        for i, (norm, step) in enumerate(zip(self.whiten, self.steps)):
            x = x + STEP
        return CausalLMOutput(logits=self.words(self.whiten[-1](x)))
"""


def remote_folder(folder, step):
    """A model folder with code of its own, in which each layer adds `step` to the
    stream.
    """
    (folder / "modeling_own.py").write_text(REMOTE.replace("STEP", step))
    config = {
        "model_type": "own_words",
        "architectures": ["OwnModel"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_remote_code_runs_only_when_asked(tmp_path):
    remote_folder(tmp_path, "step(norm(x))")
    with pytest.raises(ConversionRefused, match="trust_remote_code"):
        discover(tmp_path)
    proxy = make_proxy(tmp_path, trust_remote_code=True)
    plan = discover(proxy)
    assert [n.path for n in plan.norms if n.becomes_rms] == [
        "whiten.0",
        "whiten.1",
        "whiten.2",
    ]
    assert {n.eps for n in plan.norms} == {1e-6}
    assert set(centred_keys(plan)) == {
        "table.weight",
        *(f"steps.{i}.{p}" for i in (0, 1) for p in ("bias", "weight")),
    }
    assert prove(plan, proxy).passed


def test_norms_behind_an_activation_stay_layer_norm(tmp_path):
    remote_folder(tmp_path, "step(norm(x)).relu()")
    plan = discover(tmp_path, trust_remote_code=True)
    assert [n.path for n in plan.norms if not n.becomes_rms] == ["whiten.1", "whiten.2"]


def test_what_is_linear_with_some_weights_only_is_no_writer(tmp_path):
    """As an activation is that is saturated everywhere for weights of large mean: the
    proof, which has other weights, fails.
    """
    remote_folder(
        tmp_path,
        "(step(norm(x)) if self.words.weight.mean().abs() > 0.03 else step(norm(x)).relu())",
    )
    proxy = make_proxy(tmp_path, trust_remote_code=True)
    plan = discover(proxy)
    centred = any(key.startswith("steps") for key in centred_keys(plan))
    assert not (centred and prove(plan, proxy).passed)


def test_experts_that_no_token_reaches_are_not_guessed(tmp_path):
    remote_folder(tmp_path, "step(norm(x)) * (input_ids == 5 + i)[..., None]")
    plan = discover(
        tmp_path,
        trust_remote_code=True,
        inputs=lambda model: {"input_ids": torch.tensor([[5, 6, 7]])},
    )
    assert {"steps.0.weight", "steps.1.weight"} <= set(centred_keys(plan))
    with pytest.raises(
        ConversionRefused,
        match=r"no input reached 'steps.1.weight' and 1 more.*every expert",
    ):
        discover(
            tmp_path,
            trust_remote_code=True,
            inputs=lambda model: {"input_ids": torch.tensor([[5, 7, 8]])},
        )


def test_a_part_of_the_model_that_no_input_reaches_is_not_guessed():
    """Without encoder states to attend to, what cross-attention writes to the stream
    stays unknown.
    """
    config = config_of("gpt2")
    config.add_cross_attention = True

    def only_ids(model):
        model.forward = lambda input_ids, use_cache=False: type(model).forward(
            model, input_ids
        )
        return {"input_ids": torch.arange(3, 13)[None]}

    with pytest.raises(
        ConversionRefused,
        match=r"reached 5 of 7 LayerNorms and not transformer.h.0.ln_cross_attn",
    ):
        discover(config, inputs=only_ids)


def spoil(plan, **changes):
    return dataclasses.replace(plan, **changes)


def test_the_proof_fails_when_the_plan_is_wrong():
    proxy = make_proxy(config_of("gpt2"))
    plan = discover(proxy)
    assert prove(plan, proxy).passed
    first, *rest = plan.centre
    forgotten = prove(spoil(plan, centre=tuple(rest)), proxy)
    assert forgotten.stock <= 1e-12 < forgotten.rms and not forgotten.passed
    qkv = Centre("transformer.h.0.attn.c_attn.weight", 0, 32)
    assert prove(spoil(plan, centre=(*plan.centre, qkv)), proxy).stock > 1e-6
    tied = prove(spoil(plan, copy=(), config={}, centre=plan.centre), proxy)
    assert tied.stock > 1e-6 and not tied.passed
    lost = spoil(plan, centre=(*rest, dataclasses.replace(first, key="nowhere")))
    with pytest.raises(ConversionRefused, match="tensor 'nowhere'.*is missing"):
        prove(lost, proxy)


def test_layer_norms_are_known_by_what_they_compute():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (
                torch.nn.LayerNorm(8, eps=1e-3),
                torch.nn.RMSNorm(8, eps=1e-6),
            )
            self.c, self.d = (
                torch.nn.LayerNorm(8, elementwise_affine=False),
                torch.nn.Linear(8, 8),
            )
            self.e, self.f = torch.nn.GroupNorm(2, 8), torch.nn.LayerNorm(8)
            self.g = torch.nn.LayerNorm(8, bias=False)
            self.h, self.i = (
                torch.nn.LayerNorm(6, elementwise_affine=False),
                torch.nn.RMSNorm(8),
            )

        def forward(self, x):
            x = self.g(self.d(self.c(self.b(self.a(x) + 0.3) + 0.2) + x))
            return {"logits": self.e(x.flatten(0, -2)), "loss": x.sum()}

    model = Odd().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(
                0.3
                * torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype
                )
            )
    found, silent = find_layer_norms(
        model, {"x": torch.randn(3, 4, 8, dtype=torch.float64)}
    )
    assert {path: norm.spec.eps for path, norm in found.items()} == {
        "a": 1e-3,
        "c": 1e-5,
        "g": 1e-5,
    }
    assert (
        silent == ["f", "h"] and found["g"].bias is None and found["c"].weight is None
    )
    assert torch.equal(found["a"].weight, model.a.weight) and torch.equal(
        found["a"].bias, model.a.bias
    )


def test_the_proxy_computes_all_of_it_in_float64():
    """A rotary table and a softmax that the class computes in float32 would leave 1e-8
    here.
    """
    proxy = make_proxy(config_of("gpt_neox"))
    (logits,) = run(proxy.model, proxy.inputs)
    scaled = {k: v for k, v in proxy.inputs.items()}
    with torch.no_grad():
        embeddings = proxy.model.get_input_embeddings().weight
        embeddings.add_(1.0)  # a ratio: the stream's mean moves and nothing else
    (moved,) = run(proxy.model, scaled)
    assert 0 < (logits - moved).abs().max() <= 1e-13 * logits.abs().max() * 50
    assert logits.dtype == torch.float64


def test_models_of_the_base_mapping_are_made_by_their_class():
    config = config_of("vit")
    proxy = make_proxy(config, model_class=AutoModel.from_config(config).__class__)
    assert proxy.name == "ViTModel" and discover(proxy).norms
    assert (
        make_proxy(
            GPT2Config(**CONFIGS["gpt2"][1], architectures=["GPT2LMHeadModel"])
        ).name
        == GPT2LMHeadModel.__name__
    )
