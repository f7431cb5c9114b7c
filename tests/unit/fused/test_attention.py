"""When the norms of queries and keys are put off to the rotary embedding, and what computes them there."""

import sys

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

from hf_rmsnorm import count_launches, patch_model, use_backend
from hf_rmsnorm.fused import attention, layer
from hf_rmsnorm.fused.attention import norm_and_rotate, norm_later

D = 16
NAMES = "q_norm", "k_norm"


class Attention(nn.Module):
    def __init__(self, q_norm=None, k_norm=None):
        super().__init__()
        self.q_norm, self.k_norm = q_norm or LlamaRMSNorm(D), k_norm or LlamaRMSNorm(D)


def rotate(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin)


@pytest.fixture(autouse=True)
def proven(monkeypatch):
    """`rotate` counts as proven as long as its code and what it names are as they are."""
    named = [(globals(), "apply_rotary_pos_emb", apply_rotary_pos_emb)]
    functions = [(f, f.__code__, f.__defaults__) for f in (rotate, apply_rotary_pos_emb)]
    monkeypatch.setitem(attention.proven_rotary, rotate, (functions, named, (("", ""), ("", ""))))


def made(*norms):
    made = Attention(*norms)
    for weight in made.parameters():
        nn.init.uniform_(weight, 0.5, 1.5)
    patch_model(made)
    for norm in made.children():
        type(norm)._hf_rmsnorm_plans.clear()
    return made


def operands():
    q, k = (
        torch.randn(2, 3, 4, D),
        torch.randn(2, 3, 2, D),
    )  # (batch, length, heads, head_dim), as projections give them
    return q, k, torch.randn(1, 3, D), torch.randn(1, 3, D)


def run(made, q, k, *tables, rotate=rotate):
    """The results, and the launches by kernel."""
    held = {}
    with torch.no_grad(), count_launches() as launches:
        q, k = (norm_later(made, held, side, NAMES[side], x).transpose(1, 2) for side, x in enumerate((q, k)))
        found = norm_and_rotate(made, held, NAMES, rotate if tables else None, q, k, *tables)
    return found, dict(launches)


def apart(made, q, k, *tables, rotate=rotate):
    with torch.no_grad():
        q, k = (norm(x).transpose(1, 2) for norm, x in zip((made.q_norm, made.k_norm), (q, k), strict=True))
    return rotate(q, k, *tables) if tables else (q, k)


