"""Pickled checkpoints: read where that is allowed, without running code; broken ones are refused in one line."""

import json

import pytest
import torch
from checkpoints import CONFIG, assert_refused, tiny

PLAN = tiny()[1]


@pytest.fixture
def pickled(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(CONFIG))
    return src


class Evil:
    """Its unpickling would leave a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_are_refused_unless_allowed(pickled):
    first, second = tiny()[0]
    torch.save(first | second, pickled / "pytorch_model.bin")
    assert_refused(PLAN, pickled, str(pickled), "pickles", "allow_pickle=True", "safetensors")


def test_pickles_run_no_code(pickled):
    torch.save({"w": Evil(pickled / "ran")}, pickled / "pytorch_model.bin")
    assert_refused(PLAN, pickled, "pytorch_model.bin", "weights_only", "safetensors", allow_pickle=True)
    assert not (pickled / "ran").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"w": torch.ones(2)}, "step": 3},
        [torch.ones(2)],
        {"w": torch.ones(2, 2).to_sparse()},
        {"w": torch.ones(2, dtype=torch.complex64)},
    ],
    ids=["nested", "list", "sparse", "complex"],
)
def test_pickles_that_hold_no_state_dict(pickled, state):
    torch.save(state, pickled / "pytorch_model.bin")
    assert_refused(PLAN, pickled, "pytorch_model.bin", "state dict", allow_pickle=True)


@pytest.mark.parametrize("cut", [0, 10, 500])
def test_truncated_pickles(pickled, cut):
    torch.save(tiny()[0][0], pickled / "pytorch_model.bin")
    data = (pickled / "pytorch_model.bin").read_bytes()
    (pickled / "pytorch_model.bin").write_bytes(data[:cut])
    assert_refused(PLAN, pickled, "pytorch_model.bin", allow_pickle=True)
