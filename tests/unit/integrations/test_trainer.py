"""`HfRmsNormCallback` in a Trainer: patched when it is time, whatever the Trainer does, and nothing else changes."""

import dataclasses
import functools
import pickle
import subprocess
import sys
import warnings
from logging import Handler as StandardHandler

import pytest
import tiny_models
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments, logging
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import HfRmsNormCallback, patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused.norm import fused_part
from hf_rmsnorm.integrations import trainer
from hf_rmsnorm.ops import backend
from hf_rmsnorm.ops.backend import runs_on

STEPS = 4


class Rows(torch.utils.data.Dataset):
    ids = tiny_models.token_ids(2 * STEPS)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def make(folder, model=None, callback=None, **options):
    init = options.pop("model_init", None)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=STEPS, learning_rate=1e-2, use_cpu=True,
        report_to=[], logging_steps=1, disable_tqdm=True, **{"save_strategy": "no", **options},
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), model_init=init, callbacks=callbacks)


def losses(made, **how):
    with use_backend("reference"):
        made.train(**how)
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def fused(model):
    return sum(fused_part(type(module)) is not None for module in model.modules())


@pytest.fixture
def patches(monkeypatch):
    """The models that the callback has patched, once for each patch."""
    found = []
    real = trainer.patch_model

    @functools.wraps(real)
    def spy(model, **how):
        found.append(model)
        return real(model, **how)

    monkeypatch.setattr(trainer, "patch_model", spy)
    return found


@pytest.fixture
def logged():
    class Handler(StandardHandler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))

    lines, handler, level = [], Handler(), logging.get_verbosity()
    logging.add_handler(handler)
    logging.set_verbosity_info()
    yield lines
    logging.remove_handler(handler)
    logging.set_verbosity(level)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
    ],
)
def test_a_patched_run_has_the_losses_of_the_unpatched_one(options, tmp_path, fused_calls):
    expected = losses(make(tmp_path, tiny_models.build("qwen3"), **options))
    callback = HfRmsNormCallback()
    model = tiny_models.build("qwen3")
    got = losses(make(tmp_path, model, callback, **options))
    assert got == pytest.approx(expected, rel=1e-5) and len(got) == STEPS
    assert len(fused_calls) >= 9 * STEPS and len(callback.report.swapped) == fused(model) == 9


def test_it_is_patched_once_and_the_report_is_logged_once(tmp_path, patches, logged):
    model = tiny_models.build("llama")
    callback = HfRmsNormCallback()
    made = make(tmp_path, model, callback, eval_strategy="steps", eval_steps=2, log_level="info")
    losses(made)
    losses(made)
    assert patches == [model]
    assert [line for line in logged if "norms swapped" in line[1]] == [("INFO", str(callback.report))]