def check(made, *given, launches, **how):
    for _ in range(2):  # the second time by what the first has found
        found, counted = run(made, *given, **how)
        assert counted == launches
        for a, b in zip(found, apart(made, *given, **how), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


ONE, TWO = {"qk_norm_forward": 1}, {"norm_forward": 2}


@pytest.mark.parametrize("tables", [True, False])
def test_one_launch_for_both_norms_and_the_rotary_embedding(tables):
    check(made(), *operands()[: 4 if tables else 2], launches=ONE)


def test_plans_are_kept_for_calls_that_kernels_serve(monkeypatch):
    attention = made()
    plans = type(attention.q_norm)._hf_rmsnorm_plans
    given = operands()
    run(attention, *given)
    count = len(plans)
    run(attention, *given)
    assert len(plans) == count == 3  # of q alone, of k alone, of both
    with use_backend("reference"):
        run(attention, *(t[:1] for t in given))
    assert len(plans) == count
    monkeypatch.setattr(type(plans), "keep", None)  # what is not called
    run(attention, *given)


def test_norms_of_heads_leave_the_short_way_to_the_norms_of_rows_around_them(monkeypatch):
    attention, rows, given = made(), torch.randn(2, 3, D), operands()
    before = [attention.q_norm(rows) for _ in range(3)][-1]
    for _ in range(2):
        run(attention, *given)
    monkeypatch.setattr(type(type(attention.q_norm)._hf_rmsnorm_plans), "find", None)  # what is not called
    assert torch.equal(attention.q_norm(rows), before)


def test_norms_of_two_formulas_are_computed_apart():
    check(made(LlamaRMSNorm(D, eps=0.5)), *operands(), launches=TWO)
    attention = made()
    attention.k_norm.variance_epsilon = 0.25
    check(attention, *operands(), launches=TWO)


@pytest.mark.parametrize("at", [0, 1])
def test_norms_one_of_which_has_a_bias_are_computed_apart(at):
    norms = [LlamaRMSNorm(D), LlamaRMSNorm(D)]
    norms[at] = nn.LayerNorm(D)
    check(made(*norms), *operands(), launches=TWO)
    check(made(LlamaRMSNorm(D), LlamaRMSNorm(D)), *operands(), launches=ONE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_what_layer_norm_returns_lies_as_it_was_read(bias, heads):
    """Row-major: so it is seen by heads before the norm, or normalised where it stands."""
    attention = made(*(nn.LayerNorm(D, bias=bias) for _ in range(2)))
    check(attention, *operands(), launches=TWO)
    both = [torch.randn(2, 3, 8, D)[:, :, : 2 * n : 2] for n in heads]
    for given in (both, [x.transpose(1, 2) for x in both]):
        for _ in range(2):
            held = {}
            with torch.no_grad(), count_launches() as launches:
                pair = [norm_later(attention, held, side, NAMES[side], x) for side, x in enumerate(given)]
                found = norm_and_rotate(attention, held, NAMES, None, *pair)
            with torch.no_grad():
                expected = [norm(x) for norm, x in zip(attention.children(), given, strict=True)]
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
                assert a.is_contiguous() and b.is_contiguous()
        assert launches == ONE


def test_operators_that_autocast_computes_in_float32_are_not_served_there_by_what_was_kept():
    norms = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
    attention, (q, k, *tables) = made(*norms).bfloat16(), operands()
    given = q.bfloat16(), k.bfloat16(), *tables
    run(attention, *given)
    assert run(attention, *given)[1] == TWO
    with torch.autocast("cpu", torch.bfloat16):
        found, launches = run(attention, *given)
        assert launches == TWO and all(map(torch.equal, found, apart(attention, *given)))


@pytest.mark.parametrize("at", [0, 1])
def test_what_was_written_to_before_a_norm_has_read_it_is_an_error(at):
    for written in "xw":
        attention, held, given = made(), {}, operands()[:2]
        with torch.no_grad():
            q, k = (norm_later(attention, held, side, NAMES[side], x) for side, x in enumerate(given))
            (given[at] if written == "x" else attention.get_submodule(NAMES[at]).weight).add_(1)
            with pytest.raises(RuntimeError, match=f"what {NAMES[at]} is yet to read was written to"):
                norm_and_rotate(attention, held, NAMES, None, q, k)


def one_more(attention, at):
    attention.get_submodule(NAMES[at]).register_forward_hook(lambda *_: None)


def in_float64(attention, at):
    attention.get_submodule(NAMES[at]).double()


def heads(attention, at):
    attention.get_submodule(NAMES[at]).weight = nn.Parameter(torch.ones((4, 2)[at], D))


@pytest.mark.parametrize("at", [0, 1])
def test_a_norm_that_is_watched_is_called_where_it_stands(at):
    attention = made()
    one_more(attention, at)
    held, x = {}, torch.randn(2, 3, 4, D)
    assert norm_later(attention, held, at, NAMES[at], x) is not x and not held
    assert norm_later(attention, held, 1 - at, NAMES[1 - at], x) is x and set(held) == {1 - at}
    check(attention, *operands(), launches=TWO)


@pytest.mark.parametrize("turned", [True, False])
def test_weights_of_heads(turned):
    attention = made()
    heads(attention, 0)
    check(attention, *operands()[: 4 if turned else 2], launches=TWO)
    heads(attention, 1)
    check(attention, *operands()[: 4 if turned else 2], launches=ONE)


def spanning(heads=(4, 2), seen=None):
    """The results for norms over all heads, what plain norms give, and the launches; seen: how heads are made."""
    attention = made(*(LlamaRMSNorm(n * D) for n in heads))
    rows, tables = [torch.randn(2, 3, n * D) for n in heads], operands()[2:]
    seen = seen or (lambda x: x.view(2, 3, -1, D).transpose(1, 2))
    with torch.no_grad(), count_launches() as launches:
        for _ in range(2):
            held = {}
            pair = [norm_later(attention, held, side, NAMES[side], x, True) for side, x in enumerate(rows)]
            found = norm_and_rotate(attention, held, NAMES, rotate, *map(seen, pair), *tables)
    with torch.no_grad(), use_backend("reference"):
        expected = rotate(*(seen(norm(x)) for norm, x in zip(attention.children(), rows, strict=True)), *tables)
    return found, expected, launches


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (1, 1), (3, 3), (1, 2)])
def test_a_norm_over_all_heads(heads):
    found, expected, launches = spanning(heads)
    assert launches == {"qk_norm_forward": 2}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_norm_over_all_heads_without_a_weight_is_called_where_it_stands():
    """Nothing would tell it from one of each head."""
    attention = made(*(Llama4TextL2Norm() for _ in range(2)))
    rows = torch.randn(2, 3, 4 * D)
    assert norm_later(attention, held := {}, 0, "q_norm", rows, True) is not rows and not held


