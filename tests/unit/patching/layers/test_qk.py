"""Where an attention normalises and rotates q and k: which sources are understood, and
which functions rotate.
"""

import pytest
import torch
from fusion_models import fused
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from hf_rmsnorm import count_launches, patch_model, use_backend

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(5).view(1, 5, 1)
ANGLES = POSITIONS * torch.linspace(0.1, 1.0, 8).repeat(2)
COS = ANGLES.cos()
SIN = ANGLES.sin()


def rotate_half(x):
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def turn(x, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return x * cos + rotate_half(x) * sin


def turn_back(x, cos, sin, unsqueeze_dim=1):
    return turn(x, cos, -sin, unsqueeze_dim)


def rotary(q, k, cos, sin):
    return turn(q, cos, sin), turn(k, cos, sin)


def projection(heads):
    linear = nn.Linear(32, 16 * heads, bias=False)
    return nn.Sequential(linear, nn.Unflatten(-1, (heads, 16)))


def attend(q, k, v):
    scores = q @ k.mT
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, norm=modeling_qwen3.Qwen3RMSNorm):
        super().__init__()
        self.q_proj = projection(2)
        self.k_proj = projection(2)
        self.v_proj = projection(2)
        self.qkv = projection(6)
        self.q_norm = norm(16)
        self.k_norm = norm(16)
        self.relu = nn.ReLU(inplace=True)
        self.normalises = True
        self.shares = False

    def forward(self, x):
        q = self.q_norm(self.q_proj(x)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).transpose(1, 2)
        v = self.v_proj(x).transpose(1, 2)
        q, k = rotary(q, k, COS, SIN)
        return attend(q, k, v)


class Gemma4(Attention):
    """As `Gemma4TextAttention`."""

    def forward(self, x):
        q = self.q_proj(x)
        q = self.q_norm(q)
        q = turn(q, COS, SIN, unsqueeze_dim=2)
        q = q.transpose(1, 2)
        if self.shares:
            k, v = q, q
        else:
            k = self.k_proj(x)
            v = k
            k = self.k_norm(k)
            k = turn(k, COS, SIN, unsqueeze_dim=2)
            k = k.transpose(1, 2)
            v = v.transpose(1, 2)
        return attend(q, k, v)


class Packed(Attention):
    def forward(self, x):
        packed = self.qkv(x)
        q, k, v = torch.split(packed, 2, dim=2)
        q = self.q_norm(q)
        q = q.transpose(1, 2)
        k = self.k_norm(k)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        q, k = rotary(q, k, COS, SIN)
        return attend(q, k, v)


class TurnsTheOtherWay(Attention):
    def forward(self, x):
        q = self.q_norm(self.q_proj(x))
        q = turn_back(q, COS, SIN, unsqueeze_dim=2)
        return q


class UsesQ(Attention):
    def forward(self, x):
        q = self.q_norm(self.q_proj(x))
        q = q.transpose(1, 2)
        k = self.k_proj(x) + q.mean()
        k = self.k_norm(k)
        k = k.transpose(1, 2)
        q, k = rotary(q, k, COS, SIN)
        return q @ k.mT


class NormalisesOneOnACondition(Attention):
    def forward(self, x):
        q = self.q_norm(self.q_proj(x))
        q = q.transpose(1, 2)
        k = self.k_proj(x)
        k = k.transpose(1, 2)
        if self.normalises:
            k = self.k_norm(k)
        q, k = rotary(q, k, COS, SIN)
        return q @ k.mT


# What writes to the rows that the norms read, before the rotation.


class WritesByAChild(Attention):
    def forward(self, x):
        packed = self.qkv(x)
        q = packed[:, :, :2]
        k = packed[:, :, 2:4]
        q = self.q_norm(q)
        q = q.transpose(1, 2)
        k = self.k_norm(k)
        k = k.transpose(1, 2)
        gate = self.relu(packed)
        q, k = rotary(q, k, COS, SIN)
        return q @ k.mT + gate.mean()


class WritesInPlace(Attention):
    def forward(self, x):
        packed = self.qkv(x)
        q, k, v = torch.split(packed, 2, dim=2)
        q = self.q_norm(q)
        q = q.transpose(1, 2)
        k = self.k_norm(k)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2).mul_(2.0)
        q, k = rotary(q, k, COS, SIN)
        return (q @ k.mT) @ v


WRITING = WritesByAChild, WritesInPlace
BOTH = "q_norm, k_norm, rotary in one launch"
EACH = "q_norm with turn, k_norm with turn, each in one launch"
FUSED = [
    (Attention, BOTH, 1),
    (Packed, BOTH, 1),
    (NormalisesOneOnACondition, BOTH, 1),
    (Gemma4, EACH, 2),
]
APART = [
    TurnsTheOtherWay,
    UsesQ,
    WritesByAChild,
    WritesInPlace,
]


def run(model, fuse_residual, grad=True):
    """The output with all gradients, and how many launches were of heads."""
    patch_model(model, fuse_residual=fuse_residual)
    nn.init.ones_(model.q_norm.weight)
    model.zero_grad()
    with use_backend("triton"), count_launches() as launches:
        with torch.set_grad_enabled(grad):
            y = model(X)
        if grad:
            y.square().sum().backward()
    results = [y.detach()]
    for parameter in model.parameters():
        if parameter.grad is not None:
            results.append(parameter.grad)
    return results, launches["qk_norm_forward"]


def check(model, launches, grad=True):
    """The same bits as with the norms alone, and gradients within the rounding of
    float32.
    """
    apart, none = run(model, False, grad)
    together, count = run(model, True, grad)
    assert none == 0
    assert count == launches
    assert torch.equal(together[0], apart[0])
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls, words, launches", FUSED)
def test_norms_and_rotation_are_one_launch(cls, words, launches):
    model = cls()
    check(model, launches)
    assert fused(patch_model(model)) == [words]


@pytest.mark.parametrize("cls", APART)
def test_whatever_stands_between_leaves_them_apart(cls):
    model = cls()
    check(model, 0, grad=cls not in WRITING)
    for words in fused(patch_model(model)):
        assert words not in (BOTH, EACH)  # the rotation alone may be one launch


def test_a_norm_that_the_condition_skips():
    model = NormalisesOneOnACondition()
    model.normalises = False
    check(model, 0)


def test_keys_that_another_layer_has_made():
    model = Gemma4()
    model.shares = True
    check(model, 1)


@pytest.mark.parametrize("cls, launches", [(Attention, 0), (Gemma4, 1)])
def test_a_norm_with_a_hook_is_called_where_it_stands(cls, launches):
    model = cls()
    seen = []

    def hook(norm, args, y):
        (x,) = args
        seen.append(x.shape)
        return 2 * y

    patch_model(model)
    model.q_norm.register_forward_hook(hook)
    check(model, launches, grad=False)
    assert set(seen) == {(2, 5, 2, 16)}


class Gained(modeling_qwen3.Qwen3RMSNorm):
    def __call__(self, x):
        return super().__call__(x) * 3.0


def test_a_norm_with_a_call_of_its_own_is_called():
    model = Attention()
    model.k_norm.__class__ = Gained
    check(model, 0)


def test_norms_whose_output_is_contiguous_are_computed_apart():
    """Behind a transpose it would lie in another order in memory."""
    check(Attention(norm=nn.RMSNorm), 0)
