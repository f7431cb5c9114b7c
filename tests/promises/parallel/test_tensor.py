"""Tensor, sequence and context parallelism over two gloo processes, as the unpatched
model under the same plan.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
import tiny_models
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from parallel_runs import (
    NORMS,
    assert_gradients_as_accurate,
    batch,
    counted,
    gradients,
    rms_of,
    run_ranks,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from hf_rmsnorm import patch_model, unpatch_model, use_backend

pytestmark = pytest.mark.full

NORMS_OF = {"llama": 5, "qwen3": NORMS}


class Step(NamedTuple):
    """Of a training step: what it gave, kernels launched, collectives by name."""

    logits: torch.Tensor
    gradients: dict
    ran: Counter
    sent: dict


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(logits):
    return F.cross_entropy(whole(logits).flatten(0, 1), batch().flatten())


def run(model, **inputs):
    with counted(model) as ran, CommDebugMode() as sent:
        logits = model(input_ids=batch(), **inputs).logits
        loss_of(logits).backward()
    grads = gradients(model)
    model.zero_grad()
    return Step(whole(logits).detach(), grads, ran, sent.get_comm_counts())


def exact_step(family):
    """The logits and gradients of the whole model in float64."""
    model = tiny_models.build(family).double()
    logits = model(batch()).logits
    loss_of(logits).backward()
    return logits.detach(), gradients(model)


def assert_as_accurate(step, plain, exact, what):
    logits, grads = exact
    assert_gradients_as_accurate(step.gradients, plain.gradients, grads, what)
    ours = rms_of([step.logits - logits])
    theirs = rms_of([plain.logits - logits])
    assert ours <= 1.5 * theirs + 1e-7, what


# Transformers' own plan


def patched_and_planned(family):
    """The plan's own styles on a model that is patched already; `from_pretrained` puts
    them on a new one.
    """
    model = tiny_models.build(family)
    patch_model(model, strict=True)
    config = DistributedConfig(tp_plan="auto", tp_size=2)
    plan, _, _ = model._resolve_parallel_plans(config)
    apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)), plan)
    return model


def tensor_parallel(rank, folder, family, order):
    count = NORMS_OF[family]
    single = tiny_models.build(family)
    exact = exact_step(family)
    if rank == 0:
        single.save_pretrained(folder)
    dist.barrier()
    how = {"tp_plan": "auto", "dtype": torch.float32}
    load = partial(AutoModelForCausalLM.from_pretrained, folder, **how)
    plain = run(load())
    assert not plain.ran and plain.sent
    model = load() if order == "plan first" else patched_and_planned(family)
    for memory_efficient in (True, False):
        patch_model(model, strict=True, memory_efficient=memory_efficient)
        step = run(model)
        assert step.ran["norm_forward"] == step.ran["norm_backward"] == count, family
        assert step.sent == plain.sent and not step.ran["sums"], family
    assert_as_accurate(step, plain, exact, family)
    pairs = (count - 5) // 2  # of q and k norms
    assert_fuses_in_training(model, pairs, plain, exact)
    assert_generates(model, single)
    assert unpatch_model(model) == count
    assert_is_plain(model, plain)


def assert_is_plain(model, plain, **inputs):
    """An unpatched model computes what it did."""
    assert not tiny_models.fused_norms(model)
    again = run(model, **inputs)
    assert not again.ran
    assert torch.equal(again.logits, plain.logits)


def assert_fuses_in_training(model, pairs, plain, exact):
    """Sums are fused, where `CommDebugMode` does not hook every module; and q and k norms
    since the plan has hooked the gradients of their weights.
    """
    with counted(model) as ran:
        loss_of(model(input_ids=batch()).logits).backward()
    assert ran["qk_norm_forward"] == ran["qk_norm_backward"] == pairs
    assert ran["sums"] == 2
    assert_gradients_as_accurate(gradients(model), plain.gradients, exact[1])
    model.zero_grad()


def assert_generates(model, single):
    """The tokens of one process."""
    how = {"max_new_tokens": 4, "do_sample": False}
    with use_backend("reference"):
        tokens = model.generate(batch()[:2], **how)
    assert torch.equal(tokens, single.generate(batch()[:2], **how))


# PyTorch's SequenceParallel: between the linears of a layer, sequences are split


def plan_of_a_layer(local):
    by_columns = ColwiseParallel()
    norm = SequenceParallel(use_local_output=local)
    by_rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    )
    mlp = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn": attention,
        "self_attn.q_proj": by_columns,
        "self_attn.k_proj": by_columns,
        "self_attn.v_proj": by_columns,
        "self_attn.o_proj": by_rows,
        "mlp": mlp,
        "mlp.gate_proj": by_columns,
        "mlp.up_proj": by_columns,
        "mlp.down_proj": by_rows,
    }


def parallelize(model, local):
    """Between modules there are local tensors, or DTensors."""
    embeddings = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local
    )
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    norm = SequenceParallel(use_local_output=local)
    plan = {"model.embed_tokens": embeddings, "model.norm": norm, "lm_head": head}
    for i in range(len(model.model.layers)):
        for name, style in plan_of_a_layer(local).items():
            plan[f"model.layers.{i}.{name}"] = style
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def sequence_parallel(rank):
    length = batch().shape[1]
    exact = exact_step("llama")
    mask = torch.full((length, length), float("-inf")).triu(1)
    inputs = {
        "attention_mask": mask.expand(4, 1, -1, -1),
        "position_ids": torch.arange(length)[None],
        "use_cache": False,
    }
    for local, order in ((True, "patch first"), (False, "plan first")):
        what = f"local {local}, {order}"
        plain = run(parallelize(tiny_models.build("llama"), local), **inputs)
        model = tiny_models.build("llama")
        if order == "patch first":
            patch_model(model, strict=True)
        model = parallelize(model, local)
        assert len(patch_model(model, strict=True).swapped) == 5
        step = run(model, **inputs)
        assert step.ran["norm_forward"] == step.ran["norm_backward"] == 5, what
        assert step.sent == plain.sent, what
        assert_as_accurate(step, plain, exact, what)
        unpatch_model(model)
        assert_is_plain(model, plain, **inputs)


# Context parallelism: norms and MLPs see a part of each sequence. PyTorch's attention
# for it has CUDA kernels alone, so the keys and values are gathered here; the sequences
# are split by PyTorch.


def gathered(tensor, dim):
    return torch.cat(dist.nn.functional.all_gather(tensor.contiguous()), dim)


def attention(module, query, key, value, mask, scaling, position_ids, **kwargs):
    groups = module.num_key_value_groups
    here = position_ids[0]
    key = gathered(key, 2).repeat_interleave(groups, 1)
    value = gathered(value, 2).repeat_interleave(groups, 1)
    later = here[:, None] < gathered(here, 0)[None, :]
    scores = query @ key.mT * scaling
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return (shares @ value).transpose(1, 2), None


def run_of_a_part(model):
    """A step of this rank's part of the sequences, and the positions in it."""
    ids = tiny_models.token_ids(2, 16)
    positions = torch.arange(16).expand(2, -1).clone()
    parts = [ids.clone(), ids.roll(-1, 1), positions]
    mesh = init_device_mesh("cpu", (2,))
    with (
        counted(model) as ran,
        context_parallel(mesh, buffers=parts, buffer_seq_dims=[1, 1, 1]),
    ):
        x, y, here = parts
        logits = model(input_ids=x, position_ids=here, use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        (losses / ids.numel()).backward()
        positions = here[0].clone()
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return Step(logits.detach(), grads, ran, {}), positions


def context_parallelism(rank):
    AttentionInterface.register("gathered", attention)
    ids = tiny_models.token_ids(2, 16)
    reference = tiny_models.build("qwen3").double()
    logits = reference(ids).logits
    F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    grads = gradients(reference)
    how = {"attn_implementation": "gathered"}
    plain, positions = run_of_a_part(tiny_models.build("qwen3", **how))
    # PyTorch gives each rank early and late tokens
    first = 8 * rank
    assert positions.tolist() != list(range(first, first + 8))
    model = tiny_models.build("qwen3", **how)
    patch_model(model, strict=True)
    step, _ = run_of_a_part(model)
    assert step.ran["sums"] == 2
    assert step.ran["qk_norm_forward"] == 2
    assert_as_accurate(step, plain, (logits.detach()[:, positions], grads), "context")


def work(rank, folder):
    tensor_parallel(rank, folder / "llama", "llama", "patch first")
    tensor_parallel(rank, folder / "qwen3", "qwen3", "plan first")
    sequence_parallel(rank)
    context_parallelism(rank)


def test_tensor_sequence_and_context_parallelism(tmp_path, monkeypatch):
    run_ranks(work, tmp_path, monkeypatch, tmp_path)
