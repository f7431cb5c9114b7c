"""Axolotl's plugin: its YAML names `hf_rmsnorm.integrations.axolotl.HfRmsNormPlugin`
under ``plugins:``.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from .trainer import HfRmsNormCallback


class HfRmsNormArgs(BaseModel):
    """The option ``hf_rmsnorm:`` of the YAML, with the arguments of
    `HfRmsNormCallback`.
    """

    hf_rmsnorm: dict[str, Any] = {}

    @field_validator("hf_rmsnorm")
    @classmethod
    def _known(cls, options: dict[str, Any]) -> dict[str, Any]:
        # a wrong option is an error now, not after the model is loaded
        HfRmsNormCallback(**options)
        return options


class HfRmsNormPlugin(BasePlugin):
    """Gives each trainer of Axolotl's the callback, which patches after adapters are
    there and before FSDP wraps.
    """

    def get_input_args(self) -> str:
        """The name of the class that checks the option of the YAML."""
        return f"{__name__}.HfRmsNormArgs"

    def add_callbacks_pre_trainer(self, cfg, model) -> list[HfRmsNormCallback]:
        """The callback for the next trainer; `cfg` is the YAML, `model` is not changed."""
        return [HfRmsNormCallback(**(cfg.hf_rmsnorm or {}))]
