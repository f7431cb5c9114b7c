"""The examples do what they say, run as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hf_rmsnorm.demo import demo_path

ROOT = Path(__file__).resolve().parent.parent


def start(cwd, *argv) -> subprocess.Popen:
    base = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env=base | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen) -> str:
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text


def test_generate_says_the_same_before_and_after_and_proves_it(tmp_path):
    text = output(start(tmp_path, ROOT / "examples" / "generate.py", "--max-new-tokens", "6"))
    assert "model.layers.[0-4].input_layernorm" in text and "RMSNorm(" in text
    before, after = text.split("--- before the patch\n")[1].split("--- after the patch\n")
    assert before.strip() == after.split("--- equivalence")[0].strip() != ""
    assert "the tokens are equal" in text and "FAIL" not in text and "PASS" in text
    assert "interpreter" in text or "compiles" in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Four steps, three ways at once: the folder each wrote and its output."""
    folder = tmp_path_factory.mktemp("finetune")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    ways = {"patched": (launch, []), "unpatched": (launch, ["--no-patch"]), "reference": ([], ["--backend=reference"])}
    short = ["--max-steps", "4", "--batch-size", "2"]
    script = ROOT / "examples" / "finetune.py"
    runs = {
        name: start(folder, *launcher, script, *short, *how, "--output-dir", folder / name)
        for name, (launcher, how) in ways.items()
    }
    return {name: (folder / name, output(process)) for name, process in runs.items()}


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())["losses"]


@pytest.mark.parametrize("way", ["patched", "reference"])
def test_finetune_has_the_same_losses_patched_and_not(trained, way):
    folder, text = trained[way]
    plain, plain_text = trained["unpatched"]
    assert "RMSNorm(" in text and "RMSNorm(" not in plain_text
    assert len(losses(folder)) == 4 and losses(folder) == losses(plain)
    assert losses(folder)[0] != losses(folder)[-1]


def test_finetune_writes_a_checkpoint_with_the_same_bytes(trained):
    (patched, _), (plain, _) = trained["patched"], trained["unpatched"]
    assert (patched / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert (patched / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    before = AutoModelForCausalLM.from_pretrained(demo_path("llama"))
    after = AutoModelForCausalLM.from_pretrained(patched)
    assert not before.model.norm.weight.float().equal(after.model.norm.weight.float())
