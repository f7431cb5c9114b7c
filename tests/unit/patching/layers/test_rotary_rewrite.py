"""Where a forward rotates q and k without norms: which calls are one launch."""

import pytest
import torch
from fusion_models import fused
from torch import nn

from hf_rmsnorm import count_launches, patch_model, use_backend
from tests.unit.patching.layers.test_qk import (
    COS,
    SIN,
    Attention,
    X,
    rotary,
    turn,
    turn_back,
)


def by_place(q, k, cos, sin, unsqueeze_dim=1):
    return turn(q, cos, sin, unsqueeze_dim), turn(k, cos, sin, unsqueeze_dim)


def other(q, k, cos, sin, unsqueeze_dim=1):
    return turn_back(q, cos, sin, unsqueeze_dim), turn(k, cos, sin, unsqueeze_dim)


def vision(q, k, cos, sin):
    return turn(q, cos, sin, -2), turn(k, cos, sin, -2)


def with_a_closure():
    sign = 1.0

    def rotates(q, k, cos, sin):
        return rotary(q, k, sign * cos, sin)

    return rotates


inner = with_a_closure()
calls = []
stepping = rotary


def counting(q, k, cos, sin):
    calls.append(q)
    return rotary(q, k, cos, sin)


def in_place(q, k, cos, sin):
    torch.mul(cos, 1, out=cos)
    return rotary(q, k, cos, sin)


class ByName(Attention):
    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x)
        q, k = by_place(q, k, COS, SIN, unsqueeze_dim=2)
        return q @ k.mT


class ByPosition(Attention):
    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x)
        q, k = by_place(q, k, COS, SIN, 2)
        return q @ k.mT


class OnACondition(Attention):
    rotates = True

    def forward(self, x):
        q = self.q_proj(x).transpose(1, 2)
        k = self.k_proj(x).transpose(1, 2)
        if self.rotates:
            q, k = rotary(q, k, COS, SIN)
        return q @ k.mT


class Twice(Attention):
    def forward(self, x):
        q = self.q_proj(x).transpose(1, 2)
        k = self.k_proj(x).transpose(1, 2)
        q, k = rotary(q, k, COS, SIN)
        q, k = by_place(q, k, COS, SIN)
        return q @ k.mT


class TurnsOneBack(Attention):
    def forward(self, x):
        q = self.q_proj(x).transpose(1, 2)
        k = self.k_proj(x).transpose(1, 2)
        q, k = other(q, k, COS, SIN)
        return q @ k.mT


class ByAVariable(Attention):
    def forward(self, x):
        place = 2
        q = self.q_proj(x)
        k = self.k_proj(x)
        q, k = by_place(q, k, COS, SIN, unsqueeze_dim=place)
        return q @ k.mT


class OfVision(Attention):
    def forward(self, x):
        q = self.q_proj(x)
        k = self.k_proj(x)
        q, k = vision(q, k, COS, SIN)
        return q @ k.mT


class BySteps(Attention):
    """Rotates by a function that a test puts here."""

    def forward(self, x):
        q = self.q_proj(x).transpose(1, 2)
        k = self.k_proj(x).transpose(1, 2)
        q, k = stepping(q, k, COS, SIN)
        return q @ k.mT


LAUNCHED = {ByName: 1, OnACondition: 1, Twice: 2}
APART = [ByPosition, TurnsOneBack, ByAVariable, OfVision]


def run(model):
    """The output with all gradients, and how many launches rotated alone."""
    model.zero_grad()
    with use_backend("triton"), count_launches() as launches:
        y = model(X)
        y.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients], launches["rotary_forward"]


@pytest.mark.parametrize("cls", [*LAUNCHED, *APART])
def test_a_call_that_is_proven_is_one_launch(cls):
    model = nn.Sequential(cls())
    patch_model(model, fuse_residual=False)
    expected, none = run(model)
    report = patch_model(model, fuse_residual=True)
    results, count = run(model)
    assert (none, count) == (0, LAUNCHED.get(cls, 0))
    assert all(map(torch.equal, results, expected))
    rotating = [words for words in fused(report) if "launch" in words]
    assert len(rotating) == (cls in LAUNCHED)


@pytest.mark.parametrize("function", [counting, inner, in_place])
def test_a_function_of_more_than_arithmetic_is_not_even_run(function, monkeypatch):
    monkeypatch.setitem(globals(), "stepping", function)
    calls.clear()
    report = patch_model(nn.Sequential(BySteps()))
    assert not calls
    assert not [words for words in fused(report) if "launch" in words]


def test_the_other_branch_of_a_forward():
    model = nn.Sequential(OnACondition())
    model[0].rotates = False
    patch_model(model)
    _, count = run(model)
    assert count == 0