@pytest.fixture
def on_this_cpu(monkeypatch):
    """Without Triton's interpreter; what is known of a device is asked again."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend._device_refusal.cache_clear()
    yield
    backend._device_refusal.cache_clear()


def test_one_line_says_what_was_swapped_and_where_kernels_run(tmp_path, capsys, on_this_cpu):
    callback = HfRmsNormCallback(exclude="model.norm")
    made = make(tmp_path, tiny_models.build("llama"), callback)
    losses(made)
    line = "hf_rmsnorm: 4 norms swapped, 1 left alone, on this cpu the model's own forwards run\n"
    assert capsys.readouterr().err == line, "once, though it trains"
    make(tmp_path, made.model, callback)
    assert capsys.readouterr().err == line, "and again of another Trainer"


def test_a_model_that_is_put_on_a_gpu_later_is_told_of_by_that(on_this_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    report, gpu = patch_model(tiny_models.build("llama")), torch.device("cuda:0")
    assert trainer.swapped_line(report, gpu) == "hf_rmsnorm: 5 norms swapped, kernels on cuda:0"
    placed = dataclasses.replace(report, devices=(*report.devices, runs_on("cuda:1")))
    where = "kernels on cuda:1, on this cpu the model's own forwards run"
    assert trainer.swapped_line(placed, gpu) == f"hf_rmsnorm: 5 norms swapped, {where}"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (5, 0))
    backend._device_refusal.cache_clear()
    said = trainer.swapped_line(report, gpu)
    assert "on cuda:0 the model's own forwards run (this GPU has compute capability 5.0" in said
    none = dataclasses.replace(report, swapped=(), devices=())
    assert trainer.swapped_line(none, gpu) == "hf_rmsnorm: 0 norms swapped"


def test_one_process_of_several_says_it(tmp_path, capsys):
    callback, state = HfRmsNormCallback(), TrainerState(is_world_process_zero=False)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    callback.on_init_end(arguments, state, None, model=tiny_models.build("llama"))
    assert len(callback.report.swapped) == 5 and capsys.readouterr().err == ""


@pytest.mark.full
@pytest.mark.parametrize("adapter", ["LoRA and all norms", "LNTuning"])
def test_norms_that_an_adapter_trains(adapter, tmp_path):
    peft = pytest.importorskip("peft", reason="adapters come with peft, of scripts/requirements")
    norms = ["norm", "input_layernorm", "post_attention_layernorm"]
    config = peft.LNTuningConfig(target_modules=norms)
    if adapter != "LNTuning":
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=norms)
    runs, weights = [], []
    for callback in (None, HfRmsNormCallback()):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_models.build("llama"), config)
        before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad and "norm" in name}
        runs.append(losses(make(tmp_path / str(len(runs)), model, callback, save_strategy="steps", save_steps=STEPS)))
        weights.append({name: model.get_parameter(name) for name in before})
        assert len(before) == 5 and not any(torch.equal(weights[-1][name], p) for name, p in before.items())
    assert runs[1] == pytest.approx(runs[0], rel=1e-5) and fused(model) == 10
    for name, plain in weights[0].items():
        torch.testing.assert_close(weights[1][name], plain, rtol=1e-4, atol=1e-5)
    plain, patched = (tmp_path / str(run) / f"checkpoint-{STEPS}" for run in (0, 1))
    assert sorted(p.name for p in plain.iterdir()) == sorted(p.name for p in patched.iterdir())
    assert (plain / "adapter_config.json").read_bytes() == (patched / "adapter_config.json").read_bytes()


@pytest.mark.parametrize("use", ["evaluate", "predict"])
def test_a_trainer_that_only_evaluates_or_predicts_is_patched(use, tmp_path, fused_calls):
    expected = getattr(make(tmp_path, tiny_models.build("llama")), use)(Rows())
    made = make(tmp_path, tiny_models.build("llama"), HfRmsNormCallback())
    with use_backend("reference"):
        got = getattr(made, use)(Rows())
    assert fused_calls and fused(made.model) == 5
    if use == "evaluate":
        assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    else:
        assert torch.equal(torch.from_numpy(got.predictions), torch.from_numpy(expected.predictions))


def test_a_model_that_is_put_into_the_trainer_by_hand_is_not_seen(tmp_path):
    made = make(tmp_path, tiny_models.build("llama"), HfRmsNormCallback())
    made.model = tiny_models.build("llama", seed=1)
    made.evaluate()
    assert fused(made.model) == 0


def test_every_model_that_model_init_makes_is_patched(tmp_path, patches, logged):
    models = []

    def build():
        models.append(tiny_models.build("llama"))
        return models[-1]

    made = make(tmp_path, model_init=build, callback=HfRmsNormCallback())
    first = losses(made)
    again = losses(made)  # the model is made anew, as for each trial of hyperparameter_search
    assert first == again
    assert len(models) == 3 and patches == models and all(fused(model) == 5 for model in models)
    assert sum("norms swapped" in text for _, text in logged) == 1, "equal reports are logged once"


@pytest.mark.full
def test_torch_compile_sees_the_patched_model_and_no_graph_breaks(tmp_path):
    runs = {}
    for name, callback in (("plain", None), ("patched", HfRmsNormCallback())):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = tiny_models.build("qwen3", num_hidden_layers=1)
        made = make(tmp_path, model, callback, torch_compile=True, torch_compile_backend="eager")
        runs[name] = losses(made)
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert fused(model) == (0 if callback is None else 5)
    torch.compiler.reset()
    assert runs["patched"] == pytest.approx(runs["plain"], rel=1e-5)


def saved(folder):
    """Names of the files, config.json, and what model.safetensors has before its values: names, dtypes, shapes."""
    data = (folder / "model.safetensors").read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    return sorted(path.name for path in folder.iterdir()), (folder / "config.json").read_bytes(), header, len(data)


def test_checkpoints_are_those_of_the_unpatched_run_and_both_resume_from_either(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    runs = {}
    for name, callback in (("plain", None), ("patched", HfRmsNormCallback())):
        made = make(tmp_path / name, tiny_models.build("llama"), callback, **saving)
        made.save_model(tmp_path / name / "start")
        runs[name] = losses(made)
    assert runs["patched"] == pytest.approx(runs["plain"], rel=1e-5)
    for file in ("model.safetensors", "config.json"):
        plain, patched = ((tmp_path / name / "start" / file).read_bytes() for name in runs)
        assert plain == patched
    for step in (2, 4):
        plain, patched = (saved(tmp_path / name / f"checkpoint-{step}") for name in runs)
        assert plain == patched
    for source, callback in (("plain", HfRmsNormCallback()), ("patched", None)):
        made = make(tmp_path / "resumed", tiny_models.build("llama", seed=1), callback)
        got = losses(made, resume_from_checkpoint=str(tmp_path / source / "checkpoint-2"))
        assert got == pytest.approx(runs["plain"], rel=1e-5)


@pytest.mark.full
def test_norms_that_liger_replaces_when_training_begins_are_left_to_it_and_the_log_says_so(
    tmp_path, logged, monkeypatch
):
    def replaced(norm):
        def forward(x):
            return LlamaRMSNorm.forward(norm, x)

        forward.__module__ = "liger_kernel.transformers.rms_norm"
        return forward

    def apply(model, kernel_config):  # as Liger does, on the instances
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm" and (kernel_config or {}).get("rms_norm", True):
                module.forward = replaced(module)

    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", apply)
    for config, swapped in ((None, 0), ({"rms_norm": False}, 5)):
        model, callback = tiny_models.build("llama"), HfRmsNormCallback()
        made = make(tmp_path, model, callback)
        assert len(callback.report.swapped) == fused(model) == 5
        made.args.use_liger_kernel, made.args.liger_kernel_config = True, config
        with warnings.catch_warnings(record=True) as warned:
            losses(made)
        assert not any("changed no norm" in str(each.message) for each in warned)
        assert len(callback.report.swapped) == swapped and len(callback.report.skipped) == 5 - swapped
        assert any("use_liger_kernel took norms" in line for _, line in logged) == (not swapped)
        logged.clear()


def test_options_go_to_patch_model(tmp_path):
    callback = HfRmsNormCallback(exclude=["*.q_norm", "*.k_norm"], fuse_residual=False)
    made = make(tmp_path, tiny_models.build("qwen3"), callback)
    assert fused(made.model) == 5 and not callback.report.layers
    with pytest.raises(ValueError, match="matches the path of no norm"):
        make(tmp_path, tiny_models.build("llama"), HfRmsNormCallback(include="nowhere.*"))
    with pytest.raises(TypeError, match="no 'memory'; did you mean memory_efficient?"):
        HfRmsNormCallback(memory=True)
    with pytest.raises(TypeError, match="train_as_rms is 1: pass True or False"):
        HfRmsNormCallback(train_as_rms=1)
    with pytest.raises(ValueError, match="choose one"):
        HfRmsNormCallback(recentre=True, train_as_rms=True)
    with pytest.raises(ValueError, match="records no conversion"):
        make(tmp_path, tiny_models.build("llama"), HfRmsNormCallback(recentre=True))
    with pytest.raises(ValueError, match="numerics is 'vlm': choose one of model, "):
        HfRmsNormCallback(numerics="vlm")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return tiny_models.converted("gpt2", tmp_path_factory.mktemp("converted"))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model):
    with torch.no_grad(), use_backend("reference"):
        return model.eval()(Rows.ids).logits


SAVING = {"save_strategy": "steps", "save_steps": 2}


def test_recentre_keeps_what_the_trainer_saves_centred_through_a_resume(converted, tmp_path):
    made = make(tmp_path, load(converted), HfRmsNormCallback(recentre=True), **SAVING)
    whole = losses(made)
    callback = HfRmsNormCallback(recentre=True)
    made = make(tmp_path / "again", load(converted), callback, **SAVING)
    assert losses(made, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == pytest.approx(whole, rel=1e-5)
    for folder in (tmp_path / "checkpoint-2", tmp_path / "checkpoint-4", tmp_path / "again" / "checkpoint-4"):
        plain, model = load(folder), load(folder)
        assert all(record.converted for record in patch_model(model).swapped)
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)


def test_without_it_a_resumed_checkpoint_runs_its_layer_norms_and_the_log_says_so(converted, tmp_path, logged):
    losses(make(tmp_path, load(converted), **SAVING))
    callback = HfRmsNormCallback()
    made = make(tmp_path / "again", load(converted), callback)
    assert all(record.converted for record in callback.report.swapped)
    losses(made, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not any(record.converted for record in callback.report.swapped)
    (said,) = [
        text for level, text in logged if level == "WARNING" and "each norm that the conversion recorded" in text
    ]
    assert "no longer has zero mean" in said


@pytest.mark.parametrize("kind", ["plain", "converted"])
def test_what_was_patched_before_keeps_the_options_that_the_callback_does_not_name(kind, converted, tmp_path):
    """Of a converted model it is asked again when training begins, for which it is unpatched."""
    model = tiny_models.build("llama") if kind == "plain" else load(converted)
    patch_model(model, memory_efficient=True, fuse_residual=False)
    callback = HfRmsNormCallback(recentre=kind == "converted")
    losses(make(tmp_path, model, callback))
    assert callback.report.swapped and not callback.report.layers
    assert all("for backward" in record.notes for record in callback.report.swapped)
    callback = HfRmsNormCallback(memory_efficient=False)
    make(tmp_path, model, callback)
    assert not any("for backward" in record.notes for record in callback.report.swapped)


@pytest.mark.full
def test_a_converted_model_trained_without_a_choice_is_warned_of_once(converted, tmp_path, logged):
    said = "this converted model trains as RMSNorm, and what is saved loads as LayerNorm"
    for how in ({"recentre": True}, {"train_as_rms": True}, {}):
        losses(make(tmp_path, load(converted), HfRmsNormCallback(**how)))
        assert sum(said in text for _, text in logged) == (not how)
    losses(make(tmp_path, tiny_models.build("llama"), HfRmsNormCallback()))
    assert sum(said in text for _, text in logged) == 1


@pytest.mark.full
def test_a_callback_that_has_patched_is_pickled_for_a_search_in_other_processes(tmp_path):
    callback = HfRmsNormCallback(include="model.norm")
    whole = losses(make(tmp_path, tiny_models.build("llama"), callback))
    again = pickle.loads(pickle.dumps(callback))
    model = tiny_models.build("llama")
    assert losses(make(tmp_path, model, again)) == whole and fused(model) == 1


@pytest.mark.full
def test_train_as_rms_is_in_what_the_trainer_saves_which_warns(converted, tmp_path):
    made = make(tmp_path, load(converted), HfRmsNormCallback(train_as_rms=True), **SAVING)
    with pytest.warns(UserWarning, match="computes LayerNorm, which is another function"):
        whole = losses(made)
    expected = logits(made.model)
    model = load(tmp_path / "checkpoint-4")
    assert all(record.converted for record in patch_model(model).swapped)
    assert torch.equal(logits(model), expected)
    assert not torch.allclose(logits(load(tmp_path / "checkpoint-4")), expected, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for again in ({"model": load(converted)}, {"model_init": lambda: load(converted)}):
            made = make(tmp_path / "again", callback=HfRmsNormCallback(train_as_rms=True), **again)
            got = losses(made, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
            assert got == pytest.approx(whole, rel=1e-5)


@pytest.mark.full
def test_a_prepared_model_is_patched_like_any_other(fused_calls):
    """Mixed precision has accelerate wrap the model's forward on the instance; a plugin compiles it."""
    for how in ({"mixed_precision": "bf16"}, {"dynamo_backend": "eager"}):
        torch.compiler.reset()
        AcceleratorState._reset_state(reset_partial_state=True)
        runs = []
        for patch in (False, True):
            accelerator = Accelerator(cpu=True, **how)
            model = tiny_models.build("qwen3", num_hidden_layers=1).train()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            if patch:
                assert len(patch_model(model, strict=True).swapped) == 5
            run = []
            for batch in Rows.ids.chunk(STEPS):
                with use_backend("reference"):
                    loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.append(loss.item())
            runs.append(run)
        assert runs[1] == pytest.approx(runs[0], rel=1e-5)
        assert fused(model) == 5 and unpatch_model(model) == 5
    torch.compiler.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert fused_calls


