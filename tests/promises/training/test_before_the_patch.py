"""Training set up before a patch goes on unchanged after it: the same decay groups,
optimizer, parameters and loss.
"""

import pytest
import tiny_models
import torch
from transformers import Trainer, TrainingArguments

from hf_rmsnorm import patch_model, use_backend

FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
STEPS = 3


OPTIONS = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "weight_decay": 0.1,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def make_trainer(model, folder):
    arguments = TrainingArguments(str(folder), **OPTIONS)
    rows = []
    for r in tiny_models.token_ids(2 * STEPS):
        rows.append({"input_ids": r, "labels": r})
    return Trainer(model, arguments, train_dataset=rows)


def named_groups(optimizer, model):
    names = {}
    for name, p in model.named_parameters():
        names[id(p)] = name
    return [
        (group["weight_decay"], [names[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]


@FAMILIES
def test_weight_decay_groups_and_the_optimizer_made_from_them(family, tmp_path):
    model = tiny_models.build(family)
    trainer = make_trainer(model, tmp_path)
    decay = trainer.get_decay_parameter_names(model)
    groups = named_groups(trainer.create_optimizer(), model)
    (decayed, _), (undecayed, others) = groups
    assert (decayed, undecayed) == (0.1, 0.0)
    norms = {f"{path}.weight" for path, _ in tiny_models.norms(model)}
    assert norms and norms <= set(others)
    patch_model(model, strict=True)
    assert trainer.get_decay_parameter_names(model) == decay
    again = make_trainer(model, tmp_path)
    assert named_groups(again.create_optimizer(), model) == groups


def train(model, patch_at=None):
    """The losses of steps, before one of which the model is patched."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i, batch in enumerate(tiny_models.token_ids(2 * STEPS).chunk(STEPS)):
        if i == patch_at:
            patch_model(model, strict=True)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@FAMILIES
def test_an_optimizer_made_before_the_patch_updates_the_same_parameters(family):
    plain = tiny_models.build(family)
    model = tiny_models.build(family)
    before = dict(model.named_parameters())
    with use_backend("reference"):
        # the optimizer has a state by the second step
        assert train(model, patch_at=1) == pytest.approx(train(plain), rel=1e-5)
    after = dict(model.named_parameters())
    for name in before:
        assert after[name] is before[name]
    expected = dict(plain.named_parameters())
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)
