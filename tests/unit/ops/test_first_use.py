"""The first launch of each layout is compared with what it replaces: sound results are
kept, spoiled ones are not used, and one warning says so.
"""

import contextlib
import copy
import itertools
import random
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from computed import compute_norm, run_kind
from parallel_runs import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.counting import Operators
from hf_rmsnorm import (
    HfRmsNormCallback,
    count_launches,
    patch_model,
    rms_norm,
    use_backend,
)
from hf_rmsnorm.cli import env
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.kernels import norm_launch, qk_launch
from hf_rmsnorm.operands import of_modulation, of_norm, present
from hf_rmsnorm.ops import first_use, self_check
from hf_rmsnorm.ops.launches import forget_launches, launches_of, left_devices
from hf_rmsnorm.ops.norm import modulated_norm, run_norm

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
    first_use.equal_kernels.clear()


def model_of(family="qwen3", dtype=FP32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


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


def with_a_wrong_row(t):
    if t.dim() == 1:
        return t.flip(0)
    return t.index_copy(0, torch.tensor([0]), t[-1:].flip(-1))


FAULTS = {
    "2% off": lambda t: t * 1.02,
    "a wrong row": with_a_wrong_row,
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


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64, elementwise_affine=False, eps=1e-6)

    def forward(self, x, scale, shift):
        return self.norm(self.inner(x)) * (1 + scale) + shift


def train_modulation(model):
    x, scale, shift = torch.randn(
        3, 2, 5, 64, generator=torch.Generator().manual_seed(0)
    )
    y = model(x, scale.requires_grad_(), shift)
    y.square().sum().backward()
    return [y.detach(), scale.grad, model.inner.weight.grad]


EFFICIENT = {"memory_efficient": True}
RUNS = infer, train, train_with_checkpoints, train_under_autocast, infer_in_threads
CASES = [
    *[("qwen3", FP32, "norm", run, {}) for run in RUNS],
    ("qwen3", BF16, "norm", train, {}),
    ("qwen3", FP32, "heads", infer, {}),
    ("qwen3", BF16, "heads", train, {}),
    ("qwen3", FP32, "gradient of a norm", train, {}),
    ("qwen3", BF16, "gradient of a norm", train_with_checkpoints, {}),
    ("qwen3", FP32, "gradient of a norm", train, EFFICIENT),
    ("qwen3", FP32, "gradient of heads", train, {}),
    ("llama", FP32, "heads", train, {}),  # the rotary embedding alone
    ("gpt2", FP32, "gradient of a norm", train, {}),
    ("modulated", FP32, "norm", train_modulation, {}),
    ("modulated", FP32, "gradient of a norm", train_modulation, {}),
]


def expect_unpatched(model, run, which, fault, monkeypatch, **options):
    """A patched model whose launches are spoiled runs as it does unpatched, and one
    warning says so.
    """
    expected = run(copy.deepcopy(model))
    patch_model(getattr(model, "module", model), **options)
    spoil(monkeypatch, which, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run(model)
    said = [str(w.message) for w in caught if "hf_rmsnorm" in str(w.message)]
    assert len(said) == 1 and "hf-rmsnorm env" in said[0]
    assert ("cpu", None) in left_devices
    exact = run is not train_under_autocast
    for ours, own in zip(results, expected, strict=True):
        limit = 1e-4 if own.dtype == FP32 and exact else 2e-2
        torch.testing.assert_close(ours, own, rtol=limit, atol=limit)


@pytest.mark.differs
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family, dtype, which, run, options", CASES)
def test_a_spoiled_result_is_not_used(
    family, dtype, which, run, options, fault, monkeypatch
):
    model = Modulated() if family == "modulated" else model_of(family, dtype)
    expect_unpatched(model, run, which, fault, monkeypatch, **options)


@pytest.mark.differs
def test_a_spoiled_result_is_not_used_in_two_processes(monkeypatch, tmp_path):
    def work(rank):
        model = DistributedDataParallel(model_of())
        expect_unpatched(model, train, "norm", "2% off", pytest.MonkeyPatch())

    run_ranks(work, tmp_path, monkeypatch)


def wrap_launches(monkeypatch, wrapped):
    """Have the results of each launch be ``wrapped(number of the launch, results)``."""
    numbers = itertools.count()
    for kind in LAUNCHES.values():

        def on(self, operands, on=kind.on):
            return tuple(wrapped(next(numbers), list(on(self, operands))))

        monkeypatch.setattr(kind, "on", on)


@pytest.mark.differs
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("fault", ["2% off", "zeros", "NaN in one row"])
@pytest.mark.parametrize("kind", [k for k in self_check.KINDS if "norm" in k.lower()])
def test_a_backward_notices_a_wrong_statistic(kind, fault, dtype, monkeypatch):
    def wrapped(of_launch, results):
        if of_launch == 0:
            results[2] = FAULTS[fault](results[2])  # rstd
        return results

    wrap_launches(monkeypatch, wrapped)
    with use_backend("triton"), pytest.raises(RuntimeError, match="differs from the"):
        run_kind(kind, dtype)


@pytest.mark.differs
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", self_check.KINDS)
def test_each_output_and_gradient_is_compared(kind, dtype, monkeypatch):
    found = []
    with use_backend("triton"), monkeypatch.context() as patches:
        wrap_launches(patches, lambda _, results: found.append(results) or results)
        run_kind(kind, dtype)
    assert len(found) == 2
    reads = found[0][:2], found[1]  # what is behind them is for the backward
    spoiled = [
        (number, at)
        for number, results in enumerate(reads)
        for at, t in enumerate(results)
        if t is not None
    ]
    for (number, at), fault in itertools.product(spoiled, FAULTS):

        def wrapped(of_launch, results, number=number, at=at, fault=fault):
            if of_launch == number:
                results[at] = FAULTS[fault](results[at])
            return results

        with use_backend("triton"), monkeypatch.context() as patches:
            wrap_launches(patches, wrapped)
            with pytest.raises(RuntimeError, match="differs from the code"):
                run_kind(kind, dtype)


@pytest.mark.differs
@pytest.mark.parametrize("kind", [k for k in self_check.KINDS if "rotary" in k])
def test_a_rotary_function_with_another_constant_is_noticed(kind, monkeypatch):
    def scaled(q, k, cos, sin):
        return self_check._rotate(q, k, 1.02 * cos, sin)

    monkeypatch.setattr(self_check._ROTARY, "function", scaled)
    with use_backend("triton"), pytest.raises(RuntimeError, match="differs from the"):
        run_kind(kind, FP32)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("kind", self_check.KINDS)
def test_a_comparison_is_small_and_waits_once(kind, dtype, monkeypatch):
    counts = []
    waits = []
    tolist = torch.Tensor.tolist

    def count(step):
        def counted(self, *args):
            with Operators() as operators:
                found = step(self, *args)
            counts.append(sum(operators.counts.values()))
            return found

        monkeypatch.setattr(first_use.FirstUse, step.__name__, counted)

    count(first_use.FirstUse.replaced_results)
    count(first_use.FirstUse.difference)
    monkeypatch.setattr(first_use, "_disable_current_modes", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: waits.append(t) or tolist(t))
    run_kind(kind, dtype)
    assert sum(counts[:2]) <= 120 and sum(counts[2:]) <= 250
    assert len(counts) == 4 and len(waits) == 2


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2"])
def test_sound_results_are_kept_and_compared_once(family, dtype):
    model = model_of(family, dtype)
    patch_model(model)
    train(model)
    infer(model)
    before = first_use.equal_kernels[CPU]
    assert before
    train(model)
    infer(model)
    with torch.no_grad():
        model(IDS[:, :5])
        model(IDS[:, :4])
        count = first_use.equal_kernels[CPU]
        model(IDS[:, :3])
    assert first_use.equal_kernels[CPU] == count, (
        "layouts of other lengths are not again"
    )


def test_what_was_compared_is_said(capsys):
    model = model_of()
    patch_model(model)
    with count_launches(model) as launches:
        infer(model)
    line = f"{first_use.equal_kernels[CPU]} kernels compared with the model's own code on cpu at their first use: equal"
    assert f"  compared  {line}" in str(launches)
    callback = HfRmsNormCallback()
    for _ in range(2):
        state = SimpleNamespace(is_world_process_zero=True)
        callback.on_step_end(SimpleNamespace(device=CPU), state, None)
    assert capsys.readouterr().err == f"hf_rmsnorm: {line}\n"
    record = {"device": "cpu", "name": "x", "kernels": self_check.check_kernels(CPU)}
    assert env._checked_line(record, env.versions()).endswith(
        "7 of 7 kinds of kernels equal to plain PyTorch, forward and backward"
    )


def test_numbers_that_are_not_finite_compare_equal():
    x = torch.randn(4, 64)
    x[1, 3] = torch.inf
    x[2, 5] = torch.nan
    weight = torch.ones(64)
    y = rms_norm(x, weight)
    assert y.isfinite().all(-1).tolist() == [True, False, False, True]
    assert first_use.equal_kernels[CPU] == 1


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
        patches.setattr(first_use, "can_compare", lambda *_: False)
        rms_norm(x, weight)
    assert not first_use.equal_kernels[CPU]
    rms_norm(x, weight)
    rms_norm(x, weight)
    assert first_use.equal_kernels[CPU] == 1


def test_it_does_not_look_where_nothing_may_wait(monkeypatch):
    x = SimpleNamespace(is_meta=False, is_cuda=True)
    for capturing, watched in itertools.product((False, True), (0, 2)):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda c=capturing: c
        )
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda w=watched: w)
        compares = first_use.can_compare(x, False)
        assert compares == (not capturing and not watched)


