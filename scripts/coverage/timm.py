"""A stand-in for the vision towers that Transformers takes from timm, so that the types
around them can be built.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.utils import ModelOutput, is_timm_available


@dataclasses.dataclass
class StandInOutput(ModelOutput):
    last_hidden_state: Any = None
    logits: torch.Tensor | None = None
    hidden_states: tuple | None = None


class StandIn(transformers.PreTrainedModel):
    """In the place of a part that timm makes: patches of 8 x 8, projected, with no
    norm.
    """

    def __init__(self, config):
        super().__init__(config)
        made = (
            config.model_args
            if isinstance(getattr(config, "model_args", None), dict)
            else {}
        )
        width = getattr(config, "hidden_size", None) or made.get("embed_dim", 64)
        self.levels = len(made["out_indices"]) if made.get("features_only") else 0
        self.projection = torch.nn.Conv2d(3, width, 8, 8)
        self.head = torch.nn.Linear(width, getattr(config, "num_labels", 2) or 2)
        self.post_init()

    def forward(self, pixel_values, **kwargs):
        y = self.projection(pixel_values)
        levels = [
            torch.nn.functional.interpolate(y, scale_factor=2.0**-i)
            for i in range(self.levels)
        ]
        return StandInOutput(
            last_hidden_state=levels or y, logits=self.head(y.mean((2, 3)))
        )


def stand_in_for_timm() -> None:
    """Let the types that hold a model of timm be built without it; timm's own types are
    not built then.
    """
    if is_timm_available():
        return
    for model_type, name in MODEL_MAPPING_NAMES.items():
        if "TimmWrapperModel" in (name, *name):
            config = CONFIG_MAPPING[model_type]
            model = type("StandIn", (StandIn,), {"config_class": config})
            for auto in (
                transformers.AutoModel,
                transformers.AutoModelForImageClassification,
            ):
                auto.register(config, model, exist_ok=True)
