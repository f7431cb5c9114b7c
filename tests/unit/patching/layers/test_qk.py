"""Where an attention normalises and rotates q and k: which sources are understood, and which functions rotate."""

import types

import pytest
import torch
from fusion_models import fused
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import count_launches, patch_model, use_backend
from hf_rmsnorm.fused.attention import is_rotary
from hf_rmsnorm.fused.layer import observing
from hf_rmsnorm.fused.source import CannotRewrite
from hf_rmsnorm.patching.layers.qk import QKFusion, find_qk
from hf_rmsnorm.patching.layers.rotary import prove_rotary


def test_what_is_a_rotary_embedding_is_found_by_running_it():
    assert prove_rotary(modeling_qwen3.apply_rotary_pos_emb)
    assert not prove_rotary(lambda q, k, cos, sin: (q, k))
    assert not prove_rotary(lambda q, k: (q, k))
    assert not prove_rotary(None)

    def the_other_way_around(q, k, cos, sin):
        return modeling_qwen3.apply_rotary_pos_emb(q, k, cos, -sin)

    assert not prove_rotary(the_other_way_around)


class Attention(nn.Module):
    def forward(self, x, cos, sin):
        q = self.q_norm(x.view(1, 2, 4, 8)).transpose(1, 2)
        k = self.k_norm(x.view(1, 2, 4, 8)).transpose(1, 2)
        return q @ k.mT


class UsesQFirst(nn.Module):
    def forward(self, x):
        q = self.q_norm(x).transpose(1, 2)
        k = self.k_norm(q).transpose(1, 2)
        return q @ k.mT


class WritesInPlace(nn.Module):
    def forward(self, x):
        q = self.q_norm(x).transpose(1, 2)
        x.mul_(2)
        k = self.k_norm(x).transpose(1, 2)
        return q @ k.mT


class WholeRows(nn.Module):
    def forward(self, x):
        q = self.q_norm(x)
        k = self.k_norm(x)
        return q @ k.mT


class OneNorm(nn.Module):
    def forward(self, x):
        q = self.q_norm(x).transpose(1, 2)
        return q @ x.mT


def test_the_pattern_is_found_without_a_rotary_embedding():
    assert find_qk(Attention, {"q_norm", "k_norm"}) == QKFusion("q_norm", "k_norm", "")


@pytest.mark.parametrize("cls", [UsesQFirst, WritesInPlace, WholeRows, OneNorm])
def test_forwards_that_are_not_understood_are_left_alone(cls):
    with pytest.raises(CannotRewrite):
        find_qk(cls, {"q_norm", "k_norm"})


# Attentions in other words than Transformers', whose results and gradients are those of the norms alone.


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class Rotation:
    half = staticmethod(rotate_half)


FLAGS = {"back": False}


def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotary_by_a_class(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + Rotation.half(q) * sin, k * cos + Rotation.half(k) * sin


def rotary_by_a_flag(q, k, cos, sin):
    return rotary(q, k, cos, -sin if FLAGS["back"] else sin)


def rotary_but_in_float16(q, k, cos, sin):
    return (q, k) if q.dtype == torch.float16 else rotary(q, k, cos, sin)


@pytest.mark.parametrize("function", [rotary_by_a_class, rotary_by_a_flag, rotary_but_in_float16])
def test_what_may_rotate_otherwise_at_another_time_is_not_proven(function):
    assert not prove_rotary(function)


def rotary_back_to_the_dtype_of_q(q, k, cos, sin):
    rotated = rotary(q, k, cos, sin)
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


def rotary_of_a_dtype_of_its_own(q, k, cos, sin):
    return rotary(q, k, cos.to(q.dtype), sin.to(q.dtype))


def rotary_of_whole_heads(q, k, cos, sin):
    half = q.shape[-1] // 2
    turned = (torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k))
    return tuple(x * cos.unsqueeze(1) + y * sin.unsqueeze(1) for x, y in zip((q, k), turned, strict=True))


def test_a_function_that_rotates_whole_heads_is_proven_for_those_alone():
    assert prove_rotary(rotary_of_whole_heads) and is_rotary(rotary_of_whole_heads) == ""
    assert is_rotary(rotary_of_whole_heads, in_part=True) is None
    assert prove_rotary(modeling_glm4_moe.apply_rotary_pos_emb)
    assert is_rotary(modeling_glm4_moe.apply_rotary_pos_emb, in_part=True) == ""


