"""`NormSpec`: what it says of itself, and what it refuses."""

import pytest

from hf_rmsnorm import NormSpec


def test_spec_reads_like_a_formula():
    rms = NormSpec(False, 1e-5, rounding="before_weight")
    layer = NormSpec(True, 1e-5, has_bias=True, functional=True)
    assert str(rms).startswith("RMSNorm(eps=1e-05")
    assert str(layer).startswith("LayerNorm(")
    assert rms.with_eps(1e-3).eps == 1e-3
    assert rms.to_dict()["kind"] == "RMSNorm"


BAD = [
    ({"eps": -1e-6}, "eps is -1e-06"),
    ({"eps": float("nan")}, "eps is nan"),
    ({"eps": 1e-6, "rounding": "twice"}, "rounding is 'twice'"),
    ({"eps": 1e-6, "has_weight": False, "weight_offset": 1.0}, "without weight"),
    ({"eps": 1e-6, "functional": True, "eps_outside": True}, "inside the root"),
    ({"eps": 1e-6, "functional": True, "rounding": "rstd"}, "before a weight"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_a_spec_that_means_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        NormSpec(centered=False, **fields)
