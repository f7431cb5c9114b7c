"""Published models: a sample still gives what is committed, and the page has what the results say."""

import json

import pytest

from scripts import real_configs

FOUND = json.loads(real_configs.RESULTS.read_text())
SAMPLE = ("Qwen3-0.6B", "GPT-2", "OPT-350M", "BERT-base")


def test_the_page_is_the_table_of_the_results():
    written = real_configs.PAGE.read_text().partition(real_configs.START)[2]
    assert written.partition(real_configs.END)[0] == real_configs.table(FOUND)
    assert FOUND.keys() == real_configs.configs().keys()


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_model_gives_what_is_committed(name):
    assert real_configs.row(real_configs.configs()[name]) == FOUND[name]
