"""For trainers that read in a YAML which callback they get."""

import sys
import types

import pytest

INTEGRATIONS = "hf_rmsnorm.integrations"


@pytest.fixture
def build(tmp_path):
    """A Trainer of one step, with these callbacks."""
    # it imports triton, which asks for TRITON_INTERPRET
    import tiny_models
    from transformers import Trainer, TrainingArguments

    def build(callbacks):
        ids = tiny_models.token_ids(2)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        rows = [{"input_ids": row, "labels": row} for row in ids]
        return Trainer(
            tiny_models.build("qwen3"),
            arguments,
            train_dataset=rows,
            callbacks=callbacks,
        )

    return build


@pytest.fixture
def installed(monkeypatch):
    """Puts modules where an import finds them, by dotted name."""

    def put(**named):
        for name, content in named.items():
            module = types.ModuleType(name := name.replace("__", "."))
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)

    for name in ("axolotl", "swift"):
        monkeypatch.delitem(sys.modules, f"{INTEGRATIONS}.{name}", raising=False)
    yield put
    for name in ("axolotl", "swift"):
        sys.modules.pop(f"{INTEGRATIONS}.{name}", None)
