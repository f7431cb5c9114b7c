"""Models that another patcher has been at: said in the report, and left to it."""

import json
import os
import subprocess
import sys

import pytest
import tiny_models
import torch
from places import PYTHONPATH
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused.norm import fused_part

ids = tiny_models.token_ids()


class HubRMSNorm(nn.Module):
    """A kernel layer as the Hub's hold them: no constructor and no state, its forward
    runs on another's parameters.
    """

    can_torch_compile = True

    def forward(self, hidden_states):
        return nn.functional.rms_norm(
            hidden_states, self.weight.shape, self.weight, self.variance_epsilon
        )


def kernelize(model):
    """What `kernels.kernelize` does under ``use_kernels=True``, and again at every
    ``train()`` and ``eval()``.
    """
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = HubRMSNorm.forward.__get__(module)


def replace(model):
    """What Liger's patch of an instance does: a forward, and attributes for it, set on
    each norm.
    """
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.offset, module.casting_mode, module.in_place, module.row_mode = (
                0.0,
                "llama",
                True,
                None,
            )
            module.__dict__["forward"] = HubRMSNorm.forward.__get__(
                module, type(module)
            )
            module.__dict__["extra_repr"] = nn.RMSNorm.extra_repr.__get__(
                module, type(module)
            )
            module.__dict__["_get_name"] = (lambda self: "LigerRMSNorm").__get__(
                module, type(module)
            )


PATCHERS = pytest.mark.parametrize("other", [kernelize, replace])


@PATCHERS
def test_a_model_of_another_patcher_is_named_and_left_alone(other, fused_calls):
    model = tiny_models.build("llama")
    other(model)
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    expected = model(ids).logits
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(model)
    assert (
        not report.swapped and len(report.skipped) == len(tiny_models.norms(model)) == 5
    )
    assert all(r.class_name == "LlamaRMSNorm" for r in report.skipped)
    assert all(
        "replaced on the instance by" in r.reason and "HubRMSNorm.forward" in r.reason
        for r in report.skipped
    )
    with pytest.raises(
        ValueError, match="5 of the norms cannot be swapped.*HubRMSNorm"
    ):
        patch_model(model, strict=True)
    assert {path: vars(module) for path, module in model.named_modules()} == attributes
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert not fused_calls and unpatch_model(model) == 0


@PATCHERS
def test_a_patcher_that_comes_later_wins_and_is_reported(other, fused_calls):
    """`use_kernels` comes back at every train() and eval(): whoever came last runs, and
    nobody is undone.
    """
    plain, model = tiny_models.build("llama"), tiny_models.build("llama")
    patch_model(model)
    for m in (plain, model):
        other(m)
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert not fused_calls
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(model)
    assert len(report.skipped) == 5 and all(
        "HubRMSNorm.forward" in r.reason for r in report.skipped
    )
    assert unpatch_model(model) == 5
    assert torch.equal(model(ids).logits, plain(ids).logits), (
        "the other patch stays when this one goes"
    )
    assert not any(fused_part(type(module)) for module in model.modules())


LIGER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import tiny_models
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from liger_kernel.transformers import LigerRMSNorm, _apply_liger_kernel_to_instance
from hf_rmsnorm import patch_model, unpatch_model

untouched, liger_first, liger_last = (tiny_models.build("llama") for _ in range(3))
partly = tiny_models.build("olmo2")
for model in (liger_first, partly):
    _apply_liger_kernel_to_instance(model=model)
patch_model(liger_last)
_apply_liger_kernel_to_instance(model=liger_last)
reports = [patch_model(model).to_dict() for model in (untouched, liger_first, liger_last, partly)]
assert unpatch_model(liger_last) == 5 and type(liger_last.model.norm) is LlamaRMSNorm
for model in (liger_first, liger_last):
    assert vars(model.model.norm)["forward"].__func__ is LigerRMSNorm.forward
made_after = tiny_models.build("llama")  # Liger has replaced the class in the modeling file
reports.append(patch_model(made_after).to_dict())
assert type(made_after.model.norm) is LigerRMSNorm
json.dump(reports, sys.stdout)
"""


@pytest.mark.full
def test_liger(tmp_path):
    """Liger's own patch; in a process of its own, since it changes the modeling files
    for every later model.
    """
    pytest.importorskip(
        "liger_kernel.transformers",
        reason="Liger is not installed",
        exc_type=ImportError,
    )
    paths = [*sys.path, PYTHONPATH]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", LIGER], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    untouched, first, last, partly, made_after = json.loads(done.stdout)
    assert len(untouched["swapped"]) == 5 and not untouched["skipped"]
    for report in (first, last):
        assert not report["swapped"] and len(report["skipped"]) == 5
        assert all(
            "liger_kernel.transformers.rms_norm.LigerRMSNorm.forward" in r["reason"]
            for r in report["skipped"]
        )
    # Liger serves the norms of OLMo 2's blocks and not those of its queries and keys.
    assert [r["path"].rpartition(".")[2] for r in partly["swapped"]] == [
        "q_norm",
        "k_norm",
    ] * 2
    assert len(partly["skipped"]) == 5 and all(
        "liger_kernel" in r["reason"] for r in partly["skipped"]
    )
    assert not made_after["swapped"] and {
        r["class_name"] for r in made_after["skipped"]
    } == {"LigerRMSNorm"}
