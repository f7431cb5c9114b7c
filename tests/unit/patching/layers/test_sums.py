"""Which sums are computed with the norm that reads them next, and that all others are
left to the model.
"""

import pytest
import torch
from fusion_models import Block, fused, row
from torch import nn

from hf_rmsnorm import patch_model, use_backend

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))


class Plain(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = self.n2(h)
        return h + self.b(y)


class InTheCall(Block):
    """As `BertSelfOutput` writes it."""

    def forward(self, x):
        return self.n2(self.a(self.n1(x)) + x)


class SumInASum(Block):
    def forward(self, x):
        return self.n2(self.a(self.n1(x + 1)) + (x + self.b(x)))


class NormInTheIf(Block):
    """As a decoder with cross-attention, which runs here."""

    cross = True

    def forward(self, x):
        attended = self.a(self.n1(x))
        h = x + attended
        if self.cross:
            residual = h
            h = self.n2(h)
            h = residual + self.b(h)
        return h * 2


class NormBehindTheIf(NormInTheIf):
    """As GPT-2's layer, whose cross-attention is not there."""

    cross = False

    def forward(self, x):
        attended = self.a(self.n1(x))
        h = x + attended
        if self.cross:
            residual = h
            h = residual + self.b(h)
        residual = h
        h = self.n2(h)
        return residual + self.b(h)


class Sets(Block):
    """A layer whose mixture of experts sets and asks."""

    aux = None
    losses = ()

    def moe(self, x):
        y = self.a(x)
        self.aux = y.square().mean()
        return y

    def set_aux(self):
        self.aux = None
        return True


class AsksBehindTheSum(Sets):
    """The sum calls nothing, so its place does not matter."""

    def forward(self, x):
        y = self.moe(x)
        h = x + y
        if self.aux is None or self.training:
            self.aux = y
        return h + self.b(self.n2(h))


class ComputesBetween(Block):
    """As HunyuanVideo computes another stream."""

    def forward(self, x):
        h = x + self.a(self.n1(x))
        half = x.flatten(1).view(x.shape) * 0.5
        return half + self.b(self.n2(h))


class AsksItsShape(Block):
    """As Llama 4, whose experts return rows of tokens."""

    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = self.b(self.n2(h)).flatten(0, 1)
        return h + y.view(h.shape)


class ExchangesTheNorm(Block):
    """The norm is looked up before the call that exchanges it."""

    def exchange(self, x):
        self.n1, self.n2 = self.n2, self.n1
        return self.a(x)

    def forward(self, x):
        y = self.n2(self.exchange(x) + x)
        self.n1, self.n2 = self.n2, self.n1
        return y


FUSED = {  # class -> its norms that are computed with a sum
    Plain: "+ n2",
    InTheCall: "+ n2",
    SumInASum: "+ n1, + n2",
    NormInTheIf: "+ n2",
    NormBehindTheIf: "+ n2",
    AsksBehindTheSum: "+ n2",
    ComputesBetween: "+ n2",
    AsksItsShape: "+ n2",
    ExchangesTheNorm: "+ n2",
}


class InAConditionalExpression(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return self.n2(h) if self.training else h


class InALambda(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        later = lambda: self.n2(h)  # noqa: E731
        return h + later()


class WrittenBetween(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        h += 1
        return h + self.b(self.n2(h))


class WrittenInTheStatement(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = h.mul_(2) + self.n2(h)
        return self.b(y)


class CapturedByAFunction(Block):
    def forward(self, x):
        def show():
            return h

        h = x + self.a(self.n1(x))
        return self.n2(h) + show()


class WithMoreArguments(Block):
    class Norm(nn.RMSNorm):
        def forward(self, x, factor=1.0):
            return super().forward(x) * factor

    def __init__(self):
        super().__init__()
        self.n2 = self.Norm(32, eps=1e-6)

    def forward(self, x):
        h = x + self.a(self.n1(x))
        return self.b(self.n2(h, 2.0))


class InATry(Block):
    def forward(self, x):
        try:
            h = x + self.a(self.n1(x))
            y = self.n2(h)
        except ValueError:
            y = h
        return h + self.b(y)


class CalledBetween(Block):
    def clamp(self):
        self.n2.eps = 1.0
        return 1.0

    def forward(self, x):
        h = x + self.a(x)
        scale = self.clamp()
        return self.n2(h) + h * scale


class AsksWhatTheSumSets(Sets):
    def forward(self, x):
        h = x + self.moe(x)
        if self.aux is not None:
            h = h.clamp(-0.5, 0.5)
            self.aux = None
        return h * 2 + self.n2(h)


class CallsInItsTest(Sets):
    def forward(self, x):
        y = self.moe(x)
        h = x + y
        if self.set_aux():
            y.mul_(2)
        return y + self.n2(h)


class AsksTheSum(Block):
    def forward(self, x):
        attended = self.a(x)
        h = x + attended
        if h is None:
            h = x
        return h + self.n2(h)


class HasAnElse(Block):
    def forward(self, x):
        attended = self.a(x)
        h = x + attended
        if self.training:  # noqa: SIM108 - an else is what is refused
            h = h * 2
        else:
            h = h * 3
        return h + self.n2(h)


class SelectsBetween(Block):
    """By a child's method of a tensor's name."""

    class Counts(nn.Linear):
        count = 0

        def where(self):
            self.count += 1
            return self.count

    def __init__(self):
        super().__init__()
        self.b = self.Counts(32, 32)

    def forward(self, x):
        h = x + self.a(self.n1(x))
        count = self.b.where()
        return self.n2(h) + h * (count > 0)


class WritesAPartBetween(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        parts = [x, h]
        parts[0] = h.mul_(2)
        return parts[0] + self.n2(h)


class SetsBetween(Block):
    def forward(self, x):
        self.n2.eps = 1e-6
        h = x + self.a(self.n1(x))
        self.n2.eps = 1.0
        return h + self.b(self.n2(h))


class StoresBetween(Block):
    def forward(self, x):
        self.n2.weight.data[:] = 1.0
        h = x + self.a(self.n1(x))
        self.n2.weight.data[0] = 2.0
        return h + self.b(self.n2(h))


class BindsItself(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        self = self.b
        return self(h)


class BindsAGlobal(Block):
    """Which anything may hook."""

    def forward(self, x):
        global SUM
        SUM = x + self.a(self.n1(x))
        return SUM + self.b(self.n2(SUM))


class WritesToItsClass(Block):
    """Its class is another one while it is fused."""

    calls = 0

    def forward(self, x):
        self.__class__.calls += 1
        h = x + self.a(self.n1(x))
        return h + self.b(self.n2(h))


class AsksForItsClass(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = self.n2(h)
        return y * 2 if type(self) is AsksForItsClass else y


class NamesItselfOtherwise(SelectsBetween):
    def forward(layer, x):  # noqa: N805
        h = x + layer.a(layer.n1(x))
        count = layer.b.where()
        return layer.n2(h) + h * (count > 0)


class ReadsAProperty(Block):
    @property
    def halved(self):
        self.n2.weight.data.fill_(0.5)
        return 0.5

    def forward(self, x):
        self.n2.weight.data.fill_(1.0)
        h = x + self.a(self.n1(x))
        half = self.halved
        return h + half * self.b(self.n2(h))


REFUSED = [
    ReadsAProperty,
    BindsAGlobal,
    WritesToItsClass,
    AsksForItsClass,
    NamesItselfOtherwise,
    SelectsBetween,
    SetsBetween,
    StoresBetween,
    WritesAPartBetween,
    AsksWhatTheSumSets,
    CallsInItsTest,
    AsksTheSum,
    HasAnElse,
    BindsItself,
    CalledBetween,
    InAConditionalExpression,
    InALambda,
    WrittenBetween,
    WrittenInTheStatement,
    CapturedByAFunction,
    WithMoreArguments,
    InATry,
]


def outcome(model, grad):
    """The output and, where that is asked for, the gradients of all parameters."""
    model.zero_grad()
    with torch.set_grad_enabled(grad), use_backend("triton"):
        y = model(X)
    if not grad:
        return [y]
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def alike(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        if a is None and b is None:
            continue
        if not torch.equal(a, b):
            return False
    return True


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cls", FUSED)
def test_a_sum_that_a_norm_reads_next_is_computed_with_it(cls, grad, fused_sums):
    model = row(cls(), cls())
    patch_model(model, fuse_residual=False)
    expected = outcome(model, grad)
    assert not fused_sums
    assert fused(patch_model(model, fuse_residual=True)) == [FUSED[cls]] * 2
    assert alike(outcome(model, grad), expected)
    count = FUSED[cls].count("+")
    if cls is SumInASum:  # x + 1 adds a number
        count -= 1
    assert len(fused_sums) == 2 * count


@pytest.mark.parametrize("cls", REFUSED)
def test_what_does_not_hold_to_the_letter_is_left_to_the_model(cls, fused_sums):
    model = row(cls(), cls())
    patch_model(model, fuse_residual=False)
    expected = outcome(model, False)
    for layer in patch_model(model, fuse_residual=True).layers:
        assert layer.reason
        assert not layer.fused
    assert alike(outcome(model, False), expected)
    assert not fused_sums


class Returned(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        return (h + self.b(self.n2(h)), h)[0]


class ReturnedFromALoop(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = self.b(self.n2(h))
        last = before = None
        for _ in range(2):
            before = last
            last = h
        return (y + last, before)[0]


class WrittenAfter(Block):
    def forward(self, x):
        h = x + self.a(self.n1(x))
        y = self.n2(h)
        h += 1
        return h + self.b(y)


@pytest.mark.parametrize("cls", [Returned, ReturnedFromALoop])
def test_a_sum_that_something_else_gets_hold_of_is_fused_in_inference_alone(
    cls, fused_sums
):
    """A hook on it would see the part of its gradient that does not come by the norm."""
    model = row(cls(), cls())
    for grad in (True, False):
        patch_model(model, fuse_residual=False)
        expected = outcome(model, grad)
        patch_model(model, fuse_residual=True)
        assert alike(outcome(model, grad), expected)
        assert bool(fused_sums) != grad


def test_a_sum_that_is_written_to_after_its_norm(fused_sums):
    model = row(WrittenAfter(), WrittenAfter())
    expected = outcome(model, False)
    patch_model(model)
    (got,) = outcome(model, False)
    torch.testing.assert_close(got, *expected)
    assert len(fused_sums) == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        # as unpatched
        outcome(model, True)


def test_an_error_names_the_line_of_the_forward():
    model = row(NormBehindTheIf(), NormBehindTheIf())
    model[0].b.register_forward_hook(lambda *_: 1 / 0)
    lines = []
    for fuse_residual in (False, True):
        patch_model(model, fuse_residual=fuse_residual)
        with pytest.raises(ZeroDivisionError) as error, use_backend("triton"):
            model(X)
        for frame in error.traceback:
            if frame.name == "forward" and frame.path.name == "test_sums.py":
                lines.append(frame.lineno)
    assert len(lines) == 2
    assert lines[0] == lines[1]
