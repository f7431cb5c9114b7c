"""Models that read pictures: q and k are rotated by positions of three axes, and
verification looks at a picture.
"""

import multimodal
import pytest
import tiny_models
import torch

from hf_rmsnorm import count_launches, patch_model, use_backend, verify_equivalence

IDS = tiny_models.token_ids()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_positions_whose_axes_differ(family):
    model = multimodal.build(family)
    inputs = {
        "input_ids": IDS,
        "position_ids": multimodal.positions(),
        "use_cache": False,
    }
    with torch.no_grad(), use_backend("triton"):
        patch_model(model, fuse_residual=False)
        expected = model(**inputs).logits
        patch_model(model, fuse_residual=True)
        with count_launches() as launches:
            assert torch.equal(model(**inputs).logits, expected)
        same_axes = model(**{**inputs, "position_ids": None}).logits
    assert launches["qk_norm_forward"] > 0
    assert not torch.equal(same_axes, expected)


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_gradients_by_positions_whose_axes_differ(family):
    model = multimodal.build(family)
    inputs = {"input_ids": IDS, "position_ids": multimodal.positions()}
    with use_backend("triton"):
        report = verify_equivalence(
            model, inputs=inputs, max_new_tokens=0, backward=True
        )
    assert report.passed, report


def test_verification_shows_the_model_a_picture():
    with use_backend("triton"):
        report = verify_equivalence(multimodal.build("qwen3_vl"), max_new_tokens=0)
    assert report.passed and not report.unreached, report
