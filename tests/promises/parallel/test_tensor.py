"""Tensor, sequence and context parallelism over two gloo processes, as the unpatched
model under the same plan.
"""

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
    exact_gradients,
    gradients,
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
from hf_rmsnorm.fused.norm import fused_part

pytestmark = pytest.mark.full

ORDERS = ("patch first", "plan first")
NORMS_OF = {"llama": 5, "qwen3": NORMS}


def run(model, **inputs):
    """(logits, gradients, kernels launched, collectives by name) of a step."""
    inputs = inputs or {"input_ids": batch(), "labels": batch()}
    with counted() as ran, CommDebugMode() as sent:
        output = model(**inputs)
        loss = output.loss if output.loss is not None else own_loss(output.logits)
        loss.backward()
    logits = (
        output.logits.full_tensor()
        if isinstance(output.logits, DTensor)
        else output.logits
    )
    found = gradients(model)
    model.zero_grad()
    return logits.detach(), found, ran, sent.get_comm_counts()


def compare(got, plain, exact, exact_logits, what):
    assert_gradients_as_accurate(got[1], plain[1], exact, what)
    errors = [
        (run[0].double() - exact_logits).square().mean().sqrt().item()
        for run in (got, plain)
    ]
    assert errors[0] <= 1.5 * errors[1] + 1e-7, (what, errors)


# Transformers' own plan


def tensor_parallel(rank, folder):
    for family, count in NORMS_OF.items():
        whole = tiny_models.build(family)
        if rank == 0:
            whole.save_pretrained(folder / family)
        dist.barrier()

        def load(family=family):
            return AutoModelForCausalLM.from_pretrained(
                folder / family, tp_plan="auto", dtype=torch.float32
            )

        with torch.no_grad():
            exact_logits = tiny_models.build(family).double()(batch()).logits
        exact, plain = exact_gradients(tiny_models.build(family)), run(load())
        assert not plain[2] and plain[3]
        # The plan's own styles on a model that is patched already; `from_pretrained`
        # puts them on a new one.
        planned = load()
        first = tiny_models.build(family)
        patch_model(first, strict=True)
        config = DistributedConfig(tp_plan="auto", tp_size=2)
        plan, _, _ = first._resolve_parallel_plans(config)
        assert plan.get("model.layers.0.self_attn.q_norm", "llama") in (
            "llama",
            "replicated_with_grad_allreduce",
        )
        apply_tensor_parallelism(first, init_device_mesh("cpu", (2,)), plan)
        for order, model in zip(ORDERS, (first, planned), strict=True):
            what = f"{family}, {order}"
            forwards = {n: vars(m).get("forward") for n, m in model.named_modules()}
            assert len(patch_model(model, strict=True).swapped) == count
            for memory_efficient in (False, True):
                patch_model(model, strict=True, memory_efficient=memory_efficient)
                got = run(model)
                assert (
                    got[2]["norm_forward"] == count and got[2]["norm_backward"] == count
                ), (what, got[2])
                assert got[3] == plain[3] and not got[2]["sums"], (
                    what,
                    got[3],
                    plain[3],
                )
                if not memory_efficient:
                    # which gives the rounding of its outputs to its gradients
                    compare(got, plain, exact, exact_logits, what)
            with counted() as ran, torch.no_grad():
                model(batch())
            # what it reduces is in training a tensor that is still on its way
            assert ran["sums"] == 2
            with use_backend("reference"):
                tokens = [
                    m.generate(batch()[:2], max_new_tokens=4, do_sample=False)
                    for m in (whole, model)
                ]
            assert torch.equal(*tokens)
            assert unpatch_model(model) == count and not any(
                fused_part(type(m)) for m in model.modules()
            )
            assert {
                n: vars(m).get("forward") for n, m in model.named_modules()
            } == forwards
            again = run(model)
            assert not again[2] and torch.equal(again[0], plain[0]), what


# PyTorch's SequenceParallel: between the linears of a layer, sequences are split


