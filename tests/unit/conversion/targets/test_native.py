"""Native targets: every pair written to disk and loaded by the target's class, and
every refusal by its name.
"""

import json
import os

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rmsnorm.conversion import (
    ConversionError,
    ConversionRefused,
    convert_checkpoint,
    plan_conversion,
    tensors,
)
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import give_weights, make_proxy
from hf_rmsnorm.conversion.proxy.run import in_double
from hf_rmsnorm.conversion.targets import native_build
from hf_rmsnorm.conversion.targets.native import native_target, prove_native

SMALL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip


def config_of(model_type, **changes):
    return AutoConfig.for_model(model_type, **{**SMALL, **changes})


# source, changes of its config, target, whether the final norm's bias has to be 0
PAIRS = {
    "olmo": ("olmo", dict(num_key_value_heads=2), "llama", False),
    "olmo-tied": ("olmo", dict(tie_word_embeddings=True, attention_bias=True), "llama", False),
    "jais2": ("jais2", {}, "arcee", True),
    "nemotron": ("nemotron", dict(num_key_value_heads=2, head_dim=16), "arcee", True),
    "stablelm": ("stablelm", dict(num_key_value_heads=2, use_qkv_bias=True), "llama", True),
}  # fmt: skip


def write_source(
    folder, config, dtype=torch.float64, zero_final_bias=False, seed=5, shards="5GB"
):
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).double().eval()
    give_weights(model, seed)
    for name, p in model.named_parameters():
        if zero_final_bias and name == "model.norm.bias":
            torch.nn.init.zeros_(p)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def to_native(src, dst, **how):
    return convert_checkpoint(src, dst, target="native", **how)


def load(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def logits(folder, ids):
    with in_double():  # hidden casts and the frequencies of rotation too
        return load(folder, torch.float64)(input_ids=ids).logits


def random_ids(rows=2, length=40):
    return torch.randint(
        3, 96, (rows, length), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("name", PAIRS)
def test_the_target_on_disk_gives_the_logits_and_the_text_of_the_source(name, tmp_path):
    model_type, changes, target, zero = PAIRS[name]
    double = tmp_path / "double"
    single = tmp_path / "single"
    for dtype, folder in ((torch.float64, double), (torch.float32, single)):
        write_source(folder / "src", config_of(model_type, **changes), dtype, zero)
        done = to_native(folder / "src", folder / "dst", verify=False)
        assert done.plan.difference < 1e-12
        config = json.loads((folder / "dst" / "config.json").read_text())
        assert config["model_type"] == target
    expected = logits(double / "src", random_ids())
    got = logits(double / "dst", random_ids())
    assert (expected - got).abs().max() <= 1e-12 * expected.abs().max()

    result = load(single / "dst", "auto")
    assert result.dtype == torch.float32
    for m in result.modules():
        assert "LayerNorm" not in type(m).__name__
    how = dict(do_sample=False, min_new_tokens=30, max_new_tokens=30, pad_token_id=0)
    texts = []
    for model in (load(single / "src", "auto"), result):
        texts.append(model.generate(random_ids(1, 8), **how))
    assert torch.equal(*texts)


def refusal(model_type, **changes):
    with pytest.raises(ConversionRefused) as error:
        native_target(config_of(model_type, **changes))
    return str(error.value)


@pytest.mark.parametrize(
    "model_type, changes, reason",
    [
        ("gpt2", {}, "no RMSNorm architecture is known that computes what gpt2 does"),
        ("stablelm", dict(use_parallel_residual=True), "side by side"),
        ("stablelm", dict(qk_layernorm=True), "queries and keys have norms"),
        ("starcoder2", {}, "no RMSNorm architecture is known"),
        ("olmo", dict(clip_qkv=8.0), "it clips queries, keys and values"),
        ("nemotron", dict(num_key_value_heads=2, head_dim=16, rope_parameters=dict(
            rope_type="linear", factor=2.0, rope_theta=1e4, partial_rotary_factor=0.5)), "and scaled"),
    ],
)  # fmt: skip
def test_a_config_without_an_exact_target_is_refused_by_name(
    model_type, changes, reason
):
    message = refusal(model_type, **changes)
    assert model_type in message
    assert reason in message
    assert "\n" not in message
    assert 'without target="native"' in message


def test_other_than_causal_models_are_refused():
    config = config_of("stablelm", architectures=["StableLmForSequenceClassification"])
    with pytest.raises(
        ConversionRefused, match="StableLmForSequenceClassification.*only causal"
    ):
        native_target(config)


@pytest.mark.parametrize("name", ["jais2", "nemotron", "stablelm"])
def test_a_final_bias_with_nowhere_to_go_is_refused(name, tmp_path):
    model_type, changes, target, _ = PAIRS[name]
    write_source(tmp_path / "src", config_of(model_type, **changes))
    with pytest.raises(
        ConversionRefused,
        match=f"become {target}: .*final norm's bias, is not 0",
    ):
        to_native(tmp_path / "src", tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


def test_a_broken_pair_is_not_proven(monkeypatch):
    """Heads whose channels stay where they were show in the proof."""
    proxy = make_proxy(config_of("nemotron", num_key_value_heads=2, head_dim=16))
    assert prove_native(proxy) < 1e-12

    def unpaired(channels):
        return torch.arange(channels).view(-1, 2)

    monkeypatch.setattr(native_build, "_pairs", unpaired)
    assert prove_native(proxy) > 1e-4


def test_bf16_shards_keep_dtype_size_and_record(tmp_path):
    config = config_of("stablelm", num_key_value_heads=2)
    src = write_source(tmp_path / "src", config, torch.bfloat16, True, shards=8000)
    dst = tmp_path / "dst"
    written = to_native(src, dst, verify=False, max_shard_size=8000).written
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {*written.shards}
    assert index["metadata"]["total_size"] == written.bytes
    assert len(written.shards) > 2
    for shard in written.shards:
        assert (dst / shard).stat().st_size < 16000
        with safe_open(dst / shard, "pt") as file:
            record = json.loads(file.metadata()["hf_rmsnorm"])
            assert record["source"] == "src"
            assert record["source_type"] == "stablelm"
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert file.get_tensor(name).dtype == torch.bfloat16


def test_verification_runs_both_and_publishes_only_what_passes(tmp_path):
    src = write_source(tmp_path / "src", config_of("jais2"), torch.float32, True)
    done = to_native(src, tmp_path / "good")
    assert done.verification.runs["as loaded"].passed
    assert done.written.unused == ("model.norm.bias",)

    planned = plan_conversion(src, target="native")
    key = "model.layers.0.input_layernorm.weight"
    planned.target.tensors[key] = tensors.plus(planned.target.tensors[key], 0.1)
    with pytest.raises(
        ConversionError, match="not published, the result fails(.|\n)*FAIL"
    ):
        convert_checkpoint(src, tmp_path / "bad", planned=planned)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("name", ["olmo", "stablelm"])
def test_a_model_trained_as_rms_norm_keeps_the_weights_that_it_has(name):
    """The source's norms are RMSNorms of a stream that has a mean: what writes to it is
    not centred.
    """
    model_type, changes, *_ = PAIRS[name]
    config = config_of(model_type, **changes)
    plan = discover(make_proxy(config))
    for norm in plan.norms:
        assert norm.becomes_rms
    for key, value in plan.config.items():
        setattr(config, key, value)
    config.hf_rmsnorm = {**config.hf_rmsnorm, "computes": "rms_norm"}
    assert prove_native(make_proxy(config)) < 1e-12
