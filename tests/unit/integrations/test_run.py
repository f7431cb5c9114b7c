"""`hf_rmsnorm.integrations.run`: a program as python runs it, with a callback in every
Trainer that it makes.
"""

import inspect
import runpy
import sys

import pytest
from transformers import trainer

from hf_rmsnorm import patch_model
from hf_rmsnorm.integrations.trainer import EndingCallback

TRAINS = """
import sys, tiny_models, transformers
arguments = transformers.TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True)
for _ in range(2):
    made = transformers.Trainer(tiny_models.build("qwen3"), arguments)
"""
KERNELS = "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"
SHOWS = "import sys; print(__name__, sys.modules['__main__'].__dict__ is globals(), sys.argv[1:], sys.path[0])"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the runner with these words; (exit code, stdout, stderr)."""

    def with_words(*words):
        monkeypatch.setattr(sys, "argv", ["run", *map(str, words)])
        before, code = list(trainer.DEFAULT_CALLBACKS), 0
        try:
            runpy.run_module(
                "hf_rmsnorm.integrations.run", run_name="__main__", alter_sys=True
            )
        except SystemExit as end:
            code = end.code
        finally:
            assert before == trainer.DEFAULT_CALLBACKS, (
                "what it changed of Transformers' is undone"
            )
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
    assert run(script(TRAINS), tmp_path) == (
        0,
        "",
        f"hf_rmsnorm: 9 norms swapped, 0 skipped; {KERNELS}\n" * 2,
    )


def test_so_has_every_trainer_of_a_module(run, script, tmp_path):
    sys.path[0] = str(script(TRAINS, "trains_in_a_module").parent)
    said = f"hf_rmsnorm: 9 norms swapped, 0 skipped; {KERNELS}\n" * 2
    assert run("-m", "trains_in_a_module", tmp_path) == (0, "", said)


def test_options_stand_before_the_script(run, script, tmp_path):
    said = run(
        "exclude=*.q_norm,*.k_norm", "memory_efficient=True", script(TRAINS), tmp_path
    )[2]
    assert said == f"hf_rmsnorm: 5 norms swapped, 4 skipped; {KERNELS}\n" * 2


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_a_program_sees_what_it_would_without(
    words, run, script, tmp_path, monkeypatch
):
    monkeypatch.chdir(script(SHOWS).parent)
    sys.path[0] = str(tmp_path)
    code, said, told = run(*words, "a", "--b=c", "-m", "d")
    assert (code, said) == (0, f"__main__ True ['a', '--b=c', '-m', 'd'] {tmp_path}\n")
    assert (
        told
        == f"hf_rmsnorm: {words[-1]} made no Trainer here: call patch_model(model) in it\n"
    )


def test_an_exit_and_an_error_of_the_program_are_its_own(run, script):
    assert run(script("raise SystemExit(3)"))[0] == 3
    with pytest.raises(ZeroDivisionError):
        run(script("1 / 0"))


def test_help_says_how_to_call_it_and_names_every_option(run):
    code, said, told = run("strict=True", "--help")
    assert (code, told) == (0, "") and "[NAME=VALUE ...] -m MODULE ARGUMENTS" in said
    for line in ("include          = globs with commas", "strict           = True or False",
                 "recentre         = True or False"):  # fmt: skip
        assert line in said
    assert not [
        name
        for name in inspect.signature(patch_model).parameters
        if name != "model" and name not in said
    ]


def test_an_option_is_typed_as_patch_model_takes_it(run, script, monkeypatch):
    taken = []
    monkeypatch.setattr(
        EndingCallback, "__init__", lambda self, **options: taken.append(options)
    )
    words = "include=*.a,*.b exclude=*.c strict=True fuse_residual=False memory_efficient=True recentre=x"
    run(*words.split(), script(""))
    assert taken == [
        {"include": ["*.a", "*.b"], "exclude": ["*.c"], "strict": True, "fuse_residual": False,
         "memory_efficient": True, "recentre": "x"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    "option, said",
    [
        (
            "exclude=*.nothing",
            "exclude='*.nothing' matches the path of no norm in this Qwen3ForCausalLM, for example ",
        ),
        (
            "recentre=True",
            "the config of this Qwen3ForCausalLM records no conversion: ",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_told_in_one_line(
    option, said, run, script, tmp_path
):
    code, out, told = run(option, script(TRAINS), tmp_path)
    assert (
        (code, out) == (2, "")
        and told.startswith(f"hf_rmsnorm: {said}")
        and told.count("\n") == 1
    )


THERE = ": name SCRIPT.py or -m MODULE, after NAME=VALUE"
TAKES = "HfRmsNormCallback takes the arguments of patch_model, and there is no "


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "there is nothing to run: name SCRIPT.py or -m MODULE; --help says how to call this"),
        (["none.py", "-x"], f"there is no file none.py{THERE}"),
        (["-m", "json.none"], f"there is no module json.none{THERE}"),
        (["memory=True", "SCRIPT"], f"{TAKES}'memory'; did you mean memory_efficient?"),
        (["strict=true", "SCRIPT"], "patch_model's strict is 'true': pass True or False"),
        (["exclude=a", "exclude=b", "SCRIPT"], "exclude is there twice: put commas between globs, or leave one out"),
        (
            ["recentre=True", "train_as_rms=True", "SCRIPT"],
            "recentre and train_as_rms contradict each other: choose one",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_told_in_one_line(words, said, run, script):
    words = [script("1 / 0") if word == "SCRIPT" else word for word in words]
    assert run(*words) == (2, "", f"hf_rmsnorm.integrations.run: {said}\n")
