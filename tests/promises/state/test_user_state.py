"""What users hang on models survives a patch, as wrappers and subclasses; a patch keeps
no model alive.
"""

import gc
import weakref

import pytest
import tiny_models
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend


def x8():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def run(norm, fused_calls):
    """(whether the fused forward ran, the output)."""
    fused_calls.clear()
    with use_backend("reference"):
        y = norm(x8())
    return bool(fused_calls), y


@pytest.mark.parametrize("order", ["wrap first", "patch first"])
def test_wrappers_that_hold_the_forward_they_found_run_around_the_fused_one(
    order, fused_calls
):
    norm, seen = LlamaRMSNorm(8), []

    def wrap(factor):
        forward = norm.forward  # as Transformers' tensor parallelism keeps it

        def wrapper(x):
            seen.append(factor)
            return factor * forward(x)

        norm.forward = wrapper

    if order == "patch first":
        patch_model(norm, strict=True)
    wrap(2.0), wrap(3.0)
    expected = 3.0 * (2.0 * LlamaRMSNorm.forward(norm, x8()))
    for patch in (patch_model, unpatch_model) * 2:
        patch(norm)
        fused, y = run(norm, fused_calls)
        assert fused == (patch is patch_model)
        assert torch.equal(y, expected)
        assert seen == [3.0, 2.0]
        seen.clear()


class Mixin:
    def extra(self):
        return "extra"


def test_a_class_put_on_top_later_keeps_its_own_part(fused_calls):
    norm = LlamaRMSNorm(8)
    patch_model(norm)

    bases = Mixin, type(norm)
    norm.__class__ = type("Sharded", bases, {"__slots__": ()})
    for patch in (patch_model, unpatch_model) * 2:
        patch(norm)
        fused, _ = run(norm, fused_calls)
        assert fused == (patch is patch_model)
        assert norm.extra() == "extra"
    assert type(norm).__name__ == "Sharded"
    assert type(norm).__mro__[1:3] == (Mixin, LlamaRMSNorm)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_patched_model_is_freed_as_soon_as_nothing_refers_to_it(name):
    model = tiny_models.build(name)
    patch_model(model)
    references = [weakref.ref(module) for module in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        alive = [reference for reference in references if reference() is not None]
    finally:
        gc.enable()
    assert not alive
