"""`hf-rmsnorm run`: a program as Python runs it, and every model that it loads patched."""

import inspect
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys

import pytest
import transformers
from places import EXAMPLES, PYTHONPATH
from processes import ran
from transformers import trainer

from hf_rmsnorm import PatchReport, patch_model
from hf_rmsnorm.demo import demo_path
from hf_rmsnorm.integrations import loading

diffusers = pytest.importorskip("diffusers", reason="the models that are loaded too")

LLAMA = str(demo_path("llama"))
RUN = [sys.executable, "-m", "hf_rmsnorm", "run"]
WHERE = "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"
NONE = "hf_rmsnorm: no model was patched in this process; "


@pytest.fixture
def script(tmp_path):
    """Writes a program; the path of its file."""

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(f"path = {LLAMA!r}\ntmp = {str(tmp_path)!r}\n{text}")
        return path

    return write


@pytest.fixture
def run(run, monkeypatch):
    """`hf-rmsnorm run` with these words in this process: (exit code, stderr); what it
    changes is given back.
    """
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run_words(*words):
        before = exchanged()
        try:
            code, _, err = run("run", *words)
        finally:
            assert exchanged() == before
        return code, err

    return run_words


def exchanged():
    """What a run exchanges."""
    of_transformers = vars(transformers.PreTrainedModel)
    return [
        of_transformers["from_pretrained"],
        of_transformers["_from_config"],
        vars(diffusers.ModelMixin)["from_pretrained"],
        vars(diffusers.ConfigMixin)["from_config"],
        trainer.DEFAULT_CALLBACKS,
        list(trainer.DEFAULT_CALLBACKS),
    ]


def lines(stderr):
    """What the command says of models, but for the count of compared kernels."""
    ours = [line for line in stderr.splitlines() if line.startswith("hf_rmsnorm: ")]
    return [line for line in ours if "at their first use" not in line]


def of_model(name, swapped, skipped=0, where=WHERE):
    places = f"; {where}" if where else ""
    return f"hf_rmsnorm: {name}: {swapped} norms swapped, {skipped} skipped{places}"


LOADS = "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained(path)\n"
LOADED = [of_model("LlamaForCausalLM", 11)]
TRAINS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig.from_pretrained(path, num_hidden_layers=1)
make = lambda: LlamaForCausalLM(config)
args = TrainingArguments(tmp, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 2
"""
PROGRAMS = {
    "from_pretrained": (LOADS, LOADED),
    "with its loading": (
        "import transformers\n"
        "model, info = transformers.AutoModel.from_pretrained(path, output_loading_info=True)\n",
        [of_model("LlamaModel", 11)],
    ),
    "from_config": (
        "from transformers import AutoConfig, AutoModel\n"
        "model = AutoModel.from_config(AutoConfig.from_pretrained(path))\n",
        [of_model("LlamaModel", 11)],
    ),
    "pipeline": (
        "from transformers import pipeline\npipeline('text-generation', path)('The', max_new_tokens=1)\n",
        LOADED,
    ),
    "two models": (LOADS * 2, LOADED * 2),
    "dispatched": (
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(path, device_map={'model.layers': 'disk', 'model.norm': 'cpu',"
        " 'model.embed_tokens': 'cpu', 'model.rotary_emb': 'cpu', 'lm_head': 'cpu'}, offload_folder=tmp)\n",
        LOADED,
    ),
    "a model of two": (
        "from transformers import AutoModel, CLIPConfig\n"
        "small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)\n"
        "config = CLIPConfig(text_config=small | {'vocab_size': 64}, vision_config=small)\n"
        "AutoModel.from_config(config).save_pretrained(tmp)\n"
        "AutoModel.from_pretrained(tmp)\n",
        [of_model("CLIPModel", 7)] * 2,
    ),
    "an adapter": (
        LOADS.replace("\nAuto", "\nmodel = Auto")
        + "from peft import LoraConfig, get_peft_model\n"
        "get_peft_model(model, LoraConfig(target_modules=['q_proj'])).save_pretrained(tmp)\n"
        "AutoModelForCausalLM.from_pretrained(tmp)\n",
        LOADED * 2,
    ),
    "a Trainer": (TRAINS + "Trainer(make(), args)\n", [of_model("LlamaForCausalLM", 3)]),
    "a Trainer of a loaded model": (
        TRAINS + "Trainer(LlamaForCausalLM.from_pretrained(path), args, train_dataset=rows).train()\n",
        LOADED,
    ),
    "model_init": (
        TRAINS + "Trainer(None, args, model_init=make, train_dataset=rows).train()\n",
        [of_model("LlamaForCausalLM", 3)] * 2,
    ),
}  # fmt: skip


PIPELINE = """
import pathlib, torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, DiTPipeline, DiTTransformer2DModel
torch.manual_seed(0)
sizes = {"in_channels": 4, "out_channels": 4, "sample_size": 4, "patch_size": 2}
transformer = DiTTransformer2DModel(2, 16, num_layers=1, num_embeds_ada_norm=1000, **sizes)
for parameter in transformer.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
vae = AutoencoderKL(block_out_channels=(32,), latent_channels=4)
DiTPipeline(transformer, vae, DDIMScheduler()).save_pretrained(tmp)
pipeline = DiffusionPipeline.from_pretrained(tmp, torch_dtype=torch.bfloat16)
pipeline.set_progress_bar_config(disable=True)
images = pipeline([1], num_inference_steps=2, output_type="np", generator=torch.manual_seed(0)).images
pathlib.Path(__file__).with_suffix(".out").write_bytes(images.tobytes())
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_model_is_patched_once_it_is_whole(name, run, script):
    text, told = PROGRAMS[name]
    code, said = run(script(text))
    assert (code, lines(said)) == (0, told)


def test_a_pipeline_of_diffusers_makes_the_same_picture(run, script):
    path = script(PIPELINE)
    picture = path.with_suffix(".out")
    runpy.run_path(str(path), run_name="__main__")
    expected = picture.read_bytes()
    code, said = run(path)
    assert (code, picture.read_bytes()) == (0, expected)
    norms = of_model("DiTTransformer2DModel", 3), of_model("AutoencoderKL", 0, 0, "")
    assert sorted(lines(said)) == sorted(norms)


SHOWS = """
import sys
print(__name__, __file__, sys.modules["__main__"].__dict__ is globals(), sys.path[0], sys.argv, sys.stdin.read())
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def hear_interrupts():
    """A job in the background of a shell ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(command, cwd, **options):
    return subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "TRITON_INTERPRET": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
        **options,
    )


