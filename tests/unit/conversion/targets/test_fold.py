"""Norms folded into what reads them: found without names, exact, and refused where something else reads them too."""

import json
import os

import pytest
import torch
from checkpoints import load
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_rmsnorm import patch_model
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.conversion import convert_checkpoint, plan_conversion
from hf_rmsnorm.conversion.plan import ConversionRefused
from hf_rmsnorm.conversion.proxy.model import give_weights, make_proxy
from hf_rmsnorm.conversion.proxy.run import in_double
from hf_rmsnorm.conversion.targets.fold import folded, plan_fold

SMALL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GPT2 = dict(n_embd=32, n_head=4, n_layer=2, vocab_size=96, n_positions=64, bos_token_id=1, eos_token_id=2)
SPARSE = dict(
    tie_word_embeddings=False, head_dim=8, num_key_value_heads=2, prefix_dense_intermediate_size=40, num_experts=4,
    num_shared_experts=1, mlp_layer_types=["dense", "sparse"], layer_types=["sliding_attention", "full_attention"],
    sliding_window=8,
)  # fmt: skip


# type, config, (norms folded, norms), why the rest stays
@pytest.mark.parametrize(
    "model_type, config, count, reason",
    [
        ("gpt2", GPT2, (4, 5), "something else"),  # the tied table
        ("gpt2", {**GPT2, "tie_word_embeddings": False}, (4, 5), "has no bias to take the norm's"),
        ("gpt_neox", SMALL, (4, 5), "has no bias"),
        ("cohere", {**SMALL, "tie_word_embeddings": False}, (3, 3), None),
        ("phi", SMALL, (3, 3), None),  # a head with a bias
        ("cohere2_moe", {**SMALL, **SPARSE}, (3, 3), None),  # experts, of which each token meets two
        ("bert", SMALL, (1, 6), "something else"),  # post-norm: the skip reads the norms
    ],
)
def test_readers_are_found_and_the_fold_is_exact(model_type, config, count, reason):
    plan = plan_fold(make_proxy(AutoConfig.for_model(model_type, **config)))
    assert plan.passed and plan.difference <= 1e-13
    assert (len(plan.folds), len(plan.folds) + len(plan.kept)) == count
    assert all(reason in text for text in plan.kept.values())
    assert json.loads(json.dumps(plan.to_dict()))["passed"]


@pytest.mark.parametrize(
    "model_type, config, reason",
    [
        ("olmo", SMALL, "neither weight nor bias"),
        ("stablelm", {**SMALL, "num_key_value_heads": 2}, "q_proj.weight, which reads it, has no bias"),
        ("nemotron", {**SMALL, "num_key_value_heads": 2}, "its weight is not stored as it is applied"),
        ("llama", SMALL, "it has no LayerNorm"),
    ],
)
def test_what_cannot_be_folded_is_refused_by_name(model_type, config, reason):
    with pytest.raises(ConversionRefused, match=reason):
        plan_fold(make_proxy(AutoConfig.for_model(model_type, **config)))


