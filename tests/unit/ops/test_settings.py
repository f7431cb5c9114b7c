"""What a user chooses: by name, in a thread, for as long as the context lasts."""

import threading

import pytest
import torch

from hf_rmsnorm import NormSpec, settings, use_backend
from hf_rmsnorm.ops import chosen_backend

SPEC = NormSpec(False, 1e-6)
X = torch.ones(2, 8)
W = torch.ones(8)


@pytest.fixture
def restored():
    yield settings
    settings.while_compiling = "original"


def test_a_setting_is_one_of_its_choices(restored):
    for choice in ("operator", "original"):
        settings.while_compiling = choice
        assert settings.while_compiling == choice
    with pytest.raises(
        ValueError, match="while_compiling = 'kernel': choose one of original, operator"
    ):
        settings.while_compiling = "kernel"
    with pytest.raises(
        ValueError, match="settings.eager: no such setting, there are while_compiling"
    ):
        settings.eager = "original"
    assert settings.while_compiling == "original"


def test_backends_are_chosen_in_a_thread_and_given_back_in_their_order():
    again = use_backend("reference")
    elsewhere = []
    with use_backend("triton"):
        with again, use_backend("triton"), again:
            assert chosen_backend() == "reference"
            thread = threading.Thread(target=lambda: elsewhere.append(chosen_backend()))
            thread.start()
            thread.join()
        assert chosen_backend() == "triton"
    assert chosen_backend() == "auto"
    assert elsewhere == ["auto"]
