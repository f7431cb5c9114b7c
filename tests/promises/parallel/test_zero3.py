"""DeepSpeed ZeRO-3 gathers a module's weights for its forward and its backward; between
them they are empty.
"""

from functools import partial

import pytest
import tiny_models
import torch
from parallel_runs import (
    NORMS,
    assert_gradients_as_accurate,
    batch,
    counted,
    exact_gradients,
)
from torch.utils._pytree import tree_map_only

from hf_rmsnorm import patch_model, unpatch_model

# What DeepSpeed does, in one process: hooks on every module that owns parameters, and
# autograd functions around its inputs and outputs that gather and release for the
# backward.


class Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx, action, x):
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.action()
        return None, dy


def on_gradient(action, tensors):
    def around(tensor):
        return Around.apply(action, tensor) if tensor.requires_grad else tensor

    return tree_map_only(torch.Tensor, around, tensors)


class Zero3:
    """Empties a model's parameters between calls. `gradients` are whole, by name."""

    def __init__(self, model):
        self.whole = {}
        self.gradients = {}
        for name, p in model.named_parameters():
            self.whole[p] = p.detach().clone()
            p.ds_shape = p.shape
            p.register_post_accumulate_grad_hook(partial(self.reduce, name))
        for module in model.modules():
            if [*module.parameters(recurse=False)]:
                self.release(module)
                module.register_forward_pre_hook(self.before)
                module.register_forward_hook(self.after)

    def gather(self, module):
        for p in module.parameters(recurse=False):
            p.data = self.whole[p].clone()  # at a new address each time

    def release(self, module):
        for p in module.parameters(recurse=False):
            if p.dim() == 1:
                # a linear keeps a view of its weight, for which DeepSpeed has a linear
                # of its own
                p.data.fill_(torch.nan)
            p.data = torch.empty(0, dtype=p.dtype)

    def reduce(self, name, p):
        self.gradients[name], p.grad = p.grad, None

    def before(self, module, args):
        self.gather(module)
        return on_gradient(partial(self.release, module), args)

    def after(self, module, args, output):
        self.release(module)
        return on_gradient(partial(self.gather, module), output)


def step(model, zero3):
    with counted(model) as ran:
        loss = model(input_ids=batch(), labels=batch()).loss
        loss.backward()
    # its input has no gradient, which would tell
    zero3.release(model.model.embed_tokens)
    assert all(p.numel() == 0 for p in model.parameters())
    return loss.detach(), dict(zero3.gradients), ran


RUNS = [
    ("patch first", False),
    ("ZeRO first", True),
    ("patched and trained first", False),
]


@pytest.mark.parametrize(("order", "memory_efficient"), RUNS)
def test_weights_that_are_gathered_for_each_call(order, memory_efficient):
    exact = exact_gradients(tiny_models.build("qwen3"))
    model = tiny_models.build("qwen3")
    loss, plain, _ = step(model, Zero3(model))
    model = tiny_models.build("qwen3")
    if order != "ZeRO first":
        patch_model(model, strict=True, memory_efficient=memory_efficient)
    if order == "patched and trained first":
        model(input_ids=batch(), labels=batch()).loss.backward()
        model.zero_grad()
    zero3 = Zero3(model)
    report = patch_model(model, strict=True, memory_efficient=memory_efficient)
    assert len(report.swapped) == NORMS
    keeps_output = ["keeps its output" in record.notes for record in report.swapped]
    assert keeps_output == [memory_efficient] * NORMS
    for _ in range(2):
        got, fused, ran = step(model, zero3)
        # Every norm is called as a module: before its hooks have run it is empty.
        assert not ran["sums"]
        assert ran["norm_forward"] == ran["norm_backward"] == NORMS
        torch.testing.assert_close(got, loss)
        assert_gradients_as_accurate(fused, plain, exact, order)
    assert unpatch_model(model) == NORMS
    again, _, ran = step(model, zero3)
    assert not ran and torch.equal(again, loss)
