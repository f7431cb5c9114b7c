"""What a result says of where it comes from: the section of its model card, and the
name of its source.
"""

from pathlib import Path

import pytest

from hf_rmsnorm import __version__
from hf_rmsnorm.conversion.card import add_to_card, provenance

HEADING = "## Converted"
MADE = {
    "source": "folder",
    "converted_by": "hf-rmsnorm 1",
    "torch": "2",
    "transformers": "5",
}
BY = "Made from `folder` with hf-rmsnorm 1, PyTorch 2 and Transformers 5."
SECTION = f"{HEADING}\n\nText.\n\n```\nPASS\n```\n\n{BY}\n"


@pytest.mark.parametrize(
    "before, after",
    [
        (None, SECTION),
        (
            "---\nlicense: mit\n---\n# Model\n",
            f"---\nlicense: mit\n---\n# Model\n\n{SECTION}",
        ),
        (f"{HEADING}\n\nOld.\n", SECTION),
        (
            f"# Model\n\n{HEADING}\n\nOld.\n\n## Use\n\nSo.\n",
            f"# Model\n\n## Use\n\nSo.\n\n{SECTION}",
        ),
        (
            f"# Model\n{HEADING} by hand\n",
            f"# Model\n{HEADING} by hand\n\n{SECTION}",
        ),
    ],
)
def test_a_card_has_one_section(tmp_path, before, after):
    if before is not None:
        (tmp_path / "README.md").write_text(before)
    for _ in range(2):
        add_to_card(tmp_path, HEADING, "Text.", MADE, "PASS")
        assert (tmp_path / "README.md").read_text() == after


def test_a_card_in_another_encoding_keeps_its_bytes(tmp_path):
    (tmp_path / "README.md").write_bytes(b"# Mod\xe8le\r\n\r\nna\xefve")
    add_to_card(tmp_path, HEADING, "Text \u00e9.", MADE)
    card = (tmp_path / "README.md").read_bytes()
    assert b"# Mod\xe8le\r\n\r\nna\xefve\n\n## Converted\n\nText \xc3\xa9." in card


def test_the_source_has_a_name(tmp_path, monkeypatch):
    cached = tmp_path / "models--org--my-name" / "snapshots" / "0a1b2c"
    cached.mkdir(parents=True)
    (tmp_path / "link").symlink_to(cached)
    (cached / "config.json").write_text("{}")
    for where in (cached, tmp_path / "link"):
        assert provenance(where)["source"] == "org/my-name@0a1b2c"
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "a model")
    made = provenance(Path("."))
    assert made["source"] == "a model"
    assert made["converted_by"] == f"hf-rmsnorm {__version__}"
