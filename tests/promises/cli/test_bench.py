"""`hf-rmsnorm bench MODEL`: both sides are timed in turn, the results compared, and
what is not measured is named.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import tiny_models
import torch
import transformers

import hf_rmsnorm
from hf_rmsnorm.cli import bench
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.demo import demo_path
from hf_rmsnorm.ops import backend

FIGURES = {"before", "after", "after_over_before", "samples"}
SMALL = dict(
    vocab_size=64, num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
    intermediate_size=32, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved LLaMA of one layer; it has no tokenizer, so random ids stand for a text."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.build("llama", torch.bfloat16, num_hidden_layers=1).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def plain(monkeypatch):
    """As on a CPU outside of the tests, where no kernel runs."""
    monkeypatch.setattr(
        backend, "_device_refusal", lambda *_: "there is no such device"
    )


def run(capsys, *argv):
    code = main(["bench", *map(str, argv), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def run_json(capsys, *argv):
    code, out = run(capsys, *argv, "--json")
    return code, json.loads(out)


def test_both_sides_are_timed_and_the_kernels_judged(capsys, folder):
    code, data = run_json(
        capsys, folder, "--new-tokens", 2, "--batch", 2, "--length", 8
    )
    assert (
        code == 0
        and data["passed"]
        and data["verdict"]["passed"]
        and data["verdict"]["launches"]
    )
    assert (data["swapped"], data["new_tokens"], data["batch"]) == (3, 2, [2, 8])
    for key in ("tokens_per_second", "step_ms"):
        assert data[key].keys() == FIGURES and [
            len(side) for side in data[key]["samples"]
        ] == [2, 2]
        assert (
            data[key]["after_over_before"]
            == data[key]["after"] / data[key]["before"]
            > 0
        )
    assert data["first_difference"] is None
    assert data["losses"][0] == pytest.approx(data["losses"][1], rel=1e-2)
    assert any("interpreter" in line for line in data["not_measured"])
    assert (
        any("needs a GPU" in line for line in data["not_measured"])
        and "step_peak_gb" not in data
    )


def test_where_no_kernel_runs_it_says_that_the_times_are_of_the_same_code(
    capsys, folder, plain
):
    code, out = run(capsys, folder, "--new-tokens", 3, "--length", 8)
    assert code == 0 and out.startswith(
        f"{folder}: the same tokens\n3 norms swapped, bfloat16 on cpu\n"
    )
    assert (
        "tokens per second (3 new" in out
        and "ms per training step (1 x 8 tokens)" in out
        and "peak GB" not in out
    )
    said = " ".join(out.split())
    assert (
        "the speed-up of the kernels, as the norms run in plain PyTorch (there is no such device)"
        in said
    )
    assert (
        "Not measured: how far the results differ: both sides ran in plain PyTorch"
        in said
    )


@pytest.mark.full
def test_a_prompt_is_gone_on_from_greedily_whatever_the_checkpoint_asks_for(
    capsys, tmp_path, plain
):
    shutil.copytree(demo_path("gpt2"), tmp_path, dirs_exist_ok=True)
    transformers.GenerationConfig(
        do_sample=True, temperature=9.0, num_beams=2
    ).save_pretrained(tmp_path)
    argv = ("--prompt", "The import", "--new-tokens", 4, "--no-train")
    (_, data), (_, own) = (
        run_json(capsys, model, *argv) for model in (tmp_path, "demo:gpt2")
    )
    assert data["token_ids"] == own["token_ids"] and [
        len(side) for side in data["token_ids"]
    ] == [4, 4]
    before, after = data["texts"]
    assert (
        before == after
        and before.startswith("The import")
        and len(before) > len("The import")
    )
    code, out = run(capsys, "demo:gpt2", *argv)
    assert code == 0 and out.count(before) == 2 and "--- patched" in out


def test_a_prompt_needs_a_tokenizer(capsys, folder):
    assert main(["bench", str(folder), "--prompt", "x", "--device", "cpu"]) == 2
    assert "has no tokenizer to read a prompt with" in capsys.readouterr().err


def test_sequences_that_the_model_does_not_take_are_named(capsys, folder, plain):
    _, data = run_json(
        capsys, folder, "--new-tokens", 1, "--length", 10**6, "--no-train"
    )
    assert any(
        line.startswith("sequences of 1000000 tokens: the model takes at most")
        for line in data["not_measured"]
    )


def test_no_train_leaves_the_step_out(capsys, folder, plain):
    _, data = run_json(
        capsys, folder, "--new-tokens", 1, "--no-train", "--dtype", "fp32"
    )
    assert data["dtype"] == "float32" and "tokens_per_second" in data
    assert not {"step_ms", "losses", "batch"} & data.keys() and not any(
        "training" in x for x in data["not_measured"]
    )


def test_different_results_fail(capsys, folder, monkeypatch):
    verdict = SimpleNamespace(passed=False, to_dict=lambda: {"passed": False})
    monkeypatch.setattr(
        hf_rmsnorm, "verify_equivalence", lambda *args, **kwargs: verdict, raising=False
    )
    tokens = iter([[5, 6], [5, 7]] * 3)
    monkeypatch.setattr(bench, "greedy", lambda *args, **kwargs: next(tokens))
    code, out = run(capsys, folder, "--new-tokens", 2, "--no-train")
    assert code == 1
    assert (
        "FAIL, the results differ; other tokens from new token 1 on. Run hf-rmsnorm verify"
        in out
    )


def test_a_short_context_shortens_prompt_and_text(capsys, tmp_path, plain):
    tiny_models.build(
        "llama", num_hidden_layers=1, max_position_embeddings=16
    ).save_pretrained(tmp_path)
    code, data = run_json(capsys, tmp_path, "--new-tokens", 50, "--length", 500)
    assert code == 0 and data["new_tokens"] == 8 and data["batch"] == [1, 16]


@pytest.mark.parametrize(
    "name, config",
    [
        ("BertModel", transformers.BertConfig(**SMALL)),
        ("T5ForConditionalGeneration", transformers.T5Config(
            vocab_size=64, num_layers=1, d_model=32, d_kv=16, num_heads=2, d_ff=32, decoder_start_token_id=0,
        )),
    ],
    ids=["encoder", "encoder and decoder"],
)  # fmt: skip
def test_what_does_not_go_on_from_a_text_is_trained(
    capsys, tmp_path, plain, name, config
):
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    code, data = run_json(capsys, tmp_path, "--length", 8)
    assert (
        code == 0
        and data["losses"][0] == data["losses"][1]
        and "tokens_per_second" not in data
    )
    assert f"generation: a {name} does not continue a text" in data["not_measured"]


def test_too_little_memory_costs_that_measurement_alone(capsys, folder, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 99 GiB")

    monkeypatch.setattr(hf_rmsnorm, "verify_equivalence", full, raising=False)
    monkeypatch.setattr(bench, "_train", full)
    code, data = run_json(capsys, folder, "--new-tokens", 1)
    assert (
        code == 0 and data["tokens_per_second"]["before"] > 0 and "verdict" not in data
    )
    assert any("out of memory for float64" in line for line in data["not_measured"])
    assert any(
        "pass a smaller --batch or --length" in line for line in data["not_measured"]
    )


def test_runs_that_scatter_are_no_figure(capsys):
    data = {"not_measured": []}
    steady = bench._figure([[1.0, 1.1], [2.0, 2.2]], data, "generation")
    assert (
        steady["after_over_before"] == pytest.approx(2.0) and not data["not_measured"]
    )
    bench._figure([[1.0, 1.1], [2.0, 9.0]], data, "generation")
    assert data["not_measured"] == [
        "generation reliably: timings vary 4.5x, so the machine seems busy; try again"
    ]


def test_the_peak_of_memory_is_of_each_side_on_a_gpu(monkeypatch):
    """The calls that a GPU gets, in order; no GPU is needed to see them."""
    log, peaks = [], iter(range(1, 7))
    memory = SimpleNamespace(
        reset_peak_memory_stats=lambda device: log.append("reset"),
        max_memory_allocated=lambda device: log.append("read") or next(peaks),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: memory)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: log.append("wait"))
    for name in ("patch_model", "unpatch_model"):
        monkeypatch.setattr(
            hf_rmsnorm, name, lambda model, name=name: log.append(name), raising=False
        )
    model = SimpleNamespace(device=torch.device("cuda", 0))
    _, seconds, found = bench._in_turn(
        model, lambda: log.append("call"), range(bench.ROUNDS + 1)
    )
    turn = ["reset", "wait", "call", "wait"]
    assert log == ["unpatch_model", *turn, "patch_model", *turn] + 2 * [
        "unpatch_model", *turn, "read", "patch_model", *turn, "read"
    ]  # fmt: skip
    assert found == [[1, 3], [2, 4]] and [len(side) for side in seconds] == [2, 2]


@pytest.mark.parametrize(
    "argv, part",
    [
        (["bench"], "MODEL"),
        (["bench", "demo:llama", "--new-tokens", "0"], "below 1"),
        (["bench", "demo:llama", "--dtype", "int8"], "int8"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, part):
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and part in err


def test_a_model_that_takes_no_text_is_refused(capsys, tmp_path):
    vit = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2
    )
    transformers.ViTModel(vit).save_pretrained(tmp_path)
    assert main(["bench", str(tmp_path)]) == 2
    assert "takes pixel_values and not a text" in capsys.readouterr().err