@pytest.mark.parametrize("step", ["replaced_results", "difference"])
def test_a_comparison_without_memory_has_one_more_try(step, monkeypatch):
    tries = []

    def without_memory(*_):
        tries.append(_)
        raise torch.OutOfMemoryError("in a test")

    monkeypatch.setattr(first_use.FirstUse, step, without_memory)
    x, weight = torch.randn(2, 64), torch.ones(64)
    results = [rms_norm(x, weight) for _ in range(4)]
    assert len(tries) == 2 and not first_use.equal_kernels[CPU]
    assert all(y.equal(results[0]) for y in results)


def peak_memory(run, *args):
    """The most bytes that torch had allocated at once for a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(*args)
    totals = []
    events = profiler.profiler.kineto_results.experimental_event_tree()
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name == "[memory]":
            totals.append(event.extra_fields.total_allocated)
    return max(totals) - min(totals)


def norm_of_a_copy(norm, x, gradient):
    x = x.clone()
    if gradient is None:
        with torch.no_grad():
            return norm(x)
    norm(x.requires_grad_()).backward(gradient.clone())


@pytest.mark.parametrize("options", [{}, EFFICIENT], ids=["", "efficient"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_first_use_takes_no_more_memory_than_the_own_code(
    trains, options, monkeypatch
):
    monkeypatch.setattr(first_use, "AT_ONCE", 2**14)  # as much smaller as x is
    norm = nn.Sequential(LlamaRMSNorm(4096)).to(BF16)
    x, gradient = torch.randn(2, 64, 4096).to(BF16)
    call = norm_of_a_copy, norm, x, gradient if trains else None
    own = peak_memory(*call)
    patch_model(norm, **options)
    first = peak_memory(*call)
    assert first_use.equal_kernels[CPU] == 1 + trains
    assert first <= 1.01 * own
    assert peak_memory(*call) < own / 2


def test_norms_of_other_numbers_of_heads_are_compared_by_themselves():
    for heads in (2, 3, 2):
        spec = NormSpec(False, 1e-6)
        compute_norm(torch.randn(2, heads, 64), torch.ones(heads, 64), None, spec)
    assert first_use.equal_kernels[CPU] == 2


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
    assert first_use.equal_kernels[CPU] == 2


def test_a_result_that_shows_nothing_is_compared_again():
    weight = torch.ones(64)
    x = torch.randn(4, 64, requires_grad=True)
    for gradient in (0.0, torch.nan, 1.0):
        rms_norm(x, weight).backward(torch.full((4, 64), gradient))
        assert first_use.equal_kernels[CPU] == (2 if gradient == 1.0 else 1)


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


SPECS = [
    NormSpec(False, 1e-6, rounding="before_weight"),
    NormSpec(False, 1e-6, weight_offset=1.0, rounding="rstd"),
    NormSpec(False, 1e-12, gate="silu_before", rounding="weight_dtype"),
    NormSpec(False, 1e-5, gate="sigmoid_after"),
    NormSpec(True, 1e-5, has_bias=True),
]


def random_tensor(choice, shape, dtype):
    """Of any size; some with a large mean, a row of zeros, one infinity, or gaps."""
    t = torch.randn(shape) * 10.0 ** choice.uniform(-3, 3)
    change = choice.choice(["none", "mean", "zeros", "infinity", "gaps"])
    if change == "mean":
        t = t + 1_000 * torch.randn(shape[0], 1)
    elif change == "zeros":
        t[0] = 0.0
    elif change == "infinity":
        t[-1, -1] = torch.inf
    elif change == "gaps":
        t = t.repeat(1, 2)[:, : shape[1]]
    return t.to(dtype)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_random_layouts_are_no_alarm(spec):
    choice = random.Random(0)
    for _ in range(60):
        forget_launches()
        dtype = choice.choice([FP32, BF16, torch.float16])
        shape = choice.randint(1, 8), choice.randint(1, 300)
        x, gate = (random_tensor(choice, shape, dtype) for _ in range(2))
        of_weight = choice.choice([dtype, FP32])
        weight, bias = torch.randn(2, shape[1]).to(of_weight)
        weight = weight * choice.choice([0.0, 1.0])
        operands = of_norm(
            x, weight, bias if spec.has_bias else None, gate if spec.gate else None
        )
        for t in present(*operands):
            t.requires_grad_(choice.random() < 0.8)
        with use_backend("triton"), torch.enable_grad():
            y = run_norm(launches_of(spec), operands)
            if y.requires_grad:
                y.backward(random_tensor(choice, shape, y.dtype))


def test_a_modulation_of_which_the_shift_alone_is_trained():
    x, scale, shift = torch.randn(3, 2, 5, 64)
    operands = of_modulation(x, None, None, scale, shift.requires_grad_())
    spec = NormSpec(True, 1e-6, has_weight=False, functional=True)
    _, y = modulated_norm(spec, operands)
    y.sum().backward()
    assert torch.equal(shift.grad, torch.ones_like(shift))


def test_a_large_input_is_compared_by_parts(monkeypatch):
    monkeypatch.setattr(first_use, "AT_ONCE", 100)
    of_float64 = []
    distances_of = first_use.distances_of

    def seen(ours, own, exact, *args):
        of_float64.append(exact.numel())
        return distances_of(ours, own, exact, *args)

    monkeypatch.setattr(first_use, "distances_of", seen)
    for kind in self_check.KINDS:
        first_use.equal_kernels.clear()
        run_kind(kind, FP32)
        assert first_use.equal_kernels[CPU] == 2
    assert max(of_float64) <= 1_280
