"""Parameters that the inputs do not reach: left as they are with a note, known to be
harmless, or refused.
"""

import pytest
import torch
from conversion_models import MEAN_OF_A_MODULE, SMALL, config_of
from transformers import (
    AutoConfig,
    BlenderbotForConditionalGeneration,
    Dinov2ForImageClassification,
    Dinov2Model,
    HubertForCTC,
)

from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import prove

SOUND = {
    **SMALL, "do_stable_layer_norm": True, "feat_extract_norm": "layer",
    "conv_dim": (16,) * 7, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


@pytest.mark.parametrize("cls", [Dinov2Model, Dinov2ForImageClassification])
def test_a_mask_token_stays_and_the_plan_says_so(cls):
    config = config_of("dinov2", MEAN_OF_A_MODULE)
    plan = discover(make_proxy(config, model_class=cls))
    assert any(key.endswith("embeddings.mask_token") for key in plan.undetermined)
    assert any(
        "mask_token' stays as it is: with masked patches" in note for note in plan.notes
    )


def fuyu():
    text = {**SMALL, "model_type": "persimmon", "qk_layernorm": True}
    return AutoConfig.for_model(
        "fuyu", **SMALL, text_config=text, patch_size=4, image_token_id=5
    )


def with_an_image(model):
    ids = torch.randint(6, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, :4] = 5
    return {"input_ids": ids, "pixel_values": torch.randn(2, 4, 48), "use_cache": False}


def test_what_only_other_inputs_reach_is_refused_and_converted_with_them():
    with pytest.raises(
        ConversionRefused,
        match="no use of 'model.vision_embed_tokens.bias' and 1 more.*pass inputs",
    ):
        discover(make_proxy(fuyu()))
    proxy = make_proxy(fuyu(), inputs=with_an_image)
    plan = discover(proxy)
    assert {"vision_embed_tokens.weight", "vision_embed_tokens.bias"} <= {
        c.key for c in plan.centre
    }
    assert prove(plan, proxy).passed
    assert not plan.undetermined


def test_a_masked_frame_of_norms_that_stay_does_not_matter():
    plan = discover(
        make_proxy(AutoConfig.for_model("hubert", **SOUND), model_class=HubertForCTC)
    )
    assert any(norm.becomes_rms for norm in plan.norms)
    for c in plan.centre:
        assert "masked_spec_embed" not in c.key


def test_a_layer_whose_like_is_known_does_not_matter():
    """Attention over the one patch that the last stage has does not depend on queries
    and keys.
    """
    sizes = {
        "image_size": 16,
        "patch_size": 4,
        "window_size": 2,
        "depths": (1, 1, 1),
        "num_heads": (2, 2, 2),
    }
    config = AutoConfig.for_model("swinv2", **sizes, embed_dim=8)
    plan = discover(make_proxy(config))
    assert plan.undetermined
    for key in plan.undetermined:
        assert ".layers.2." in key


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_table_that_only_other_tables_are_tied_to_does_not_matter(is_tied):
    config = config_of("blenderbot")
    config.tie_word_embeddings = is_tied
    plan = discover(make_proxy(config, model_class=BlenderbotForConditionalGeneration))
    assert plan.undetermined == ("model.shared.weight",)
    for norm in plan.norms:
        assert norm.becomes_rms
    assert any(copy.source == "model.shared.weight" for copy in plan.copy) == is_tied
