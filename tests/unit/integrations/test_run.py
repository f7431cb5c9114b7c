"""`hf_rmsnorm.integrations.run`: a program as python runs it, with a callback in every Trainer that it makes."""

import runpy
import sys

import pytest
from transformers import trainer

TRAINS = """
import sys, tiny_models, transformers
arguments = transformers.TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True)
for _ in range(2):
    made = transformers.Trainer(tiny_models.build("qwen3"), arguments)
"""
SHOWS = "import sys; print(__name__, sys.modules['__main__'].__dict__ is globals(), sys.argv[1:], sys.path[0])"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the runner with these words; (exit code, stdout, stderr)."""

    def with_words(*words):
        monkeypatch.setattr(sys, "argv", ["run", *map(str, words)])
        before, code = list(trainer.DEFAULT_CALLBACKS), 0
        try:
            runpy.run_module("hf_rmsnorm.integrations.run", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        finally:
            assert before == trainer.DEFAULT_CALLBACKS, "what it changed of Transformers' is undone"
        return code, *capsys.readouterr()

    monkeypatch.setattr(sys, "path", list(sys.path))
    return with_words


@pytest.fixture
def script(tmp_path):
    def write(text, name="script"):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    return write


def test_every_trainer_of_a_script_has_the_callback(run, script, tmp_path):
    assert run(script(TRAINS), tmp_path) == (0, "", "hf_rmsnorm: 9 norms swapped, 0 left alone\n" * 2)


def test_so_has_every_trainer_of_a_module(run, script, tmp_path):
    sys.path[0] = str(script(TRAINS, "trains_in_a_module").parent)
    said = "hf_rmsnorm: 9 norms swapped, 0 left alone\n" * 2
    assert run("-m", "trains_in_a_module", tmp_path) == (0, "", said)


def test_options_stand_before_the_script(run, script, tmp_path):
    said = run("exclude=*.q_norm,*.k_norm", "memory_efficient=True", script(TRAINS), tmp_path)[2]
    assert said == "hf_rmsnorm: 5 norms swapped, 4 left alone\n" * 2


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_a_program_sees_what_it_would_without(words, run, script, tmp_path, monkeypatch):
    monkeypatch.chdir(script(SHOWS).parent)
    sys.path[0] = str(tmp_path)
    code, said, told = run(*words, "a", "--b=c", "-m", "d")
    assert (code, said) == (0, f"__main__ True ['a', '--b=c', '-m', 'd'] {tmp_path}\n")
    assert told == f"hf_rmsnorm: {words[-1]} made no Trainer here: call patch_model(model) in it\n"


def test_an_exit_and_an_error_of_the_program_are_its_own(run, script):
    assert run(script("raise SystemExit(3)"))[0] == 3
    with pytest.raises(ZeroDivisionError):
        run(script("1 / 0"))


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "nothing: it is not there: name SCRIPT.py or -m MODULE, after NAME=VALUE"),
        (["-m"], "nothing: it is not there: name SCRIPT.py or -m MODULE, after NAME=VALUE"),
        (["none.py", "-x"], "none.py: it is not there: name SCRIPT.py or -m MODULE, after NAME=VALUE"),
        (["-m", "json.none"], "json.none: it is not there: name SCRIPT.py or -m MODULE, after NAME=VALUE"),
        (["-m", "no_such_trainer.cli"], "no_such_trainer.cli: No module named 'no_such_trainer'"),
        (
            ["memory=True", "train.py"],
            "train.py: HfRmsNormCallback takes the arguments of patch_model: got an unexpected keyword argument "
            "'memory'",
        ),
        (
            ["recentre=True", "train_as_rms=True", "train.py"],
            "train.py: recentre and train_as_rms contradict each other: choose one",
        ),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(words, said, run):
    assert run(*words) == (2, "", f"hf_rmsnorm.integrations.run: cannot run {said}\n")
