"""The committed table of diffusers' transformers, and a sample of it made anew."""

import json

import pytest
from places import SCRIPTS

diffusers = pytest.importorskip(
    "diffusers", reason="the library that this is for, of scripts/requirements"
)
coverage = pytest.importorskip("scripts.coverage.diffusers")
from scripts.coverage import launches  # noqa: E402
from scripts.coverage.__main__ import main  # noqa: E402

COMMITTED = SCRIPTS / "results" / f"diffusers-{diffusers.__version__}.json"
pytestmark = pytest.mark.skipif(
    not COMMITTED.exists(), reason=f"no table was made with {diffusers.__version__}"
)
SAMPLE = [
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
    "SD3Transformer2DModel",
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
        assert entry["launched"].keys() == {"bfloat16", "float32"}, name


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_table_made_anew(name):
    made = coverage.examine(name, "diffusers")
    committed = entries()[name]
    before, now = (launches.flat(e.pop("launched")) for e in (committed, made))
    assert made == committed
    assert not launches.print_falls({name: before}, {name: now})


def test_fewer_launches_than_in_the_table_fail(monkeypatch, capsys):
    name = SAMPLE[0]
    entry = entries()[name]
    monkeypatch.setattr(coverage, "take", lambda *args: [entry])
    run = ["diffusers", "--only", name, "--check", str(COMMITTED)]
    assert main(run) == 0
    entry["launched"]["bfloat16"]["norms"] -= 1
    assert main(run) == 1
    assert f"{name}: bfloat16 norms " in capsys.readouterr().err
