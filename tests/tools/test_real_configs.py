"""Published models: each has a result, and a sample still gives what is committed."""

import json

import pytest

from scripts import real_configs

FOUND = json.loads(real_configs.RESULTS.read_text())
SAMPLE = ("GPT-2", "BERT-base", "OPT-350M", "Qwen3-0.6B")


def test_every_model_has_a_result():
    assert FOUND.keys() == real_configs.configs().keys()


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_model_gives_what_is_committed(name):
    assert real_configs.row(real_configs.configs()[name]) == FOUND[name]
