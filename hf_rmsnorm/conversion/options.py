"""The options of a conversion: `convert_checkpoint` and `plan_conversion` make them of
their keyword arguments, before anything is read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import ConversionRefused

TARGETS = ("same", "native")
VERIFY = (True, False, "full")
SIZE = re.compile(r"[1-9]\d*|\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)


@dataclass(frozen=True)
class ConversionOptions:
    """How a checkpoint is read, planned and verified.

    Args:
        target: ``"same"``: keep the checkpoint's architecture and centre all that
            writes to its residual stream. ``"native"``: write an architecture that uses
            RMSNorm and computes the same, if there is one.
        allow_pickle: read ``pytorch_model.bin`` if there is no safetensors file,
            without running code in it.
        trust_remote_code: run the model code that comes with the folder.
        model_class: the class to load it with, instead of the one its config names.
        inputs: makes keyword arguments of the forward for a model that takes other than
            token ids and pixels.
        prompts: texts to verify on, if there is a tokenizer.
        verify: run source and result after writing, and publish only what passes. Of a
            large checkpoint a few tokens are run; ``"full"`` runs all texts.
        max_shard_size: of a file of weights, in bytes or as ``"2GB"``; as of
            `save_pretrained`.
    """

    target: str = "same"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    model_class: type | None = None
    inputs: Callable[[torch.nn.Module], dict] | None = None
    prompts: list[str] | None = None
    verify: bool | str = True
    max_shard_size: int | str = "2GB"

    def __post_init__(self):
        if self.target not in TARGETS:
            known = ", ".join(TARGETS)
            raise ConversionRefused(f"target={self.target!r}: choose one of {known}")
        if self.is_native and (self.model_class or self.inputs):
            raise ConversionRefused(
                "target='native' takes causal language models alone: leave out "
                "model_class and inputs"
            )
        if self.verify not in VERIFY:
            raise ConversionRefused(
                f"verify={self.verify!r}: choose one of True, False, 'full'"
            )
        if isinstance(self.prompts, str):
            raise ConversionRefused(f"prompts={self.prompts!r}: pass a list of texts")
        if not SIZE.fullmatch(str(self.max_shard_size)):
            raise ConversionRefused(
                f"max_shard_size={self.max_shard_size!r}: pass a number of bytes, or a "
                "size such as '500MB' or '2GB'"
            )

    @property
    def is_native(self) -> bool:
        return self.target == "native"

    @property
    def parsed_max_shard_size(self) -> int | str:
        """`max_shard_size` as a number, or with its unit."""
        size = str(self.max_shard_size)
        return int(size) if size.isdecimal() else size
