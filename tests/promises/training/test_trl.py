"""TRL's trainers with the callback: the losses of the unpatched run, and reference
models that share its modules.
"""

import json
import runpy
import shlex
import sys

import pytest
import torch
from places import EXAMPLES, ROOT
from tiny_models import fused_norms
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import HfRmsNormCallback, use_backend
from hf_rmsnorm.demo import demo_path

pytestmark = pytest.mark.full

trl = pytest.importorskip(
    "trl", reason="it is of scripts/requirements from Python 3.11 on, which it needs"
)
datasets = pytest.importorskip("datasets", reason="TRL's own dependency")
peft = pytest.importorskip(
    "peft", reason="adapters come with peft, of scripts/requirements"
)

STEPS = 3
LINES = [
    "The import statement finds a module and binds a name.",
    "A class definition defines a class object.",
    "The with statement wraps the execution of a block.",
    "An expression is evaluated before the result is bound.",
    "The for statement iterates over the elements of a sequence.",
    "A function call may raise an exception.",
]
SWAPPED = (
    "hf_rmsnorm: LlamaForCausalLM: 11 norms swapped, 0 skipped; "
    "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"
)
LORA = dict(
    r=4,
    target_modules=["q_proj", "down_proj"],
    modules_to_save=["model.norm"],
    task_type="CAUSAL_LM",
)
OPTIONS = dict(
    per_device_train_batch_size=2,
    max_steps=STEPS,
    learning_rate=1e-2,
    use_cpu=True,
    report_to=[],
    logging_steps=1,
    save_strategy="no",
    disable_tqdm=True,
    max_length=48,
    bf16=False,
    gradient_checkpointing=False,
)


def load():
    return AutoModelForCausalLM.from_pretrained(demo_path("llama"), dtype=torch.float32)


def tokenizer():
    made = AutoTokenizer.from_pretrained(demo_path("llama"))
    made.pad_token = made.pad_token or made.eos_token
    return made


def text(line):
    return {"text": line}


def preferred(line):
    return {"prompt": line[:12], "chosen": line[12:], "rejected": line[::-1]}


KINDS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, text),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, preferred),
}


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(kind, folder, callback, adapter):
    """The trainer of a kind after its steps, and their losses."""
    made, config, row = KINDS[kind]
    torch.manual_seed(0)
    trainer = made(
        model=load(),
        args=config(output_dir=str(folder), **OPTIONS),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([row(line) for line in LINES]),
        callbacks=[callback] if callback else [],
        peft_config=peft.LoraConfig(**LORA) if adapter else None,
    )
    with use_backend("reference"):
        trainer.train()
    return trainer, history(trainer, "loss")


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_the_losses_are_those_of_the_unpatched_run(
    kind, adapter, tmp_path, fused_calls
):
    _, expected = run(kind, tmp_path, None, adapter)
    assert not fused_calls
    callback = HfRmsNormCallback()
    trainer, got = run(kind, tmp_path, callback, adapter)
    assert len(got) == STEPS
    assert got == pytest.approx(expected, rel=1e-5)
    # Two in each of 5 layers and the last, of which an adapter trains a copy.
    norms = 12 if adapter else 11
    assert len(fused_norms(trainer.model)) == len(callback.report.swapped) == norms
    # The policy runs every norm once a step. Under an adapter it is its own reference:
    # twice.
    runs = 1
    if kind == "DPO" and adapter:
        runs = 2
    assert len(fused_calls) == 11 * STEPS * runs
    if kind == "DPO" and not adapter:
        # TRL loads a reference model of its own, which no callback sees
        assert not fused_norms(trainer.ref_model)


def reward(completions, **kwargs):
    return [float(sum(map(ord, text)) % 17) for text in completions]


def run_grpo(folder, callback):
    options = OPTIONS | {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    del options["max_length"]
    rows = [{"prompt": line[:12]} for line in LINES]
    torch.manual_seed(0)
    trainer = trl.GRPOTrainer(
        model=load(),
        args=trl.GRPOConfig(output_dir=str(folder), **options),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[callback] if callback else [],
        reward_funcs=reward,
        peft_config=peft.LoraConfig(**LORA),
    )
    with use_backend("reference"):
        trainer.train()
    return trainer, history(trainer, "kl")


def test_grpo_generates_and_compares_with_its_reference_as_without(
    tmp_path, fused_calls
):
    """Generation, and the policy without its adapter as the reference of the KL term."""
    _, expected = run_grpo(tmp_path, None)
    # the policy has left its reference
    assert len(expected) == STEPS
    assert expected[-1] > 1e-5
    trainer, got = run_grpo(tmp_path, HfRmsNormCallback())
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert len(fused_norms(trainer.model)) == 12
    # each token is generated by the patched model
    assert len(fused_calls) > 11 * STEPS * 6


def test_the_command_of_the_page_patches_and_has_the_losses_of_trls_own(
    tmp_path, monkeypatch, capfd, fused_calls
):
    (tmp_path / "hf_rmsnorm").symlink_to(ROOT / "hf_rmsnorm")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    first, *_ = (EXAMPLES / "trainers/trl.yaml").read_text().splitlines()
    words = shlex.split(first.removeprefix("# accelerate launch -m "))
    checkpoint, losses, said = tmp_path / "runs/trl/checkpoint-3", [], []
    for module, *arguments in (words[3:], words):
        assert not fused_calls
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        losses.append([e["loss"] for e in state["log_history"] if "loss" in e])
        said.append(capfd.readouterr().err)
    assert "hf_rmsnorm" not in said[0]
    assert SWAPPED in said[1].splitlines()
    assert len(losses[1]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # of 5 layers the norms run again: TRL checkpoints them unless told not to
    assert len(fused_calls) == (11 + 10) * 3
