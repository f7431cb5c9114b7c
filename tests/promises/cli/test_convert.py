"""`hf-rmsnorm convert`: every option reaches every way of converting, and what is said
and when.
"""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hf_rmsnorm import convert_checkpoint
from hf_rmsnorm.cli.main import build_parser, main
from hf_rmsnorm.conversion.options import TARGETS, ConversionOptions
from hf_rmsnorm.conversion.proxy.model import give_weights
from hf_rmsnorm.conversion.proxy.run import quiet

SMALL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
COHERE = ("CohereForCausalLM", "cohere", {**SMALL, "tie_word_embeddings": False})
WAYS = {
    "": COHERE,
    "--target native": ("OlmoForCausalLM", "olmo", SMALL),
}
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 96
    def get_vocab(self): return {}
    def _tokenize(self, text, **kwargs):
        with open(MARK, "a") as file: file.write(text)
        return list(text)
    def _convert_token_to_id(self, token): return 3 + ord(token) % 90
    def _convert_id_to_token(self, index): return "a"
    def save_vocabulary(self, *args, **kwargs): return ()
"""


def save(folder, name, model_type, sizes):
    torch.manual_seed(0)
    model = getattr(transformers, name)(
        AutoConfig.for_model(model_type, **sizes)
    ).eval()
    give_weights(model)
    with quiet():
        model.save_pretrained(folder)
    return folder


def run(capsys, *argv):
    code = main(["convert", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_and_the_function_take_the_same():
    called = {"prompt": "prompts", "no_verify": "verify", "full_verify": "verify"}
    of_the_command = {"help", "json", "traceback", "plan"}
    parser = build_parser()._subparsers._group_actions[0].choices["convert"]
    options = {
        called.get(a.dest, a.dest): a
        for a in parser._actions
        if a.dest not in of_the_command
    }
    of_objects = {"model_class", "progress", "planned"}  # which no command line has
    parameters = {*inspect.signature(convert_checkpoint).parameters} - {"options"}
    defaults = {field.name: field.default for field in fields(ConversionOptions)}
    assert {*options} == {*parameters, *defaults} - of_objects
    assert list(TARGETS) == options["target"].choices
    assert options["target"].default == defaults["target"]


@pytest.mark.parametrize("way", WAYS)
def test_options_reach_every_way(way, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked on stdin"))
    src, dst, mark = (
        save(tmp_path / "src", *WAYS[way]),
        tmp_path / "dst",
        tmp_path / "ran",
    )
    torch.save(load_file(src / "model.safetensors"), src / "pytorch_model.bin")
    (src / "model.safetensors").unlink()
    (src / "own.py").write_text(TOKENIZER.replace("MARK", repr(str(mark))))
    own = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
    }
    (src / "tokenizer_config.json").write_text(json.dumps(own))

    options = [src, dst, *way.split(), "--prompt", "abcabc"]
    given: list[str] = []
    for _ in range(2):
        code, _, err = run(capsys, *options, *given)
        assert code == 2 and err.count("\n") == 1, err
        assert not mark.exists() or "--trust-remote-code" in given
        given += [
            cure for cure in ("--allow-pickle", "--trust-remote-code") if cure in err
        ]
    assert len(set(given)) == 2 and not dst.exists()
    options += ["--max-shard-size", "10KB"]
    code, out, err = run(capsys, *options, "--allow-pickle", "--trust-remote-code")
    assert code == 0, err
    assert "abcabc" in mark.read_text() and "not copied" not in out.replace(
        "pytorch_model", ""
    )
    assert (dst / "README.md").is_file()
    assert (dst / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("way", [*WAYS, "--plan"])
def test_code_of_the_source_runs_only_if_trusted(way, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    src, mark = save(tmp_path / "src", *COHERE), tmp_path / "ran"
    (src / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass OwnConfig: pass\n")
    config = json.loads((src / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (src / "config.json").write_text(json.dumps(config))
    code, _, err = run(
        capsys, src, *([] if way == "--plan" else [tmp_path / "dst"]), *way.split()
    )
    assert code == 2 and err.count("\n") == 1, err
    assert (
        "own has no native target" in err
        if "native" in way
        else "--trust-remote-code" in err
    )
    assert not mark.exists() and not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["dst", "--no-verify", "--full-verify"], "not allowed with"),
        (["dst", "--plan"], "leave out --plan, or DST"),
        ([""], "pass DST"),
    ],
)
def test_arguments_that_contradict_each_other(capsys, arguments, words):
    try:
        code, _, err = run(capsys, "demo:gpt2", *arguments)
    except SystemExit as error:
        code = error.code
        err = capsys.readouterr().err
    assert code == 2
    assert words in err


def test_options_may_stand_before_dst(tmp_path, capsys):
    src = save(tmp_path / "src", *WAYS["--target native"])
    code, out, err = run(
        capsys, src, "--no-verify", "--target", "native", tmp_path / "dst", "--json"
    )
    assert code == 0 and json.loads(out)["dst"] == str(tmp_path / "dst"), err
    with pytest.raises(SystemExit):
        run(capsys, src, "--no-verify", tmp_path / "one", "--json", tmp_path / "two")
    err = capsys.readouterr().err
    assert str(tmp_path / "two") in err and err.count("\n") == 1


def test_inputs_of_a_file_reach_what_text_does_not(tmp_path, capsys):
    tower = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = {
        "model_type": "clip_vision_model",
        **tower,
        "image_size": 16,
        "patch_size": 8,
    }
    text = {"model_type": "llama", **tower, "vocab_size": 96}
    sizes = {"vision_config": vision, "text_config": text, "image_token_index": 5}
    src = save(tmp_path / "src", "LlavaForConditionalGeneration", "llava", sizes)
    words = {"input_ids": torch.arange(8, 16)[None]}
    picture = {
        "input_ids": torch.tensor([[5, 5, 5, 5, 8, 9]]),
        "pixel_values": torch.randn(1, 3, 16, 16),
    }
    for name, tensors in (("words", words), ("picture", picture)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    code, _, err = run(
        capsys, src, "--plan", "--inputs", tmp_path / "words.safetensors"
    )
    assert (
        code == 2
        and "the inputs reached 0 of 6 LayerNorms" in err
        and "pass --inputs FILE that reach all" in err
    )
    code, out, err = run(
        capsys, src, "--plan", "--inputs", tmp_path / "picture.safetensors"
    )
    assert code == 0 and "of 6 norms as RMSNorm" in out, err


@pytest.mark.full
def test_a_conversion_converted_again_is_said_to_be_one(tmp_path, capsys):
    src, once = save(tmp_path / "src", *COHERE), tmp_path / "once"
    assert run(capsys, src, once, "--no-verify")[0] == 0
    code, out, _ = run(capsys, once, "--plan")
    assert code == 0 and "converted before" in out


def test_the_plan_comes_before_the_weights_are_written(tmp_path, capsys, monkeypatch):
    src = save(tmp_path / "src", *COHERE)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code, out, err = run(capsys, src, "~/dst", "--no-verify", "--json")
    assert code == 0 and (tmp_path / "home" / "dst").is_dir()
    assert "proven" in err and "tensors changed" in err
    assert json.loads(out)["published"]


def test_an_interrupt_is_one_line(tmp_path, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_rmsnorm.conversion.convert_checkpoint", interrupt)
    code, out, err = run(capsys, "demo:gpt2", tmp_path / "dst")
    assert code == 130 and not out
    assert err == "hf-rmsnorm: interrupted\n"


@pytest.mark.parametrize("text", ["{", "[]", "", '{"a":' + "[" * 100_000])
@pytest.mark.parametrize("way", WAYS)
def test_a_broken_config_is_named(way, text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    code, _, err = run(capsys, tmp_path, Path("dst"), *way.split())
    assert (
        code == 2
        and str(tmp_path / "config.json") in err
        and "download it again" in err
        and err.count("\n") == 1
    )


GPT2 = dict(n_layer=1, n_embd=32, n_head=2, vocab_size=96, n_positions=32)


MISSING = {
    "transformer.h.0.mlp.c_fc.bias": "src: has no 'transformer.h.0.mlp.c_fc.bias'",
    "transformer.h.0.mlp.c_proj.weight": "tensor 'transformer.h.0.mlp.c_proj.weight', "
    "which such a model has, is missing from the checkpoint: add it",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_tensor_that_the_source_lacks_is_named(name, tmp_path, capsys):
    src = save(tmp_path / "src", "GPT2LMHeadModel", "gpt2", GPT2)
    tensors = load_file(src / "model.safetensors")
    del tensors[name]
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    code, _, err = run(capsys, src, tmp_path / "dst")
    assert code == 2 and MISSING[name] in err
    # Before a byte is written: nothing is left beside DST.
    assert len(err.splitlines()) == 1 and [*tmp_path.iterdir()] == [src]
