"""Where an attention normalises and rotates q and k: which sources are understood, and which functions rotate."""

import types

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import count_launches, patch_model, use_backend
from hf_rmsnorm.fused.attention import is_rotary
from hf_rmsnorm.fused.source import CannotRewrite
from hf_rmsnorm.patching.layers.qk import QKFusion, find_qk, prove_rotary


def test_what_is_a_rotary_embedding_is_found_by_running_it():
    assert prove_rotary(modeling_qwen3.apply_rotary_pos_emb)
    assert not prove_rotary(lambda q, k, cos, sin: (q, k))
    assert not prove_rotary(lambda q, k: (q, k))
    assert not prove_rotary(None)

    def interleaved(q, k, cos, sin):
        def rotate(x):
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

        return tuple(x * cos[:, None] + rotate(x) * sin[:, None] for x in (q, k))

    assert not prove_rotary(interleaved)


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


def test_a_function_that_gives_the_dtype_of_q_back_is_proven_for_tables_of_that_dtype_alone():
    assert prove_rotary(rotary_back_to_the_dtype_of_q) and is_rotary(rotary_back_to_the_dtype_of_q)
    assert not is_rotary(rotary_back_to_the_dtype_of_q, dtypes_differ=True)
    assert prove_rotary(rotary) and is_rotary(rotary) and is_rotary(rotary, dtypes_differ=True)


def test_code_that_autoreload_exchanges_is_seen():
    def other(q, k, cos, sin):
        return 2 * q, k

    reloaded = types.FunctionType(rotary.__code__, globals())
    assert prove_rotary(reloaded) and is_rotary(reloaded)
    reloaded.__code__ = other.__code__
    assert not is_rotary(reloaded)


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


def test_norms_whose_output_is_contiguous_keep_q_and_k_in_their_order_in_memory():
    model, x, strides = Heads(norm=nn.RMSNorm), torch.randn(2, 5, 32), []
    model.mix = lambda q, k, v: strides.append((q.stride(), k.stride())) or v
    for fuse_residual in (False, True):
        patch_model(model, fuse_residual=fuse_residual)
        with torch.no_grad(), use_backend("triton"):
            model(x)
    assert strides[0] == strides[1]
