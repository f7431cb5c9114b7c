"""A sample of `python -m scripts.coverage patch`: tiny models of types drawn by date,
and of every formula once.
"""

import datetime
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, SCRIPTS
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

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


def families() -> dict[str, tuple[str, str]]:
    """Every formula of the committed table, whatever its eps, with a (mapping, type)
    that has it: few and fast ones.
    """
    of_type: dict[tuple[str, str], set[str]] = {}
    seconds = {}
    for mapping in MAPPINGS:
        for t in committed_types(mapping):
            if t["ran"]:
                of_type[mapping, t["type"]] = {
                    family(f) for run in t["runs"] for _, f, _ in run["swapped"]
                }
                seconds[mapping, t["type"]] = t["seconds"]
    chosen: dict[str, tuple[str, str]] = {}
    missing = set().union(*of_type.values())
    while missing:
        best = max(
            of_type, key=lambda t: (len(of_type[t] & missing) / (0.5 + seconds[t]), t)
        )
        chosen |= dict.fromkeys(of_type[best] & missing, best)
        missing -= of_type[best]
    return dict(sorted(chosen.items()))


def family(formula: str) -> str:
    return re.sub(
        r"groups of \d+", "groups", re.sub(r"eps=[\d.e+-]+(, )?", "", formula)
    )


FAMILIES = families()


def run_coverage(out: Path, mapping: str, types, *options: str) -> dict[str, dict]:
    """The records that the script writes for these types; it must end well."""
    command = [
        sys.executable,
        "-m",
        "scripts.coverage",
        "patch",
        "--mapping",
        mapping,
        "--jobs",
        "1",
    ]
    command += ["--only", ",".join(types), "--out", out, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert out.exists(), done.stderr
    records = {
        t["type"]: t for t in json.loads(out.read_text())["mappings"][mapping]["types"]
    }
    assert sorted(records) == sorted(types)
    assert {name: t["wrong"] for name, t in records.items() if t["wrong"]} == {}
    assert done.returncode == 0
    for run in (run for t in records.values() if t["ran"] for run in t["runs"]):
        assert (
            run["bit_equal"]
            and all(run["bit_equal"])
            and run["saved_equal"]
            and run["classes_restored"]
        )
    return records


@pytest.mark.nightly
def test_a_sample_drawn_by_date_is_bit_equal_patched_and_unpatched(tmp_path):
    records = run_coverage(
        tmp_path / "sample.json", "causal", SAMPLE, "--interpreter", "fusion"
    )
    must_run = {t["type"] for t in committed_types("causal") if t["ran"]} & set(SAMPLE)
    assert {name for name, t in records.items() if t["ran"]} >= must_run


@pytest.fixture(scope="module")
def run_of_families(tmp_path_factory) -> dict[tuple[str, str], dict]:
    records = {}
    for mapping in MAPPINGS:
        types = sorted({t for m, t in FAMILIES.values() if m == mapping})
        if types:
            found = run_coverage(
                tmp_path_factory.mktemp("families") / f"{mapping}.json", mapping, types
            )
            records |= {(mapping, name): t for name, t in found.items()}
    return records


@pytest.mark.full
@pytest.mark.parametrize("formula", FAMILIES)
def test_every_formula_of_the_table_is_swapped_bit_equal(formula, run_of_families):
    record = run_of_families[FAMILIES[formula]]
    assert record["ran"]
    assert formula in {
        family(f) for run in record["runs"] for _, f, _ in run["swapped"]
    }


@pytest.mark.full
def test_a_wrong_result_is_noticed():
    """A fused norm that is off by one part in a hundred shows in the model and in the
    norm alone.
    """
    code = """if True:
        import json
        from scripts.coverage import compare, report
        from hf_rmsnorm.fused import norm as layers
        real = layers.fused_norm
        layers.fused_norm = lambda *args: real(*args) * 1.01
        print(json.dumps(report.wrong(compare.examine("llama", "causal"))))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert "model: not bit_equal" in wrong
    assert any(line.startswith("model.norm (LlamaRMSNorm)") for line in wrong)
    assert not any("restored" in line or "saved" in line for line in wrong)


def test_the_committed_table_has_no_wrong_result_and_every_type():
    assert TABLE, (
        f"run python -m scripts.coverage patch --out {COMMITTED.relative_to(ROOT)}"
    )
    for mapping, names in MAPPINGS.items():
        assert {t["type"] for t in committed_types(mapping)} == set(names)
        assert {
            t["type"]: t["wrong"] for t in committed_types(mapping) if t["wrong"]
        } == {}
        assert all(t["error"] for t in committed_types(mapping) if not t["ran"])
        part = TABLE["mappings"][mapping]
        assert part["totals"]["types"] == part["totals"]["tried"] == len(names)
        assert all(
            g["reason"] for key in ("left_alone", "not_norms") for g in part[key]
        )
    assert all(TABLE["not_built"].values())


def unnamed(folder: Path | None = None) -> list[str]:
    """Norm classes in the installed source that the committed table neither names nor
    lists as built by no type.
    """
    code = f"""if True:
        import json, pathlib
        from scripts.coverage import scan
        classes = scan.norm_classes({"pathlib.Path(" + repr(str(folder)) + ")" if folder else ""})
        table = json.loads(pathlib.Path({str(COMMITTED)!r}).read_text(encoding="utf-8"))
        print(json.dumps(sorted(classes.keys() - scan.seen_classes(table) - table["not_built"].keys())))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.full
def test_every_norm_class_of_the_installed_transformers_is_swapped_or_named():
    assert unnamed() == []


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
    assert unnamed(tmp_path) == ["NewRMSNorm", "NewerRMSNorm"]
