"""FSDP around a patched model and a patch beneath FSDP: a training step as without, with fused norms, on shards."""

import pytest
import tiny_models
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend
from hf_rmsnorm.fused.norm import fused_part

orders = pytest.mark.parametrize("order", ["patch first", "shard first"])
ids = tiny_models.token_ids()


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def shard2(model, mesh, each_norm):
    for layer in model.model.layers:
        if each_norm:  # its class is then FSDP's, at whatever place in the family tree
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                fully_shard(norm, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard1(model, mesh, classes, original_parameters):
    policy = ModuleWrapPolicy(classes)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=original_parameters, device_id=torch.device("cpu")
    )


SHARDS = {
    "fully_shard, layers": lambda m, mesh: shard2(m, mesh, False),
    "fully_shard, layers and norms": lambda m, mesh: shard2(m, mesh, True),
    "FSDP1, layers": lambda m, mesh: shard1(m, mesh, {Qwen3DecoderLayer}, True),
    "FSDP1, layers and norms": lambda m, mesh: shard1(m, mesh, {Qwen3DecoderLayer, Qwen3RMSNorm}, True),
    "FSDP1, flat parameters": lambda m, mesh: shard1(m, mesh, {Qwen3DecoderLayer}, False),
    "FSDP1, flat parameters and norms": lambda m, mesh: shard1(m, mesh, {Qwen3DecoderLayer, Qwen3RMSNorm}, False),
}


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return loss.detach(), model(input_ids=ids).logits


def norms(model):
    return [module for module in model.modules() if isinstance(module, Qwen3RMSNorm)]


@orders
@pytest.mark.parametrize("how", SHARDS)
def test_a_training_step(how, order, mesh, fused_calls):
    loss, logits = step(tiny_models.build("qwen3"))
    model = tiny_models.build("qwen3")
    if order == "patch first":
        patch_model(model, strict=True)
    model = SHARDS[how](model, mesh)
    types, of_fsdp = [type(norm) for norm in norms(model)], [isinstance(norm, FSDPModule) for norm in norms(model)]
    if how.startswith("fully_shard"):
        assert all(isinstance(norm.weight, DTensor) for norm in norms(model))
        assert sum(of_fsdp) == (4 if "norms" in how else 0)
    if order == "shard first":
        assert len(patch_model(model, strict=True).swapped) == 9
    with use_backend("reference"):
        got_loss, got_logits = step(model)
    assert len(fused_calls) == 2 * 9
    assert torch.equal(got_loss, loss)
    torch.testing.assert_close(got_logits, logits, rtol=1e-4, atol=1e-5)
    assert unpatch_model(model) == 9
    assert not any(fused_part(type(module)) for module in model.modules())
    assert order == "patch first" or [type(norm) for norm in norms(model)] == types
    assert [isinstance(norm, FSDPModule) for norm in norms(model)] == of_fsdp
    fused_calls.clear()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, got_logits) and not fused_calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo is for the CPU, where the interpreter must run")
@orders
@pytest.mark.parametrize("make", [LlamaRMSNorm, nn.LayerNorm])
def test_sequence_parallel(make, order, mesh):
    model, x = nn.Sequential(make(16)), torch.randn(2, 4, 16)
    expected = model(x)
    if order == "patch first":
        patch_model(model, strict=True)
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    assert len(patch_model(model, strict=True).swapped) == 1
    with use_backend("triton"), count_launches() as launches:
        y = model(x)
        y.full_tensor().sum().backward()
    assert isinstance(y, DTensor) and launches["norm_forward"] == launches["norm_backward"] == 1
    torch.testing.assert_close(y.full_tensor(), expected)
    assert isinstance(model[0].weight.grad, DTensor)
