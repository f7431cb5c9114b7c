"""The committed table of conversions, and a sample of it made anew."""

import json
import subprocess
import sys

import pytest
from places import ROOT, SCRIPTS
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

pytestmark = pytest.mark.full

COMMITTED = SCRIPTS / "results" / f"convert-{transformers_version}.json"
needs_table = pytest.mark.skipif(
    not COMMITTED.exists(),
    reason=f"no table was made with Transformers {transformers_version}",
)
SAMPLE = ("gpt_bigcode", "xglm", "bert", "llama")


def table():
    return json.loads(COMMITTED.read_text(encoding="utf-8"))["types"]


def variants(types, verdict):
    return [
        (r["type"], v) for r in types for v in r["variants"] if v["verdict"] == verdict
    ]


@needs_table
def test_forty_architectures_convert_to_rounding_in_both_runs():
    types = table()
    done = variants(types, "converted")
    assert len({name for name, _ in done}) >= 40
    for name, v in [*done, *variants(types, "partly")]:
        assert (
            v["stock"] <= 1e-12 and v["rms"] <= 1e-12 and v["largest_mean"] <= 1e-12
        ), name
    assert all(v["rms_norms"] == v["norms"] for _, v in done)
    assert not variants(types, "failed")


@needs_table
def test_every_type_is_in_the_table_with_a_reason_where_it_does_not_convert():
    types = table()
    assert {r["type"] for r in types} == {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_MAPPING_NAMES,
    }
    for r in types:
        assert r["variants"] or r["error"], r["type"]
        for v in r["variants"]:
            assert v["verdict"] in ("converted", "no LayerNorm") or v["reason"], r[
                "type"
            ]
    for name, v in variants(types, "refused"):
        assert "\n" not in v["reason"] and len(v["reason"]) > 40, name


def run_script(out, types):
    command = [
        sys.executable,
        "-m",
        "scripts.coverage",
        "convert",
        "--mapping",
        "causal",
        "--jobs",
        "1",
    ]
    command += ["--only", ",".join(types), "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {r["type"]: r for r in json.loads(out.read_text(encoding="utf-8"))["types"]}


def test_a_sample_of_the_table_made_anew(tmp_path):
    found = run_script(tmp_path / "some.json", SAMPLE)
    verdicts = {
        name: [v["verdict"] for v in r["variants"]] for name, r in found.items()
    }
    assert {name: v[0] for name, v in verdicts.items()} == {
        "gpt_bigcode": "converted",
        "xglm": "refused",
        "bert": "refused",
        "llama": "RMSNorm",
    }
    assert "gpt_bigcode" in (tmp_path / "some.txt").read_text(encoding="utf-8")


@pytest.mark.nightly
@needs_table
def test_every_causal_type_that_converts_still_does(tmp_path):
    before = {
        r["type"]: r for r in table() if r["mapping"] == "causal" and r["variants"]
    }
    names = [
        name
        for name, r in before.items()
        if any(v["verdict"] in ("converted", "partly") for v in r["variants"])
    ]
    after = run_script(tmp_path / "all.json", names)
    for name in names:
        verdicts = [
            [v["verdict"] for v in r[name]["variants"]] for r in (before, after)
        ]
        assert verdicts[0] == verdicts[1], name
