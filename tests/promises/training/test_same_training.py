"""Training with the kernels is the training without: losses, gradient norms, decay
groups, files, and either goes on where the other stopped."""

import json

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_rmsnorm import count_launches, patch_model, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 50
# for the interpreter's sake
ONE_LAYER = {"qwen3": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}
WAYS = {
    "each norm alone": {"fuse_residual": False},
    "fused": {},
    "memory_efficient": {"memory_efficient": True},
}


def optimizer_of(model, folder):
    """AdamW over the groups that Trainer makes, and the names in each."""
    arguments = TrainingArguments(
        str(folder), weight_decay=0.1, learning_rate=1e-3, use_cpu=DEVICE == "cpu"
    )
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    names = {id(p): name for name, p in model.named_parameters()}
    return optimizer, [
        (g["weight_decay"], [names[id(p)] for p in g["params"]])
        for g in optimizer.param_groups
    ]


def train(model, optimizer, first, last):
    """The (loss, gradient norm) of each step, on one of five batches, which depends on
    the step alone.
    """
    seen = []
    for step in range(first, last):
        ids = tiny_models.token_ids(1, 8, seed=step % 5).to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def assert_close(seen, expected, same_weights=True):
    """Of the same weights, gradient norms agree to 1e-6; later ones are those of
    weights that AdamW has moved apart.
    """
    losses, norms = (
        [abs(a[i] - b[i]) / b[i] for a, b in zip(seen, expected, strict=True)]
        for i in (0, 1)
    )
    worst = max(losses), norms[0] if same_weights else 0.0, max(norms)
    assert worst[0] <= 1e-5 and worst[1] <= 1e-6 and worst[2] <= 2e-4, worst


def header(path):
    """Names, dtypes, shapes and places of all tensors in a safetensors file, as its
    bytes say.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def build(family, patch=None, device=DEVICE):
    model = tiny_models.build(family, **ONE_LAYER.get(family, {})).train().to(device)
    if patch is not None:
        patch_model(model, strict=True, **patch)
    return model


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    """family -> what an unpatched run of STEPS gave, and the folder with its checkpoints half way and at the end."""
    runs = {}

    def run(family):
        if family not in runs:
            folder = tmp_path_factory.mktemp(family)
            model = build(family)
            optimizer, names = optimizer_of(model, folder)
            seen = train(model, optimizer, 0, STEPS // 2)
            save(model, optimizer, folder / "half")
            seen += train(model, optimizer, STEPS // 2, STEPS)
            save(model, optimizer, folder / "end")
            runs[family] = seen, names, folder
        return runs[family]

    return run


def save(model, optimizer, folder):
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def load(folder, patch):
    model = AutoModelForCausalLM.from_pretrained(folder).train().to(DEVICE)
    if patch:
        patch_model(model, strict=True)
    optimizer, _ = optimizer_of(model, folder)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    return model, optimizer


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family, way",
    [
        ("llama", "fused"),
        ("llama", "each norm alone"),
        ("qwen3", "fused"),
        ("gpt2", "memory_efficient"),
    ],
)
def test_fifty_steps_of_the_kernels(family, way, unpatched, tmp_path):
    expected, names, folder = unpatched(family)
    model = build(family, WAYS[way])
    optimizer, groups = optimizer_of(model, tmp_path)
    assert (
        groups == names
        and [decay for decay, _ in groups] == [0.1, 0.0]
        and all(names for _, names in groups)
    )
    with use_backend("triton"), count_launches() as launches:
        seen = train(model, optimizer, 0, STEPS)
    assert launches.total() >= 2 * 3 * STEPS
    assert expected[-1][0] < 0.7 * expected[0][0], "nothing was learned"
    assert_close(seen, expected)
    save(model, optimizer, tmp_path)
    assert header(tmp_path / "model.safetensors") == header(
        folder / "end" / "model.safetensors"
    )
    assert (tmp_path / "config.json").read_bytes() == (
        folder / "end" / "config.json"
    ).read_bytes()
    states = [torch.load(path / "optimizer.pt") for path in (tmp_path, folder / "end")]
    assert states[0]["param_groups"] == states[1]["param_groups"]


def test_the_kernels_go_on_from_an_unpatched_checkpoint_and_back(unpatched, tmp_path):
    expected, _, folder = unpatched("llama")
    model, optimizer = load(folder / "half", patch=True)
    with use_backend("triton"):
        assert_close(
            train(model, optimizer, STEPS // 2, STEPS * 3 // 4),
            expected[STEPS // 2 : STEPS * 3 // 4],
        )
    save(model, optimizer, tmp_path)
    model, optimizer = load(tmp_path, patch=False)
    with count_launches() as launches:
        assert_close(
            train(model, optimizer, STEPS * 3 // 4, STEPS),
            expected[STEPS * 3 // 4 :],
            same_weights=False,
        )
    assert not launches
