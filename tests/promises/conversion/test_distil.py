"""`examples/distil.py`: a student starts as the conversion, comes nearer to the
original, and loads as what it is.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from runpy import run_path

import pytest
import torch
from places import EXAMPLES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast

from hf_rmsnorm import patch_model
from hf_rmsnorm.conversion.proxy.layer_norms import find_layer_norms
from hf_rmsnorm.converted.record import make_record

EXAMPLE = EXAMPLES / "distil.py"
WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(teacher, a student whose LayerNorms are called RMSNorms, text)."""
    root = tmp_path_factory.mktemp("distil")
    (root / "empty").touch()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif parameter.dim() == 2:
                parameter.mul_(5.0)
    vocabulary = {}
    for i, word in enumerate(["[PAD]", "[UNK]", *WORDS]):
        vocabulary[word] = i
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]"
    )
    ids = torch.ones(1, 4, dtype=torch.long)
    norms, _ = find_layer_norms(BertModel(config).double().eval(), {"input_ids": ids})
    rms = {}
    for path, norm in norms.items():
        rms[path] = {"eps": norm.spec.eps}
    record = make_record({}, rms, [], list(norms))
    for name in ("teacher", "student"):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        model.config.hf_rmsnorm = {**record, "computes": "rms_norm"}
    generator = torch.Generator().manual_seed(1)
    lines = []
    for length in torch.randint(3, 12, (200,), generator=generator):
        words = torch.randint(60, (int(length),), generator=generator)
        lines.append(" ".join(WORDS[i] for i in words))
    (root / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    shutil.copytree(root / "student", root / "cut")
    os.truncate(root / "cut" / "model.safetensors", 2000)
    shutil.copytree(root / "student", root / "wide")
    config.hidden_size = 48
    BertModel(config).save_pretrained(root / "wide")
    return root / "teacher", root / "student", root / "text.txt"


def launched(*arguments):
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    # plain torch takes a second
    environment = {}
    for k, v in os.environ.items():
        if k != "TRITON_INTERPRET":
            environment[k] = v
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, *launch, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def main(monkeypatch, folders, tmp_path):
    """The example's own, in this process, with arguments after those of each run."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    example = run_path(str(EXAMPLE))["main"]

    def run(*options, student=folders[1], text=folders[2], out=tmp_path / "out"):
        paths = [str(folders[0]), str(student), f"--text={text}"]
        if out is not None:
            paths.append(f"--output-dir={out}")
        example([*paths, "--cpu", *options])

    return run


@pytest.mark.full
def test_two_processes_bring_a_student_nearer_and_it_loads_as_rms_norm(
    folders, tmp_path
):
    teacher, student, text = folders
    run = launched(
        teacher, student, "--cpu", "--text", text, "--max-steps", 40,
        "--evaluate-every", 20, "--batch-size", 16, "--learning-rate", 3e-3,
        "--output-dir", tmp_path / "out",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("distilled ") == 1
    result = json.loads((tmp_path / "out" / "distil.json").read_text())
    assert len(result["losses"]) == 40
    assert result["converted"]["cosine_mean"] < result["distilled"]["cosine_mean"]
    model = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    report = patch_model(model)
    assert [norm.converted for norm in report.swapped] == [True] * 5
    ids = torch.arange(2, 12)[None]
    original = AutoModel.from_pretrained(teacher).eval()(ids).last_hidden_state
    started = AutoModel.from_pretrained(student).eval()
    patch_model(started)
    errors = []
    for m in (started, model):
        errors.append((m(ids).last_hidden_state - original).norm())
    assert errors[1] < errors[0]


@pytest.mark.full
def test_what_is_near_already_is_left_as_it_is(tmp_path, capsys, main):
    main("--max-steps=2", "--learning-rate=10")
    assert "The conversion is enough" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("paths", "option", "says"),
    [
        (
            {"student": "teacher"},
            "",
            "no LayerNorm of .*teacher runs as RMSNorm: make it with examples/postnorm",
        ),
        ({"student": "nothing"}, "", "cannot load .*nothing"),
        ({"text": "nothing.txt"}, "", "cannot read .*nothing.txt"),
        ({}, "--batch-size=5000", "fewer than one batch of 5000"),
        ({}, "--batch-size=0", "invalid number, at least 1: value: '0'"),
        ({"student": "cut"}, "", "cannot load .*cut: Error while deserializing header"),
        (
            {"student": "wide"},
            "",
            "wide is no conversion of .*teacher: its hidden_size is 48, not 32",
        ),
        ({}, "--seed=-1", "invalid number, at least 0, less than"),
        ({}, "--learning-rate=nan", "argument --learning-rate: invalid number"),
        (
            {},
            "--learning-rate=1e30",
            "the loss is nan at step 2, nothing is written: give a smaller",
        ),
        ({}, "--held-out=EMPTY", "empty has no line to measure on"),
        (
            {"out": "empty/out"},
            "",
            "cannot write to --output-dir .*empty/out: .*; give another one",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    folders, tmp_path, capsys, main, paths, option, says
):
    root = folders[0].parent
    where = {}
    for name, path in paths.items():
        where[name] = root / path
    option = (option or "--seed=0").replace("EMPTY", str(root / "empty"))
    with pytest.raises(SystemExit) as stop:
        main("--batch-size=8", "--max-steps=3", option, **where)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("distil.py")]
    assert re.search(says, line)
    assert not (tmp_path / "out").exists()


def test_longer_lines_than_the_model_has_positions_are_cut(tmp_path, main):
    text = tmp_path / "long.txt"
    text.write_text(f"{' '.join(WORDS)}\n" * 20)
    main("--max-steps=1", "--batch-size=8", text=text)
