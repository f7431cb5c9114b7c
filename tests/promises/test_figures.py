"""The tables of the documentation show what comes out here, or what a committed result holds."""

import io
import pickle
import re

import pages
import pytest
import torch
import torch.nn.functional as F
from places import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_rmsnorm
from scripts import tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    assert pages.row("README.md", "elements equal to Hugging Face's") == ["100%", share]
    assert pages.row("docs/correctness.md", "hf-rmsnorm") == [share]
    assert pages.row("docs/correctness.md", "`F.rms_norm`, which rounds once, at the end") == [share_once]


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
    shown = pages.row("README.md", "GPU kernels for each call")
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
    shown = pages.row("README.md", "activation memory for each token, bytes (D = hidden size)")
    assert [per_row(module), fused] == [int(d) * 512 + int(c) for d, c in (cell.split(" D + ") for cell in shown)]


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


@pytest.mark.parametrize("page", [page for page, text in pages.PAGES.items() if "<!-- table: " in text])
def test_tables_are_made_from_the_committed_results(page):
    assert tables.renewed(pages.PAGES[page]) == pages.PAGES[page], "run python -m scripts.tables --write"


def test_every_table_is_on_a_page():
    placed = re.findall(r"<!-- table: ([\w ]+) -->", "".join(pages.PAGES.values()))
    assert set(placed) == tables.TABLES.keys()


def test_no_type_of_transformers_has_a_wrong_result():
    for mapping in tables.result("coverage-5.23.0.json")["mappings"].values():
        totals = mapping["totals"]
        assert totals["bit_equal"] == totals["run"] and not totals["with_wrong_results"]
