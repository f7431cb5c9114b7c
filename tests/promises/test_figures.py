"""The tables of the documentation show what comes out here, or what a committed result holds."""

import io
import json
import pickle
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
from benchmarks.counting import decoded_layer
from benchmarks.shapes import ModelShape

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


@pytest.mark.full
def test_norms_swapped_by_themselves_remove_what_the_table_says():
    columns = ("llama", "mistral", "qwen2", "qwen3")  # the other rows are test_counts.py's
    shapes = [ModelShape(kind, 64, 96, 4, 2, 16, 128) for kind in columns]
    counted = [str(decoded_layer(shape, True, fuse_residual=False)["sum"]) for shape in shapes]
    shown = pages.row("docs/fusion.md", "", "each norm swapped by itself (`fuse_residual=False`)")
    assert shown == counted


# --- what a page says of pickles --------------------------------------------------------------------------------


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


# --- what a committed result holds -------------------------------------------------------------------------------


def test_the_host_costs_are_those_of_the_result():
    cases = result("nvidia-h100-80gb-hbm3-2026-11-25.json")["sections"]["host"]["data"]["cases"]

    def least(case, name, mode):
        return f"{cases[case][name][mode]['us_min']:.1f}"

    def host_costs(row):
        return pages.row("docs/fusion.md", "What a call costs the host", row)

    case, both = "RMSNorm 1x1x64", ("inference", "forward+backward")
    for shown, name in (("hf-rmsnorm", "hf_rmsnorm"), ("Hugging Face", "hf_eager"), ("Liger", "liger")):
        assert host_costs(shown) == [least(case, name, mode) for mode in both]
    assert host_costs("an `autograd.Function` that computes nothing") == ["", least(case, "an empty Function", both[1])]


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
