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

import psutil
import pytest
import torch
from places import EXAMPLES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast

from hf_rmsnorm import patch_model
from hf_rmsnorm.conversion.proxy.layer_norms import find_layer_norms
from hf_rmsnorm.record import RECORD_KEY, make_record

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
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]"
    )
    norms, _ = find_layer_norms(
        BertModel(config).double().eval(),
        {"input_ids": torch.ones(1, 4, dtype=torch.long)},
    )
    rms = {
        path: {"eps": n.spec.eps, "hidden_size": n.hidden_size}
        for path, n in norms.items()
    }
    for name in ("teacher", "student"):
        if name == "student":
            record = make_record({}, rms, [], list(norms))
            setattr(model.config, RECORD_KEY, {**record, "computes": "rms_norm"})
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    generator = torch.Generator().manual_seed(1)
    lines = [
        " ".join(WORDS[i] for i in torch.randint(60, (int(torch.randint(3, 12, (1,), generator=generator)),),
                                                 generator=generator))
        for _ in range(200)
    ]  # fmt: skip
    shutil.copytree(root / "student", root / "cut")
    os.truncate(root / "cut" / "model.safetensors", 2000)
    shutil.copytree(root / "student", root / "wide")
    BertModel(BertConfig(**{**config.to_dict(), "hidden_size": 48})).save_pretrained(
        root / "wide"
    )
    (root / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return root / "teacher", root / "student", root / "text.txt"


def launched(*arguments):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        str(EXAMPLE),
    ]
    # plain torch takes a second
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture
def main(monkeypatch):
    """The example's own, in this process."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    return run_path(str(EXAMPLE))["main"]


@pytest.mark.nightly
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
    errors = [(m(ids).last_hidden_state - original).norm() for m in (started, model)]
    assert errors[1] < errors[0]


@pytest.mark.full
def test_what_is_near_already_is_left_as_it_is(folders, tmp_path, capsys, main):
    teacher, student, text = folders
    out = tmp_path / "out"
    main([str(teacher), str(student), "--cpu", f"--text={text}", "--max-steps=2", "--learning-rate=10",
          f"--output-dir={out}"])  # fmt: skip
    assert "The conversion is enough" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"student": "teacher"},
            "no LayerNorm of .*teacher runs as RMSNorm: make it with examples/postnorm/convert.py",
        ),
        ({"student": "nothing"}, "cannot load .*nothing"),
        ({"text": "nothing.txt"}, "cannot read .*nothing.txt"),
        ({"batch": "5000"}, "fewer than one batch of 5000"),
        ({"batch": "0"}, "invalid number, at least 1: value: '0'"),
        ({"student": "cut"}, "cannot load .*cut: Error while deserializing header"),
        (
            {"student": "wide"},
            "wide is no conversion of .*teacher: its hidden_size is 48, not 32",
        ),
        ({"flag": "--seed=-1"}, "invalid number, at least 0, less than"),
        ({"flag": "--learning-rate=nan"}, "argument --learning-rate: invalid number"),
        (
            {"flag": "--learning-rate=1e30"},
            "the loss is nan at step 2, nothing is written: give a smaller",
        ),
        ({"flag": "--held-out=EMPTY"}, "empty has no line to measure on"),
        (
            {"flag": "--output-dir=EMPTY/out"},
            "cannot write to --output-dir .*empty/out: .*; give another one",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    folders, tmp_path, capsys, main, change, says
):
    teacher, student, text = folders
    student, text = (
        student.with_name(change.get("student", "student")),
        text.with_name(change.get("text", text.name)),
    )
    flag = change.get("flag", "--seed=0").replace("EMPTY", str(text.with_name("empty")))
    with pytest.raises(SystemExit) as stop:
        main([str(teacher), str(student), "--cpu", f"--text={text}", f"--batch-size={change.get('batch', 8)}",
              f"--output-dir={tmp_path / 'out'}", "--max-steps=3", flag])  # fmt: skip
    assert stop.value.code == 2
    (line,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("distil.py")
    ]
    assert re.search(says, line)
    assert not (tmp_path / "out").exists()


def test_the_student_of_an_earlier_run_is_not_written_over(
    folders, tmp_path, capsys, main, monkeypatch
):
    teacher, student, text = folders
    kept = tmp_path / "distilled" / "model.safetensors"
    kept.parent.mkdir()
    kept.touch()
    words = [
        str(teacher),
        str(student),
        "--cpu",
        f"--text={text}",
        "--max-steps=2",
        "--learning-rate=3e-3",
    ]
    with pytest.raises(SystemExit):
        main([*words, f"--output-dir={kept.parent}"])
    assert (
        "distilled has model.safetensors of an earlier run: give another --output-dir"
        in capsys.readouterr().err
    )
    monkeypatch.chdir(tmp_path)
    main(words)
    assert (
        tmp_path / "distilled-2" / "distil.json"
    ).is_file() and kept.stat().st_size == 0


def test_longer_lines_than_the_model_has_positions_are_cut(folders, tmp_path, main):
    teacher, student, _ = folders
    text = tmp_path / "long.txt"
    text.write_text("\n".join(" ".join(WORDS) for _ in range(20)))
    main([str(teacher), str(student), "--cpu", f"--text={text}", "--max-steps=1", "--batch-size=8",
          f"--output-dir={tmp_path / 'out'}"])  # fmt: skip


def test_another_number_of_processes_than_was_asked_for_is_refused(
    folders, tmp_path, capsys, main, monkeypatch
):
    teacher, student, text = folders

    class Parent:
        def cmdline(self):
            return [
                "accelerate",
                "launch",
                "--cpu",
                "--num_processes",
                "2",
                "distil.py",
            ]

    monkeypatch.setattr(psutil.Process, "parents", lambda self: [Parent()])
    with pytest.raises(SystemExit):
        main(
            [
                str(teacher),
                str(student),
                "--cpu",
                f"--text={text}",
                f"--output-dir={tmp_path / 'out'}",
            ]
        )
    assert "distil.py: 2 processes were asked for, 1 started" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
