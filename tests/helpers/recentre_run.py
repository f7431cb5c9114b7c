"""`Recentre` in two gloo processes: DDP and `fully_shard` leave what one process makes
of both batches.
"""

import pytest
import tiny_models
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from hf_rmsnorm import Recentre, patch_model, use_backend
from hf_rmsnorm.converted.follow import conversion_of

STEPS = 3


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(record.converted for record in patch_model(model).swapped)
    return model


def train(model, recentre, rank=None):
    # Not Adam, which makes a step of the noise where a gradient is zero, as that of a
    # key's bias.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        ids = tiny_models.token_ids(4, 12, seed=step)
        if rank is not None:
            ids = ids[2 * rank : 2 * rank + 2]
        with use_backend("reference"):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank is None:
            moved = model.get_input_embeddings().weight
            assert moved.mean(-1).abs().max() > 1e-5
        recentre()


def check(model, expected):
    """Whether a model has the parameters of another, and is centred."""
    whole = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }
    for name, wanted in expected.named_parameters():
        torch.testing.assert_close(whole[name], wanted, rtol=1e-3, atol=1e-5, msg=name)
    result = type(expected)(expected.config)
    result.load_state_dict(whole)
    assert not conversion_of(result).why_not


def shard(model):
    (layers,) = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    for part in (*layers, model.get_input_embeddings(), model):
        fully_shard(part)
    for p in model.parameters():
        assert all(place.is_shard() for place in p.placements)


def work(rank, *folders):
    for folder in folders:
        expected = load(folder)
        train(expected, Recentre(expected))

        model = load(folder)
        wrapped = DistributedDataParallel(model)
        train(wrapped, Recentre(wrapped), rank)
        check(model, expected)

        for before in (False, True):
            model = load(folder)
            recentre = None
            if before:
                recentre = Recentre(model)
            shard(model)
            train(model, recentre or Recentre(model), rank)
            check(model, expected)
    whole = FullyShardedDataParallel(load(folder), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"use FSDP2 \(fully_shard\)"):
        Recentre(whole)