def test_a_rotation_of_what_lies_by_heads_of_which_each_has_a_weight():
    """As many heads as positions: which of them the weights are for, only the norm's own forward says."""
    attention = made(*(LlamaRMSNorm(D) for _ in range(2)))
    for norm in attention.children():
        norm.weight = nn.Parameter(torch.randn(3, D))
    q, k, *tables = torch.randn(2, 3, 3, D), torch.randn(2, 3, 3, D), *operands()[2:]
    with torch.no_grad():
        held = {}
        pair = [norm_later(attention, held, side, NAMES[side], x) for side, x in enumerate((q, k))]
        found = norm_and_rotate(attention, held, NAMES, rotate, *pair, *tables)
        expected = rotate(*(norm(x) for norm, x in zip(attention.children(), (q, k), strict=True)), *tables)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_heads_that_are_made_in_another_way_are_an_error_and_no_other_result():
    with pytest.raises(RuntimeError, match="patch it with fuse_residual=False"):
        spanning((4, 4), lambda x: x.view(2, 3, D, -1).permute(0, 3, 1, 2))


def test_rows_that_heads_cannot_be_made_of_are_normalised_where_they_stand():
    attention, x = made(LlamaRMSNorm(4 * D), LlamaRMSNorm(4 * D)), torch.randn(2, 3, 8 * D)[..., ::2]
    assert norm_later(attention, held := {}, 0, "q_norm", x, True) is not x and not held
    assert norm_later(attention, held, 0, "q_norm", x.unsqueeze(0), True) is not x and not held
    assert norm_later(attention, held, 0, "q_norm", x.contiguous()) is not x and not held


def test_what_no_kernel_serves_is_normalised_where_it_stands():
    attention, held = made(), {}
    x = torch.randn(2, 3, 4, D)
    for given in (x.double(), x[..., :8]):
        attention.q_norm.weight.data = torch.ones(given.shape[-1], dtype=given.dtype)
        y = norm_later(attention, held, 0, "q_norm", given)
        if given.dtype == torch.float64:
            assert y is not given and not held
    with use_backend("reference"):
        given = x[..., :8]
        assert norm_later(attention, held, 0, "q_norm", given) is given
        with pytest.raises(RuntimeError):  # as the module itself
            norm_later(attention, {}, 0, "q_norm", x)


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of an operator."""


def test_a_subclass_is_normalised_where_it_stands():
    x = torch.randn(2, 3, 4, D).as_subclass(Tagged)
    assert norm_later(made(), held := {}, 0, "q_norm", x) is not x and not held


def test_while_compiling_norms_are_called_where_they_stand(monkeypatch):
    monkeypatch.setattr(attention, "_is_compiling", lambda: True)
    x = torch.randn(2, 3, 4, D)
    assert norm_later(made(), held := {}, 0, "q_norm", x) is not x and not held


def test_a_norm_that_is_gone_or_absent_is_the_attentions_own():
    attention = made()
    del attention.q_norm
    attention.q_norm = None
    with pytest.raises(TypeError, match="not callable"):
        norm_later(attention, {}, 0, "q_norm", torch.ones(D))
    attention = made()
    del attention.q_norm
    object.__setattr__(attention, "q_norm", lambda x: 2 * x)
    assert norm_later(attention, {}, 0, "q_norm", torch.ones(D)).eq(2.0).all()


def test_one_norm_that_is_not_put_off_is_not_applied_twice():
    attention, (q, k, *_) = made(), operands()
    held = {}
    with torch.no_grad():
        q, k = norm_later(attention, held, 0, "q_norm", q).transpose(1, 2), k.transpose(1, 2)
        found = norm_and_rotate(attention, held, NAMES, None, q, k)
        assert torch.equal(found[1], k) and torch.equal(found[0], attention.q_norm(q))


def test_a_rotary_function_that_is_not_the_proven_one_is_called(monkeypatch):
    attention, given = made(), operands()
    check(attention, *given, rotate=lambda q, k, cos, sin: (q * cos.unsqueeze(1), k), launches=TWO)
    with monkeypatch.context() as changed:
        changed.setattr(sys.modules[__name__], "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, 2 * k))
        check(attention, *given, launches=TWO)
    check(attention, *given, launches=ONE)
    with monkeypatch.context() as changed:
        changed.setattr(rotate, "__code__", (lambda q, k, cos, sin: (3 * q, k)).__code__)
        check(attention, *given, launches=TWO)


def test_tables_decide_too():
    q, k, cos, sin = operands()
    check(made(), q, k, cos.double(), sin.double(), launches=TWO)
    check(made(), q, k, torch.cat([cos, cos]), torch.cat([sin, sin]), launches=ONE)


def test_observers_see_queries_and_keys_until_they_leave():
    attention, given, seen = made(), operands(), []
    with layer.observing(lambda *what: seen.append(what)):
        run(attention, *given)
    run(attention, *given)
    ((module, kind, which, tensors),) = seen
    assert (module, kind, which, len(tensors)) == (attention, "q/k", (NAMES, rotate), 4)
