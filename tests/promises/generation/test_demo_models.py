"""The embedded models: they load offline, are really trained, and write words."""

import json
import pydoc_data.topics
import re
import subprocess
import sys

import pytest
import torch
from places import SCRIPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm.demo import DEMO_MODELS, demo_path

# Written for this test, in no training text. Byte frequencies of the training text alone would give 3.02 nats.
UNSEEN = """\
If you open a file for reading and the file does not exist, an exception is raised. The function returns a list of
strings, one for each line of the file, and the optional argument gives the name of the encoding. When an object is
no longer needed, the method close() should be called, so that the resources used by the object are released.
"""
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
DTYPES = {"llama": torch.bfloat16, "qwen3": torch.bfloat16, "gpt2": torch.float32}
# measured when the models were committed, plus 0.05
UNSEEN_NATS_PER_BYTE = {"llama": 0.99, "qwen3": 0.99, "gpt2": 1.09}


@pytest.fixture(scope="module", params=DEMO_MODELS)
def demo(request):
    """(name, model in its stored dtype, tokenizer), read from the package alone."""
    path = demo_path(request.param)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()
    return request.param, model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def norm_weights(model):
    """Weights of every norm by parameter name: the 1-D parameters that are not biases."""
    return {n: p.float() for n, p in model.named_parameters() if p.ndim == 1 and n.endswith("weight")}


def test_unknown_name_is_one_clear_line():
    with pytest.raises(ValueError, match=r"^unknown demo model 'bert': choose one of llama, qwen3, gpt2$"):
        demo_path("bert")


def test_together_under_12_megabytes():
    files = [f for name in DEMO_MODELS for f in demo_path(name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 12_000_000
    assert sorted(f.parent.name for f in files if f.suffix == ".safetensors") == sorted(DEMO_MODELS)


def test_architecture_size_and_stored_dtype(demo):
    name, model, _ = demo
    assert type(model).__name__ == CLASSES[name]
    assert {p.dtype for p in model.parameters()} == {DTYPES[name]}
    assert 0.9e6 < model.num_parameters() < 1.2e6
    assert model.config.max_position_embeddings >= 512
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (name != "llama")


def test_no_machine_paths_in_the_json_files():
    for name in DEMO_MODELS:
        for file in demo_path(name).glob("*.json"):
            if file.name != "tokenizer.json":  # its alphabet holds every character
                assert not re.search(r'"(/|[A-Z]:\\|~)', file.read_text(encoding="utf-8")), file.name


def test_every_norm_weight_is_trained(demo):
    name, model, _ = demo
    weights = norm_weights(model)
    per_layer = {"llama": 2, "qwen3": 4, "gpt2": 2}[name]  # qwen3: q_norm and k_norm beside the usual two
    assert len(weights) == per_layer * model.config.num_hidden_layers + 1
    for path, weight in weights.items():
        assert weight.std() > 0.02, path
        assert (weight != 1).float().mean() > 0.9, path


def test_layer_norm_biases_are_trained():
    model = AutoModelForCausalLM.from_pretrained(demo_path("gpt2"))
    biases = {n: p for n, p in model.named_parameters() if ".ln_" in n and n.endswith("bias")}
    assert len(biases) == 2 * model.config.num_hidden_layers + 1
    assert all(bias.std() > 0.02 for bias in biases.values())


@torch.no_grad()
def test_loss_on_unseen_text(demo):
    name, model, tokenizer = demo
    ids = tokenizer(UNSEEN, return_tensors="pt").input_ids
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < UNSEEN_NATS_PER_BYTE[name]


def test_committed_record_is_consistent():
    for name in DEMO_MODELS:
        record = json.loads((demo_path(name) / "training.json").read_text(encoding="utf-8"))
        assert record["arch"] == name
        assert record["held_out_nats_per_byte"] < record["loss_start"]
        assert record["cpu_seconds"] < 2 * 15 * 60  # 15 minutes on 2 cores


@pytest.fixture(scope="module")
def vocabulary():
    """Words of the language reference; of the one- and two-letter ones only real words."""
    words = set(re.findall(r"[a-z]+", " ".join(pydoc_data.topics.topics.values()).lower()))
    short = {"a", "an", "as", "at", "be", "by", "do", "if", "in", "is", "it", "no", "of", "on", "or", "so", "to"}
    return {word for word in words if len(word) > 2 or word in short}


def continuation(model, tokenizer, prompt, **how):
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, **how, min_new_tokens=160, max_new_tokens=160)[0, inputs.input_ids.shape[1] :]
    return re.findall(r"[a-z]+", tokenizer.decode(output, skip_special_tokens=True).lower())[1:-1]  # whole words


@pytest.mark.parametrize("prompt", ["The following table", "Raises an exception if"])
def test_greedy_text_is_words(demo, vocabulary, prompt):
    """Greedy text of so small a model falls into a loop, but into a loop of words."""
    _, model, tokenizer = demo
    words = continuation(model, tokenizer, prompt, do_sample=False)
    assert len(words) >= 15
    assert sum(word in vocabulary for word in words) >= 0.8 * len(words), " ".join(words)


@pytest.mark.full
def test_sampled_text_is_many_words(demo, vocabulary):
    _, model, tokenizer = demo
    words = []
    for seed, prompt in enumerate(["The following table", "Raises an exception if", "This module", "Return the"]):
        torch.manual_seed(seed)
        words += continuation(model, tokenizer, prompt, do_sample=True, temperature=0.6)
    assert len(words) >= 60
    assert len(set(words)) >= 30
    assert sum(word in vocabulary for word in words) >= 0.8 * len(words), " ".join(words)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  two  spaces , and ' s ",
        "tab\there\r\nline\n",
        "naïve café — ½ · 한국어 日本語 🙂",
        "\x00\x7f\u200b",
        "don 't .",
    ],
)
def test_tokenizer_round_trip(demo, text):
    _, _, tokenizer = demo
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_tokenizer_end_of_text(demo):
    _, _, tokenizer = demo
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer(["ab", "a"], padding=True).input_ids == [[97, 98], [97, 256]]
    assert tokenizer.decode([97, 256], skip_special_tokens=True) == "a"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "processes"), [("accelerate.commands.launch", 1), ("torch.distributed.run", 2)], ids=["one", "two"]
)
def test_training_script_writes_a_loadable_checkpoint(tmp_path, monkeypatch, launcher, processes):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    script = SCRIPTS / "train_demo.py"
    launch = [sys.executable, "-m", launcher] + (["--nproc_per_node=2"] if processes == 2 else [])
    train = [str(script), "--arch", "qwen3", "--steps", "3", "--threads", "1", "--output", str(tmp_path)]
    done = subprocess.run(launch + train, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == record
    assert (record["steps"], record["processes"]) == (3, processes)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
