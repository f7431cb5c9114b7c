"""A daily sample of scripts/coverage.py: tiny models of types drawn by date, before and after a patch, bit for bit.

The script runs in a process of its own: its name is that of a well-known package, which no test should shadow.
"""

import datetime
import json
import random
import subprocess
import sys
from pathlib import Path

from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "scripts" / "results" / f"coverage-{transformers_version}.json"
SAMPLE = sorted(random.Random(datetime.date.today().isoformat()).sample(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 8))


def test_a_sample_drawn_by_date_is_bit_equal_patched_and_unpatched(tmp_path):
    out = tmp_path / "sample.json"
    command = [sys.executable, ROOT / "scripts" / "coverage.py", "--mapping", "causal", "--jobs", "1"]
    done = subprocess.run([*command, "--only", ",".join(SAMPLE), "--out", out], capture_output=True, text=True)
    assert out.exists(), done.stderr
    types = json.loads(out.read_text())["mappings"]["causal"]["types"]
    assert sorted(t["type"] for t in types) == SAMPLE
    assert {t["type"]: t["wrong"] for t in types if t["wrong"]} == {}
    assert done.returncode == 0
    must_run = _committed("causal", "ran") & set(SAMPLE)
    assert {t["type"] for t in types if t["ran"]} >= must_run
    for run in (run for t in types if t["ran"] for run in t["runs"]):
        assert run["bit_equal"] and all(run["bit_equal"]) and run["saved_equal"] and run["classes_restored"]


def _committed(mapping: str, key: str) -> set[str]:
    """Types of which the committed table of the installed version says so; empty for a version without a table."""
    if not COMMITTED.exists():
        return set()
    return {t["type"] for t in json.loads(COMMITTED.read_text())["mappings"][mapping]["types"] if t[key]}


def test_a_wrong_result_is_noticed():
    """A fused norm that is off by one part in a hundred shows in the model and in the norm alone."""
    code = """if True:
        import coverage, json
        from hf_rmsnorm import layers
        real = layers.fused_norm
        layers.fused_norm = lambda *args: real(*args) * 1.01
        print(json.dumps(coverage.wrong(coverage.examine("llama", "causal"))))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "scripts", check=True
    )
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert "model: not bit_equal" in wrong
    assert any(line.startswith("model.norm (LlamaRMSNorm)") for line in wrong)
    assert not any("restored" in line or "saved" in line for line in wrong)


def test_the_committed_table_has_no_wrong_result_and_every_type():
    assert COMMITTED.exists(), f"run python scripts/coverage.py --out {COMMITTED.relative_to(ROOT)}"
    mappings = json.loads(COMMITTED.read_text())["mappings"]
    assert {t["type"] for t in mappings["causal"]["types"]} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for mapping in mappings.values():
        assert {t["type"]: t["wrong"] for t in mapping["types"] if t["wrong"]} == {}
        assert all(g["reason"] for g in mapping["left_alone"])
