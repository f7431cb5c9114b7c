"""The commands of docs/training.md, run as they stand: the processes, wrappers, losses
and exit codes they promise.
"""

import json
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pages
import pytest
import torch
from processes import ran

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
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    words = [*command, *arguments]
    if torch.accelerator.is_available() and not on_gpu:
        words.append("--cpu")
    done = ran(*words, PATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder):
    text = (folder / "losses.json").read_text()
    return json.loads(text)["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: what a command of the page wrote, and its output."""
    folder = tmp_path_factory.mktemp("finetune")

    @cache
    def train(name):
        output = folder / name
        text = run(COMMANDS[name], *SHORT, "--output-dir", output)
        return output, text

    return train


@pytest.mark.parametrize("name", KINDS)
def test_each_command_trains_with_the_processes_and_the_wrapper_it_asks_for(
    name, trained
):
    folder, text = trained(name)
    assert text.count("process(es)") == 1
    assert KINDS[name] in text
    assert "11 x LlamaRMSNorm: RMSNorm(" in text
    assert "100%" in text
    values = losses(folder)
    assert len(values) == 4
    assert values[0] != values[-1]
    kind = "adapter_model" if name == "LoRA" else "model"
    written = "losses.png", "checkpoint-2", "checkpoint-4", f"{kind}.safetensors"
    for file in written:
        assert (folder / file).exists()


TORCHRUN = "torchrun --standalone --nproc_per_node 2 examples/finetune.py --cpu --fsdp2"


def test_launched_by_flags_unpatched_it_goes_on_exactly_from_the_patched_checkpoint(
    trained, tmp_path
):
    whole, _ = trained("FSDP2")
    resume = ["--no-patch", "--resume", whole / "checkpoint-2"]
    text = run(TORCHRUN.split(), *SHORT, *resume, "--output-dir", tmp_path)
    assert KINDS["FSDP2"] in text
    assert "RMSNorm(" not in text
    assert "Going on from" in text
    assert losses(tmp_path) == losses(whole)
    weights = (whole / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_ddp_and_fsdp2_are_the_same_training_on_two_batches(trained):
    ddp, fsdp2, alone = (
        losses(trained(name)[0]) for name in ("DDP", "FSDP2", "one process")
    )
    assert fsdp2 == pytest.approx(ddp, rel=1e-6)
    assert ddp[0] != alone[0]


WRAPPERS = {"fsdp2": "FSDP2", "zero3": "DeepSpeed ZeRO-3"}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that Triton serves"
)
@pytest.mark.parametrize("config", WRAPPERS)
def test_the_configs_for_sharding_train_on_a_gpu_and_go_on(config, tmp_path):
    if config == "zero3":
        pytest.importorskip("deepspeed", reason="ZeRO-3 is DeepSpeed's")
    file = f"examples/accelerate/{config}.yaml"
    launch = f"accelerate launch --config_file {file} --num_processes 1"
    command = [*launch.split(), "examples/finetune.py", "--model", demo_path("qwen3")]
    wrapper = WRAPPERS[config]

    def finetune(name, *flags):
        folder = tmp_path / name
        text = run(command, *SHORT, "--output-dir", folder, *flags, on_gpu=True)
        assert f"1 process(es) on cuda, {wrapper}" in text
        return losses(folder)

    patched = finetune("patched")
    plain = finetune("plain", "--no-patch")
    assert patched == pytest.approx(plain, rel=1e-4)
    again = finetune("again", "--resume", tmp_path / "patched" / "checkpoint-2")
    assert again == pytest.approx(patched, rel=1e-5)
