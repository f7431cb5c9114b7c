"""`hf-rmsnorm bench MODEL`: both sides are timed in turn, and the results compared."""

import json
import re
import shutil

import pytest
import tiny_models
import torch
import transformers

from hf_rmsnorm.cli import bench
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.demo import demo_path

SMALL = dict(
    vocab_size=64, num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
    intermediate_size=32, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
T5 = dict(
    vocab_size=64, num_layers=1, d_model=32, d_kv=16, num_heads=2, d_ff=32,
    decoder_start_token_id=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved LLaMA of one layer; it has no tokenizer, so random ids stand for a text."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_models.build("llama", torch.bfloat16, num_hidden_layers=1)
    model.save_pretrained(folder)
    return folder


def run(capsys, *argv):
    code = main(["bench", *map(str, argv), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def run_json(capsys, *argv):
    return json.loads(run(capsys, *argv, "--json"))


def test_both_sides_are_timed_and_compared(capsys, folder):
    argv = (folder, "--new-tokens", 2, "--batch", 2, "--length", 8)
    data = run_json(capsys, *argv)
    assert (data["swapped"], data["new_tokens"], data["batch"]) == (3, 2, [2, 8])
    for key in ("tokens_per_second", "step_ms"):
        assert min(data[key]) > 0 and len(data[key]) == 2
    assert data["token_ids"][0] == data["token_ids"][1]
    assert data["losses"][0] == pytest.approx(data["losses"][1], rel=1e-2)
    assert "interpreter" in data["backend_reason"]


def test_where_no_kernel_runs_it_says_that_the_times_are_of_the_same_code(
    capsys, folder, no_kernel_here
):
    out = run(capsys, folder, "--new-tokens", 3, "--length", 8)
    assert out.startswith(f"{folder}: 3 norms swapped, bfloat16 on cpu\n")
    assert "tokens per second (3 new" in out and "the same tokens" in out
    assert "ms per training step (1 x 8 tokens)" in out
    assert len(re.findall(r" \d\.\d\d \(\d\.\d\d to \d\.\d\d\)$", out, re.M)) == 2
    text = " ".join(out.split())
    assert "plain PyTorch (there is no kernel here); both times are of the same" in text


@pytest.mark.full
def test_it_generates_greedily_whatever_the_checkpoint_asks_for(
    capsys, tmp_path, no_kernel_here
):
    shutil.copytree(demo_path("gpt2"), tmp_path, dirs_exist_ok=True)
    config = transformers.GenerationConfig(do_sample=True, temperature=9.0, num_beams=2)
    config.save_pretrained(tmp_path)
    argv = ("--new-tokens", 4, "--no-train")
    data, demo = (run_json(capsys, model, *argv) for model in (tmp_path, "demo:gpt2"))
    assert data["token_ids"] == demo["token_ids"]
    assert [len(side) for side in data["token_ids"]] == [4, 4]


def test_without_a_gpu_there_is_nothing_to_measure_unless_asked(capsys, folder):
    assert main(["bench", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"{folder}: nothing to measure")
    assert "--device cpu" in out and "speed-up" not in out


def test_no_train_leaves_the_step_out(capsys, folder, no_kernel_here):
    argv = (folder, "--new-tokens", 1, "--no-train", "--dtype", "fp32")
    data = run_json(capsys, *argv)
    assert data["dtype"] == "float32" and "tokens_per_second" in data
    assert not {"step_ms", "losses", "batch"} & data.keys()


def test_different_results_are_named(capsys, folder, no_kernel_here, monkeypatch):
    tokens = iter([[5, 6], [5, 7]] * 3)
    monkeypatch.setattr(bench, "greedy", lambda *args: next(tokens))
    out = run(capsys, folder, "--new-tokens", 2, "--no-train")
    assert "other tokens: run hf-rmsnorm verify" in out


def test_a_short_context_shortens_prompt_and_text(capsys, tmp_path, no_kernel_here):
    tiny_models.build(
        "llama", num_hidden_layers=1, max_position_embeddings=16
    ).save_pretrained(tmp_path)
    data = run_json(capsys, tmp_path, "--new-tokens", 50, "--length", 500)
    assert data["new_tokens"] == 8 and data["batch"] == [1, 16]


@pytest.mark.parametrize(
    "name, config",
    [
        ("BertModel", transformers.BertConfig(**SMALL)),
        ("T5ForConditionalGeneration", transformers.T5Config(**T5)),
    ],
    ids=["encoder", "encoder and decoder"],
)
def test_what_does_not_go_on_from_a_text_is_trained(
    capsys, tmp_path, no_kernel_here, name, config
):
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    data = run_json(capsys, tmp_path, "--length", 8)
    assert data["losses"][0] == data["losses"][1] and "token_ids" not in data


def test_a_model_that_takes_no_text_is_refused(capsys, tmp_path):
    vit = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2
    )
    transformers.ViTModel(vit).save_pretrained(tmp_path)
    assert main(["bench", str(tmp_path)]) == 2
    assert "takes pixel_values and not a text" in capsys.readouterr().err