def test_how_a_function_rotates_is_found_by_running_it():
    """(with tables of the dtype of q, with others)"""
    ways = {
        rotary: ("", ""),
        rotary_back_to_the_dtype_of_q: ("", "once"),
        modeling_cohere.apply_rotary_pos_emb: ("once pairs", "once pairs"),
        rotary_of_a_dtype_of_its_own: ("", None),
    }
    for function, expected in ways.items():
        assert prove_rotary(function)
        assert (is_rotary(function), is_rotary(function, dtypes_differ=True)) == expected


def test_code_that_autoreload_exchanges_is_seen():
    def other(q, k, cos, sin):
        return 2 * q, k

    reloaded = types.FunctionType(rotary.__code__, globals())
    assert prove_rotary(reloaded) and is_rotary(reloaded) == ""
    reloaded.__code__ = other.__code__
    assert is_rotary(reloaded) is None


class Heads(nn.Module):
    def __init__(self, norm=modeling_qwen3.Qwen3RMSNorm):
        super().__init__()
        self.qp, self.kp, self.vp = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = norm(16), norm(16)
        self.act = nn.ReLU(inplace=True)

    def mix(self, q, k, v):
        angles = torch.arange(q.shape[2])[:, None] * torch.linspace(0.1, 1.0, 8).repeat(2)
        q, k = rotary(q, k, angles.cos()[None], angles.sin()[None])
        return (q @ k.mT).softmax(-1) @ v

    def forward(self, x):
        q = self.q_norm(self.qp(x).view(2, 5, 2, 16)).transpose(1, 2)
        k = self.k_norm(self.kp(x).view(2, 5, 2, 16)).transpose(1, 2)
        v = self.vp(x).view(2, 5, 2, 16).transpose(1, 2)
        return self.mix(q, k, v)


class WritesToTheRows(Heads):
    def forward(self, x):
        rows = self.qp(x)
        q = self.q_norm(rows.view(2, 5, 2, 16)).transpose(1, 2)
        k = self.k_norm(self.act(rows).view(2, 5, 2, 16)).transpose(1, 2)
        return self.mix(q, k, k)


class LooksAtItsVariables(Heads):
    def forward(self, x):
        q = self.q_norm(self.qp(x).view(2, 5, 2, 16)).transpose(1, 2)
        k = self.k_norm(self.kp(x).view(2, 5, 2, 16) + locals()["q"].mean()).transpose(1, 2)
        return self.mix(q, k, k)


@pytest.mark.parametrize("cls, count", [(Heads, 1), (WritesToTheRows, 0), (LooksAtItsVariables, 0)])
def test_attentions_in_other_words(cls, count):
    torch.manual_seed(0)
    model, x, found = cls(), torch.randn(2, 5, 32), []
    for fuse_residual in (False, True):
        patch_model(model, fuse_residual=fuse_residual)
        with torch.no_grad(), use_backend("triton"), count_launches() as launches:
            found.append(model(x))
        assert launches["qk_norm_forward"] == count * fuse_residual
    assert torch.equal(*found)


class NormalisesWhatItHasRotated(Heads):
    """As `NanoChatAttention`."""

    def forward(self, x):
        q = self.qp(x).view(2, 5, 2, 16).transpose(1, 2)
        k = self.kp(x).view(2, 5, 2, 16).transpose(1, 2)
        q, k = rotary(q, k, *self.tables(5))
        q = self.q_norm(q)
        k = self.k_norm(k)
        return (q @ k.mT).softmax(-1) @ k

    def tables(self, length):
        angles = torch.arange(length)[:, None] * torch.linspace(0.1, 1.0, 8).repeat(2)
        return angles.cos()[None], angles.sin()[None]


class RotatesOnACondition(NormalisesWhatItHasRotated):
    """As `Exaone4Attention`."""

    sliding = True

    def forward(self, x):
        cos, sin = angles_of(5)
        q = self.qp(x).view(2, 5, 2, 16).transpose(1, 2)
        k = self.kp(x).view(2, 5, 2, 16).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        if self.sliding:
            q, k = rotary(q, k, cos, sin)
        return (q @ k.mT).softmax(-1) @ k