def ended(command, cwd):
    """(stdout, stderr, exit code) of a program that is given a word on stdin."""
    process = started(command, cwd, stdin=subprocess.PIPE)
    return *process.communicate("a word"), process.returncode


@pytest.mark.parametrize("how", ["a file", "a module", "a command"])
def test_a_program_sees_what_it_would_without(how, script, tmp_path, monkeypatch):
    path = script(SHOWS)
    command = tmp_path / "bin" / "shows"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{path.read_text()}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    arguments = ["a", "--strict", "-m", "--", "b"]
    words = {
        "a file": [["script.py"], [sys.executable, "script.py"]],
        "a module": [["-m", "script"], [sys.executable, "-m", "script"]],
        "a command": [["shows"], ["shows"]],
    }
    ours, own = words[how]
    said, told, code = ended([*own, *arguments], tmp_path)
    assert (told, code) == ("to stderr\n", 7)
    ran = ended([*RUN, "--memory-efficient", *ours, *arguments], tmp_path)
    assert (ran[0], ran[2]) == (said, code)
    before, _, after = ran[1].partition(told)
    assert lines(before) == []  # bitsandbytes may talk when Transformers is imported
    assert after.startswith(NONE) and after.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_as_it_would_without(number, script, tmp_path):
    path = script(LOADS + "print('ready', flush=True)\ninput()\n")
    process = started([*RUN, path], tmp_path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == -number
    assert lines(told) == LOADED
    assert ("KeyboardInterrupt" in told) == (number == signal.SIGINT)


def test_an_exit_and_an_error_of_the_program_are_its_own(run, script, capsys):
    assert run(script("raise SystemExit('no')"))[0] == "no"
    with pytest.raises(ZeroDivisionError) as error:
        run(script("1 / 0"))
    assert error.traceback[-1].path.name == "script.py"
    assert lines(capsys.readouterr().err)[0].startswith(NONE)


def test_a_model_that_cannot_be_patched_is_told_and_the_program_runs_on(run, script):
    code, said = run("--exclude", "*.nothing", script(LOADS + "exit(3)"))
    told, none = lines(said)
    assert code == 3 and none.startswith(NONE)
    assert told.startswith(
        "hf_rmsnorm: LlamaForCausalLM is not patched: ValueError: exclude='*.nothing' "
        "matches the path of no norm"
    )


@pytest.mark.full
def test_norms_that_liger_takes_are_told_again(script, tmp_path):
    pytest.importorskip("liger_kernel", reason="the patcher that this is for")
    others = "rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy"
    norms_alone = dict.fromkeys(others, False) | {"rms_norm": True}
    liger = f"use_liger_kernel=True, liger_kernel_config={norms_alone}, "
    text = TRAINS.replace("(tmp, ", f"(tmp, {liger}")
    path = script(text + "Trainer(make(), args, train_dataset=rows).train()\n")
    # Liger's kernel does not run in every Triton's interpreter
    _, told, _ = ended([*RUN, path], tmp_path)
    first, last = lines(told)
    assert first == of_model("LlamaForCausalLM", 3)
    assert last == of_model("LlamaForCausalLM", 0, 3, "")


def test_a_quantised_model_is_patched_when_it_is_whole(run, script):
    pytest.importorskip("bitsandbytes", reason="the quantiser that this is for")
    text = "from transformers import BitsAndBytesConfig\n" + LOADS.replace(
        "(path", "(path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
    )
    assert lines(run(script(text))[1]) == LOADED


MODELLING = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

class OwnModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm = OwnNorm(config.hidden_size)
"""


def test_remote_code_is_patched(script, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for file in demo_path("llama").iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modelling.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modelling.py").write_text(MODELLING)
    text = LOADS.replace("(path", "(tmp, trust_remote_code=True")
    _, told, code = ended([*RUN, script(text)], tmp_path)
    assert (code, lines(told)) == (0, [of_model("OwnModel", 11)])


@pytest.mark.full
def test_each_process_of_a_launcher_patches_its_own(script, tmp_path):
    path = script(LOADS + "import os\nprint('rank', os.environ['RANK'])\n")
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", EXAMPLES / "accelerate" / "ddp.yaml"]
    launch += ["--num_processes", 2, "--main_process_port", 0]
    said, told, code = ended([*launch, *RUN[1:], "--strict", path], tmp_path)
    assert (code, sorted(said.split("\n"))) == (0, ["", "rank 0", "rank 1"]), told
    # what one process writes may stand within a line of the other
    assert told.count(LOADED[0]) == 2


# options and what cannot be run


def test_each_option_of_patch_model_is_one(run, script, monkeypatch):
    taken = []

    def take(model, **options):
        taken.append(options)
        return PatchReport()

    monkeypatch.setattr(loading, "patch_model", take)
    words = "--include *.a --include=*.b --exclude *.c --strict --no-fuse-residual --memory-efficient"
    run(*words.split(), script(LOADS))
    run(script(LOADS))
    named = {"include": ["*.a", "*.b"], "exclude": ["*.c"], "strict": True}
    named |= {"fuse_residual": False, "memory_efficient": True}
    unnamed = dict.fromkeys(named) | {"strict": False}
    assert taken == [named, unnamed]
    parameters = set(inspect.signature(patch_model).parameters)
    assert named.keys() == parameters - {"model"}


KINDS = "name a Python file, a command that pip installed, or -m MODULE"
STARTS = "starts other processes, in which nothing would be patched: "
REFUSED = {
    "": f"there is nothing to run: {KINDS}",
    "--strict": f"there is nothing to run: {KINDS}",
    "no_such_program": f"there is no program 'no_such_program': {KINDS}",
    "-m no.such": f"there is no module 'no.such': {KINDS}",
    "-m": f"there is no module '': {KINDS}",
    "/bin/sh -c true": f"/bin/sh is no Python program: {KINDS}",
    "--excluded x y.py": "unrecognized arguments: --excluded",
    "--exclude": "argument --exclude: expected one argument",
    "accelerate launch x.py": f"accelerate {STARTS}accelerate launch -m hf_rmsnorm run PROGRAM",
    "-m torch.distributed.run x.py": f"torch.distributed.run {STARTS}torchrun -m hf_rmsnorm run PROGRAM",
    "/usr/bin/deepspeed x.py": f"/usr/bin/deepspeed {STARTS}deepspeed --no_local_rank --module hf_rmsnorm run PROGRAM",
    "trl dpo": f"trl {STARTS}accelerate launch -m hf_rmsnorm run -m trl.scripts.sft, or .dpo",
}


def test_what_cannot_be_run_is_told_in_one_line_before_torch_is_imported():
    code = """
import json, sys
from hf_rmsnorm.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(["run", *words.split()])
    except SystemExit as stop:
        assert stop.code == 2
assert not {"torch", "transformers", "triton"} & set(sys.modules)
"""
    done = ran(sys.executable, "-c", code, json.dumps([*REFUSED]))
    assert done.returncode == 0, done.stderr
    for told, expected in zip(done.stderr.splitlines(), REFUSED.values(), strict=True):
        program, _, message = told.partition(": error: ")
        assert program in ("hf-rmsnorm", "hf-rmsnorm run")
        assert message.startswith(f"{expected} (see ")
