"""The committed table of diffusers' transformers, and a sample of it made anew."""

import json

import pytest
from places import SCRIPTS

diffusers = pytest.importorskip(
    "diffusers", reason="the library that this is for, of scripts/requirements"
)
coverage = pytest.importorskip("scripts.coverage.diffusers")

COMMITTED = SCRIPTS / "results" / f"diffusers-{diffusers.__version__}.json"
pytestmark = pytest.mark.skipif(
    not COMMITTED.exists(), reason=f"no table was made with {diffusers.__version__}"
)
SAMPLE = [
    "FluxTransformer2DModel",
    pytest.param("WanTransformer3DModel", marks=pytest.mark.full),
    pytest.param("ZImageTransformer2DModel", marks=pytest.mark.full),
    pytest.param("SD3Transformer2DModel", marks=pytest.mark.full),
]


def entries():
    return {
        entry["type"]: entry
        for entry in json.loads(COMMITTED.read_text(encoding="utf-8"))["types"]
    }


def test_every_transformer_is_in_the_table_and_none_is_changed_by_a_patch():
    table = entries()
    assert table.keys() == coverage.classes().keys()
    for name, entry in table.items():
        assert "error" not in entry and not coverage.is_wrong(entry), name


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_table_made_anew(name):
    assert coverage.examine(name, "diffusers") == entries()[name]
