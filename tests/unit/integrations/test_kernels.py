"""Our layers in the `kernels` library: bound to modules of any class, each runs the formula of its module."""

import copy
import io
import json
import os
import subprocess
import sys

import pytest
import tiny_models
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

kernels = pytest.importorskip("kernels", reason="the library that this is for, of scripts/requirements")

from places import HELPERS, PYTHONPATH  # noqa: E402

from hf_rmsnorm.integrations.kernels import RMSNorm, kernel_mapping  # noqa: E402

INFERENCE, TRAINING = kernels.Mode.INFERENCE, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE


class Squashed(LlamaRMSNorm):
    """No formula that anybody knows, under a name that says RMSNorm."""

    def forward(self, hidden_states):
        return torch.tanh(super().forward(hidden_states))


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """The classes as Transformers decorates them, where it has found a `kernels` that it takes."""
    classes = {LlamaRMSNorm: "RMSNorm", Olmo2RMSNorm: "RMSNorm", Gemma2RMSNorm: "RMSNormZeroCentered"}
    for cls, name in {**classes, Squashed: "RMSNorm", Qwen3NextRMSNormGated: "RMSNormGated"}.items():
        monkeypatch.setattr(cls, "kernel_layer_name", name, raising=False)
        monkeypatch.setattr(cls, "kernel_condition", staticmethod(lambda module: True), raising=False)


def kernelized(model, mode=INFERENCE):
    with kernels.use_kernel_mapping(kernel_mapping()):
        return kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)


def norms():
    """One module of each class, and what it is given; bfloat16, with weights that are not ones."""
    made = torch.nn.ModuleList([LlamaRMSNorm(64), Olmo2RMSNorm(64), Gemma2RMSNorm(64), Qwen3NextRMSNormGated(64)])
    generator = torch.Generator().manual_seed(0)
    for norm in made:
        norm.weight.data.copy_(torch.randn(64, generator=generator))
    x, gate = torch.randn(2, 32, 64, generator=generator).bfloat16()
    return made.bfloat16(), [(x,), (x,), (x,), (x, gate)]


def test_one_layer_runs_both_roundings_that_are_called_rms_norm_and_the_others():
    made, inputs = norms()
    expected = [norm(*given) for norm, given in zip(made, inputs, strict=True)]
    llama, olmo = made[0], made[1]
    olmo.weight.data.copy_(llama.weight.data)
    assert not torch.equal(olmo(*inputs[1]), expected[0]), "the two roundings differ on this input"
    expected[1] = olmo(*inputs[1])
    kernelized(made)
    assert llama.forward.__func__ is olmo.forward.__func__ is RMSNorm.forward
    for backend, launched in (("reference", 0), ("triton", 4)):
        with use_backend(backend), count_launches() as launches:
            got = [norm(*given) for norm, given in zip(made, inputs, strict=True)]
        assert sum(launches.values()) == launched
        for y, wanted in zip(got, expected, strict=True):
            assert torch.equal(y, wanted) and y.dtype == wanted.dtype


def test_a_module_of_no_known_formula_runs_its_own_forward():
    norm, x = Squashed(64), torch.randn(4, 64)
    expected = norm(x)
    kernelized(norm)
    assert norm.forward.__func__ is RMSNorm.forward
    with use_backend("triton"), count_launches() as launches:
        assert torch.equal(norm(x), expected)
    assert not launches


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_model_trains_as_it_does_without(family):
    def gradients(model):
        ids = tiny_models.token_ids()
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    expected, wanted = gradients(tiny_models.build(family))
    model = kernelized(tiny_models.build(family), TRAINING)
    keys = list(model.state_dict())
    with use_backend("triton"), count_launches() as launches:
        loss, got = gradients(model)
    assert launches["norm_forward"] == launches["norm_backward"] == len(tiny_models.norms(model))
    assert loss == pytest.approx(expected, rel=1e-5) and list(model.state_dict()) == keys
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_copy_recognises_itself_and_a_pickle_runs_its_own_forward():
    model = kernelized(torch.nn.Sequential(LlamaRMSNorm(64)))
    x = torch.randn(4, 64)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)  # bound methods are pickled by name, so the class's own comes back
    file.seek(0)
    copied, loaded = copy.deepcopy(model), torch.load(file, weights_only=False)
    for other, forward in ((copied, RMSNorm.forward), (loaded, LlamaRMSNorm.forward)):
        other[0].weight.data.mul_(2)
        assert other[0].forward.__func__ is forward and other[0].forward.__self__ is other[0]
        torch.testing.assert_close(other(x), 2 * expected)
    assert torch.equal(model(x), expected)


def test_a_patched_model_stays_patched_and_a_kernelized_one_is_left_to_kernels(fused_calls):
    ids = tiny_models.token_ids()
    model = tiny_models.build("llama")
    expected = model(ids).logits
    patch_model(model)
    kernelized(model)
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert len(fused_calls) == 5
    assert unpatch_model(model) == 5
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(model)
    assert all("integrations.kernels.RMSNorm.forward" in record.reason for record in report.skipped)


@pytest.mark.full
def test_transformers_own_use_kernels_in_inference_and_training(tmp_path):
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HELPERS / "kernels_run.py"), str(tmp_path)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for family, cls, count in (("llama", "LlamaRMSNorm", 5), ("olmo2", "Olmo2RMSNorm", 9)):
        run = found[family]
        assert run["inference"] == run["training"] == {cls: count}
        assert run["equal"] and run["launches"] == run["backward"] == count
