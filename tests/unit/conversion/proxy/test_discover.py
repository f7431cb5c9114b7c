"""Discovery and proof on live classes: which tensors write to the stream, and that the
converted model is the same.
"""

import json

import pytest
import torch
from conversion_models import (
    CONFIGS,
    MEAN_OF_A_MODULE,
    SMALL,
    carry_out,
    causal_lm,
    config_of,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaForConditionalGeneration,
    VipLlavaConfig,
)

from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.conversion.plan import Centre
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.keys import in_checkpoint
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import prove


def plan_of(source, **how):
    return discover(make_proxy(source, **how))


def plan_of_folder(folder):
    """The plan in the names of the folder's own tensors."""
    proxy = make_proxy(folder)
    names = load_file(folder / "model.safetensors")
    return in_checkpoint(discover(proxy), names, proxy)


def centred_keys(plan):
    return {c.key: c for c in plan.centre}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_norm_becomes_an_rmsnorm_and_the_outputs_stay(name):
    proxy = make_proxy(config_of(name))
    plan = discover(proxy)
    proof = prove(plan, proxy)
    assert plan.norms
    for n in plan.norms:
        assert n.becomes_rms
    assert proof.stock <= 1e-12
    assert proof.rms <= 1e-12


def convert_folder(folder, plan):
    """Carry out a plan on the checkpoint of a folder."""
    path = folder / "model.safetensors"
    save_file(carry_out(plan, load_file(path)), path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **plan.config}))


def assert_same_logits(model, folder):
    """The stock class keeps no float32 in a GPT-2, so even its plain run is exact."""
    how = {"dtype": torch.float64, "attn_implementation": "eager"}
    converted = AutoModelForCausalLM.from_pretrained(folder, **how)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        before = model(ids).logits
        after = converted(ids).logits
    assert (before - after).abs().max() <= 1e-12 * before.abs().max()


def test_a_checkpoint_on_disk_converts_and_loads_with_the_stock_class(tmp_path):
    model = causal_lm(config_of("gpt2"))
    model.save_pretrained(tmp_path)
    # tied, so the plan must bring it
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    convert_folder(tmp_path, plan_of_folder(tmp_path))
    assert_same_logits(model, tmp_path)


def test_a_checkpoint_saved_without_the_prefix_of_its_base_model(tmp_path):
    model = causal_lm(config_of("gpt2"))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    bare = {}
    for key, tensor in load_file(path).items():
        bare[key.removeprefix("transformer.")] = tensor
    save_file(bare, path, {"format": "pt"})
    plan = plan_of_folder(tmp_path)
    assert plan.copy[0].source == "wte.weight"
    assert "h.0.attn.c_proj.weight" in centred_keys(plan)
    convert_folder(tmp_path, plan)
    assert_same_logits(model, tmp_path)


