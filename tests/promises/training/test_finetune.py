"""examples/finetune.py: what its flags do, what it refuses, and that a run goes on
exactly where it stopped.
"""

import json
import os
import re
import resource
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from accelerate.state import AcceleratorState
from places import EXAMPLES

from hf_rmsnorm.demo import demo_path

CONFIGS = EXAMPLES / "accelerate"
sys.path.insert(0, str(EXAMPLES))

import finetune  # noqa: E402
import refusals  # noqa: E402

# reference: bit for bit the model's own forward, as "auto" runs on a CPU outside of
# Triton's interpreter
SHORT = ["--batch-size", "2", "--block-size", "32", "--cpu", "--backend", "reference"]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Run finetune.py in this process; the folder it wrote, within tmp_path. None: it is
    not told where to write.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    # and back, after the test: the script sets it
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")

    def run(name, *arguments):
        AcceleratorState._reset_state(reset_partial_state=True)
        where = []
        if name is not None:
            where = ["--output-dir", str(tmp_path / name)]
        finetune.main([*SHORT, *where, *map(str, arguments)])
        return tmp_path / (name or "")

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


def losses(folder):
    return json.loads((folder / "losses.json").read_text())["losses"]


def weights(folder):
    (path,) = folder.glob("*model.safetensors")
    return path.read_bytes()


