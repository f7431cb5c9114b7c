"""`HfRmsNormCallback` in a Trainer: patched when it is time, whatever the Trainer does,
and nothing else changes.
"""

from logging import Handler as StandardHandler

import pytest
import tiny_models
import torch
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerState,
    TrainingArguments,
    logging,
)

from hf_rmsnorm import HfRmsNormCallback, patch_model, use_backend
from hf_rmsnorm.patching.swap import fused_part

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
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=STEPS,
        learning_rate=1e-2, use_cpu=True, report_to=[], logging_steps=1,
        disable_tqdm=True, **{"save_strategy": "no", **options},
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    return Trainer(
        model,
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        model_init=init,
        callbacks=callbacks,
    )


def losses(made, **how):
    with use_backend("reference"):
        made.train(**how)
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def fused(model):
    return sum(fused_part(type(module)) is not None for module in model.modules())


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
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
    ],
)
def test_a_patched_run_has_the_losses_of_the_unpatched_one(
    options, tmp_path, fused_calls
):
    expected = losses(make(tmp_path, tiny_models.build("qwen3"), **options))
    callback = HfRmsNormCallback()
    model = tiny_models.build("qwen3")
    got = losses(make(tmp_path, model, callback, **options))
    assert got == pytest.approx(expected, rel=1e-5) and len(got) == STEPS
    assert (
        len(fused_calls) >= 9 * STEPS
        and len(callback.report.swapped) == fused(model) == 9
    )


def test_the_report_is_logged_once(tmp_path, logged):
    model = tiny_models.build("llama")
    callback = HfRmsNormCallback()
    made = make(
        tmp_path, model, callback, eval_strategy="steps", eval_steps=2, log_level="info"
    )
    losses(made)
    losses(made)
    assert [line for line in logged if "norms swapped" in line[1]] == [
        ("INFO", str(callback.report))
    ]


def test_one_line_says_what_was_swapped_and_where_kernels_run(
    tmp_path, capsys, no_kernel_here
):
    callback = HfRmsNormCallback(exclude="model.norm")
    made = make(tmp_path, tiny_models.build("llama"), callback)
    losses(made)
    where = "runs on cpu: plain PyTorch (there is no kernel here)"
    line = f"hf_rmsnorm: 4 norms swapped, 1 skipped; {where}\n"
    assert capsys.readouterr().err == line, "once, though it trains"
    make(tmp_path, made.model, callback)
    assert capsys.readouterr().err == line, "and again of another Trainer"


def test_one_process_of_several_says_it(tmp_path, capsys):
    callback, state = HfRmsNormCallback(), TrainerState(is_world_process_zero=False)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    callback.on_init_end(arguments, state, None, model=tiny_models.build("llama"))
    assert len(callback.report.swapped) == 5 and capsys.readouterr().err == ""


@pytest.mark.parametrize("use", ["evaluate", "predict"])
def test_a_trainer_that_only_evaluates_or_predicts_is_patched(
    use, tmp_path, fused_calls
):
    expected = getattr(make(tmp_path, tiny_models.build("llama")), use)(Rows())
    made = make(tmp_path, tiny_models.build("llama"), HfRmsNormCallback())
    with use_backend("reference"):
        got = getattr(made, use)(Rows())
    assert fused_calls and fused(made.model) == 5
    if use == "evaluate":
        assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    else:
        assert torch.equal(
            torch.from_numpy(got.predictions), torch.from_numpy(expected.predictions)
        )


def test_every_model_that_model_init_makes_is_patched(tmp_path, logged):
    models = []

    def build():
        models.append(tiny_models.build("llama"))
        return models[-1]

    made = make(tmp_path, model_init=build, callback=HfRmsNormCallback())
    first = losses(made)
    # the model is made anew, as for each trial of hyperparameter_search
    again = losses(made)
    assert first == again
    assert len(models) == 3 and all(fused(model) == 5 for model in models)
    assert sum("norms swapped" in text for _, text in logged) == 1, (
        "equal reports are logged once"
    )


