"""The commands of docs/training.md, run as they stand: the processes, wrappers, losses
and exit codes they promise.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pages
import pytest
import torch
from places import ROOT

from hf_rmsnorm.demo import demo_path

pytestmark = pytest.mark.full

SHORT = shlex.split("--max-steps 4 --batch-size 2 --block-size 32 --save-every 2")
PAGE = pages.PAGES["docs/training.md"]
LINES = re.findall(r"^(accelerate launch .*?) +# (.*)$", PAGE, re.MULTILINE)
COMMANDS = {words: shlex.split(command) for command, words in LINES}
KINDS = {
    "one process": "1 process(es) on cpu, not sharded",
    "DDP": "2 process(es) on cpu, not sharded",
    "FSDP2": "2 process(es) on cpu, FSDP2",
    "LoRA": "1 process(es) on cpu, not sharded",
}


def run(command, *arguments, on_gpu=False) -> str:
    """The output of a command that ends well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    scripts = Path(sys.executable).parent
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    for name in ("TRITON_INTERPRET", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    words = [*command, *map(str, arguments)]
    if torch.accelerator.is_available() and not on_gpu:
        words.append("--cpu")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=ROOT, env=environment, **streams)
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(folder):
    return json.loads((folder / "losses.json").read_text())["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: what a command of the page wrote, and its output."""
    folder = tmp_path_factory.mktemp("finetune")

    @cache
    def train(name):
        where = "--output-dir", folder / name
        return folder / name, run(COMMANDS[name], *SHORT, *where)

    return train


# two processes by day, all kinds at night; test_finetune.py runs one process
kinds = [
    pytest.param(kind, marks=() if kind == "FSDP2" else pytest.mark.nightly)
    for kind in KINDS
]


@pytest.mark.parametrize("name", kinds)
def test_each_command_trains_with_the_processes_and_the_wrapper_it_asks_for(
    name, trained
):
    folder, text = trained(name)
    assert text.count("process(es)") == 1
    assert KINDS[name] in text
    assert "11 x LlamaRMSNorm: RMSNorm(" in text and "100%" in text
    assert len(losses(folder)) == 4
    assert losses(folder)[0] != losses(folder)[-1]
    assert (folder / "losses.png").stat().st_size > 1000
    assert len([*folder.glob("checkpoint-[24]")]) == 2
    kind = "adapter_model" if name == "LoRA" else "model"
    assert (folder / f"{kind}.safetensors").exists()


RESUMED = {
    "FSDP2": "torchrun --standalone --nproc_per_node 2 examples/finetune.py --cpu --fsdp2",
    "DDP": "accelerate launch --multi_gpu --num_processes 2 examples/finetune.py --cpu",
}


@pytest.mark.parametrize(
    "name", ["FSDP2", pytest.param("DDP", marks=pytest.mark.nightly)]
)
def test_launched_by_flags_unpatched_it_goes_on_exactly_from_the_patched_checkpoint(
    name, trained, tmp_path
):
    whole, _ = trained(name)
    resume = ["--no-patch", "--resume", whole / "checkpoint-2"]
    command = shlex.split(RESUMED[name])
    text = run(command, *SHORT, *resume, "--output-dir", tmp_path)
    assert KINDS[name] in text
    assert "RMSNorm(" not in text
    assert "Going on from" in text
    assert losses(tmp_path) == losses(whole)
    weights = (whole / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == weights


@pytest.mark.nightly
def test_ddp_and_fsdp2_are_the_same_training_on_two_batches(trained):
    ddp, fsdp2, alone = (losses(trained(n)[0]) for n in ("DDP", "FSDP2", "one process"))
    assert fsdp2 == pytest.approx(ddp, rel=1e-6)
    assert ddp[0] != alone[0]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that Triton serves"
)
@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_the_configs_for_sharding_train_on_a_gpu_and_go_on(config, tmp_path):
    if config == "zero3":
        pytest.importorskip("deepspeed", reason="ZeRO-3 is DeepSpeed's")
    file = f"examples/accelerate/{config}.yaml"
    launch = f"accelerate launch --config_file {file} --num_processes 1"
    command = [*launch.split(), "examples/finetune.py", "--model", demo_path("qwen3")]

    def finetune(name, *flags):
        where = "--output-dir", tmp_path / name
        text = run(command, *SHORT, *where, *flags, on_gpu=True)
        wrapper = "FSDP2" if config == "fsdp2" else "DeepSpeed ZeRO-3"
        assert f"1 process(es) on cuda, {wrapper}" in text
        return losses(tmp_path / name)

    patched = finetune("patched")
    plain = finetune("plain", "--no-patch")
    assert patched == pytest.approx(plain, rel=1e-4)
    again = finetune("again", "--resume", tmp_path / "patched" / "checkpoint-2")
    assert again == pytest.approx(patched, rel=1e-5)
