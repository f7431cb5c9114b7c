"""The command line: what each subcommand says, as text and as JSON, and how it fails."""

import json
import os
import re
import shutil
import socket
import sys

import pytest
import tiny_models
import torch
import transformers
from processes import python, ran
from safetensors.torch import save_file
from towers import IMAGE

from hf_rmsnorm.cli.main import main
from hf_rmsnorm.demo import demo_path
from hf_rmsnorm.ops import runs_on

COMMANDS = ["report", "verify", "convert", "bench", "env", "run"]
NORMS = {"demo:llama": 5 * 2 + 1, "demo:qwen3": 4 * 4 + 1, "demo:gpt2": 5 * 2 + 1}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the command line reached for the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def save_config(folder, config):
    config.save_pretrained(folder)
    return folder


# report


@pytest.mark.parametrize("model", NORMS)
def test_report_lists_every_norm_of_a_demo_as_swapped(run_json, model):
    data = run_json("report", model)
    assert len(data["swapped"]) == NORMS[model] and data["skipped"] == []
    assert {record["formula"]["kind"] for record in data["swapped"]} == {
        "LayerNorm" if model == "demo:gpt2" else "RMSNorm"
    }


def test_report_says_what_would_run_here(run, run_json):
    (where,) = run_json("report", "demo:llama")["devices"]
    assert where == runs_on(where["device"])
    out = " ".join(run("report", "demo:llama")[1].split())
    assert f"runs on {where['device']}: {where['reason']}" in out


def test_a_config_of_700_billion_parameters_needs_no_memory(run_json, fails, tmp_path):
    """Its experts are one parameter of 15 GB in each layer."""
    folder = save_config(tmp_path, transformers.DeepseekV3Config())
    assert len(run_json("report", folder)["swapped"]) == 245
    refusal = fails("convert", folder, "--plan")
    assert "it uses RMSNorm already" in refusal


@pytest.mark.parametrize(
    "argv, step",
    [
        (["report", "demo:gpt2"], "building the modules of demo:gpt2"),
        (["convert", "demo:gpt2", "--plan"], "planning on a small random model"),
    ],
)
def test_a_step_that_can_take_long_says_so_on_a_terminal(run, monkeypatch, argv, step):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run(*argv)
    assert code == 0 and step in err and "\n" not in err


SMALL = dict(
    vocab_size=64, num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
    intermediate_size=32,
)  # fmt: skip
WHISPER = dict(
    vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
    decoder_ffn_dim=16,
)  # fmt: skip
WHISPER |= dict(
    encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0, eos_token_id=2
)


@pytest.mark.parametrize(
    "saved, config, built, norms",
    [
        ("WhisperForConditionalGeneration", transformers.WhisperConfig(**WHISPER),
         "WhisperForConditionalGeneration", 7),
        ("LlamaModel", transformers.LlamaConfig(**SMALL), "LlamaModel", 3),
        ("BertNoSuchHead", transformers.BertConfig(**SMALL), "BertLMHeadModel", 4),
        (None, transformers.T5Config(num_layers=2, d_model=32),
         "T5ForConditionalGeneration", 12),
        (None, transformers.ViTConfig(num_hidden_layers=2, hidden_size=32,
         num_attention_heads=2), "ViTModel", 5),
    ],
)  # fmt: skip
def test_report_builds_the_class_that_was_saved(
    run_json, tmp_path, saved, config, built, norms
):
    if saved is not None:
        config.architectures = [saved]
    data = run_json("report", save_config(tmp_path, config))
    assert (data["class_name"], len(data["swapped"])) == (built, norms)


def test_report_takes_include_and_exclude(run_json):
    words = "report demo:qwen3 --include *.layers.0.* --exclude *.q_norm"
    data = run_json(*words.split())
    assert {record["path"].rpartition(".")[2] for record in data["swapped"]} == {
        "input_layernorm", "post_attention_layernorm", "k_norm"
    }  # fmt: skip


