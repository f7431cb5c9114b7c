"""The first launch of each layout is compared with what it replaces: sound results are
kept, spoiled ones are not used, and one warning says so.
"""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rmsnorm import patch_model, rms_norm, use_backend
from hf_rmsnorm.kernels import norm_launch, qk_launch
from hf_rmsnorm.ops import first_use
from hf_rmsnorm.ops.launches import forget_launches, left_devices

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    "head_dim": 16,
}  # fmt: skip
LAUNCHES = {
    "norm": norm_launch.NormForward,
    "gradient of a norm": norm_launch.NormBackward,
    "heads": qk_launch.QKForward,
    "gradient of heads": qk_launch.QKBackward,
}


@pytest.fixture(autouse=True)
def from_the_beginning():
    forget_launches()
    first_use.compared.clear()


def model_of(family="qwen3", dtype=FP32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


IDS = torch.arange(14).view(2, 7)


def infer(model):
    with torch.no_grad():
        return [model(IDS).logits]


def train(model):
    out = model(IDS, labels=IDS)
    out.loss.backward()
    return [out.logits.detach(), *[p.grad for p in model.parameters()]]


def train_with_checkpoints(model):
    model.gradient_checkpointing_enable()
    return train(model.train())


def train_under_autocast(model):
    with torch.autocast("cpu", BF16):
        return train(model)


def infer_in_threads(model):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(infer(model)[0]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


FAULTS = {
    "2% off": lambda t: t * 1.02,
    "a wrong row": lambda t: t.index_copy(0, torch.tensor([0]), t[-1:].flip(-1)),
    "zeros": torch.zeros_like,
    "NaN in one row": lambda t: t.index_fill(0, torch.tensor([0]), torch.nan),
}


def spoil(monkeypatch, which, fault):
    """Have the launches of a kind spoil each result that a model reads."""
    kind = LAUNCHES[which]
    on = kind.on

    def spoiled(self, operands):
        results = on(self, operands)
        reads = 2 if "gradient" not in which else len(results)
        return tuple(
            t if t is None or at >= reads else FAULTS[fault](t)
            for at, t in enumerate(results)
        )

    monkeypatch.setattr(kind, "on", spoiled)


FORWARDS = [("norm", run) for run in (infer, train, train_with_checkpoints,
            train_under_autocast, infer_in_threads)]  # fmt: skip
CASES = [
    *FORWARDS,
    ("heads", infer),
    ("heads", train),
    ("gradient of a norm", train),
    ("gradient of a norm", train_with_checkpoints),
    ("gradient of heads", train),
]


@pytest.mark.differs
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which, run", CASES)
def test_a_spoiled_result_is_not_used(which, run, fault, monkeypatch):
    model = model_of()
    expected = run(copy.deepcopy(model))
    patch_model(model)
    spoil(monkeypatch, which, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run(model)
    said = [str(w.message) for w in caught if "hf_rmsnorm" in str(w.message)]
    assert len(said) == 1 and "hf-rmsnorm env" in said[0]
    assert ("cpu", None) in left_devices
    for ours, own in zip(results, expected, strict=True):
        limit = 1e-5 if own.dtype == FP32 and run is not train_under_autocast else 2e-2
        torch.testing.assert_close(ours, own, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2"])
def test_sound_results_are_kept_and_compared_once(family, dtype):
    model = model_of(family, dtype)
    patch_model(model)
    train(model)
    infer(model)
    before = first_use.compared[CPU]
    assert before
    train(model)
    infer(model)
    with torch.no_grad():
        model(IDS[:, :5])
        model(IDS[:, :4])
        count = first_use.compared[CPU]
        model(IDS[:, :3])
    assert first_use.compared[CPU] == count, "layouts of other lengths are not again"
    assert first_use.summary(CPU).endswith("on cpu at their first use: equal")


def test_numbers_that_are_not_finite_compare_equal():
    x = torch.randn(4, 64)
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    weight = torch.ones(64)
    y = rms_norm(x, weight)
    assert y.isfinite().all(-1).tolist() == [True, False, False, True]
    assert first_use.compared[CPU] == 1


def test_what_raises_unpatched_raises(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(8))
    patch_model(model)

    def fails(*_):
        raise ArithmeticError("as unpatched")

    monkeypatch.setattr(torch.nn.functional, "layer_norm", fails)
    with pytest.raises(ArithmeticError, match="as unpatched"):
        model(torch.ones(2, 8))


@pytest.mark.differs
def test_where_the_kernels_are_insisted_on_a_difference_is_an_error(monkeypatch):
    spoil(monkeypatch, "norm", "2% off")
    with use_backend("triton"), pytest.raises(RuntimeError, match="differs from the"):
        rms_norm(torch.ones(2, 64), torch.ones(64))


def test_where_it_cannot_look_the_next_call_is_compared(monkeypatch):
    x, weight = torch.randn(2, 64), torch.ones(64)
    with monkeypatch.context() as patches:
        patches.setattr(first_use, "can_look", lambda *_: False)
        rms_norm(x, weight)
    assert not first_use.compared[CPU]
    rms_norm(x, weight)
    rms_norm(x, weight)
    assert first_use.compared[CPU] == 1


def test_a_comparison_saves_nothing_and_no_mode_sees_it():
    saved = []
    norm = nn.Sequential(nn.RMSNorm(64, eps=1e-6))
    patch_model(norm)
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or t, lambda t: t
    ):
        y = checkpoint(norm, x, use_reentrant=False)
        count = len(saved)
        y.sum().backward()
        first = len(saved)
        saved.clear()
        y = checkpoint(norm, x, use_reentrant=False)
        assert len(saved) == count
        y.sum().backward()
    assert len(saved) == first


def test_hooks_of_saved_tensors_may_be_forbidden():
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("forbidden"):
        rms_norm(x, torch.ones(64)).sum().backward()
    assert first_use.compared[CPU] == 2


def test_a_result_that_shows_nothing_is_compared_again():
    weight = torch.ones(64)
    x = torch.randn(4, 64, requires_grad=True)
    for gradient in (0.0, torch.nan, 1.0):
        rms_norm(x, weight).backward(torch.full((4, 64), gradient))
        assert first_use.compared[CPU] == (2 if gradient == 1.0 else 1)


def test_gradients_at_the_largest_number_of_float16_are_no_alarm():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 64, 1024)
    x = x.half().requires_grad_()
    weight = torch.ones(1024, dtype=torch.float16, requires_grad=True)
    for scale in (2e3, 2e4, 6e4):
        rms_norm(x, weight).backward((dy * scale).clamp(-65504, 65504).half())
    assert ("cpu", None) not in left_devices


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_numbers_whose_squares_leave_float32_are_no_alarm(dtype):
    x = torch.full((3, 64), 3e38, dtype=dtype, requires_grad=True)
    rms_norm(x, torch.ones(64, dtype=dtype)).backward(x.detach())
    assert ("cpu", None) not in left_devices


def test_a_large_input_is_compared_by_parts(monkeypatch):
    monkeypatch.setattr(first_use, "AT_ONCE", 100)
    x = torch.randn(5, 64, requires_grad=True)
    rms_norm(x, torch.ones(64)).sum().backward()
    assert first_use.compared[CPU] == 2
