"""The tables of the documentation show what comes out here, or what a committed result
holds.
"""

import io
import pickle
import re

import pages
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_rmsnorm
from scripts import tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- counted or computed anew
# ------------------------------------------------------------------------------------


@pytest.fixture
def norm() -> tuple[LlamaRMSNorm, torch.Tensor]:
    torch.manual_seed(0)
    module = LlamaRMSNorm(512)
    torch.nn.init.normal_(module.weight)
    return module.to(DEVICE, torch.bfloat16), torch.randn(64, 512).to(
        DEVICE, torch.bfloat16
    )


def test_share_of_equal_elements_is_the_one_given(norm):
    module, x = norm
    with torch.no_grad(), hf_rmsnorm.use_backend("triton"):
        expected = module(x)
        fused = hf_rmsnorm.rms_norm(x, module.weight, module.variance_epsilon)
        once = F.rms_norm(x, (512,), module.weight, module.variance_epsilon)
    share, share_once = (
        f"{(y == expected).float().mean().item():.0%}" for y in (fused, once)
    )
    assert pages.row("docs/correctness.md", "hf-rmsnorm") == [share]
    assert pages.row(
        "docs/correctness.md", "`F.rms_norm`, which rounds once, at the end"
    ) == [share_once]


# --- what a page says of pickles
# --------------------------------------------------------------------------------


def test_what_pickle_holds_is_what_it_says():
    model = torch.nn.Sequential(LlamaRMSNorm(8))
    files = {}
    for state in ("plain", "patched", "unpatched"):
        {"patched": hf_rmsnorm.patch_model, "unpatched": hf_rmsnorm.unpatch_model}.get(
            state, len
        )(model)
        files[state] = io.BytesIO()
        torch.save(model, files[state])
        weights = io.BytesIO()
        torch.save(model.state_dict(), weights)
        assert b"hf_rmsnorm" not in weights.getvalue()
    assert [
        name for name, file in files.items() if b"hf_rmsnorm" in file.getvalue()
    ] == ["patched"]
    files["patched"].seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(files["patched"], weights_only=True)


# --- what a committed result holds
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page, text in pages.PAGES.items() if "<!-- table: " in text]
)
def test_tables_are_made_from_the_committed_results(page):
    assert tables.renewed(pages.PAGES[page]) == pages.PAGES[page], (
        "run python -m scripts.tables --write"
    )


def test_every_table_is_on_a_page():
    placed = re.findall(r"<!-- table: ([\w ]+) -->", "".join(pages.PAGES.values()))
    assert set(placed) == tables.TABLES.keys()


def test_no_type_of_transformers_has_a_wrong_result():
    for mapping in tables.result("coverage-5.23.0.json")["mappings"].values():
        totals = mapping["totals"]
        assert totals["bit_equal"] == totals["run"] and not totals["with_wrong_results"]