def test_a_second_reader_keeps_its_norm(monkeypatch):
    """A skip that starts behind the norm reads it as well: nothing may be folded there."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    forward = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: forward(self, x) + x)
    plan = plan_fold(make_proxy(AutoConfig.for_model("gpt2", **GPT2)))
    assert {fold.path.rpartition(".")[2] for fold in plan.folds} == {"ln_1"}
    assert "something else" in plan.kept["transformer.h.0.ln_2"]


def test_an_incomplete_fold_does_not_pass(monkeypatch):
    from hf_rmsnorm.conversion.targets import fold as module

    def without_biases(folds, names):
        made = folded(folds, names)
        changed = {bias for fold in folds for bias, _, _ in fold.biases}
        return {key: module.Stored(key) if key in changed else new for key, new in made.items()}

    monkeypatch.setattr(module, "folded", without_biases)
    with pytest.raises(ConversionRefused, match="nothing is folded"):
        plan_fold(make_proxy(AutoConfig.for_model("gpt2", **GPT2)))


def write_source(folder, model_type, config, dtype, auto=AutoModelForCausalLM, **how):
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(AutoConfig.for_model(model_type, **config)).double().eval()
    give_weights(model, seed=5)
    model.to(dtype).save_pretrained(folder, **how)
    return folder


@torch.no_grad()
def logits(folder, **inputs):
    with in_double():
        how = {"dtype": torch.float64, "experts_implementation": "eager"}  # the grouped one takes no float64
        return AutoModelForCausalLM.from_pretrained(folder, **how).eval()(**inputs).logits


@pytest.mark.full
def test_written_checkpoint_has_ones_zeros_and_the_logits_of_the_source(tmp_path):
    src = write_source(tmp_path / "src", "gpt2", GPT2, torch.float32, max_shard_size="20KB")
    done = convert_checkpoint(src, tmp_path / "dst", fold_affine=True)
    assert done.verification.passed and len(done.written.shards) > 1
    ids = torch.randint(3, 96, (2, 30), generator=torch.Generator().manual_seed(1))
    expected, got = (logits(tmp_path / which, input_ids=ids) for which in ("src", "dst"))
    assert (expected - got).abs().max() <= 1e-6 * expected.abs().max()  # rounded to float32
    plain = convert_checkpoint(src, tmp_path / "plain", verify=False)
    before, after = load(tmp_path / "plain"), load(tmp_path / "dst")
    assert before.keys() == after.keys() and plain.written.shards.keys() == done.written.shards.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    readers = {
        f"transformer.h.{i}.{n}.{p}" for i in (0, 1) for n in ("attn.c_attn", "mlp.c_fc") for p in ("weight", "bias")
    }
    norms = {f"transformer.h.{i}.{n}.{p}" for i in (0, 1) for n in ("ln_1", "ln_2") for p in ("weight", "bias")}
    assert changed == readers | norms
    assert all(bool((after[key] == (1 if key.endswith("weight") else 0)).all()) for key in norms)
    assert (tmp_path / "dst" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()


def test_a_converted_checkpoint_stays_converted(tmp_path):
    """The record of the conversion is kept and still holds: the norms run as RMSNorm."""
    src = write_source(tmp_path / "src", "gpt2", GPT2, torch.float32)
    convert_checkpoint(src, tmp_path / "rms", verify=False)
    done = convert_checkpoint(tmp_path / "rms", tmp_path / "dst", fold_affine=True)
    assert done.verification.passed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst").eval()
    report = patch_model(model)
    assert sum(record.converted is not None and bool(record.converted) for record in report.swapped) == 5


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "config"),
    [("gpt2", GPT2), ("persimmon", SMALL), ("phi", SMALL), ("cohere2_moe", {**SMALL, **SPARSE})],
)
def test_converted_and_folded_in_one_pass(model_type, config, tmp_path, capsys):
    """Every norm that has readers with biases is the bare RMSNorm of its input, and the logits stay."""
    src = write_source(tmp_path / "src", model_type, config, torch.float32)
    assert main(["convert", str(src), str(tmp_path / "dst"), "--fold-affine"]) == 0
    assert "folded into the linears" in capsys.readouterr().out
    card = (tmp_path / "dst" / "README.md").read_text()
    assert card.index("## Converted") < card.index("## Norms folded") and card.count("Made from `src`") == 2
    convert_checkpoint(src, tmp_path / "rms", verify=False)
    folds = plan_conversion(src, fold_affine=True).fold.folds
    after, plain = load(tmp_path / "dst"), load(tmp_path / "rms")
    assert folds and all(bool((after[fold.weight] == 1).all()) for fold in folds)
    assert all(fold.bias is None or not after[fold.bias].any() for fold in folds)
    touched = {n for f in folds for n in (f.weight, f.bias, *(s.key for s in f.scales), *(b[0] for b in f.biases))}
    assert all(torch.equal(after[key], plain[key]) for key in plain.keys() - touched)
    ids = torch.randint(3, 96, (2, 30), generator=torch.Generator().manual_seed(1))
    expected, got = (logits(tmp_path / which, input_ids=ids) for which in ("src", "dst"))
    assert (expected - got).abs().max() <= 2e-6 * expected.abs().max()  # rounded to float32
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst").eval()
    assert all(record.converted for record in patch_model(model).swapped)


def test_a_checkpoint_saved_without_the_prefix_of_its_base_model(tmp_path):
    src = write_source(tmp_path / "src", "gpt2", GPT2, torch.float32)
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in load(src).items()}
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    done = convert_checkpoint(src, tmp_path / "dst", fold_affine=True)
    assert done.verification.passed and done.plan.fold.folds[0].weight == "h.0.ln_1.weight"
    assert bool((load(tmp_path / "dst")["h.0.ln_1.weight"] == 1).all())


def test_the_plan_of_a_fold_is_printed(tmp_path, capsys):
    src = write_source(tmp_path / "src", "gpt2", GPT2, torch.float32)
    assert main(["convert", str(src), "--plan", "--fold-affine", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["proof"]["passed"] and data["fold"]["passed"] and len(data["fold"]["folds"]) == 4


def test_tensors_of_other_dtypes_keep_their_bytes(tmp_path):
    src = write_source(tmp_path / "src", "gpt2", GPT2, torch.bfloat16)
    tensors = load_file(src / "model.safetensors")
    extra = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()}
    save_file({**tensors, **extra}, src / "model.safetensors", {"format": "pt"})
    convert_checkpoint(src, tmp_path / "dst", fold_affine=True, verify=False)
    after = load(tmp_path / "dst")
    assert torch.equal(after["transformer.h.0.attn.bias"], extra["transformer.h.0.attn.bias"])
    assert after["transformer.h.0.attn.c_attn.weight"].dtype == torch.bfloat16


def test_a_model_of_pixels(tmp_path):
    config = dict(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    src = write_source(tmp_path / "src", "vit", config, torch.float32, AutoModel)
    done = convert_checkpoint(src, tmp_path / "dst", fold_affine=True)
    assert done.verification.passed and len(done.plan.fold.folds) == 4
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]
