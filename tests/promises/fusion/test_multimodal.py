"""Models that read pictures: q and k are rotated by positions of three axes, and
verification looks at a picture.
"""

import multimodal
import pytest
import tiny_models

from hf_rmsnorm import count_launches, use_backend, verify_equivalence

IDS = tiny_models.token_ids()


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_positions_whose_axes_differ(family):
    inputs = {"input_ids": IDS, "position_ids": multimodal.positions()}
    with use_backend("triton"), count_launches() as launches:
        report = verify_equivalence(
            multimodal.build(family), inputs=inputs, max_new_tokens=0, backward=True
        )
    assert report.passed, report
    assert bool(launches["qk_norm_forward"]) == family.startswith("qwen3")


def test_verification_shows_the_model_a_picture():
    with use_backend("triton"):
        report = verify_equivalence(multimodal.build("qwen3_vl"), max_new_tokens=0)
    assert report.passed and not report.unreached, report
