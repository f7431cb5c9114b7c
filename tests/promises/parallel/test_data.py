"""DDP, FSDP1 and FSDP2 over two gloo processes: a patched model trains as the unpatched
one in the same wrapping.
"""

import contextlib
import itertools
import unittest.mock
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_models
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from parallel_runs import (
    NORMS,
    assert_gradients_as_accurate,
    batch,
    counted,
    exact_gradients,
    gradients,
    run_ranks,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from hf_rmsnorm import patch_model, unpatch_model

BF16 = torch.bfloat16


@dataclass
class Case:
    """One wrapping. sums: how many of a forward's four residual sums are computed with
    a norm.
    """

    wrap: Any
    sums: int
    prepare: Any = lambda model: None
    forwards: int = 1
    accumulate: bool = False


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def fsdp1(classes=(Qwen3DecoderLayer,), checkpointed=False, **options):
    def wrap(model):
        policy = ModuleWrapPolicy(set(classes))
        options.setdefault("use_orig_params", True)
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=cpu, **options
        )
        if checkpointed:
            apply_activation_checkpointing(
                model, check_fn=lambda m: isinstance(m, Qwen3DecoderLayer)
            )
        return model

    return wrap


def fsdp2(each_norm=False, **options):
    def wrap(model):
        options.setdefault("mesh", init_device_mesh("cpu", (2,)))
        for layer in model.model.layers:
            if each_norm:
                fully_shard(layer.input_layernorm, **options)
                fully_shard(layer.post_attention_layernorm, **options)
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return wrap


def prepared(model):
    """What `accelerator.prepare` makes of a model."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True).prepare(model)


def prepared_fsdp2(model):
    """On a CPU `Accelerator` itself takes DDP whatever the plugin: these are the
    functions that its `prepare` calls.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    return fsdp2_prepare_model(accelerator, model)


def checkpointing(reentrant):
    how = {"use_reentrant": reentrant}
    return lambda model: model.gradient_checkpointing_enable(how)


def only(*trained):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in trained))

    return freeze


HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
HALF1 = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
CASES = {
    # With every parameter used and reduced: DDP itself raises in the second step where
    # one was not.
    "DDP": Case(ddp(find_unused_parameters=False), 2),
    "DDP, bucket views, accumulation": Case(
        ddp(gradient_as_bucket_view=True), 2, accumulate=True
    ),
    "DDP, reentrant checkpoints": Case(
        ddp(static_graph=True), 2, checkpointing(True), 2
    ),
    "DDP, only norms trained": Case(ddp(), 2, only("norm")),
    "accelerate": Case(prepared, 2),
    "accelerate, FSDP2": Case(prepared_fsdp2, 2),
    "FSDP2": Case(fsdp2(), 2),
    "FSDP2, norms by themselves": Case(fsdp2(each_norm=True), 0),
    "FSDP2, offloaded to the CPU": Case(
        fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), 2
    ),
    "FSDP2, bf16, checkpoints": Case(fsdp2(mp_policy=HALF), 2, checkpointing(False), 2),
    "FSDP2, norms frozen": Case(fsdp2(), 2, only("proj", "embed", "head")),
    "FSDP1, bf16": Case(fsdp1(mixed_precision=HALF1), 2),
    "FSDP1, gradients and optimizer alone, norms by themselves": Case(
        fsdp1(
            (Qwen3DecoderLayer, Qwen3RMSNorm),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        ),
        0,
    ),
    "FSDP1, bf16, checkpoints": Case(
        fsdp1(checkpointed=True, mixed_precision=HALF1), 2, forwards=2
    ),
}


def step(model, rank, accumulate):
    """Two steps, so that whatever was left over from the first shows; gradients are
    those of the first.
    """
    ids, losses = batch(rank), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(2):
        parts = ids.split(1) if accumulate else [ids]
        for part in parts:
            with model.no_sync() if part is not parts[-1] else contextlib.nullcontext():
                loss = model(input_ids=part, labels=part).loss / len(parts)
                loss.backward()
            losses.append(loss.detach())
        if len(losses) == len(parts):
            grads = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), grads


def build(case):
    model = tiny_models.build("qwen3").train()
    case.prepare(model)
    return model


def check(name, case, rank, order):
    exact = exact_gradients(build(case))
    losses, plain = step(case.wrap(build(case)), rank, case.accumulate)
    model = build(case)
    if order == "patch first":
        patch_model(model, strict=True)
    model = case.wrap(model)
    types = {n: type(m) for n, m in model.named_modules()}
    with unittest.mock.patch.object(torch.distributed, "all_gather") as gathers:
        # as FSDP1 calls it on a CPU
        report = patch_model(model, strict=True)
    assert not gathers.called, "patching one rank waits for another"
    assert len(report.swapped) == NORMS
    with counted(model) as ran:
        got, fused = step(model, rank, case.accumulate)
    steps = len(got)
    what = f"{name}, {order}: {dict(ran)}"
    assert ran["sums"] == steps * case.sums * case.forwards, what
    assert ran["norm_forward"] + 2 * ran["qk_norm_forward"] >= steps * NORMS, what
    assert (got - losses).abs().max() <= (0.02 if "bf16" in name else 1e-5), what
    assert_gradients_as_accurate(fused, plain, exact, what)
    assert_unpatched(model, types, order)


def assert_unpatched(model, types, order):
    """An undo leaves no trace, and the classes that FSDP2 made."""
    assert unpatch_model(model) == NORMS
    after = {n: type(m) for n, m in model.named_modules()}
    if order == "wrap first":
        assert after == types
    of_fsdp = [n for n, t in after.items() if issubclass(t, FSDPModule)]
    assert of_fsdp == [n for n, t in types.items() if issubclass(t, FSDPModule)]
    with counted(model) as ran, torch.no_grad():
        model(input_ids=batch())
    assert not ran


def work(rank, pairs):
    for name, order in pairs:
        check(name, CASES[name], rank, order)


QUICK = [("DDP", "patch first"), ("FSDP2", "wrap first")]
FULL = [
    ("accelerate", "wrap first"),
    ("accelerate, FSDP2", "patch first"),
    ("FSDP2, bf16, checkpoints", "patch first"),
    ("FSDP1, bf16", "wrap first"),
]
PAIRS = itertools.product(CASES, ("patch first", "wrap first"))
REST = [pair for pair in PAIRS if pair not in (*QUICK, *FULL)]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(QUICK, id="DDP and FSDP2"),
        pytest.param(FULL, id="one of each", marks=pytest.mark.full),
        pytest.param(REST, id="the rest", marks=pytest.mark.full),
    ],
)
def test_data_parallel_training(pairs, tmp_path, monkeypatch):
    run_ranks(work, tmp_path, monkeypatch, pairs)