def files(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.full
def test_patched_and_unpatched_runs_have_the_same_losses_and_write_the_same_files(
    train, capsys
):
    plain = train("plain", "--max-steps", 4, "--no-patch", "--save-every", 2)
    assert "RMSNorm(" not in capsys.readouterr().out
    patched = train("patched", "--max-steps", 4, "--save-every", 2)
    assert "11 x LlamaRMSNorm: RMSNorm(" in capsys.readouterr().out
    assert len(losses(patched)) == 4
    assert losses(patched)[0] != losses(patched)[-1]
    assert files(patched) == files(plain)
    assert files(plain)["losses.png"].startswith(b"\x89PNG")
    kernels = train("kernels", "--max-steps", 2, "--backend", "triton")
    assert losses(kernels) == pytest.approx(losses(plain)[:2], rel=1e-5)


WAYS = {
    "all of it": ["--gradient-accumulation", 2, "--gradient-checkpointing"],
    "adapters, bf16": ["--lora", "--bf16"],
    "tied, q and k norms": ["--model", "demo:qwen3"],
    "LayerNorm": ["--model", demo_path("gpt2")],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_exactly_where_it_stopped_patched_or_not(
    way, train, tmp_path, capsys
):
    whole = train("whole", "--max-steps", 6, "--save-every", 3, *WAYS[way])
    assert len(losses(whole)) == 6
    for first, then in (("--patch", "--no-patch"), ("--no-patch", "--patch")):
        part = train(first, "--max-steps", 3, "--save-every", 3, first, *WAYS[way])
        assert losses(part) == losses(whole)[:3]
        capsys.readouterr()
        train(first, "--max-steps", 6, "--save-every", 3, then, "--resume", *WAYS[way])
        assert f"Going on from {part / 'checkpoint-3'}" in capsys.readouterr().out
        assert losses(part) == losses(whole)
        assert weights(part) == weights(whole)


def test_without_an_output_folder_each_run_has_a_fresh_one_and_resume_goes_on_in_the_last(
    train, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("finetuned", "finetuned-2"):
        train(None, "--max-steps", 1, "--save-every", 1)
        assert f"all is in {name}\n" in capsys.readouterr().out
    first = weights(tmp_path / "finetuned")
    more = None, "--max-steps", 2, "--save-every", 1, "--resume"
    train(*more)
    said = capsys.readouterr().out
    assert "No --output-dir: it writes to finetuned-2\n" in said
    assert "Going on from finetuned-2/checkpoint-1\n" in said
    train(*more, "finetuned/checkpoint-1")
    assert "all is in finetuned\n" in capsys.readouterr().out
    assert weights(tmp_path / "finetuned") != first
    assert len([*tmp_path.iterdir()]) == 2


# What is refused


def refusal(capsys, run):
    """The one line that a run which exits with 2 writes."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        run()
    lines = re.split(r"[\r\n]+", capsys.readouterr().err)
    (line,) = [line for line in lines if line and "%|" not in line]  # no bars
    assert exit.value.code == 2
    assert line.startswith("finetune.py: ")
    return line


BAD = {
    "--max-steps 0": "argument --max-steps: invalid number, at least 1: value: '0'",
    "--learning-rate nan": "argument --learning-rate: invalid number",
    "--text nowhere.txt": "cannot read --text nowhere.txt: ",
    "--text short": "has 2 tokens, fewer than one block of 32 (--block-size)",
    "--block-size 1024": "--block-size 1024 is more than the 512 positions of ",
    "--model nowhere/model": "cannot load --model nowhere/model: ",
    "--model cut": "cannot load --model cut: Error while deserializing header",
    "--resume nowhere": "--resume nowhere: no checkpoint of finetune.py",
    "--output-dir short": "short is a file: give another --output-dir",
    "--fsdp2": "no process group was started: use `accelerate launch --config_file",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_arguments_are_one_line_and_exit_code_2(
    flags, train, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("ab")
    if flags == "--model cut":
        shutil.copytree(demo_path("llama"), "cut")
        os.truncate("cut/model.safetensors", 2000)
    assert BAD[flags] in refusal(capsys, lambda: train("out", *flags.split()))
    assert not Path("out").exists()


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(train, capsys):
    folder = train("run", "--max-steps", 2, "--save-every", 1)
    differences = {
        "--batch-size 3": "it was made with batch_size 2, this run has 3",
        "--lora": "it was made with lora False, this run has True",
        f"--model {demo_path('qwen3')}": "it was made with model llama, this run has qwen3",
        "--max-steps 1": "it has 2 steps already, --max-steps is 1",
    }
    run = ["run", "--max-steps", 2]

    def refused(*flags):
        return refusal(capsys, lambda: train(*run, *flags))

    for flags, said in differences.items():
        assert said in refused("--resume", *flags.split())
    assert "checkpoints of an earlier run: --resume" in refused()
    (folder / "checkpoint-2" / "run.json").write_text("{")
    assert "no checkpoint of finetune.py" in refused("--resume")


def test_the_model_of_an_earlier_run_is_not_written_over_or_mixed_with_another(
    train, tmp_path, capsys
):
    run = ["run", "--max-steps", 1, "--save-every", 0]
    before = files(train(*run))
    for flags in ([], ["--lora"], ["--resume"]):
        said = refusal(capsys, lambda flags=flags: train(*run, *flags))
        assert "has model.safetensors of an earlier run: give another" in said
    assert files(tmp_path / "run") == before


@pytest.mark.full
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "optimizer.pt"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_goes_on(
    name, train, capsys
):
    whole = train("whole", "--max-steps", 2, "--save-every", 1)
    result = losses(whole), weights(whole)
    path = whole / "checkpoint-2" / name
    path.write_bytes(path.read_bytes()[:100])
    more = "whole", "--max-steps", 2, "--save-every", 1, "--resume"
    said = refusal(capsys, lambda: train(*more))
    assert f"--resume {whole / 'checkpoint-2'}: it is damaged: " in said
    assert "; --resume another checkpoint" in said
    train(*more, whole / "checkpoint-1")
    assert (losses(whole), weights(whole)) == result


def test_a_full_disk_is_one_line_and_leaves_what_was_saved(train, tmp_path, capsys):
    folder = train("run", "--max-steps", 2, "--save-every", 1)
    before = files(folder)
    size = (folder / "model.safetensors").stat().st_size
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    again = ["run", "--max-steps", 3, "--save-every", 1, "--resume"]
    for limit in (size // 2, size + 1000):
        # of the weights, and of the optimizer's state
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            said = refusal(capsys, lambda: train(*again))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert f"cannot write {folder / 'checkpoint-3.partial'}: " in said
        assert "make room; the checkpoints written before are whole" in said
        assert before.items() <= files(folder).items()
    train(*again)
    assert losses(folder) == losses(train("whole", "--max-steps", 3))


def test_a_second_run_into_the_same_folder_is_refused(train, tmp_path, capsys):
    folder = tmp_path / "run"
    with refusals.output_folder(folder, alone=True):
        said = refusal(capsys, lambda: train("run", "--max-steps", 1))
    assert f"--output-dir {folder}: another run is writing there now" in said


def test_an_adapter_in_the_place_of_a_model_is_refused(train, capsys):
    pytest.importorskip("peft", reason="makes the adapter")
    folder = train("adapter", "--max-steps", 1, "--lora")
    # it would train nothing, and lose the adapter
    said = refusal(capsys, lambda: train("out", "--model", folder, "--lora"))
    assert f"--model {folder} is an adapter: merge_and_unload it" in said


# What was launched


def launch(monkeypatch, command):
    """As if this process had been started by such a command line."""
    parent = Mock(cmdline=command.split)
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [parent])


CPU = "/venv/bin/python /venv/bin/accelerate launch --cpu"
WRONG = {
    f"{CPU} --num_processes 2 finetune.py": "2 processes were asked for, 1 started: `accelerate launch",
    f"{CPU} --num_processes=1 --config_file fsdp2.yaml finetune.py": "FSDP2 was asked for, but no process group",
    "accelerate-launch --config_file zero3.yaml --num_processes 1 f.py": "DeepSpeed ZeRO-3 was asked for",
}


@pytest.mark.parametrize("command", WRONG)
def test_another_launch_than_was_asked_for_is_refused(
    command, train, tmp_path, monkeypatch, capsys
):
    shutil.copytree(CONFIGS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    launch(monkeypatch, command)
    assert WRONG[command] in refusal(capsys, lambda: train("out"))


def test_a_launch_as_it_was_asked_for_trains(train, monkeypatch):
    launch(monkeypatch, f"{CPU} --num_processes 1 f.py")
    assert len(losses(train("out", "--max-steps", 1))) == 1
