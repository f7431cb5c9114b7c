"""`convert_checkpoint` and `hf-rmsnorm convert` from end to end."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from checkpoints import contents
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from hf_rmsnorm.cli.main import main
from hf_rmsnorm.conversion import (
    ConversionError,
    ConversionRefused,
    VerificationFailed,
    convert_checkpoint,
    plan_conversion,
)
from hf_rmsnorm.conversion.proxy.model import give_weights
from hf_rmsnorm.demo import demo_path

GPT2 = demo_path("gpt2")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "gpt2-rms"
    before = contents(GPT2)
    done = convert_checkpoint(GPT2, folder)
    assert contents(GPT2) == before, "the source is only read"
    return folder, done


def text_ids(limit):
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(GPT2)
    text = "\n".join(topics[name] for name in sorted(topics))[: 40 * limit]
    return tokenizer(text, return_tensors="pt").input_ids[:, :limit]


@pytest.mark.full
def test_it_loads_without_this_package_and_says_the_same(converted):
    source = AutoModelForCausalLM.from_pretrained(GPT2).eval()
    result = AutoModelForCausalLM.from_pretrained(converted[0]).eval()
    assert type(result) is type(source)
    assert not result.config.tie_word_embeddings
    ids = text_ids(256)
    texts = []
    for model in (source, result):
        how = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0}
        texts.append(model.generate(ids[:, :16], **how).tolist())
    assert texts[0] == texts[1]
    with torch.no_grad():
        expected = source(ids).logits
        logits = result(ids).logits
        exact = source.double()(ids).logits
    assert (logits - exact).abs().max() <= 1.5 * (expected - exact).abs().max()


class NaiveSwap(torch.nn.LayerNorm):
    """A LayerNorm that subtracts no mean."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias


def perplexities(folder, ids):
    """(the perplexity of a model, that of the model with its norms swapped naively)."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = model(ids, labels=ids).loss.exp().item()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.__class__ = NaiveSwap
    return before, model(ids, labels=ids).loss.exp().item()


@torch.no_grad()
def test_perplexity_is_equal_to_six_digits_and_a_naive_swap_is_not(converted):
    ids = text_ids(512)
    source, swapped = perplexities(GPT2, ids)
    result, result_swapped = perplexities(converted[0], ids)
    assert f"{source:.6g}" == f"{result:.6g}"
    assert swapped > 1.02 * source
    assert f"{result_swapped:.6g}" == f"{source:.6g}"


def test_what_was_done_is_recorded(converted):
    folder, done = converted
    record = json.loads((folder / "config.json").read_text())["hf_rmsnorm"]
    assert record["computes"] == "layer_norm"
    assert record["proof"]["passed"]
    plan = json.loads((folder / "conversion_plan.json").read_text())
    assert len(plan["centre"]) == 22
    card = (folder / "README.md").read_text()
    assert "11 of 11 norms may run as RMSNorm" in card and "as RMSNorm: PASS" in card
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "hf-rmsnorm" in json.loads(file.metadata()["hf_rmsnorm"])["converted_by"]
        assert "lm_head.weight" in set(file.keys())
    assert done.verification.passed
    assert done.verification.runs.keys() == {"as loaded", "as RMSNorm"}
    assert contents(folder)["tokenizer.json"] == contents(GPT2)["tokenizer.json"]


@pytest.mark.full
def test_the_same_conversion_gives_the_same_bytes(converted, tmp_path):
    folder, _ = converted
    convert_checkpoint(GPT2, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


def test_the_plan_is_printed_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "demo:gpt2", "--plan"]) == 0
    text = capsys.readouterr().out
    assert "proven, 11 of 11 norms as RMSNorm" in text
    assert (
        "transformer.h.[0-4].mlp.c_proj.weight" in text
        and "lm_head.weight, a copy of" in text
    )
    assert not list(tmp_path.iterdir())
    assert main(["convert", "demo:gpt2", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["passed"]


@pytest.mark.full
def test_a_result_that_fails_is_not_published(tmp_path, monkeypatch, capsys):
    def damaged(*args, **kwargs):
        planned = plan_conversion(*args, **kwargs)
        steps = planned.centring.centre[1:]
        return replace(planned, centring=replace(planned.centring, centre=steps))

    with pytest.raises(VerificationFailed, match="0 norms as RMSNorm: FAIL"):
        convert_checkpoint(GPT2, tmp_path / "out", planned=damaged(GPT2))
    assert not (tmp_path / "out").exists()

    def convert_damaged(*args, **kwargs):
        return convert_checkpoint(*args, **kwargs, planned=damaged(GPT2))

    monkeypatch.setattr("hf_rmsnorm.conversion.convert_checkpoint", convert_damaged)
    assert main(["convert", "demo:gpt2", str(tmp_path / "other"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["published"] is False
    assert not (tmp_path / "other").exists()


def test_a_demo_is_converted_by_its_name(tmp_path, converted):
    convert_checkpoint("demo:gpt2", tmp_path / "dst", verify=False)
    assert tensors(tmp_path / "dst") == tensors(converted[0])
    assert plan_conversion("demo:gpt2").to_dict() == plan_conversion(GPT2).to_dict()


def test_a_hubs_model_is_planned_before_its_weights_are_there(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    shutil.copytree(GPT2, whole)
    # the keys of the hub's gpt2: those of the model without its head
    stored = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(whole / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    save_file(stored, whole / "model.safetensors", {"format": "pt"})
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"))

    def download(_, *, ignore_patterns, local_files_only):
        return str(bare if "*.safetensors" in ignore_patterns else whole)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    planned = plan_conversion("org/gpt2")
    done = convert_checkpoint("org/gpt2", tmp_path / "dst", planned=planned)
    assert done.verification.passed


def test_a_hub_id_is_looked_up_and_a_path_is_not(tmp_path, monkeypatch):
    asked = []

    def download(repository, *, ignore_patterns, local_files_only):
        asked.append((repository, "*.safetensors" in ignore_patterns))
        if repository == "org/gpt2":
            return str(GPT2)
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("hf_rmsnorm.sources.hub_answers", lambda: False)
    assert plan_conversion("org/gpt2").to_dict() == plan_conversion(GPT2).to_dict()
    convert_checkpoint("org/gpt2", tmp_path / "dst", verify=False)
    assert asked == [("org/gpt2", True), ("org/gpt2", False)], "a plan needs no weights"
    refused = {
        "bert-base-uncased": "cannot load the files of .*the hub does not answer",
        Path("nowhere"): "there is no folder .*nowhere",
        str(tmp_path / "nowhere"): "there is no folder .*nowhere",
        GPT2 / "config.json": "is a file: pass the folder that holds it",
        "demo:bert": "^no demo 'bert': choose one of demo:llama",
    }
    for src, what in refused.items():
        with pytest.raises(ConversionError, match=what):
            convert_checkpoint(src, tmp_path / "other")
    assert asked[2:] == [("bert-base-uncased", False)]
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_converted_is_refused_by_name(tmp_path, capsys):
    with pytest.raises(ConversionRefused, match="it uses RMSNorm already"):
        plan_conversion(demo_path("llama"))
    with pytest.raises(ConversionError, match=r"no config.json: pass "):
        plan_conversion(tmp_path)
    assert main(["convert", "demo:gpt2"]) == 2
    assert "pass DST, or --plan" in capsys.readouterr().err
    assert main(["convert", "demo:gpt2", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_broken_weights_are_not_published(tmp_path, capsys):
    model = tiny_models.build("gpt2")
    with torch.no_grad():
        model.get_parameter("transformer.h.0.ln_1.weight")[3] = float("nan")
    model.save_pretrained(tmp_path / "src")
    capsys.readouterr()
    assert (
        main(["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--json"]) == 3
    )
    out = capsys.readouterr().out
    assert "the original gives NaN or infinity in float64 too" in out
    assert not (tmp_path / "dst").exists()
    json.loads(out, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))


def break_tokenizer(src):
    (src / "tokenizer.json").write_text("{")
    text = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (src / "tokenizer_config.json").write_text(text)


def break_link(src):
    (src / "vocab.txt").symlink_to(src / "gone")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(break_tokenizer, "its tokenizer does not load"), (break_link, "vocab.txt")],
)
def test_what_cannot_be_read_is_found_before_anything_is_written(spoil, what, tmp_path):
    tiny_models.build("gpt2").save_pretrained(tmp_path / "src")
    spoil(tmp_path / "src")
    with pytest.raises(ConversionError, match=what):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


TRAINED = {
    "version": 1,
    "computes": "rms_norm",
    "residual_weights": {},
    "rms_norms": {},
}


def test_a_model_that_was_trained_as_rms_norm_is_not_converted(tmp_path):
    model = tiny_models.build("gpt2")
    model.config.hf_rmsnorm = TRAINED
    model.save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionRefused, match="is an RMSNorm model already"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("positions", [8, 32])
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_short_context_is_respected(positions, has_tokenizer, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(GPT2)
    tiny_models.build(
        "gpt2", vocab_size=len(tokenizer), n_positions=positions
    ).save_pretrained(tmp_path / "src")
    if has_tokenizer:
        tokenizer.save_pretrained(tmp_path / "src")
    done = convert_checkpoint(tmp_path / "src", tmp_path / "dst", verify="full")
    assert done.verification.passed


def test_a_model_without_a_head_gets_none_that_is_tied_to_the_centred_table(tmp_path):
    src = tmp_path / "src"
    dst = tmp_path / "dst"
    tiny_models.build("gpt2").transformer.save_pretrained(src)
    notes = convert_checkpoint(src, dst, verify=False).plan.centring.notes
    assert any("tie_word_embeddings becomes false" in note for note in notes)
    ids = torch.arange(1, 25)[None]
    outputs = []
    for folder in (src, dst):
        model = AutoModel.from_pretrained(folder, dtype=torch.float64)
        outputs.append(model(ids)[0])
    assert (outputs[0] - outputs[1]).abs().max() <= 1e-6 * outputs[0].abs().max()
    _, info = AutoModelForCausalLM.from_pretrained(dst, output_loading_info=True)
    assert "lm_head.weight" in info["missing_keys"]


@pytest.mark.full
def test_48_layers_in_bfloat16_are_as_good_as_before(tmp_path):
    model = tiny_models.build("gpt2", n_layer=48)
    give_weights(model)
    model.bfloat16().save_pretrained(tmp_path / "src")
    done = convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    for run in done.verification.runs.values():
        floor = run.noise_floor
        assert floor.candidate_max <= 1.5 * floor.reference_max


@pytest.mark.full
def test_what_memory_does_not_hold_is_verified_module_by_module(
    converted, tmp_path, monkeypatch
):
    little = SimpleNamespace(available=8_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    verification = convert_checkpoint(GPT2, tmp_path / "dst").verification
    assert verification.passed and "module by module" in verification.summary
    assert "11 norms as RMSNorm: PASS" in verification.summary
    assert tensors(tmp_path / "dst") == tensors(converted[0])


def tensors(folder):
    return contents(folder)["model.safetensors"]


@pytest.fixture
def no_plan(monkeypatch):
    def make_proxy(*_, **__):
        pytest.fail("it was planned")

    monkeypatch.setattr("hf_rmsnorm.conversion.api.make_proxy", make_proxy)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"prompts": "hello"}, "pass a list of texts"),
        ({"target": "bogus"}, "choose one of same, native"),
        ({"verify": "ful"}, "verify='ful': choose one of True, False, 'full'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_planned(
    tmp_path, no_plan, options, part
):
    with pytest.raises(ConversionRefused, match=part):
        convert_checkpoint(GPT2, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_plan_goes_with_no_other_way_to_convert(tmp_path):
    planned = plan_conversion(GPT2)
    with pytest.raises(ConversionRefused, match="planned says how"):
        convert_checkpoint(GPT2, tmp_path / "out", planned=planned, target="native")
    with pytest.raises(ConversionRefused, match="planned is of type dict"):
        convert_checkpoint(GPT2, tmp_path / "out", planned={})


def test_a_destination_that_cannot_be_made_is_refused_before_a_download_or_a_plan(
    tmp_path, monkeypatch, no_plan
):
    def download(*_, **__):
        pytest.fail("it downloads")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConversionError, match="exists already"):
        convert_checkpoint("org/gpt2", tmp_path)
    with pytest.raises(ConversionError, match="/: exists already"):
        convert_checkpoint("org/gpt2", "/")
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match=r"file is no folder: choose another DST"):
        convert_checkpoint("org/gpt2", tmp_path / "file" / "new" / "dst")

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    what = "permission denied: give permission to it, or choose another DST"
    with pytest.raises(ConversionError, match=what):
        convert_checkpoint("org/gpt2", tmp_path / "dst")


def test_a_few_tokens_of_a_large_checkpoint_are_run(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_rmsnorm.conversion.verify.pair.LARGE", 1)
    few = convert_checkpoint("demo:gpt2", tmp_path / "few").verification
    assert few.passed and "on 16 tokens" in few.summary
    every = convert_checkpoint(
        "demo:gpt2", tmp_path / "every", verify="full"
    ).verification
    assert every.passed and "on 16 tokens" not in every.summary
