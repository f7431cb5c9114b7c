"""A sample of `python -m scripts.coverage patch`: tiny models of types drawn by date."""

import datetime
import json
import random
from pathlib import Path

import pytest
from places import SCRIPTS
from processes import python
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from scripts.coverage import patch

COMMITTED = SCRIPTS / "results" / f"coverage-{transformers_version}.json"
MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "base": MODEL_MAPPING_NAMES}
TABLE = (
    json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else None
)
SAMPLE = sorted(
    random.Random(datetime.date.today().isoformat()).sample(
        sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 8
    )
)


def committed_types(mapping: str) -> list[dict]:
    """The records of a mapping; none for a version of Transformers without a committed
    table.
    """
    return TABLE["mappings"][mapping]["types"] if TABLE else []


def run_coverage(out: Path, mapping: str, types) -> dict[str, dict]:
    """The records that the script writes for these types; it must end well."""
    how = ("--mapping", mapping, "--jobs", "1", "--only", ",".join(types))
    python("-m", "scripts.coverage", "patch", *how, "--out", out)
    table = json.loads(out.read_text())["mappings"][mapping]["types"]
    records = {record["type"]: record for record in table}
    assert sorted(records) == sorted(types)
    for record in table:
        assert not record["wrong"], record["type"]
        for run in record["runs"] if record["ran"] else ():
            assert run["bit_equal"] and all(run["bit_equal"])
            assert run["saved_equal"] and run["classes_restored"]
    return records


@pytest.mark.full
def test_a_sample_drawn_by_date_is_bit_equal_patched_and_unpatched(tmp_path):
    records = run_coverage(tmp_path / "sample.json", "causal", SAMPLE)
    must_run = {t["type"] for t in committed_types("causal") if t["ran"]} & set(SAMPLE)
    assert {name for name, t in records.items() if t["ran"]} >= must_run


@pytest.mark.full
def test_a_wrong_result_is_noticed():
    """A fused norm that is off by one part in a hundred shows in the model and in the
    norm alone.
    """
    code = """if True:
        import json
        from scripts.coverage import compare, patch
        from hf_rmsnorm.fused import norm as layers
        real = layers.compute_norm
        layers.compute_norm = lambda *args: real(*args) * 1.01
        print(json.dumps(patch.wrong(compare.examine("llama", "base"))))
    """
    wrong = json.loads(python("-c", code).splitlines()[-1])
    assert "model: not bit_equal" in wrong
    assert any(line.startswith("norm (LlamaRMSNorm)") for line in wrong)
    assert not any("restored" in line or "saved" in line for line in wrong)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_committed_table_has_no_wrong_result_and_every_type(mapping):
    assert TABLE, f"run python -m scripts.coverage patch --out {COMMITTED}"
    part = TABLE["mappings"][mapping]
    assert {record["type"] for record in part["types"]} == set(MAPPINGS[mapping])
    for record in part["types"]:
        assert not record["wrong"], record["type"]
        assert record["ran"] or record["error"], record["type"]
    groups = [*part["left_alone"], *part["not_norms"]]
    assert all(group["reason"] for group in groups)
    assert all(TABLE["not_built"].values())


def unnamed(*folder: Path) -> set[str]:
    """Norm classes in the installed source that the committed table neither names nor
    lists as built by no type.
    """
    classes = patch.norm_classes(*folder).keys()
    return classes - patch.seen_classes(TABLE) - TABLE["not_built"].keys()


@pytest.mark.full
def test_every_norm_class_of_the_installed_transformers_is_swapped_or_named():
    assert not unnamed()


def test_a_new_norm_class_is_noticed(tmp_path):
    """As a new version of Transformers would bring it: with a forward of its own, or
    with that of another.
    """
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "modeling_new.py").write_text(
        "class NewRMSNorm(nn.Module):\n    def forward(self, x):\n        return x\n"
        "class NewerRMSNorm(NewRMSNorm):\n    pass\n"
        "class LlamaRMSNorm(nn.Module):\n    def forward(self, x):\n        return x\n"
    )
    assert unnamed(tmp_path) == {"NewRMSNorm", "NewerRMSNorm"}
