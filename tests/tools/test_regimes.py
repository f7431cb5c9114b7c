"""The committed table of regimes, and a sample of it made anew."""

import json

import pytest
from places import SCRIPTS

from scripts.coverage import regimes
from scripts.coverage.__main__ import main

COMMITTED = SCRIPTS / "results" / "regimes.json"
ERROR = {"model": "LLaMA", "regime": "LoRA", "error": "RuntimeError: no"}


def cells():
    document = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return {regimes.place(cell): cell for cell in document["cells"]}


def test_every_model_is_there_in_every_regime():
    committed = cells()
    assert not any("error" in cell for cell in committed.values())
    for name in regimes.MODELS:
        assert all((name, regime) in committed for regime in regimes.REGIMES)
        assert committed[name, "inference"]["ran"] > 0
        assert committed[name, "inference"]["launched"]["norms"] > 0


@pytest.mark.parametrize(
    "regime", ["a map of several GPUs", "LoRA", "ZeRO-3 (forward)"]
)
def test_a_cell_made_anew(regime):
    if regime == "LoRA":
        pytest.importorskip("peft", reason="adapters come with peft")
    made = regimes.examine("Qwen3", regime)
    committed = cells()["Qwen3", regime]
    assert made == committed


@pytest.mark.parametrize("change", [{"ran": 1}, {"reasons": {"norm: other": 1}}, None])
def test_another_result_than_the_committed_one_fails(change, tmp_path, monkeypatch):
    cell = {
        "model": "LLaMA", "regime": "LoRA", "pieces": 2, "ran": 2, "reasons": {},
    }  # fmt: skip
    monkeypatch.setattr(regimes, "cells_of", lambda name: [cell])
    file = tmp_path / "regimes.json"
    run = ["regimes", "--only", "LLaMA"]
    assert main([*run, "--out", str(file)]) == 0
    assert main([*run, "--check", str(file)]) == 0
    now = ERROR if change is None else cell | change
    monkeypatch.setattr(regimes, "cells_of", lambda name: [now])
    assert main([*run, "--check", str(file)]) == 1
