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
COMMANDS = {
    words: shlex.split(command)
    for command, words in re.findall(
        r"^(accelerate launch .*?) +# (.*)$", PAGE, re.MULTILINE
    )
}
KINDS = {
    "one process": "1 process(es) on cpu, not sharded",
    "DDP": "2 process(es) on cpu, not sharded",
    "FSDP2": "2 process(es) on cpu, FSDP2",
    "LoRA": "1 process(es) on cpu, not sharded",
}


def start(command, *arguments, on_gpu=False) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    )
    for name in ("TRITON_INTERPRET", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    cpu = ["--cpu"] if torch.accelerator.is_available() and not on_gpu else []
    return subprocess.Popen(
        [*command, *cpu, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen) -> str:
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text


def losses(folder):
    return json.loads((folder / "losses.json").read_text())["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: what a command of the page wrote, and its output."""
    folder = tmp_path_factory.mktemp("finetune")

    @cache
    def run(name):
        made = start(COMMANDS[name], *SHORT, "--output-dir", folder / name)
        return folder / name, output(made)

    return run


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
    assert text.count("process(es)") == 1 and KINDS[name] in text
    assert "11 x LlamaRMSNorm: RMSNorm(" in text and "100%" in text
    assert len(losses(folder)) == 4 and losses(folder)[0] != losses(folder)[-1]
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
    text = output(start(command, *SHORT, *resume, "--output-dir", tmp_path))
    assert KINDS[name] in text and "RMSNorm(" not in text and "Going on from" in text
    assert losses(tmp_path) == losses(whole)
    weights = (whole / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == weights


@pytest.mark.nightly
def test_ddp_and_fsdp2_are_the_same_training_on_two_batches(trained):
    ddp, fsdp2, alone = (losses(trained(n)[0]) for n in ("DDP", "FSDP2", "one process"))
    assert fsdp2 == pytest.approx(ddp, rel=1e-6) and ddp[0] != alone[0]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that Triton serves"
)
@pytest.mark.parametrize(
    "config, wrapper", [("fsdp2", "FSDP2"), ("zero3", "DeepSpeed ZeRO-3")]
)
def test_the_configs_for_sharding_train_on_a_gpu_and_go_on(config, wrapper, tmp_path):
    if config == "zero3":
        pytest.importorskip("deepspeed", reason="ZeRO-3 is DeepSpeed's")
    launch = f"accelerate launch --config_file examples/accelerate/{config}.yaml --num_processes 1 examples/finetune.py"

    def finetune(name, *flags):
        where = ["--model", demo_path("qwen3"), "--output-dir", tmp_path / name]
        run = start(launch.split(), *SHORT, *where, *flags, on_gpu=True)
        assert f"1 process(es) on cuda, {wrapper}" in output(run)
        return losses(tmp_path / name)

    patched, plain = finetune("patched"), finetune("plain", "--no-patch")
    assert patched == pytest.approx(plain, rel=1e-4)
    assert finetune(
        "again", "--resume", tmp_path / "patched" / "checkpoint-2"
    ) == pytest.approx(patched, rel=1e-5)
