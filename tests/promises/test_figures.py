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


def made(kind, size, dtype):
    """A norm with weights of any size."""
    module = kind(size)
    torch.nn.init.normal_(module.weight)
    return module.to(dtype)


def test_share_of_equal_elements_is_the_one_given():
    module = made(LlamaRMSNorm, 512, torch.bfloat16)
    x = torch.randn(64, 512).to(torch.bfloat16)
    with torch.no_grad(), hf_rmsnorm.use_backend("triton"):
        expected = module(x)
        fused = hf_rmsnorm.rms_norm(x, module.weight, module.variance_epsilon)
        once = F.rms_norm(x, (512,), module.weight, module.variance_epsilon)
    rows = {"hf-rmsnorm": fused, "`F.rms_norm`, which rounds once, at the end": once}
    for name, y in rows.items():
        share = (y == expected).float().mean().item()
        assert pages.row("docs/correctness.md", name) == [f"{share:.0%}"]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("column, dtype", [(0, torch.bfloat16), (1, torch.float16)])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, torch.nn.LayerNorm])
def test_ties_in_rounding_are_as_rare_as_the_page_says(kind, column, dtype):
    """Of fewer elements than were counted for the page, so within a factor of 4."""
    module = made(kind, 768, dtype)
    x = torch.randn(512, 768).to(dtype)
    with torch.no_grad(), hf_rmsnorm.use_backend("triton"):
        expected = module(x)
        hf_rmsnorm.patch_model(module)
        differing = (module(x) != expected).sum().item()
    name = kind.__name__.removeprefix("Llama")
    cell = pages.row("docs/correctness.md", name)[column]
    least = int(re.search(r"1 in ([\d,]+) to", cell)[1].replace(",", ""))
    assert differing <= max(4, 4 * x.numel() / least)


def test_what_pickle_holds_is_what_it_says():
    model = torch.nn.Sequential(LlamaRMSNorm(8))
    assert b"hf_rmsnorm" not in saved(model)
    hf_rmsnorm.patch_model(model)
    assert b"hf_rmsnorm" not in saved(model.state_dict())
    patched = saved(model)
    assert b"hf_rmsnorm" in patched
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(patched), weights_only=True)
    hf_rmsnorm.unpatch_model(model)
    assert b"hf_rmsnorm" not in saved(model)


def test_tables_are_made_from_the_committed_results():
    for page, text in pages.PAGES.items():
        assert tables.renewed(text) == text, f"{page}: run scripts.tables --write"


def test_every_table_is_on_a_page():
    text = "".join(pages.PAGES.values())
    placed = re.findall(r"<!-- table: ([\w ]+) -->", text)
    assert set(placed) == tables.TABLES.keys()


def test_the_readme_has_a_row_for_each_model_and_variant_that_was_run():
    rows = re.findall(
        r"^\| (\w+-\S+), (.+?) \|", pages.PAGES["README.md"], re.MULTILINE
    )
    variants = ["Hugging Face", "Liger's norms alone", "hf-rmsnorm"]
    assert rows == [(m, v) for m in ("Llama-3.1-8B", "Qwen3-8B") for v in variants]
    assert "not run" not in pages.PAGES["README.md"]