def test_report_of_a_model_without_norms_warns_and_is_strict_on_request(
    run, fails, tmp_path
):
    folder = save_config(
        tmp_path,
        transformers.ResNetConfig(depths=[1], hidden_sizes=[8], embedding_size=8),
    )
    code, out, err = run("report", folder, "--json")
    assert code == 0 and json.loads(out)["swapped"] == []
    assert re.fullmatch(r"hf-rmsnorm: warning: .+\n", err)
    fails("report", folder, "--strict")


REMOTE = """
import pathlib
import torch
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path({marker!r}).touch()

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.norm = torch.nn.LayerNorm(16)
        self.post_init()
"""


def test_report_runs_a_checkpoints_code_only_when_told_to(
    run_json, fails, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache")
    )
    marker, folder = tmp_path / "ran", tmp_path / "own"
    folder.mkdir()
    (folder / "modeling.py").write_text(REMOTE.format(marker=str(marker)))
    auto_map = {"AutoConfig": "modeling.OwnConfig", "AutoModel": "modeling.OwnModel"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": auto_map})
    )
    assert "--trust-remote-code" in fails("report", folder)
    assert not marker.exists()
    data = run_json("report", folder, "--trust-remote-code")
    assert marker.exists() and [record["path"] for record in data["swapped"]] == [
        "norm"
    ]


# verify


@pytest.mark.full
def test_verify_says_pass_in_fp32_and_bf16_with_the_kernels(tmp_path):
    """In a process of its own, as a user runs it: triton has to start under the
    interpreter where there is no GPU.
    """
    words = "-m hf_rmsnorm verify demo:llama --json --dtype all"
    data = json.loads(python(*words.split(), cwd=tmp_path))
    assert data["passed"]
    assert data["backend"] == "triton"
    assert [run["dtype"] for run in data["runs"]] == ["float32", "bfloat16"]
    for verified in data["runs"]:
        assert verified["passed"]
        assert verified["noise_floor"]["rows"] == 16
        assert verified["greedy"]["compared"] == 4
        assert sum(verified["launches"].values()) > 0
    if not torch.accelerator.is_available():
        assert "interpreter" in data["backend_reason"]


def test_verify_in_one_dtype_prints_its_verdict_and_backend(run):
    words = "verify demo:gpt2 --dtype fp32 --max-tokens 4 --max-new-tokens 2"
    code, out, _ = run(*words.split())
    assert code == 0
    assert "demo:gpt2 in float32: PASS" in out and "bfloat16" not in out
    assert "\nThe norms ran on cpu: Triton kernels in Triton's interpreter" in out


@pytest.mark.full
def test_verify_takes_the_stored_dtype_and_random_ids_where_there_is_no_tokenizer(
    run_json, tmp_path
):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(demo_path("qwen3") / name, tmp_path)
    few = "--max-tokens", "3", "--max-new-tokens", "0"
    (found,) = run_json("verify", tmp_path, *few)["runs"]
    assert (found["dtype"], found["noise_floor"]["rows"]) == ("bfloat16", 3)


def test_verify_takes_inputs_from_a_file(run_json, fails, tmp_path):
    transformers.ViTForImageClassification(
        transformers.ViTConfig(**IMAGE)
    ).save_pretrained(tmp_path)
    file, other = tmp_path / "inputs.safetensors", tmp_path / "empty.safetensors"
    save_file({"pixel_values": torch.randn(5, 3, 16, 16)}, file)
    verify = "verify", tmp_path, "--inputs"
    (found,) = run_json(*verify, file, "--no-backward")["runs"]
    assert found["passed"] and found["noise_floor"]["rows"] == 5
    save_file({}, other)
    refused = {
        tmp_path / "config.json": "pass a .safetensors file",
        tmp_path / "not there": "cannot read",
        other: "holds no tensors",
    }
    for path, said in refused.items():
        assert said in fails(*verify, path)


@pytest.mark.full
def test_verify_runs_every_norm_of_an_encoder_and_a_decoder(run_json, tmp_path):
    config = transformers.T5Config(
        vocab_size=64, num_layers=1, d_model=32, d_kv=16, num_heads=2, d_ff=32
    )
    config.decoder_start_token_id = 0
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    (found,) = run_json("verify", tmp_path, "--max-tokens", "2")["runs"]
    assert found["passed"] and len(found["norms"]) == 7 and found["unreached"] == []
    assert "it would begin at the decoder's start token" in found["greedy"]["text"]
    few = "--max-tokens", "2", "--max-new-tokens", "0"
    (found,) = run_json("verify", tmp_path, *few)["runs"]
    assert found["greedy"]["text"] == "not asked for"


