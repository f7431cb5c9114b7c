"""What a result says of where it comes from: the section of its model card, and the
name of its source.
"""

import pytest
from huggingface_hub import ModelCard

from hf_rmsnorm import __version__, convert_checkpoint
from hf_rmsnorm.conversion.verify.folder import add_to_card, provenance

HEADING = "## Converted"
MADE = {
    "source": "folder",
    "converted_by": "hf-rmsnorm 1",
    "torch": "2",
    "transformers": "5",
}
SECTION = f"{HEADING}\n\nText.\n\nMade from `folder` with hf-rmsnorm 1, PyTorch 2 and Transformers 5.\n"
TOLD = "library_name: transformers\ntags:\n- rmsnorm\n- hf-rmsnorm\n"
FRONT = f"---\n{TOLD}---\n\n"


@pytest.mark.parametrize(
    "before, after",
    [
        (None, FRONT + SECTION),
        ("", FRONT + SECTION),
        (
            "---\nlicense: mit\n---\n# Model\n",
            f"---\nlicense: mit\n---\n# Model\n\n{SECTION}",
        ),
        (f"{HEADING}\n\nOld.\n", FRONT + SECTION),
        (
            f"# Model\n\n{HEADING}\n\nOld.\n\n## Use\n\nSo.\n",
            f"{FRONT}# Model\n\n## Use\n\nSo.\n\n{SECTION}",
        ),
        (
            f"# Model\n{HEADING} by hand\n",
            f"{FRONT}# Model\n{HEADING} by hand\n\n{SECTION}",
        ),
        (
            "---\nlicense: [mit\n---\n# Broken\n",
            f"---\nlicense: [mit\n---\n# Broken\n\n{SECTION}",
        ),
    ],
)
def test_a_card_has_one_section(tmp_path, before, after):
    if before is not None:
        (tmp_path / "README.md").write_text(before)
    for _ in range(2):
        add_to_card(tmp_path, HEADING, "Text.\n", MADE)
        assert (tmp_path / "README.md").read_text() == after


def test_a_card_in_another_encoding_keeps_its_bytes(tmp_path):
    (tmp_path / "README.md").write_bytes(b"# Mod\xe8le\r\n\r\nna\xefve")
    add_to_card(tmp_path, HEADING, "Text \u00e9.", MADE)
    card = (tmp_path / "README.md").read_bytes()
    assert (
        b"---\n\n# Mod\xe8le\r\n\r\nna\xefve\n\n## Converted\n\nText \xc3\xa9." in card
    )


@pytest.mark.parametrize(
    "source, base",
    [("org/name@0a1b", "org/name"), ("gpt2@0a1b", "gpt2"), ("gpt2", None)],
)
def test_a_card_names_the_model_of_the_hub_that_it_was_made_from(
    tmp_path, source, base
):
    add_to_card(tmp_path, HEADING, "Text.", {**MADE, "source": source})
    assert ModelCard.load(tmp_path / "README.md").data.base_model == base


@pytest.mark.parametrize(
    "front",
    [
        "---\nlanguage: no\nversion: 010\nempty:\n# a comment\ntags: [mine]\nlibrary_name: timm\n---\n# Model\n",
        "\ufeff---\ntags: [mine]\nlibrary_name: timm\n---\n# Model\n",
        "\n---\ntags: [mine]\nlibrary_name: timm\n---\n# Model\n",
        "---\r\ntags: [mine]\r\nlibrary_name: timm\r\n---\r\n# Model\r\n",
    ],
    ids=["odd words", "a mark before", "an empty line before", "line ends of Windows"],
)
def test_what_a_card_says_already_stays(tmp_path, front):
    (tmp_path / "README.md").write_bytes(front.encode())
    for _ in range(2):
        add_to_card(tmp_path, HEADING, "Text.", MADE)
        assert (
            tmp_path / "README.md"
        ).read_bytes().decode() == f"{front.rstrip()}\n\n{SECTION}"


def test_the_card_of_an_adapter_is_of_peft(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    add_to_card(tmp_path, HEADING, "Text.", MADE)
    assert ModelCard.load(tmp_path / "README.md").data.library_name == "peft"


def test_the_source_has_a_name(tmp_path, monkeypatch):
    cached = tmp_path / "models--org--my-name" / "snapshots" / "0a1b2c"
    cached.mkdir(parents=True)
    (tmp_path / "link").symlink_to(cached)
    for where in (cached, tmp_path / "link"):
        assert provenance(where)["source"] == "org/my-name@0a1b2c"
    (tmp_path / "a model").mkdir()
    monkeypatch.chdir(tmp_path / "a model")
    assert provenance(".")["source"] == provenance("../a model/")["source"] == "a model"
    assert provenance(".")["converted_by"] == f"hf-rmsnorm {__version__}"


def test_a_few_tokens_of_a_large_checkpoint_are_run(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_rmsnorm.conversion.verify.pair.LARGE", 1)
    few = convert_checkpoint("demo:gpt2", tmp_path / "few").verification
    assert (
        few.passed
        and "on 16 tokens" in few.summary
        and "greedy" not in few.runs["as RMSNorm"]
    )
    every = convert_checkpoint(
        "demo:gpt2", tmp_path / "every", verify="full"
    ).verification
    assert (
        every.passed
        and "on 16 tokens" not in every.summary
        and "greedy" in every.runs["as RMSNorm"]
    )