def saved(folder):
    """Names of the files, config.json, and what model.safetensors has before its
    values: names, dtypes, shapes.
    """
    data = (folder / "model.safetensors").read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    return (
        sorted(path.name for path in folder.iterdir()),
        (folder / "config.json").read_bytes(),
        header,
        len(data),
    )


def test_checkpoints_are_those_of_the_unpatched_run_and_both_resume_from_either(
    tmp_path,
):
    saving = {"save_strategy": "steps", "save_steps": 2}
    runs = {}
    for name, callback in (("plain", None), ("patched", HfRmsNormCallback())):
        made = make(tmp_path / name, tiny_models.build("llama"), callback, **saving)
        made.save_model(tmp_path / name / "start")
        runs[name] = losses(made)
    assert runs["patched"] == pytest.approx(runs["plain"], rel=1e-5)
    for file in ("model.safetensors", "config.json"):
        plain, patched = (
            (tmp_path / name / "start" / file).read_bytes() for name in runs
        )
        assert plain == patched
    for step in (2, 4):
        plain, patched = (
            saved(tmp_path / name / f"checkpoint-{step}") for name in runs
        )
        assert plain == patched
    for source, callback in (("plain", HfRmsNormCallback()), ("patched", None)):
        made = make(tmp_path / "resumed", tiny_models.build("llama", seed=1), callback)
        got = losses(
            made, resume_from_checkpoint=str(tmp_path / source / "checkpoint-2")
        )
        assert got == pytest.approx(runs["plain"], rel=1e-5)


def test_options_go_to_patch_model(tmp_path):
    callback = HfRmsNormCallback(exclude=["*.q_norm", "*.k_norm"], fuse_residual=False)
    made = make(tmp_path, tiny_models.build("qwen3"), callback)
    assert fused(made.model) == 5 and not callback.report.layers
    with pytest.raises(ValueError, match="matches the path of no norm"):
        make(
            tmp_path, tiny_models.build("llama"), HfRmsNormCallback(include="nowhere.*")
        )
    with pytest.raises(TypeError, match="no 'memory'; did you mean memory_efficient?"):
        HfRmsNormCallback(memory=True)
    with pytest.raises(TypeError, match="train_as_rms is 1: pass True or False"):
        HfRmsNormCallback(train_as_rms=1)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return tiny_models.converted("gpt2", tmp_path_factory.mktemp("converted"))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model):
    with torch.no_grad(), use_backend("reference"):
        return model.eval()(Rows.ids).logits


SAVING = {"save_strategy": "steps", "save_steps": 2}


def test_recentre_keeps_what_the_trainer_saves_centred_through_a_resume(
    converted, tmp_path
):
    made = make(tmp_path, load(converted), HfRmsNormCallback(recentre=True), **SAVING)
    whole = losses(made)
    callback = HfRmsNormCallback(recentre=True)
    made = make(tmp_path / "again", load(converted), callback, **SAVING)
    assert losses(
        made, resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    ) == pytest.approx(whole, rel=1e-5)
    for folder in (
        tmp_path / "checkpoint-2",
        tmp_path / "checkpoint-4",
        tmp_path / "again" / "checkpoint-4",
    ):
        plain, model = load(folder), load(folder)
        assert all(record.converted for record in patch_model(model).swapped)
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "converted"])
def test_what_was_patched_before_keeps_the_options_that_the_callback_does_not_name(
    kind, converted, tmp_path
):
    """Of a converted model it is asked again when training begins, for which it is
    unpatched.
    """
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
def test_train_as_rms_is_in_what_the_trainer_saves_which_warns(converted, tmp_path):
    made = make(
        tmp_path, load(converted), HfRmsNormCallback(train_as_rms=True), **SAVING
    )
    with pytest.warns(
        UserWarning, match="computes LayerNorm, which is another function"
    ):
        losses(made)
    expected = logits(made.model)
    model = load(tmp_path / "checkpoint-4")
    assert all(record.converted for record in patch_model(model).swapped)
    assert torch.equal(logits(model), expected)
    assert not torch.allclose(
        logits(load(tmp_path / "checkpoint-4")), expected, atol=1e-3
    )