@pytest.mark.full
def test_verify_says_why_a_converted_model_keeps_its_layer_norms(
    run, run_json, tmp_path
):
    tiny_models.build("gpt2", torch.bfloat16).save_pretrained(tmp_path / "src")
    dst = tmp_path / "dst"
    assert run("convert", tmp_path / "src", dst, "--no-verify")[0] == 0
    argv = ("verify", dst, "--max-new-tokens", "2")
    (done,) = run_json(*argv)["runs"]
    assert done["conversion"].startswith("converted: 5 of its LayerNorms run as RMSN")
    code, out, _ = run(*argv, "--dtype", "fp32")
    assert code == 0 and 'load it with dtype="auto"' in " ".join(out.split())
    assert "each norm that the conversion recorded stays" in " ".join(out.split())


@pytest.mark.full
def test_verify_keeps_to_a_short_context(run_json, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_path("gpt2"))
    tiny_models.build(
        "gpt2", vocab_size=len(tokenizer), n_positions=32
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    argv = ("--max-tokens", 20, "--max-new-tokens", 20)
    (done,) = run_json("verify", tmp_path, *argv)["runs"]
    assert done["passed"]
    assert done["greedy"]["compared"] == done["noise_floor"]["rows"] == 16


def test_verify_exits_with_1_on_fail(run, monkeypatch):
    import hf_rmsnorm

    class Verdict:
        passed, dtype = False, "bfloat16"

        def to_dict(self):
            return {"passed": False, "rounding": ""}

        def to_text(self, verbose):
            return "FAIL: generated tokens\na table"

    def verify(*args, **kwargs):
        return Verdict()

    monkeypatch.setattr(hf_rmsnorm, "verify_equivalence", verify, raising=False)
    code, out, _ = run("verify", "demo:llama", "--dtype", "bf16")
    assert code == 1
    assert "demo:llama in bfloat16: FAIL: generated tokens\na table" in out


# env


def test_env_names_versions_devices_and_the_reason_for_each_backend(run, run_json):
    data = run_json("env")
    assert data["versions"]["torch"] == torch.__version__
    assert data["devices"][0]["device"] == "cpu"
    assert all(device["reason"] for device in data["devices"])
    assert data["launches"]
    code, out, _ = run("env")
    assert code == 0 and torch.__version__ in out
    assert f"\nlaunches: {data['launches']}\n" in out
    assert data["devices"][0]["reason"] in " ".join(out.split())


def test_env_says_why_no_kernel_can_be_compiled_and_what_to_do(run_json, monkeypatch):
    compiled = pytest.importorskip("hf_rmsnorm.kernels.compiled")
    launches = pytest.importorskip("hf_rmsnorm.ops.launches")

    def no_compiler(*_, **__):
        raise RuntimeError("Failed to find C compiler")

    # the interpreter compiles nothing, and says so
    assert run_json("env")["devices"][0]["compiles"] is None
    monkeypatch.setattr(compiled.Kernel, "load", no_compiler)
    launches.forget_launches()
    device = run_json("env")["devices"][0]
    assert (device["backend"], device["compiles"]) == ("original", False)
    assert "Failed to find C compiler" in device["reason"] and "CC=" in device["reason"]


# on a terminal


@pytest.mark.parametrize(
    "line, completed",
    [("hf-rmsnorm ver", {"verify "}), ("hf-rmsnorm verify --max-", {"--max-tokens", "--max-new-tokens"}),
     ("hf-rmsnorm convert demo:gpt2 --target nat", {"native "})],
)  # fmt: skip
def test_tab_completes_commands_and_options(line, completed, tmp_path):
    pytest.importorskip("argcomplete", reason="of the extra 'completion'")
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
    }
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "answer")
    python("-c", "from hf_rmsnorm.cli.main import main; main(); assert 0", **asked)
    assert set((tmp_path / "answer").read_text().split("\n")) == completed


