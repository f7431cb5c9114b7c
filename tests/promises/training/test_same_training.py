"""Training with the kernels is the training without, as the page on correctness says."""

import pytest
import tiny_models
import torch
from transformers import Trainer, TrainingArguments

from hf_rmsnorm import count_launches, patch_model, use_backend

STEPS = 50
CASES = [
    ("llama", {}),
    ("llama", {"fuse_residual": False}),
    ("qwen3", {}),
    ("gpt2", {"memory_efficient": True}),
]


def train(model, folder):
    """The losses of AdamW as Trainer makes it, on five batches in turns."""
    model.train()
    arguments = TrainingArguments(
        str(folder), weight_decay=0.1, learning_rate=1e-3, use_cpu=True
    )
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    losses = []
    for step in range(STEPS):
        ids = tiny_models.token_ids(1, 8, seed=step % 5)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.full
@pytest.mark.parametrize(("family", "options"), CASES)
def test_fifty_steps_of_the_kernels(family, options, tmp_path):
    plain = tiny_models.build(family, num_hidden_layers=1)
    model = tiny_models.build(family, num_hidden_layers=1)
    expected = train(plain, tmp_path)
    assert expected[-1] < 0.7 * expected[0], "nothing was learned"
    patch_model(model, strict=True, **options)
    with use_backend("triton"), count_launches() as launches:
        assert train(model, tmp_path) == pytest.approx(expected, rel=1e-5)
    assert launches.total() >= 2 * 3 * STEPS