def test_a_plan_found_on_a_narrow_proxy_fits_the_wide_model():
    sizes = {"n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 500}
    config = GPT2Config(**sizes, n_positions=200, tie_word_embeddings=False)
    proxy = make_proxy(config)
    assert proxy.factor > 1
    assert proxy.model.num_parameters() < 2e5
    plan = in_checkpoint(discover(proxy), (), proxy)
    assert {c.block for c in plan.centre} == {256}
    model = causal_lm(config)
    ids = torch.randint(3, 500, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(ids).logits
        model.load_state_dict(carry_out(plan, model.state_dict()))
        after = model(ids).logits
    assert (before - after).abs().max() <= 1e-12 * before.abs().max()


def test_which_blocks_of_a_fused_projection_feed_norms():
    """Persimmon stacks q, k, v of each head; q and k are normed there, v is not."""
    plan = plan_of(config_of("persimmon"))
    weight = centred_keys(plan)["model.layers.0.self_attn.query_key_value.weight"]
    assert weight.axis == 0
    assert weight.block == 8
    assert weight.blocks == (0, 1, 3, 4, 6, 7, 9, 10)
    assert centred_keys(plan)["model.layers.0.self_attn.dense.weight"].blocks is None


def test_keys_are_those_of_the_checkpoint_and_not_of_the_modules():
    """Phi-MoE keeps all experts in one parameter and saves each by itself, under
    another name.
    """
    plan = plan_of(config_of("phimoe"))
    experts = []
    for c in plan.centre:
        if "experts" in c.key:
            experts.append(c)
    first = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    assert experts[0] == Centre(first, 0, 32)
    assert len(experts) == 8
    assert {(c.axis, c.block) for c in experts} == {(0, 32)}
    record = plan.config["hf_rmsnorm"]["residual_weights"]
    assert "model.layers.*.mlp.experts.down_proj" in record


def test_cross_attention_of_a_decoder_by_itself_is_exercised():
    plan = plan_of(
        GPT2Config(**CONFIGS["gpt2"][1], add_cross_attention=True, is_decoder=True)
    )
    assert len(plan.norms) == 7
    for n in plan.norms:
        assert n.becomes_rms
    assert "transformer.h.0.crossattention.c_proj.weight" in centred_keys(plan)
    assert not plan.undetermined


POST_NORM = "is a post-norm model: 4 of its"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", POST_NORM),
        ("openai-gpt", "is a post-norm model"),
        ("ernie", POST_NORM),
        (
            "llama",
            "it uses RMSNorm already: nothing to convert; to fuse its norms, use",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(model_type, reason):
    with pytest.raises(ConversionRefused, match=reason) as refused:
        plan_of(AutoConfig.for_model(model_type, **SMALL, is_decoder=True))
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
    for n in plan.norms:
        if not n.becomes_rms:
            assert n.reason


def test_a_model_whose_norms_would_all_stay_is_refused():
    what = "all 5 LayerNorms would stay, .*SinusoidalPositionalEmbedding"
    with pytest.raises(ConversionRefused, match=what):
        plan_of(config_of("xglm", MEAN_OF_A_MODULE))


def llava():
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    text = {"model_type": "llama", **SMALL}
    vision |= SMALL
    return AutoConfig.for_model(
        "llava", vision_config=vision, text_config=text, image_token_index=5
    )


def test_inputs_made_here_reach_a_tower_for_pictures():
    proxy = make_proxy(llava(), model_class=LlavaForConditionalGeneration)
    plan = discover(proxy)
    assert "pixel_values" in proxy.inputs
    assert len(plan.norms) == 6
    assert prove(plan, proxy).passed


def test_layer_norms_that_no_input_reached_are_counted():
    def texts(model):
        return {"input_ids": torch.arange(8, 16)[None]}

    proxy = make_proxy(llava(), model_class=LlavaForConditionalGeneration, inputs=texts)
    what = "the inputs reached 0 of 6 LayerNorms .*: pass inputs="
    with pytest.raises(ConversionRefused, match=what):
        discover(proxy)


def test_a_norm_behind_an_activation_stays_and_says_why():
    config = AutoConfig.for_model("megatron-bert", **SMALL, is_decoder=True)
    proxy = make_proxy(config)
    plan = discover(proxy)
    (stays,) = [n for n in plan.norms if not n.becomes_rms]
    assert stays.path == "cls.predictions.transform.LayerNorm"
    assert "GELU" in stays.reason
    assert stays.path not in plan.config["hf_rmsnorm"]["rms_norms"]
    assert prove(plan, proxy).passed


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
        plan_of(tmp_path)
    proxy = make_proxy(tmp_path, trust_remote_code=True)
    plan = discover(proxy)
    norms = []
    for n in plan.norms:
        norms.append((n.path, n.becomes_rms, n.eps))
    assert norms == [(f"whiten.{i}", True, 1e-6) for i in range(3)]
    steps = set()
    for i in (0, 1):
        for leaf in ("bias", "weight"):
            steps.add(f"steps.{i}.{leaf}")
    assert centred_keys(plan).keys() == {"table.weight"} | steps
    assert prove(plan, proxy).passed


def test_experts_that_no_token_reaches_are_not_guessed(tmp_path):
    remote_folder(tmp_path, "step(norm(x)) * (input_ids == 5 + i)[..., None]")

    def plan_on(*ids):
        inputs = {"input_ids": torch.tensor([ids])}
        return plan_of(tmp_path, trust_remote_code=True, inputs=lambda model: inputs)

    assert {"steps.0.weight", "steps.1.weight"} <= set(centred_keys(plan_on(5, 6, 7)))
    what = r"no input reached 'steps.1.weight' and 1 more.*other layers or experts"
    with pytest.raises(ConversionRefused, match=what):
        plan_on(5, 7, 8)


def test_a_last_layer_whose_output_nothing_reads_does_not_hinder():
    """VipLlava reads features before the last layers of its vision tower: their norms
    stay, and no input could reach them.
    """
    sizes = {**SMALL, "num_hidden_layers": 3}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = LlamaConfig(**SMALL)
    layers = {"vision_feature_layers": [-2, 1], "image_token_index": 60}
    config = VipLlavaConfig(vision_config=vision, text_config=text, **layers)
    becomes_rms = {norm.path: norm.becomes_rms for norm in plan_of(config).norms}
    assert becomes_rms["vision_tower.pre_layrnorm"]
    assert not becomes_rms["vision_tower.encoder.layers.2.layer_norm2"]
