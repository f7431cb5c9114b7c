"""Every figure of the documentation is what comes out here, or what a committed result holds."""

import importlib.util
import io
import json
import pickle
import re
import shutil
import subprocess
import sys

import pages
import pytest
import torch
import torch.nn.functional as F
from places import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_rmsnorm
from hf_rmsnorm.cli.main import main

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = ROOT / "scripts/results"


def result(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# --- counted or computed anew ------------------------------------------------------------------------------------


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
    assert pages.row("README.md", "", "elements equal to those of Hugging Face's module") == ["100%", share]
    assert f"so gives {share_once} of those elements" in pages.prose("README.md")
    assert pages.row("docs/proof.md", "What is compared", "hf-rmsnorm") == [share]
    assert pages.row("docs/proof.md", "What is compared", "`F.rms_norm`, which rounds once, at the end") == [share_once]


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
    shown = pages.row("README.md", "", "operators or kernels launched in inference, allocation aside")
    assert shown == [str(eager.total), str(launches.total())]


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
    shown = pages.row("README.md", "", "bytes saved for backward per row of D elements")
    assert [per_row(module), fused] == [int(d) * 512 + int(c) for d, c in (cell.split(" D + ") for cell in shown)]


@pytest.fixture(scope="module")
def drawn():
    """docs/draw_operators.py."""
    spec = importlib.util.spec_from_file_location("draw_operators", ROOT / "docs/draw_operators.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_the_picture_shows_what_is_counted(drawn, tmp_path):
    counts = drawn.count()
    labels = re.findall(r">([^<>]+)</text>", drawn.FILE.read_text(encoding="utf-8"))
    before, after = zip(*counts.values(), strict=True)
    assert [int(label) for label in labels if label.isdigit()] == [*before, *after]
    assert [label for label in labels if label in counts] == list(counts)
    pytest.importorskip("matplotlib")
    drawn.draw(counts, tmp_path / "operators.svg")
    assert re.findall(r">([^<>]+)</text>", (tmp_path / "operators.svg").read_text(encoding="utf-8")) == labels


@pytest.mark.full
def test_norms_swapped_by_themselves_remove_what_the_table_says(drawn):
    def counted(kind):
        three, two = (drawn.decoded_token(kind, layers, True, fuse_residual=False) for layers in (3, 2))
        return str(three - two)

    columns = ("llama", "mistral", "qwen2", "qwen3")  # the other rows are test_counts.py's
    shown = pages.row("docs/fusion.md", "", "each norm swapped by itself (`fuse_residual=False`)")
    assert shown == [counted(kind) for kind in columns]


def test_tolerances_of_other_primitives_are_those_of_the_code():
    from hf_rmsnorm.patching.formula.closeness import MAX_DIFFERING, MAX_ULPS

    bf16, fp16 = (f"{MAX_DIFFERING[dtype]:.1%}" for dtype in (torch.bfloat16, torch.float16))
    said = f"held to {MAX_ULPS} ulp in float32 and to {bf16} of differing elements in bfloat16, {fp16} in"
    assert said in pages.prose("docs/patching.md")


def test_the_largest_sizes_are_those_of_the_code():
    from hf_rmsnorm.kernels import sizes

    said = f"Hidden sizes from 1 to {sizes.MAX_HIDDEN_SIZE:,}; norms of longer rows run their own forward"
    assert said in pages.prose("docs/formulas.md")


# --- what a page says of pickles, limits and the like ------------------------------------------------------------


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
    said = pages.prose("docs/patching.md")
    assert "names this package" in said and "Unpatch to pickle for others" in said


def test_limits_it_names_are_there():
    model = torch.nn.Sequential(torch.nn.LayerNorm(1), torch.nn.LayerNorm(8))
    report = hf_rmsnorm.patch_model(model)
    said = pages.prose("docs/limits.md")
    assert [record.path for record in report.skipped] == ["0"] and "`nn.LayerNorm(1)`" in said
    assert hf_rmsnorm.rms_norm(torch.ones(2, 1), torch.ones(1), 0.0).tolist() == [[1.0], [1.0]]
    with pytest.raises(torch.jit.frontend.NotSupportedError):
        torch.jit.script(model[1])
    assert "`torch.jit.script` of a patched module is not supported" in said


# --- what a committed result holds -------------------------------------------------------------------------------


def test_the_numbers_of_types_are_those_of_the_results():
    causal = result("coverage-5.23.0.json")["mappings"]["causal"]
    fused = [{text for run in t["runs"] for _, text, _ in run["layers"]} for t in causal["types"]]
    pairs = sum(any("in one launch" in text for text in texts) for texts in fused)
    said = pages.prose("docs/fusion.md")
    assert f"Of Transformers' {len(fused)} causal types 153 have sums fused and {pairs} their q and k norms" in said
    assert causal["totals"]["with_wrong_results"] == 0
    around = [run["fusion"] for t in causal["types"] for run in t["runs"][:1] if "fusion" in run]
    assert all(f["bit_equal"] and f["hidden_states"] for f in around)
    assert f"hidden states of all {len(around)} are equal to the bit" in said
    assert f"greedy tokens of the {sum(f['tokens_equal'] is True for f in around)} that generate" in said


def test_the_numbers_of_conversions_are_those_of_the_result():
    found = result("convert-5.23.0.json")
    counts, said = found["summary"], pages.prose("docs/conversion.md")
    converted = f"{counts['converted']} convert in full, {counts['partly']} in part"
    without = counts["no LayerNorm"] + counts["RMSNorm"]
    others = f"{counts['refused']} are refused by name and {without} have no LayerNorm"
    assert f"{converted}, {others}" in said
    landing = f"types {counts['converted']} convert in full and {counts['partly']} in part"
    assert landing in pages.prose("README.md")

    verdicts = {t["type"]: {v["verdict"] for v in t["variants"]} for t in found["types"] if t["mapping"] == "causal"}
    in_full = (
        "gpt2", "opt", "falcon", "mpt", "phi", "cohere", "starcoder2", "olmo", "dbrx", "stablelm", "nemotron",
        "gpt_neox", "jais2", "cohere2",
    )  # fmt: skip
    for name in in_full:
        assert verdicts[name] == {"converted"}, name
    for name in ("bert", "roberta", "bart"):
        (reason,) = {v["reason"] for t in found["types"] if t["type"] == name and t["mapping"] == "causal"
                     for v in t["variants"]}  # fmt: skip
        assert "is a post-norm model" in reason


def test_the_pairs_of_architectures_are_those_of_the_code():
    from hf_rmsnorm.conversion.targets.native_rules import PAIRS

    names = {
        "OLMo": "olmo", "DBRX": "dbrx", "Cohere": "cohere", "Cohere 2": "cohere2", "StableLM": "stablelm",
        "Nemotron": "nemotron", "Jais 2": "jais2", "LLaMA": "llama", "Mixtral": "mixtral",
        "Cohere 2 MoE": "cohere2_moe", "Arcee": "arcee",
    }  # fmt: skip
    section = pages.section("docs/conversion.md", "An architecture that uses RMSNorm")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| runs \|", section, re.MULTILINE)
    shown: dict[str, str] = {}
    for sources, target in rows:
        shown |= {names[source]: names[target] for source in sources.split(", ")}
    assert shown == {source: pair.target for source, pair in PAIRS.items() if pair.target != source}


def test_the_host_costs_are_those_of_the_result():
    cases = result("host-cpu.json")["cases"]

    def least(case, name, mode):
        return f"{cases[case][name][mode]['us_min']:.1f}"

    def host_costs(row):
        return pages.row("docs/fusion.md", "What a call costs the host", row)

    case, both = "RMSNorm 1x1x64", ("inference", "forward+backward")
    for shown, name in (("hf-rmsnorm", "hf_rmsnorm"), ("Hugging Face", "hf_eager"), ("Liger", "liger")):
        assert host_costs(shown) == [least(case, name, mode) for mode in both]
    assert host_costs("an `autograd.Function` that computes nothing") == ["", least(case, "an empty Function", both[1])]
    add = [least("add + RMSNorm 1x1x64", name, "inference") for name in ("hf_rmsnorm", "hf_eager")]
    said = pages.prose("docs/fusion.md")
    assert f"A residual sum with its norm takes {add[0]} in inference, Hugging Face's {add[1]}" in said


def test_the_cost_of_a_patch_that_no_kernel_serves_is_that_of_the_result():
    models = result("cpu.json")["models"]
    demo, llama = models["demo:qwen3"], models["LLaMA of 90 M"]
    shown = [f"{each[what] - 1:.1%}" for what in ("ratio", "ratio by chance") for each in (demo, llama)]
    said = pages.prose("docs/fusion.md")
    assert f"{shown[0]} more CPU time in the demo Qwen3" in said and f"and {shown[1]} in a LLaMA of 90 million" in said
    assert f"two unpatched copies differ by {shown[2]} and {shown[3]}" in said
    assert demo["ratio"] <= 1.05 and llama["ratio"] <= 1.01 and 8.5e7 < llama["parameters"] < 9.5e7
    within = re.search(r"as fast as before \[within (\d+)%\]", pages.prose("README.md"))
    assert demo["ratio"] <= 1 + int(within[1]) / 100


@pytest.mark.full
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the text is Python 3.11's own help")
def test_the_perplexities_are_those_of_the_embedded_model_and_its_naive_swap(capsys):
    """That the converted one's is the source's: tests/unit/conversion/test_api.py."""
    assert main(["inspect", "demo:gpt2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = pages.prose("docs/conversion.md")
    shown = re.search(r"the perplexity is ([\d.]+) over (\d+) tokens of Python 3.11's help texts", said)
    assert float(shown[1]) == pytest.approx(found["perplexity"], rel=1e-5) and int(shown[2]) == found["tokens"]
    naive = float(re.search(r"nothing else changed it is ([\d.]+)\. `hf-rmsnorm inspect", said)[1])
    assert naive == pytest.approx(found["naive"]["perplexity"], rel=1e-5)


def test_the_coverage_table_is_the_committed_result():
    command = [sys.executable, "-m", "scripts.coverage", "table", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    mappings = result("coverage-5.23.0.json")["mappings"]
    for words, mapping in (("causal language models", "causal"), ("base models", "base")):
        totals = mappings[mapping]["totals"]
        keys = ("types", "built", "run", "norms_swapped", "norms_left_alone", "with_wrong_results")
        assert pages.row("docs/formulas.md", "Coverage", words) == [str(totals[k]) for k in keys]
        assert totals["bit_equal"] == totals["run"] and not totals["with_wrong_results"]


def test_another_coverage_table_is_noticed(tmp_path):
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    page = pages.PAGES["docs/formulas.md"]
    (tmp_path / "docs/formulas.md").write_text(page.replace("| base models | 605 |", "| base models | 606 |"))
    command = [sys.executable, "-m", "scripts.coverage", "table"]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "run python -m scripts.coverage table --write" in done.stdout
    subprocess.run([*command, "--write"], check=True, cwd=tmp_path)
    assert (tmp_path / "docs/formulas.md").read_text() == page
