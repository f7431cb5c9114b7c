"""Training with the kernels is the training without: losses, gradient norms, decay
groups and files.
"""

import pytest
import tiny_models
import torch
from safetensors import safe_open
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
    """[(loss, gradient norm)] of AdamW over the groups that Trainer makes, on five
    batches in turns; and those groups, by name.
    """
    model.train()
    arguments = TrainingArguments(
        str(folder), weight_decay=0.1, learning_rate=1e-3, use_cpu=True
    )
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"]]
        groups.append((group["weight_decay"], members))
    seen = []
    for step in range(STEPS):
        ids = tiny_models.token_ids(1, 8, seed=step % 5)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    model.save_pretrained(folder)
    return seen, groups


def layout(folder):
    """Names, dtypes and shapes of the saved tensors."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "options"), CASES)
def test_fifty_steps_of_the_kernels(family, options, tmp_path):
    one_layer = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    plain = tiny_models.build(family, **one_layer)
    expected, groups = train(plain, tmp_path / "plain")
    assert expected[-1][0] < 0.7 * expected[0][0], "nothing was learned"
    model = tiny_models.build(family, **one_layer)
    patch_model(model, strict=True, **options)
    with use_backend("triton"), count_launches() as launches:
        seen, patched_groups = train(model, tmp_path / "patched")
    assert launches.total() >= 2 * 3 * STEPS
    assert patched_groups == groups and groups[0][1] and groups[1][1]
    for (loss, norm), (right, right_norm) in zip(seen, expected, strict=True):
        assert loss == pytest.approx(right, rel=1e-5)
        # later ones are those of weights that AdamW has moved apart
        assert norm == pytest.approx(right_norm, rel=2e-4)
    assert seen[0][1] == pytest.approx(expected[0][1], rel=1e-6)
    assert layout(tmp_path / "patched") == layout(tmp_path / "plain")