class NormalisesOnACondition(NormalisesWhatItHasRotated):
    """As `Glm4MoeAttention`."""

    normalises = True

    def forward(self, x):
        cos, sin = angles_of(5)
        q = self.qp(x).view(2, 5, 2, 16)
        k = self.kp(x).view(2, 5, 2, 16)
        if self.normalises:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        q, k = rotary(q, k, cos, sin)
        return (q @ k.mT).softmax(-1) @ k


class NormalisesNothing(NormalisesOnACondition):
    normalises = False
    forward = NormalisesOnACondition.forward


class NormalisesOnTwoConditions(NormalisesOnACondition):
    second = False

    def forward(self, x):
        q = self.qp(x).view(2, 5, 2, 16).transpose(1, 2)
        k = self.kp(x).view(2, 5, 2, 16).transpose(1, 2)
        if self.normalises:
            q = self.q_norm(q)
        if self.second:
            k = self.k_norm(k)
        return (q @ k.mT).softmax(-1) @ k


class NormalisesOneOnACondition(NormalisesOnACondition):
    def forward(self, x):
        q = self.qp(x).view(2, 5, 2, 16).transpose(1, 2)
        k = self.kp(x).view(2, 5, 2, 16).transpose(1, 2)
        q = self.q_norm(q)
        if q.square().mean() > 1e9:
            k = self.k_norm(k)
        return (q @ k.mT).softmax(-1) @ k


class MakesHeadsOnACondition(NormalisesOnACondition):
    normalises = sliding = False

    def forward(self, x):
        cos, sin = angles_of(5)
        if self.normalises:
            q = self.q_norm(self.qp(x).view(2, 5, 2, 16)).transpose(1, 2)
            k = self.k_norm(self.kp(x).view(2, 5, 2, 16)).transpose(1, 2)
        if self.sliding:
            q, k = rotary(q, k, cos, sin)
        return self.vp(x) if not self.normalises else q @ k.mT


class DoesNotRotate(RotatesOnACondition):
    sliding = False
    forward = RotatesOnACondition.forward


def angles_of(length):
    return NormalisesWhatItHasRotated.tables(None, length)


def turn(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return x * cos + rotate_half(x) * sin


def turn_back(x, cos, sin, unsqueeze_dim=1):
    return turn(x, cos, -sin, unsqueeze_dim)


class TurnsEach(Heads):
    """As `Gemma4TextAttention`."""

    shares = False

    def forward(self, x):
        cos, sin = NormalisesWhatItHasRotated.tables(None, 5)
        q = self.qp(x).view(2, 5, 2, 16)
        q = self.q_norm(q)
        q = turn(q, cos, sin, unsqueeze_dim=2)
        q = q.transpose(1, 2)
        if self.shares:
            k, v = q, q
        else:
            k = self.kp(x).view(2, 5, 2, 16)
            v = k
            k = self.k_norm(k)
            k = turn(k, cos, sin, unsqueeze_dim=2)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return (q @ k.mT).softmax(-1) @ v


class TurnsByTheFirstDimension(Heads):
    def forward(self, x):
        cos, sin = NormalisesWhatItHasRotated.tables(None, 5)
        q = self.qp(x).view(2, 5, 2, 16).transpose(1, 2)
        q = self.q_norm(q)
        q = turn(q, cos, sin, unsqueeze_dim=1)
        return q


class TurnsTheOtherWay(Heads):
    def forward(self, x):
        cos, sin = NormalisesWhatItHasRotated.tables(None, 5)
        q = self.q_norm(self.qp(x).view(2, 5, 2, 16))
        q = turn_back(q, cos, sin, unsqueeze_dim=2)
        return q


class DoesMoreInBetween(Heads):
    def forward(self, x):
        cos, sin = NormalisesWhatItHasRotated.tables(None, 5)
        q = self.q_norm(self.qp(x).view(2, 5, 2, 16))
        q = q * 2
        q = turn(q, cos, sin, unsqueeze_dim=2)
        return q


BOTH, ALONE = "q_norm, k_norm, rotary in one launch", "q_norm, k_norm in one launch"
ORDERS = [
    (NormalisesWhatItHasRotated, 1, ALONE),
    (RotatesOnACondition, 1, BOTH),
    (DoesNotRotate, 1, BOTH),
    (NormalisesOnACondition, 1, BOTH),
    (NormalisesNothing, 0, BOTH),
    (NormalisesOnTwoConditions, 0, None),
    (NormalisesOneOnACondition, 0, None),
    (MakesHeadsOnACondition, 0, BOTH),
    (TurnsEach, 2, "q_norm with turn, k_norm with turn, each in one launch"),
    (TurnsByTheFirstDimension, 1, "q_norm with turn, each in one launch"),
    (TurnsTheOtherWay, 0, None),
    (DoesMoreInBetween, 0, None),
]


def trained(model, x, fuse_residual):
    """The output, all gradients, and how many launches were of heads."""
    patch_model(model, fuse_residual=fuse_residual)
    model.zero_grad()
    with use_backend("triton"), count_launches() as launches:
        y = model(x)
        y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], launches["qk_norm_forward"]


