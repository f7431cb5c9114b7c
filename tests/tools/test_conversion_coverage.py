"""The committed table of conversions, and a sample of it made anew."""

import json

import pytest
from places import SCRIPTS
from processes import python
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


def table():
    return json.loads(COMMITTED.read_text(encoding="utf-8"))["types"]


def variants(types, verdict):
    return [
        (r["type"], v) for r in types for v in r["variants"] if v["verdict"] == verdict
    ]


@needs_table
def test_forty_architectures_convert_to_rounding_in_both_runs():
    done = variants(table(), "converted")
    assert len({name for name, _ in done}) >= 40
    for name, v in done:
        assert v["rms_norms"] == v["norms"], name
        assert max(v["stock"], v["rms"]) <= 1e-12, name


@needs_table
def test_every_type_is_in_the_table_with_a_reason_where_it_does_not_convert():
    types = table()
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_MAPPING_NAMES}
    assert {r["type"] for r in types} == known
    for r in types:
        assert r["variants"] or r["error"], r["type"]
        for v in r["variants"]:
            done = v["verdict"] in ("converted", "no LayerNorm")
            assert done or v["reason"], r["type"]
    assert not variants(types, "failed")


def verdicts(record):
    return [variant["verdict"] for variant in record["variants"]]


def run_script(out, types):
    how = ("--mapping", "causal", "--jobs", "1", "--only", ",".join(types))
    python("-m", "scripts.coverage", "convert", *how, "--out", out)
    return {r["type"]: r for r in json.loads(out.read_text(encoding="utf-8"))["types"]}


@needs_table
def test_every_causal_type_that_converts_still_does(tmp_path):
    causal = [r for r in table() if r["mapping"] == "causal"]
    before = {r["type"]: verdicts(r) for r in causal}
    names = [n for n, all in before.items() if {"converted", "partly"} & {*all}]
    after = run_script(tmp_path / "all.json", names)
    for name in names:
        assert verdicts(after[name]) == before[name], name
