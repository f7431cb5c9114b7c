"""Launch keys: calls that need other launches have other keys, and what a launch must not serve has none."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from hf_rmsnorm import rms_norm, use_backend
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import direct
from hf_rmsnorm.ops.direct import LaunchCache, alike_to, is_watched, launch_key
from hf_rmsnorm.ops.qk import qk_launch_key
from tests.unit.kernels.test_plan_keys import BF16, RMS, B, D, W, X, layouts, pairs


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of an operator."""


def key_of_pair(q, k, q_weight, k_weight, cos, sin, spec):
    """As attentions that are patched ask for it."""
    norms = (launch_key(x, weight, None, spec.functional) for x, weight in ((q, q_weight), (k, k_weight)))
    return qk_launch_key(*norms, q, k, cos, sin)


def norms():
    """(x, weight, bias, functional) of calls no two of which are served by one launch."""
    for _, x in layouts(X):
        yield x, W, None, False
    yield X[:1], W, None, False
    yield X.to(BF16), W, None, False
    yield X, W.to(BF16), None, False
    yield X, torch.ones(3, D), None, False
    yield X, None, None, False
    yield X, W, B, False
    yield X, W, B.to(BF16), False
    yield X, W, torch.ones(3, D), False
    yield X.to("meta"), W, None, False
    yield X.to("meta"), None, None, False
    yield X, W.to("meta"), None, False
    yield X, W, B.to("meta"), False


def test_norms_that_need_other_launches_have_other_keys():
    keys = [launch_key(*each) for each in norms()]
    assert None not in keys
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_queries_and_keys_that_need_other_launches_have_other_keys():
    # The first again is not another call, and each formula has a cache of its own.
    calls = {name: operands for name, operands in pairs() if name not in ("k ", "centred", "eps")}
    q, k, wq, wk, cos, sin, spec = calls["q "]
    calls |= {
        "k in bfloat16": (q, k.to(BF16), wq, wk, cos, sin, spec),
        "k's weight in bfloat16": (q, k, wq, wk.to(BF16), cos, sin, spec),
        "k's weight is longer": (q, k, wq, torch.ones(17), cos, sin, spec),
        "sin in bfloat16": (q, k, wq, wk, cos, sin.to(BF16), spec),
        "sin with gaps": (q, k, wq, wk, cos, torch.cat([sin, sin], -1)[..., :16], spec),
        "sin of more": (q, k, wq, wk, cos, torch.cat([sin, sin]), spec),
        "k elsewhere": (q, k.to("meta"), wq, wk, cos, sin, spec),
        "k's weight elsewhere": (q, k, wq, wk.to("meta"), cos, sin, spec),
        "cos elsewhere": (q, k, wq, wk, cos.to("meta"), sin, spec),
        "sin elsewhere": (q, k, wq, wk, cos, sin.to("meta"), spec),
    }
    keys = [key_of_pair(*each) for each in calls.values()]
    assert None not in keys
    for a, b in itertools.combinations(range(len(keys)), 2):
        assert keys[a] != keys[b], (list(calls)[a], list(calls)[b])


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, 4, 16), torch.ones(2, 1, 4, 16), torch.ones(2, 3, 3, 16),
        torch.ones(128).as_strided((2, 1, 4, 16), (64, 16, 16, 1)),  # and so lies the transposed one
    ],
    ids=["any", "one position", "as many heads as positions", "equal strides"],
)  # fmt: skip
def test_views_of_queries_and_keys_that_need_other_launches_have_other_keys(x):
    norm, other = launch_key(x, W, None, False), launch_key(x[:1], W, None, False)
    views = list(itertools.product((x, x.transpose(1, 2)), repeat=2))
    for tables in ((), (x, x)):
        keys = [qk_launch_key(norm, norm, *pair, *tables) for pair in views]
        keys += [qk_launch_key(*norms, x, x, *tables) for norms in ((norm, other), (other, norm), (other, other))]
        assert len(set(keys)) == len(keys) == 7 and None not in keys
        assert qk_launch_key(norm, None, x, x, *tables) is None and qk_launch_key(None, norm, x, x, *tables) is None
    assert qk_launch_key(norm, norm, x, x, x, None) != qk_launch_key(norm, norm, x, x)


@pytest.mark.parametrize(
    "x, weight, bias",
    [
        (X.as_subclass(Tagged), W, None), (X, W.as_subclass(Tagged), None), (X, W, B.as_subclass(Tagged)),
        (X, torch.stack([W, W], 1)[:, 0], None), (X, W, torch.stack([B, B], 1)[:, 0]),
    ],
    ids=["x", "weight", "bias", "weight with gaps", "bias with gaps"],
)  # fmt: skip
def test_what_a_launch_does_not_read_as_it_lies_has_no_key(x, weight, bias):
    assert launch_key(x, weight, bias, False) is None