# errors


@pytest.mark.parametrize("command", ["report", "verify", "bench"])
@pytest.mark.parametrize(
    "model, cure",
    [
        ("demo:bert", "demo:qwen3"),
        ("./missing", "pass a local folder"),
        ("a/b/c", "pass a local folder"),
        ("{tmp}", "save_pretrained"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/broken", "repair the folder"),
        ("{tmp}/unknown", "repair the folder"),
    ],
)
def test_a_model_that_is_none_fails_with_the_cure(
    fails, tmp_path, command, model, cure
):
    (tmp_path / "file").touch()
    for name, config in (
        ("broken", "{"),
        ("unknown", '{"model_type": "no-such-type"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    assert cure in fails(command, model.format(tmp=tmp_path))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_download_that_no_bar_shows_is_said(run, monkeypatch, terminal):
    monkeypatch.setattr("hf_rmsnorm.sources.hub_answers", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    name = f"no-such-org/{terminal}"
    code, _, err = run("report", name)
    assert code == 2
    assert ("HF_HUB_DISABLE_PROGRESS_BARS" in os.environ) != terminal
    assert (f"loading {name} from the Hub or its cache\n" in err) != terminal


@pytest.mark.full
def test_a_network_that_is_down_is_told_in_one_line_and_asked_once(
    tmp_path, monkeypatch
):
    code = (
        "import socket, sys, time\nasked = []\n"
        "def down(*args, **kwargs):\n    asked.append(args)\n    raise socket.gaierror(-2, 'not known')\n"
        "socket.getaddrinfo = down\n"
        "def no_waiting(seconds): raise AssertionError(f'it waits {seconds} s to ask again')\n"
        "time.sleep = no_waiting\n"
        "from hf_rmsnorm.cli.main import main\ncode = main(['report', 'no-such-org/no-such-model'])\n"
        "assert len(asked) <= 2, asked\nsys.exit(code)"
    )
    for name in [*os.environ]:
        if name.lower().endswith("_proxy") or name == "HF_HUB_OFFLINE":
            monkeypatch.delenv(name)
    done = ran(sys.executable, "-c", code, HF_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (
        done.stderr
    )
    assert "check the id and the network" in done.stderr


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_folder_without_weights_fails_with_the_cure(fails, tmp_path, command):
    shutil.copytree(demo_path("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    assert "weights" in fails(command, tmp_path)


@pytest.mark.parametrize(
    "argv, part",
    [
        ([], "COMMAND"),
        (["patch"], "invalid choice"),
        (["verify", "demo:llama", "--zzz"], "--zzz (see hf-rmsnorm verify --help)"),
        (["verify", "demo:lama"], "did you mean llama?"),
        (["report"], "MODEL"),
        (["report", "demo:llama", "--include", "no.such.*"], "no.such.*"),
        (["verify", "demo:llama", "--dtype", "int8"], "int8"),
        (["verify", "demo:llama", "--max-tokens", "0"], "below 1"),
        (["verify", "demo:llama", "--max-new-tokens", "-5"], "below 0"),
        (["report", ""], "MODEL is empty"),
        (["verify", "demo:llama", "--prompt", ""], "--prompt"),
        (["verify", "demo:llama", "--device", "toaster"], "toaster"),
        (["verify", "demo:llama", "--device", "mps:7"], "mps"),
        (["bench", "demo:llama", "--new-tokens", "0"], "below 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_fail_in_one_line(fails, argv, part):
    assert part in fails(*argv)


def test_traceback_is_there_for_who_asks():
    from hf_rmsnorm.sources import SourceError

    with pytest.raises(SourceError):
        main(["report", "./missing", "--traceback"])


# the program


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys\nfrom hf_rmsnorm.cli.main import main\n"
        "for argv in (['--version'], ['--help'], ['verify', '--help'], ['bench', '--help']):\n"
        "    try: main(argv)\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    assert "hf-rmsnorm 0." in python("-c", code)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_at_most_100_columns_wide(run, command):
    assert max(map(len, run(command, "--help")[1].splitlines())) <= 100
