"""The README's code and commands exist, and its figures are what comes out here."""

import io
import json
import pickle
import re
import shlex
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from places import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_rmsnorm
from hf_rmsnorm.cli.main import COMMANDS, build_parser

README = (ROOT / "README.md").read_text(encoding="utf-8")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_compile_and_import_what_there_is():
    for block in blocks("python"):
        compile(block, "README.md", "exec")
    names = [name for line in re.findall(r"from hf_rmsnorm import (.+)", README) for name in line.split(", ")]
    assert names and all(hasattr(hf_rmsnorm, name) for name in names)


def test_commands_parse():
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("hf-rmsnorm ")]
    assert {line.split()[1] for line in lines} == {command.__name__.rpartition(".")[2] for command in COMMANDS}
    for line in lines:
        assert callable(build_parser().parse_args(shlex.split(line, comments=True)[1:]).run)


@pytest.mark.parametrize("path", re.findall(r"`((?:scripts|examples|tests)/[\w/]+\.py)", README))
def test_files_it_names_exist(path):
    assert (ROOT / path).is_file()


PROSE = " ".join(README.split())


def test_what_pickle_holds_is_what_it_says():
    model = torch.nn.Sequential(LlamaRMSNorm(8))
    files = {}
    for state in ("plain", "patched", "unpatched"):
        {"patched": hf_rmsnorm.patch_model, "unpatched": hf_rmsnorm.unpatch_model}.get(state, len)(model)
        files[state] = io.BytesIO()
        torch.save(model, files[state])
        weights = io.BytesIO()
        torch.save(model.state_dict(), weights)
        assert b"hf_rmsnorm" not in weights.getvalue()
    assert [name for name, file in files.items() if b"hf_rmsnorm" in file.getvalue()] == ["patched"]
    files["patched"].seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(files["patched"], weights_only=True)
    assert "names this package" in PROSE and "Unpatch to pickle for others" in PROSE
    assert "and pickle do not notice" not in PROSE


def test_limits_it_names_are_there():
    model = torch.nn.Sequential(torch.nn.LayerNorm(1), torch.nn.LayerNorm(8))
    report = hf_rmsnorm.patch_model(model)
    assert [record.path for record in report.skipped] == ["0"] and "`nn.LayerNorm(1)`" in PROSE
    assert hf_rmsnorm.rms_norm(torch.ones(2, 1), torch.ones(1), 0.0).tolist() == [[1.0], [1.0]]
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(model[1])
    assert "`torch.jit.script` of a patched module is not supported" in PROSE


def test_tolerances_of_other_primitives_are_those_of_the_code():
    from hf_rmsnorm.patching.formula.closeness import MAX_DIFFERING, MAX_ULPS

    bf16, fp16 = (f"{MAX_DIFFERING[dtype]:.1%}" for dtype in (torch.bfloat16, torch.float16))
    assert f"held to {MAX_ULPS} ulp in float32 and to {bf16} of differing elements in bfloat16, {fp16} in" in PROSE


def test_it_names_what_the_table_of_budgets_holds():
    (version, table), = json.loads((ROOT / "tests/tools/aot_budgets.json").read_text(encoding="utf-8")).items()
    assert f"for Triton {version} alone" in PROSE
    rows = [row.split() for row in table]
    on_sm_90 = {variant.split("-")[0] for target, variant, _ in rows if target == "sm_90"}
    around = {"add_llama", "add_layernorm", "qk", "qk_rotary"}
    # plain has no weight; mamba's gate is before the norm, qwen3_next's after it
    assert on_sm_90 == {"llama", "gemma", "t5", "plain", "textbook", "mamba", "qwen3_next", "layernorm"} | around
    elsewhere = {(target, variant.split("-")[0]) for target, variant, _ in rows if target != "sm_90"}
    assert {target for target, _ in elsewhere} == {"sm_80", "sm_86", "sm_100", "gfx942"}
    assert {variant for _, variant in elsewhere} == {"llama", "layernorm"} | around
    assert "residual sums with the norms of LLaMA and LayerNorm, and q and k norm with and without rotary" in PROSE
    assert "LLaMA, Gemma and T5, one without weight, one with its eps outside the root, gated ones" in PROSE
    assert "of both orders, and LayerNorm for sm_90" in PROSE
    assert "LLaMA's and LayerNorm for sm_80, sm_86, sm_100 and gfx942" in PROSE


def test_the_numbers_of_types_are_those_of_the_results():
    results = ROOT / "scripts/results"
    causal = json.loads((results / "coverage-5.23.0.json").read_text(encoding="utf-8"))["mappings"]["causal"]
    fused = [{text for run in t["runs"] for _, text, _ in run["layers"]} for t in causal["types"]]
    sums, pairs = (sum(any(word in text for text in texts) for texts in fused) for word in ("+ ", "in one launch"))
    assert f"Of Transformers' {len(fused)} causal types {sums} have sums fused and {pairs} their q and k norms" in PROSE
    assert causal["totals"]["with_wrong_results"] == 0
    around = [run["fusion"] for t in causal["types"] for run in t["runs"][:1] if "fusion" in run]
    assert all(f["bit_equal"] and f["hidden_states"] for f in around)
    assert f"hidden states of all {len(around)} are equal to the bit" in PROSE
    assert f"greedy tokens of the {sum(f['tokens_equal'] is True for f in around)} that generate" in PROSE
    counts = json.loads((results / "convert-5.23.0.json").read_text(encoding="utf-8"))["summary"]
    converted = f"{counts['converted']} convert in full, {counts['partly']} in part"
    assert f"{converted}, {counts['refused']} are refused by name" in PROSE
    assert f"{counts['no LayerNorm']} have no LayerNorm" in PROSE