@pytest.mark.parametrize("which", range(6))
def test_queries_and_keys_that_a_launch_does_not_read_have_no_key(which):
    *operands, spec = dict(pairs())["q "]
    assert key_of_pair(*operands, spec) is not None
    operands[which] = operands[which].as_subclass(Tagged)
    assert key_of_pair(*operands, spec) is None


def test_weights_of_keys_with_gaps_have_no_key():
    q, k, wq, wk, cos, sin, spec = dict(pairs())["q "]
    assert key_of_pair(q, k, wq, torch.stack([wk, wk], 1)[:, 0], cos, sin, spec) is None


def test_tables_that_ask_for_gradients_have_no_key():
    q, k, wq, wk, cos, sin, spec = dict(pairs())["q "]
    for tables in ((cos.clone().requires_grad_(), sin), (cos, sin.clone().requires_grad_())):
        assert key_of_pair(q, k, wq, wk, *tables, spec) is None
        with torch.no_grad():
            assert key_of_pair(q, k, wq, wk, *tables, spec) is not None


def test_operators_that_autocast_computes_in_float32_have_no_key_there():
    q, k, wq, wk, cos, sin, _ = dict(pairs())["q "]
    functional = NormSpec(False, 1e-2, functional=True)
    with torch.autocast("cpu", BF16):
        assert launch_key(X, W, B, True) is None and launch_key(X, W, B, False) is not None
        assert key_of_pair(q, k, wq, wk, cos, sin, functional) is None
        assert key_of_pair(q, k, wq, wk, cos, sin, RMS) is not None
    assert launch_key(X, W, B, True) is not None and key_of_pair(q, k, wq, wk, cos, sin, functional) is not None


def test_the_reference_has_no_launches():
    with use_backend("reference"):
        assert launch_key(X, W, None, False) is None
    with use_backend("triton"):
        assert launch_key(X, nn.Parameter(W), None, False) == launch_key(X, W, None, False) is not None


def test_a_call_is_found_by_its_operands_and_no_other():
    calls = [call for call in norms() if call[1] is not None or call[2] is None]
    for one, other in itertools.permutations(calls, 2):
        if (one[2] is None) != (other[2] is None) or (one[1] is None) != (other[1] is None):
            continue  # each cache is of calls that have a weight and a bias, or have not
        plans = LaunchCache()
        key, plan = plans.find(*one)
        assert key == launch_key(*one) and plan is None
        plans[key] = "one"
        assert plans.find(*one) == plans.find(*one) == (key, "one")
        assert plans.find(*other) == (launch_key(*other), None)
        plans[launch_key(*other)] = "other"
        assert [plans.find(*call)[1] for call in (other, one, one, other)] == ["other", "one", "one", "other"]
        plans.clear()
        assert plans.find(*one) == (key, None)


def test_a_call_is_found_without_what_torch_keeps_to_itself(monkeypatch):
    monkeypatch.setattr(direct, "TensorGuards", None)
    plans = LaunchCache()
    plans[launch_key(X, W, None, False)] = "kept"
    assert plans.find(X, W, None, False)[1] == plans.find(X, W, None, False)[1] == "kept"
    assert plans.find(X[:1], W, None, False)[1] is None


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.autocast("cpu", BF16), torch.inference_mode, FakeTensorMode, lambda: use_backend("reference"),
        forward_ad.dual_level, lambda: torch.utils._python_dispatch.TorchDispatchMode(),
    ],
    ids=["autocast", "inference", "fake", "reference", "forward-mode AD", "a mode"],
)  # fmt: skip
def test_a_call_elsewhere_is_another(surroundings):
    plans, functional = LaunchCache(), (X, W, B, True)
    plans[launch_key(*functional)] = "kept"
    assert plans.find(*functional)[1] == plans.find(*functional)[1] == "kept"
    with surroundings():
        alike = plans.last[X.shape][0](X, W, B) and not is_watched() and direct.chosen.backend != "reference"
        assert not alike
    assert plans.find(*functional)[1] == "kept"


def test_transforms_see_the_operators_of_calls_that_were_found():
    alike = alike_to([X, W])
    assert alike(X, W) and not is_watched()
    seen = []

    def look(x):
        seen.append((alike(x, W) or alike(X, W)) and not is_watched())
        return x * 2

    torch.func.vmap(look)(torch.stack([X, X]))
    torch.func.grad(lambda x: look(x).sum())(X)
    torch.jit.trace(look, X, check_trace=False)  # which would run it once more, untraced
    assert seen and not any(seen)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_symbolic_sizes_under_a_transform_are_no_call_that_is_kept(transform):
    found = []

    def look(x):
        found.append(LaunchCache().find(x, None, None, False))
        return rms_norm(x, torch.ones(16))

    graph = make_fx(transform(look), tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(3, 16))
    x = torch.randn(3, 16)
    torch.testing.assert_close(graph(x), transform(look)(x), rtol=1e-4, atol=1e-5)
    assert found and all(each == (None, None) for each in found)