@pytest.mark.parametrize("cls, count, words", ORDERS)
def test_norms_in_another_order(cls, count, words):
    model, x = cls(), torch.randn(2, 5, 32)
    apart, none = trained(model, x, False)
    together, launches = trained(model, x, True)
    assert (none, launches) == (0, count) and words in (None, *fused(patch_model(model)))
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(together[0], apart[0])


def test_a_norm_that_turns_what_it_returns_is_called_once_where_somebody_watches_it():
    model, x, seen = TurnsEach(), torch.randn(2, 5, 32), []
    patch_model(model)
    model.q_norm.register_forward_hook(lambda norm, args, y: seen.append(args[0].shape) or 2 * y)
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        found = model(x)
        assert seen == [(2, 5, 2, 16)] and launches["qk_norm_forward"] == 1
        patch_model(model, fuse_residual=False)
        assert torch.equal(model(x), found)


def test_a_turn_that_is_exchanged_after_the_patch_is_the_one_that_runs(monkeypatch):
    model, x = TurnsEach(), torch.randn(2, 5, 32)
    patch_model(model)
    monkeypatch.setitem(globals(), "turn", lambda x, cos, sin, unsqueeze_dim: x * cos.unsqueeze(unsqueeze_dim))
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        found = model(x)
        assert not launches["qk_norm_forward"]
        patch_model(model, fuse_residual=False)
        assert torch.equal(model(x), found)


def test_what_turns_each_is_reported_and_observed():
    model, x = nn.Sequential(TurnsEach()), torch.randn(2, 5, 32)
    assert fused(patch_model(model)) == ["q_norm with turn, k_norm with turn, each in one launch"]
    seen = []
    with observing(lambda *what: seen.append(what)), torch.no_grad(), use_backend("triton"):
        model(x)
    assert [which[0] for _, _, which, _ in seen] == [("q_norm", "q_norm"), ("k_norm", "k_norm")]


def test_norms_whose_output_is_contiguous_keep_q_and_k_in_their_order_in_memory():
    model, x, strides = Heads(norm=nn.RMSNorm), torch.randn(2, 5, 32), []
    model.mix = lambda q, k, v: strides.append((q.stride(), k.stride())) or v
    for fuse_residual in (False, True):
        patch_model(model, fuse_residual=fuse_residual)
        with torch.no_grad(), use_backend("triton"):
            model(x)
    assert strides[0] == strides[1]


# Attentions of one packed projection, of which q and k are views, that do something between the norms and the rotation.


def rescale(rows):
    rows.mul_(2.0).add_(1.0)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.q_norm, self.k_norm = nn.Linear(32, 96), *(modeling_qwen3.Qwen3RMSNorm(16) for _ in range(2))
        self.act, self.out = nn.ReLU(inplace=True), nn.Linear(96, 32)

    def grow(self, rows):
        return rows.mul_(3.0)

    def heads_of(self, x):
        return self.qkv(x).view(*x.shape[:2], 6, 16)

    def forward(self, x, cos, sin):
        packed = self.heads_of(x)
        q, k, v = torch.split(packed, 2, dim=2)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


