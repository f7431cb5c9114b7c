"""DeepSpeed ZeRO-3 gathers a module's weights for its forward and its backward; between them they are empty."""

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
    run_ranks,
)
from torch.utils._pytree import tree_map_only

from hf_rmsnorm import patch_model, unpatch_model
from hf_rmsnorm.fused.norm import fused_part

# What DeepSpeed does, in one process: hooks on every module that owns parameters, and autograd functions around its
# inputs and outputs that gather and release for the backward.


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
    return tree_map_only(torch.Tensor, lambda t: Around.apply(action, t) if t.requires_grad else t, tensors)


class Zero3:
    """Empties a model's parameters between calls. `events` is what happened; `gradients` are whole, by name."""

    def __init__(self, model):
        self.events, self.whole, self.gradients = [], {}, {}
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            for name, p in own.items():
                full = f"{path}.{name}"
                self.whole[p] = p.detach().clone()
                p.ds_id, p.ds_shape, p.ds_numel = len(self.whole), p.shape, p.numel()
                p.register_post_accumulate_grad_hook(partial(self.reduce, full))
            self.release(path, module)
            module.register_forward_pre_hook(partial(self.before, path))
            module.register_forward_hook(partial(self.after, path))
        self.events.clear()

    def gather(self, path, module):
        self.events.append(("gather", path))
        for p in module.parameters(recurse=False):
            p.data = self.whole[p].clone()  # at a new address each time

    def release(self, path, module):
        self.events.append(("release", path))
        for p in module.parameters(recurse=False):
            if "norm" in path:  # a linear keeps a view of its weight, for which DeepSpeed has a linear of its own
                p.data.fill_(torch.nan)
            p.data = torch.empty(0, dtype=p.dtype)

    def reduce(self, name, p):
        self.gradients[name], p.grad = p.grad, None

    def before(self, path, module, args):
        self.gather(path, module)
        return on_gradient(partial(self.release, path, module), args)

    def after(self, path, module, args, output):
        self.release(path, module)
        return on_gradient(partial(self.gather, path, module), output)


def step(model, zero3):
    zero3.events.clear()
    with counted() as ran:
        loss = model(input_ids=batch(), labels=batch()).loss
        loss.backward()
    zero3.release("model.embed_tokens", model.model.embed_tokens)  # its input has no gradient, which would tell
    assert all(p.numel() == 0 for p in model.parameters())
    return loss.detach(), dict(zero3.gradients), list(zero3.events), ran


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_weights_that_are_gathered_for_each_call(memory_efficient):
    exact = exact_gradients(tiny_models.build("qwen3"))
    model = tiny_models.build("qwen3")
    loss, plain, events, _ = step(model, Zero3(model))
    norm = ("gather", "model.layers.1.post_attention_layernorm")
    assert events.count(norm) == 2 and ("release", "model.norm") in events
    for order in ("patch first", "ZeRO first", "patched and trained first"):
        model = tiny_models.build("qwen3")
        if order != "ZeRO first":
            patch_model(model, strict=True, memory_efficient=memory_efficient)
        if order == "patched and trained first":
            model(input_ids=batch(), labels=batch()).loss.backward()
            model.zero_grad()
        zero3 = Zero3(model)
        report = patch_model(model, strict=True, memory_efficient=memory_efficient)
        assert len(report.swapped) == NORMS
        if memory_efficient:
            assert all("keeps its output" in record.notes for record in report.swapped)
        for _ in range(2):
            got = step(model, zero3)
            # Every norm is called as a module, so that its hooks have run: nothing is computed ahead of it.
            assert got[2] == events and not got[3]["sums"], order
            assert got[3]["norm_forward"] == got[3]["norm_backward"] == NORMS
            torch.testing.assert_close(got[0], loss)
            assert_gradients_as_accurate(got[1], plain, exact, order)
        assert unpatch_model(model) == NORMS
        again = step(model, zero3)
        assert not again[3] and torch.equal(again[0], loss)


def test_empty_weights_of_one_model_do_not_disturb_another():
    away, here = (tiny_models.build("llama") for _ in range(2))
    for model in (away, here):
        patch_model(model, memory_efficient=True)
        with counted():
            model(input_ids=batch(), labels=batch()).loss.backward()
    Zero3(away)
    with torch.no_grad():
        here.model.norm.weight.mul_(2.0)
    with counted() as ran:
        here(input_ids=batch(), labels=batch()).loss.backward()
    assert ran["norm_backward"] == 5


# DeepSpeed itself, where it is installed


def deepspeed_step(engine, rank):
    from deepspeed.utils import safe_get_full_grad

    with counted() as ran:
        loss = engine(input_ids=batch(rank), labels=batch(rank)).loss
        engine.backward(loss)
    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    engine.step()
    return loss.detach(), found, ran


def under_deepspeed(rank):
    import deepspeed

    deepspeed.init_distributed("gloo")
    exact = exact_gradients(tiny_models.build("qwen3"))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        # Nothing is small enough to stay, and nothing is fetched ahead of its module.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
                              "stage3_prefetch_bucket_size": 0},
    }  # fmt: skip

    def engine_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    engine = engine_of(tiny_models.build("qwen3"))
    plain = [deepspeed_step(engine, rank) for _ in range(2)]
    for order in ("patch first", "ZeRO first"):
        for memory_efficient in (False, True):
            model = tiny_models.build("qwen3")
            if order == "patch first":
                patch_model(model, strict=True, memory_efficient=memory_efficient)
            engine = engine_of(model)
            shapes = {tuple(p.shape) for p in engine.module.parameters()}
            report = patch_model(engine, strict=True, memory_efficient=memory_efficient)
            assert shapes == {(0,)} == {tuple(p.shape) for p in engine.module.parameters()}
            assert len(report.swapped) == NORMS
            got = [deepspeed_step(engine, rank) for _ in range(2)]
            for ours, theirs in zip(got, plain, strict=True):
                assert ours[2]["norm_forward"] == ours[2]["norm_backward"] == NORMS and not ours[2]["sums"], ours[2]
                torch.testing.assert_close(ours[0], theirs[0])
            assert_gradients_as_accurate(got[0][1], plain[0][1], exact, order)
            assert unpatch_model(engine) == NORMS
            assert not any(fused_part(type(m)) for m in engine.modules())
            assert not deepspeed_step(engine, rank)[2]
            engine.destroy()


def test_deepspeed_zero3(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed; the stand-in above does what it does")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run_ranks(under_deepspeed, tmp_path, monkeypatch)
