"""Training with the kernels is the training without: losses, gradient norms and files."""

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
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
    """(losses, gradient norms) of AdamW as Trainer makes it, on five batches in turns."""
    model.train()
    arguments = TrainingArguments(
        str(folder), weight_decay=0.1, learning_rate=1e-3, use_cpu=True
    )
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    losses = []
    norms = []
    for step in range(STEPS):
        ids = tiny_models.token_ids(1, 8, seed=step % 5)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    model.save_pretrained(folder)
    return losses, norms


def layout(folder):
    """Names, dtypes and shapes of the saved tensors."""
    tensors = load_file(folder / "model.safetensors")
    layout = {}
    for name, tensor in tensors.items():
        layout[name] = tensor.dtype, tensor.shape
    return layout


@pytest.mark.full
@pytest.mark.parametrize(("family", "options"), CASES)
def test_fifty_steps_of_the_kernels(family, options, tmp_path):
    one_layer = {"num_hidden_layers": 1}
    if family == "gpt2":
        one_layer = {"n_layer": 1}
    plain = tiny_models.build(family, **one_layer)
    expected_losses, expected_norms = train(plain, tmp_path / "plain")
    assert expected_losses[-1] < 0.7 * expected_losses[0], "nothing was learned"
    model = tiny_models.build(family, **one_layer)
    patch_model(model, strict=True, **options)
    with use_backend("triton"), count_launches() as launches:
        losses, norms = train(model, tmp_path / "patched")
    assert launches.total() >= 2 * 3 * STEPS
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    # later ones are those of weights that AdamW has moved apart
    assert norms == pytest.approx(expected_norms, rel=2e-4)
    assert norms[0] == pytest.approx(expected_norms[0], rel=1e-6)
    assert layout(tmp_path / "patched") == layout(tmp_path / "plain")
