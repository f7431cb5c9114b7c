"""The commands of docs/training.md, run as they stand: the processes, wrappers, losses
and exit codes they promise.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import torch
from places import ROOT

from hf_rmsnorm.demo import demo_path

pytestmark = pytest.mark.full

SHORT = [
    "--max-steps",
    "4",
    "--batch-size",
    "2",
    "--block-size",
    "32",
    "--save-every",
    "2",
]
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
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TRITON_INTERPRET", "RANK", "WORLD_SIZE")
    }
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cpu = ["--cpu"] if torch.accelerator.is_available() and not on_gpu else []
    return subprocess.Popen(
        [*command, *cpu, *map(str, arguments)],
        cwd=ROOT,
        env=environment
        | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
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
    """What each command of the page wrote, and its output."""
    folder = tmp_path_factory.mktemp("finetune")
    done = {}
    for wave in (["one process", "LoRA"], ["DDP"], ["FSDP2"]):
        # at once only what asks for no port
        runs = {
            name: start(COMMANDS[name], *SHORT, "--output-dir", folder / name)
            for name in wave
        }
        done |= {name: (folder / name, output(run)) for name, run in runs.items()}
    return done


@pytest.mark.parametrize("name", KINDS)
def test_each_command_trains_with_the_processes_and_the_wrapper_it_asks_for(
    name, trained
):
    folder, text = trained[name]
    assert text.count("process(es)") == 1 and KINDS[name] in text
    assert "11 x LlamaRMSNorm: RMSNorm(" in text and "100%" in text
    assert len(losses(folder)) == 4 and losses(folder)[0] != losses(folder)[-1]
    assert (folder / "losses.png").stat().st_size > 1000
    assert sorted(p.name for p in folder.glob("checkpoint*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    adapter = (folder / "adapter_model.safetensors").exists()
    assert adapter == (name == "LoRA") != (folder / "model.safetensors").exists()


RESUMED = {
    "DDP": "accelerate launch --multi_gpu --num_processes 2 examples/finetune.py --cpu",
    "FSDP2": "torchrun --standalone --nproc_per_node 2 examples/finetune.py --cpu --fsdp2",
}


@pytest.mark.parametrize("name", RESUMED)
def test_launched_by_flags_unpatched_it_goes_on_exactly_from_the_patched_checkpoint(
    name, trained, tmp_path
):
    whole, _ = trained[name]
    resume = [
        "--no-patch",
        "--resume",
        whole / "checkpoint-2",
        "--output-dir",
        tmp_path,
    ]
    text = output(start(RESUMED[name].split(), *SHORT, *resume))
    assert KINDS[name] in text and "RMSNorm(" not in text and "Going on from" in text
    assert losses(tmp_path) == losses(whole)
    assert (tmp_path / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


def test_ddp_and_fsdp2_are_the_same_training_on_two_batches(trained):
    assert losses(trained["FSDP2"][0]) == pytest.approx(
        losses(trained["DDP"][0]), rel=1e-6
    )
    assert losses(trained["DDP"][0])[0] != losses(trained["one process"][0])[0]


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
        flags = [
            *SHORT,
            "--model",
            demo_path("qwen3"),
            "--output-dir",
            tmp_path / name,
            *flags,
        ]
        assert f"1 process(es) on cuda, {wrapper}" in output(
            start(launch.split(), *flags, on_gpu=True)
        )
        return losses(tmp_path / name)

    patched, plain = finetune("patched"), finetune("plain", "--no-patch")
    assert patched == pytest.approx(plain, rel=1e-4)
    assert finetune(
        "again", "--resume", tmp_path / "patched" / "checkpoint-2"
    ) == pytest.approx(patched, rel=1e-5)