def test_importing_the_package_loads_no_trainer():
    code = (
        "import sys, hf_rmsnorm, hf_rmsnorm.integrations; loaded = {n.partition('.')[0] for n in sys.modules}; "
        "print(sorted(loaded & {'transformers', 'trl', 'kernels', 'peft', 'accelerate'}), "
        "'HfRmsNormCallback' in dir(hf_rmsnorm))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[] True\n"
    )


class Scored(torch.nn.Module):
    """A model with a head of its own on a base that another model uses too, as value heads and references are."""

    def __init__(self, model):
        super().__init__()
        self.base, self.score = model.model, torch.nn.Linear(model.config.hidden_size, 1)

    def forward(self, ids):
        return self.score(self.base(ids).last_hidden_state)


def test_models_that_share_modules_are_patched_together(fused_calls):
    policy = tiny_models.build("llama")
    scored = Scored(policy)
    expected = policy(Rows.ids).logits, scored(Rows.ids)
    assert len(patch_model(policy).swapped) == 5
    assert fused(scored) == 5, "a module is patched in every model that holds it"
    with use_backend("reference"):
        assert torch.equal(policy(Rows.ids).logits, expected[0]) and torch.equal(scored(Rows.ids), expected[1])
    assert len(fused_calls) == 10
    assert len(patch_model(scored).swapped) == 5 and unpatch_model(scored) == 5
    assert fused(policy) == 0 and torch.equal(policy(Rows.ids).logits, expected[0])