class OnlyLooks(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(x.shape[0], x.shape[1], 6, 16)
        q, k, v = torch.split(packed, 2, dim=2)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        v = torch.relu(v).transpose(1, 2)
        gate = self.qkv(x) if len(packed) > 1 else None
        q, k = rotary(q, k, cos.to(x.dtype), sin)
        return self.out(torch.cat((q, k, v), 1).transpose(1, 2).flatten(2)) + gate.sum()


class WritesByAFunction(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(*x.shape[:2], 6, 16)
        q, k, v = packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        rescale(packed)
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


class WritesByAMethod(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(*x.shape[:2], 6, 16)
        q, k, v = packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        v = self.grow(packed)[:, :, 4:]
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


class WritesByAChild(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(*x.shape[:2], 6, 16)
        q, k, v = torch.split(packed, 2, dim=2)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        v = self.act(packed)[:, :, 4:]
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


class WritesByAnArgument(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(*x.shape[:2], 6, 16)
        q, k, v = packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        nn.functional.relu(packed, True)
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


class WritesToAWeight(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(*x.shape[:2], 6, 16)
        q, k, v = packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        rescale(self.q_norm.weight.data)
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


class WritesBeforeK(Packed):
    def forward(self, x, cos, sin):
        packed = self.qkv(x).view(*x.shape[:2], 6, 16)
        q, k, v = packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]
        q = self.q_norm(q).transpose(1, 2)
        rescale(packed)
        k = self.k_norm(k).transpose(1, 2)
        q, k = rotary(q, k, cos, sin)
        return self.out(torch.cat((q, k, v.transpose(1, 2)), 1).transpose(1, 2).flatten(2))


ALONE, ALL = "q_norm, k_norm in one launch", "q_norm, k_norm, rotary in one launch"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "cls, said",
    [
        (Packed, ALL),
        (OnlyLooks, ALL),
        (WritesByAFunction, ALONE),
        (WritesByAMethod, ALONE),
        (WritesByAChild, ALONE),
        (WritesByAnArgument, ALONE),
        (WritesToAWeight, ALONE),
        (WritesBeforeK, "its forward calls rescale after q is normalised, which may write to it"),
    ],
)
def test_what_a_forward_calls_between_the_norms_and_the_rotation(cls, said, mode):
    torch.manual_seed(0)
    model, x, angles, found = cls(), torch.randn(2, 5, 32), torch.rand(1, 5, 16), []
    for fuse_residual in (False, True):
        report = patch_model(model, fuse_residual=fuse_residual)
        nn.init.ones_(model.q_norm.weight)
        with mode(), use_backend("triton"):
            found.append(model(x, angles.cos(), angles.sin()))
    assert [layer.fused or layer.reason for layer in report.layers] == [said]
    assert torch.equal(*found)


class WritesUnseen(nn.Linear):
    def forward(self, x):
        self.__dict__["rows"].mul_(2.0)
        return super().forward(x)


class Keeps(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.__dict__["writer"].__dict__["rows"] = y
        return y


class HasAWriter(Packed):
    def forward(self, x, cos, sin):
        q, k, v = torch.split(self.qkv(x).view(2, 5, 6, 16), 2, dim=2)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        v = self.out(x).view(2, 5, 2, 16)
        q, k = rotary(q, k, cos, sin)
        return torch.cat((q, k, v.transpose(1, 2)), 1)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_write_that_no_source_shows_is_an_error_and_no_wrong_result(backend):
    model, x, angles = HasAWriter(), torch.randn(2, 5, 32), torch.rand(1, 5, 16)
    model.qkv, model.out = Keeps(32, 96), WritesUnseen(32, 32)
    model.qkv.__dict__["writer"] = model.out
    assert [layer.fused for layer in patch_model(model).layers] == [ALL]
    with torch.no_grad(), use_backend(backend), pytest.raises(RuntimeError, match="fuse_residual=False"):
        model(x, angles.cos(), angles.sin())


class Gained(modeling_qwen3.Qwen3RMSNorm):
    def __call__(self, x):
        return super().__call__(x) * 3.0


def test_a_norm_that_gets_a_call_of_its_own_is_called():
    torch.manual_seed(0)
    model, x, angles = Packed(), torch.randn(2, 5, 32), torch.rand(1, 5, 16)
    model.k_norm.__class__ = Gained
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        expected = model(x, angles.cos(), angles.sin())
        patch.delattr(Gained, "__call__")
        (layer,) = patch_model(model).layers
        patch.undo()
        with use_backend("triton"), count_launches() as launches:
            torch.testing.assert_close(model(x, angles.cos(), angles.sin()), expected)
    assert launches["qk_norm_forward"] == 0
    assert layer.fused == ALL
