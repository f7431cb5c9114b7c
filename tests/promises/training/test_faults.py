"""What goes wrong in training goes wrong as without a patch: the same errors, the same
NaNs, the same steps skipped.
"""

import copy
import math

import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {
    "each norm alone": {"fuse_residual": False},
    "fused": {},
    "memory_efficient": {"memory_efficient": True},
}
SIZES = {
    "qwen3": {"num_hidden_layers": 1},
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
}
ids = tiny_models.token_ids(2, 8).to(DEVICE)
ways = pytest.mark.parametrize("way", WAYS)
# sums, q and k norms with rotary; LayerNorm with bias
families = pytest.mark.parametrize("family", ["qwen3", "gpt2"])


@pytest.fixture(autouse=True)
def kernels():
    with use_backend("triton"):
        yield


def build(family, way=None, dtype=torch.float32, **config):
    """A tiny model in training mode, without dropout, on the kernels if patched in a
    way.
    """
    model = (
        tiny_models.build(family, dtype, **SIZES.get(family, {}), **config)
        .train()
        .to(DEVICE)
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if way is not None:
        report = patch_model(model, strict=True, **WAYS[way])
        assert way != "memory_efficient" or any(
            "keeps its output" in record.notes for record in report.swapped
        )
    return model


def norm_parameters(model):
    return {
        f"{path}.{name}": p
        for path, norm in tiny_models.norms(model)
        for name, p in norm.named_parameters()
    }


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_nans(got, expected):
    for name, gradient in expected.items():
        assert torch.equal(got[name].isnan(), gradient.isnan()), name
        torch.testing.assert_close(
            got[name], gradient, rtol=1e-4, atol=1e-6, equal_nan=True, msg=name
        )


# Parameters changed in place between forward and backward


def outcome_of_a_change(model, name):
    """The error of a backward before which a parameter was changed in place; "" if
    there is none.
    """
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        model.get_parameter(name).add_(0.0)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@ways
@families
def test_a_parameter_changed_before_the_backward_is_eagers_error(family, way):
    plain, model = build(family), build(family, way)
    for name in norm_parameters(plain):
        expected, got = (
            outcome_of_a_change(plain, name),
            outcome_of_a_change(model, name),
        )
        if not expected and not (way == "memory_efficient" and name.endswith("bias")):
            # which is then needed
            assert not got, name
            assert_same_nans(gradients(model), gradients(plain))
        else:
            assert "modified by an inplace operation" in got, name
        assert (
            name.endswith("bias") or "modified by an inplace operation" in expected
        ), name


# A weight frozen in the middle of training


def train_frozen(model, frozen):
    """Losses of six steps of which two have some parameters frozen, and whether those
    moved in each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched = [model.get_parameter(name) for name in frozen]
    losses, moved = [], []
    for step in range(6):
        before = [p.detach().clone() for p in watched]
        for p in watched:
            p.requires_grad_(step not in (2, 3))
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        moved.append(
            [not torch.equal(p, old) for p, old in zip(watched, before, strict=True)]
        )
    return losses, moved


@ways
@families
def test_a_weight_frozen_for_two_steps_and_thawed(family, way):
    plain, model = build(family), build(family, way)
    frozen = [name for name in norm_parameters(plain) if name.endswith("weight")][::2]
    losses, moved = train_frozen(plain, frozen)
    assert moved == [[step not in (2, 3)] * len(frozen) for step in range(6)]
    assert train_frozen(model, frozen) == (pytest.approx(losses, rel=1e-5), moved)


# NaN and inf


# whose square is inf
BAD_VALUES = [(1, 3, math.nan), (2, 5, math.inf), (3, 0, -math.inf), (4, 1, 1e30)]
NORMS = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "layer norm": nn.LayerNorm}


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_gradients_of_bad_rows_are_eagers_row_by_row(make, memory_efficient):
    """In the input or in the incoming gradient: a row's dx is bad where eager's is, and
    no other row's is.
    """
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(9, 64, generator=generator) for _ in range(2))
    for row, column, value in BAD_VALUES:
        x[row, column] = value
    x[5] = 0.0
    dy[6, 2], dy[7, 2], dy[8] = math.nan, math.inf, 0.0
    norm = make(64).to(DEVICE)
    fused = copy.deepcopy(norm)
    patch_model(fused, memory_efficient=memory_efficient)
    results = []
    for module in (norm, fused):
        leaf = x.to(DEVICE).requires_grad_()
        with count_launches() as launches:
            y = module(leaf)
            dx, *dw = torch.autograd.grad(
                y, [leaf, *module.parameters()], dy.to(DEVICE)
            )
        results.append((y.detach(), dx, *dw))
    assert launches.total() >= 2
    for got, expected in zip(results[1], results[0], strict=True):
        # whether an infinite dy gives inf or NaN depends on how rows are vectorised
        finite = expected.isfinite()
        assert torch.equal(got.isfinite(), finite)
        torch.testing.assert_close(got[finite], expected[finite], rtol=1e-5, atol=1e-5)
    assert torch.equal(results[1][0].isnan(), results[0][0].isnan())
    bad = (~results[1][1].isfinite()).any(1).tolist()
    assert bad == [False, True, True, True, False, False, True, True, False]


# Gradient scaler


def train_scaled(model):
    """What a float16 autocast makes of a scale too large.

    Returns by step the loss, the scale after it and whether it was taken; and the
    weights behind the last one.
    """
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**18, growth_interval=3)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(7):
        tokens = tiny_models.token_ids(1, 8, seed=step % 2).to(DEVICE)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.autocast(DEVICE, torch.float16):
            loss = model(tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken = not all(
            torch.equal(p, old)
            for p, old in zip(model.parameters(), before, strict=True)
        )
        seen.append((loss.item(), scaler.get_scale(), taken))
    return seen, dict(model.named_parameters())


@ways
@families
def test_steps_whose_scaled_gradients_overflow_are_skipped_as_in_eager(family, way):
    (plain, weights), (patched, ours) = (
        train_scaled(build(family)),
        train_scaled(build(family, way)),
    )
    taken = [step for *_, step in plain]
    assert False in taken and taken.count(True) >= 3
    assert [step[1:] for step in patched] == [step[1:] for step in plain]
    assert [loss for loss, *_ in patched] == pytest.approx(
        [loss for loss, *_ in plain], rel=2e-3
    )
    for name in norm_parameters(build(family)):
        # others' gradients may be noise around 0, which AdamW makes a step of
        torch.testing.assert_close(
            ours[name], weights[name], rtol=0, atol=2e-5, msg=name
        )


# Parameters of several dtypes


def mix(model, dtype):
    for norm in list(norm_parameters(model).values()):
        norm.data = norm.data.to(dtype)
    return model


def rms_errors(gradients, exact):
    return {
        name: (g.double() - exact[name]).square().mean().sqrt()
        for name, g in gradients.items()
    }


MIXED = {
    "float32 norms in a bfloat16 Gemma": (
        "gemma2",
        torch.bfloat16,
        torch.float32,
        False,
    ),
    "bfloat16 norms in a float32 LLaMA": (
        "llama",
        torch.float32,
        torch.bfloat16,
        False,
    ),
    "float32 norms in a bfloat16 LLaMA, autocast": (
        "llama",
        torch.bfloat16,
        torch.float32,
        True,
    ),
}


@ways
@pytest.mark.parametrize("mixture", MIXED)
def test_parameters_of_several_dtypes_train_as_accurately_as_in_eager(mixture, way):
    family, dtype, norms, autocast = MIXED[mixture]
    size = {"num_hidden_layers": 1} if family == "gemma2" else {}
    found = []
    for patch in (None, way):
        model = mix(build(family, patch, dtype, **size), norms)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
        found.append(gradients(model))
    plain = mix(build(family, None, dtype, **size), norms).double()
    plain(ids, labels=ids).loss.backward()
    eager, fused = (rms_errors(g, gradients(plain)) for g in found)
    worse = {
        name: (fused[name] / eager[name]).item()
        for name in fused
        if fused[name] > 1.5 * eager[name]
    }
    assert not worse


def test_a_mixture_that_eager_refuses_is_refused_in_its_words():
    """LLaMA's norm with a float32 weight gives float32, which no bfloat16 linear takes."""
    errors = []
    for model in (
        build("llama", None, torch.bfloat16),
        build("llama", "fused", torch.bfloat16),
    ):
        with pytest.raises(RuntimeError, match="same dtype") as error:
            mix(model, torch.float32)(ids)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


# An optimizer that holds stale parameters


def replace_parameters(model, how):
    if how == "new Parameter":
        for _, norm in tiny_models.norms(model):
            for name, parameter in list(norm.named_parameters(recurse=False)):
                setattr(norm, name, nn.Parameter(parameter.detach() * 1.5))
    else:
        state = {
            name: tensor.clone() * 1.5 for name, tensor in model.state_dict().items()
        }
        model.load_state_dict(state, assign=True)


@ways
@families
@pytest.mark.parametrize("how", ["new Parameter", "load_state_dict(assign=True)"])
def test_an_optimizer_of_replaced_parameters_moves_what_it_moves_in_eager(
    how, family, way
):
    """The model reads the new ones, the optimizer's old ones get no gradient, and
    nothing is remembered of them.
    """
    outcomes = []
    for model in (build(family), build(family, way)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        before = norm_parameters(model)
        losses = []
        for step in range(4):
            if step == 1:
                replace_parameters(model, how)
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        now = norm_parameters(model)
        assert all(
            now[name] is not before[name] and before[name].grad is None for name in now
        )
        outcomes.append((losses, now))
    (expected, parameters), (got, fused) = outcomes
    assert got == pytest.approx(expected, rel=1e-5) and got[1] != pytest.approx(
        got[0], rel=1e-3
    )
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            fused[name], parameter, rtol=1e-4, atol=1e-6, msg=name
        )
