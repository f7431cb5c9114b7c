"""The writes in place to what a norm reads or gives, as the source of a forward shows
them.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_rmsnorm.patching.layers.writes import written_in


class Adds(nn.Module):
    def forward(self, h):
        h += self.mlp(self.norm(h))
        return h


class ByMethod(nn.Module):
    def forward(self, h):
        y = self.norm(hidden=h)
        h.mul_(2)
        return y


class ByFunction(nn.Module):
    def forward(self, h):
        y = self.norm(h)
        torch.add(h, 1, out=h)
        return y


class InPlaceActivation(nn.Module):
    def forward(self, h):
        y = self.norm(h)
        return y + F.relu(h, inplace=True)


class ToAPart(nn.Module):
    def forward(self, h, mask):
        y = self.norm(h)
        h[mask] = 0
        return y


class OfAPart(nn.Module):
    def forward(self, h):
        first, second = h.chunk(2, dim=-1)
        y = self.norm(first)
        second.add_(1)  # chunks are one tensor here: it is not seen that they differ
        return y


class UnderAnotherName(nn.Module):
    def forward(self, h):
        residual = h
        h = self.norm(h)
        residual += h
        return residual


class ThroughAView(nn.Module):
    def forward(self, h):
        rows = h.view(-1, 8)
        y = self.norm(rows)
        h += 1
        return y


class ThroughData(nn.Module):
    def forward(self, h):
        y = self.norm(h)
        h.data.mul_(2)
        return y


class ToData(nn.Module):
    def forward(self, h):
        y = self.norm(h)
        h.data = 2 * h
        return y


class OnOneBranch(nn.Module):
    def forward(self, h, scale=None):
        y = self.norm(h)
        if scale is not None:
            h *= scale
        return h + y


class BehindABranch(nn.Module):
    def forward(self, h, first):
        y = 0
        if first:
            y = self.norm(h)
        h += 1
        return y


class InALoop(nn.Module):
    def forward(self, h):
        for _ in range(2):
            h += 1
            y = self.norm(h)
        return y


class Argument(nn.Module):
    def forward(self, h):
        return h.mul_(self.norm(h))


SHOWN = (
    Adds,
    ByMethod,
    ByFunction,
    InPlaceActivation,
    ToAPart,
    OfAPart,
    UnderAnotherName,
    ThroughAView,
    ThroughData,
    ToData,
    OnOneBranch,
    BehindABranch,
    InALoop,
    Argument,
)


@pytest.mark.parametrize("cls", SHOWN)
def test_a_write_to_an_input_is_found(cls):
    assert "norm" in written_in(cls).inputs


class Before(nn.Module):
    def forward(self, h):
        h += 1
        return self.norm(h)


class BeforeInOneExpression(nn.Module):
    def forward(self, h):
        return self.norm(h.mul_(2))


class ToTheSum(nn.Module):
    def forward(self, h):
        residual = h
        h = self.norm(h)
        h = residual + h
        h *= self.scale
        return h


class ToACopy(nn.Module):
    def forward(self, h):
        y = self.norm(h)
        h = h.clone()
        h += y
        return h


class NotTheFirst(nn.Module):
    def forward(self, h, mask):
        a, b = h, h + 1
        y = self.norm(b)
        a[mask] = 0
        return y


class OnTheOtherBranch(nn.Module):
    def forward(self, h, first):
        if first:
            h = self.norm(h)
        else:
            h += 1
        return h


class InAFunction(nn.Module):
    def forward(self, h):
        y = self.norm(h)

        def change(h):
            h += 1

        return y


NOT_SHOWN = (
    Before,
    BeforeInOneExpression,
    ToTheSum,
    ToACopy,
    NotTheFirst,
    OnTheOtherBranch,
    InAFunction,
)


@pytest.mark.parametrize("cls", NOT_SHOWN)
def test_other_writes_are_not_taken_for_one(cls):
    assert "norm" not in written_in(cls).inputs


def test_a_write_to_an_output_is_told_from_one_to_an_input():
    class Output(nn.Module):
        def forward(self, h):
            y = self.norm(h).transpose(1, 2)
            y.clamp_(-1, 1)
            return y

    assert written_in(Output) == (set(), {"norm"})


def test_a_forward_without_a_source_shows_nothing():
    made = {}
    exec("def forward(self, h):\n    h += self.norm(h)\n    return h", made)
    cls = type("Made", (nn.Module,), {"forward": made["forward"]})
    assert written_in(cls) == (set(), set())
    assert written_in(nn.Module) == (set(), set())