def test_the_host_costs_are_those_of_the_result():
    cases = json.loads((ROOT / "scripts/results/host-cpu.json").read_text(encoding="utf-8"))["cases"]

    def least(case, name, mode):
        return f"{cases[case][name][mode]['us_min']:.1f}"

    norm, both = "RMSNorm 1x1x64", ("inference", "forward+backward")
    ours, eager, liger = ([least(norm, n, m) for m in both] for n in ("hf_rmsnorm", "hf_eager", "liger"))
    assert f"takes {ours[0]} us in inference and {ours[1]} with its backward" in PROSE
    assert f"Hugging Face's {eager[0]} and {eager[1]}, Liger's {liger[0]} and {liger[1]}" in PROSE
    assert f"computes nothing {least(norm, 'an empty Function', both[1])} with its backward" in PROSE
    add = [least("add + RMSNorm 1x1x64", name, "inference") for name in ("hf_rmsnorm", "hf_eager")]
    assert f"a sum with its norm takes {add[0]}, Hugging Face's {add[1]}" in PROSE


def figures(row: str) -> list[str]:
    """The cells of the table's row that starts with `row`, without its name."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.fixture
def norm() -> tuple[LlamaRMSNorm, torch.Tensor]:
    torch.manual_seed(0)
    module = LlamaRMSNorm(512)
    torch.nn.init.normal_(module.weight)
    return module.to(DEVICE, torch.bfloat16), torch.randn(64, 512).to(DEVICE, torch.bfloat16)


def test_share_of_equal_elements_is_the_one_given(norm):
    module, x = norm
    with torch.no_grad(), hf_rmsnorm.use_backend("triton"):
        expected = module(x)
        fused = hf_rmsnorm.rms_norm(x, module.weight, module.variance_epsilon)
        once = F.rms_norm(x, (512,), module.weight, module.variance_epsilon)
    share, share_once = (f"{(y == expected).float().mean().item():.0%}" for y in (fused, once))
    assert figures("elements equal") == ["100%", share]
    assert f"so gives {share_once} of those elements" in " ".join(README.split())


def test_operators_are_as_many_as_in_the_table(norm):
    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.total += not func.is_view
            return func(*args, **(kwargs or {}))

    module, x = norm
    with torch.no_grad(), Count() as eager:
        module(x)
    with torch.no_grad(), hf_rmsnorm.use_backend("triton"), Count() as fused, hf_rmsnorm.count_launches() as launches:
        hf_rmsnorm.rms_norm(x, module.weight)
    assert fused.total == 1, "the allocation"
    assert figures("operators or kernels") == [str(eager.total), str(launches.total())]


def test_saved_bytes_are_as_many_as_in_the_table(norm):
    module, x = norm
    x.requires_grad_()

    def per_row(function) -> float:
        storages = {}

        def pack(tensor):
            if tensor.data_ptr() != module.weight.data_ptr():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = function(x)  # noqa: F841 - kept, so that no saved tensor's memory is used for another
        return sum(storages.values()) / x.shape[0]

    with hf_rmsnorm.use_backend("triton"):
        fused = per_row(lambda x: hf_rmsnorm.rms_norm(x, module.weight))
    table = [int(d) * 512 + int(c) for d, c in (cell.split(" D + ") for cell in figures("bytes saved"))]
    assert [per_row(module), fused] == table


def test_the_coverage_table_is_the_committed_result():
    script = ROOT / "scripts" / "coverage_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    mappings = json.loads((ROOT / "scripts/results/coverage-5.23.0.json").read_text())["mappings"]
    for words, mapping in (("causal language models", "causal"), ("base models", "base")):
        totals = mappings[mapping]["totals"]
        (row,) = [line for line in README.splitlines() if line.startswith(f"| {words} |")]
        keys = ("types", "built", "run", "norms_swapped", "norms_left_alone", "with_wrong_results")
        assert row.strip("| ").split(" | ")[1:] == [str(totals[k]) for k in keys]
        assert totals["bit_equal"] == totals["run"] and not totals["with_wrong_results"]


def test_another_coverage_table_is_noticed(tmp_path):
    copy = tmp_path / "scripts"
    (copy / "results").mkdir(parents=True)
    for name in ("coverage_table.py", "results/coverage-5.23.0.json"):
        (copy / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (tmp_path / "README.md").write_text(README.replace("| base models | 605 |", "| base models | 606 |"))
    command = [sys.executable, copy / "coverage_table.py"]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and "run scripts/coverage_table.py --write" in done.stdout
    subprocess.run([*command, "--write"], check=True)
    assert (tmp_path / "README.md").read_text() == README