def sequence_parallel(rank):
    mesh, length = init_device_mesh("cpu", (2,)), batch().shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    positions = torch.arange(length)[None]

    def parallelize(model, local):
        """Between modules there are local tensors, or DTensors."""

        def rows():
            return RowwiseParallel(output_layouts=Shard(1), use_local_output=local)

        def whole(**layouts):
            return PrepareModuleInput(**layouts)

        plan = {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(),
                output_layouts=Shard(1),
                use_local_output=local,
            ),
            "model.norm": SequenceParallel(use_local_output=local),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Replicate()
            ),
        }
        for i in range(len(model.model.layers)):
            at = f"model.layers.{i}."
            plan[at + "input_layernorm"] = plan[at + "post_attention_layernorm"] = (
                SequenceParallel(use_local_output=local)
            )
            plan[at + "self_attn"] = whole(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            )
            plan[at + "mlp"] = whole(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            )
            for name in (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            ):
                plan[at + name] = ColwiseParallel()
            plan[at + "self_attn.o_proj"] = plan[at + "mlp.down_proj"] = rows()
        return parallelize_module(model, mesh, plan)

    def inputs():
        return {"input_ids": batch(), "attention_mask": mask.expand(4, 1, -1, -1), "position_ids": positions,
                "use_cache": False}  # fmt: skip

    reference = tiny_models.build("llama").double()
    exact_logits = reference(batch()).logits
    own_loss(exact_logits).backward()
    exact = {name: p.grad for name, p in reference.named_parameters()}
    for local in (True, False):
        plain = run(parallelize(tiny_models.build("llama"), local), **inputs())
        for order in ORDERS:
            model, what = tiny_models.build("llama"), f"local {local}, {order}"
            if order == "patch first":
                patch_model(model, strict=True)
            model = parallelize(model, local)
            assert len(patch_model(model, strict=True).swapped) == 5
            seen = []
            for layer in model.model.layers:
                layer.input_layernorm.register_forward_hook(
                    lambda m, args, y, seen=seen: seen.append((args[0], y))
                )
            got = run(model, **inputs())
            assert got[2]["norm_forward"] == got[2]["norm_backward"] == 5, (
                what,
                got[2],
            )
            assert got[3] == plain[3], (what, got[3], plain[3])
            for x, y in seen:
                assert isinstance(y, DTensor) is not local
                assert local or x.placements == y.placements == (Shard(1),)
            compare(got, plain, exact, exact_logits.detach(), what)
            unpatch_model(model)
            again = run(model, **inputs())
            assert not again[2] and torch.equal(again[0], plain[0]), what


def own_loss(logits):
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1), batch().flatten())


# Context parallelism: norms and MLPs see a part of each sequence. PyTorch's attention
# for it has CUDA kernels alone, so the keys and values are gathered here; the sequences
# are split by PyTorch.


def context_parallelism(rank):
    mesh, ids = init_device_mesh("cpu", (2,)), tiny_models.token_ids(2, 16)
    labels, where = ids.roll(-1, 1), {}

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        key, value = (
            torch.cat(dist.nn.functional.all_gather(t.contiguous()), 2)
            for t in (key, value)
        )
        key, value = (
            t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value)
        )
        hidden = where["here"][:, None] < where["all"][None, :]
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(
            hidden, float("-inf")
        )
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("gathered", attention)

    def part(model):
        buffers = [ids.clone(), labels.clone(), torch.arange(16)[None].repeat(2, 1)]
        with (
            counted() as ran,
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]),
        ):
            x, y, positions = buffers
            where["here"], parts = (
                positions[0].clone(),
                [torch.empty_like(positions[0]) for _ in range(2)],
            )
            dist.all_gather(parts, where["here"])
            where["all"] = torch.cat(parts)
            logits = model(input_ids=x, position_ids=positions, use_cache=False).logits
            (
                F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
                / ids.numel()
            ).backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        for grad in found.values():
            dist.all_reduce(grad)
        return logits.detach(), found, ran, where["here"]

    reference = tiny_models.build("qwen3").double()
    exact_logits = reference(ids).logits
    F.cross_entropy(exact_logits.flatten(0, 1), labels.flatten()).backward()
    exact = {name: p.grad for name, p in reference.named_parameters()}
    plain = part(tiny_models.build("qwen3", attn_implementation="gathered"))
    # PyTorch gives each rank early and late tokens
    assert plain[3].tolist() != list(range(8 * rank, 8 * rank + 8))
    model = tiny_models.build("qwen3", attn_implementation="gathered")
    patch_model(model, strict=True)
    got = part(model)
    assert got[2]["sums"] == 2 and got[2]["qk_norm_forward"] == 2, got[2]
    compare(got, plain, exact, exact_logits.detach()[:, plain[3]], "context")


def work(rank, folder):
    tensor_parallel(rank, folder)
    sequence_parallel(rank)
    context_parallelism(rank)


def test_tensor_sequence_and_context_parallelism(tmp_path, monkeypatch):
    run_ranks(work, tmp_path, monkeypatch, tmp_path)
