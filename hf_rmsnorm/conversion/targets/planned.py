"""What every kind of planned conversion answers: `centred.py` and `native.py` have one
each, that `plan_conversion` returns and `convert_checkpoint` carries out.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from ...converted.record import RECORD_KEY
from ..checkpoint.source import Checkpoint
from ..tensors import Lazy
from ..verify.compare import Verification


@dataclass(frozen=True)
class PlannedConversion(ABC):
    """A conversion that is planned and proven; nothing is written yet.

    Args:
        provenance: of the result, as the function of this name returns it.
    """

    provenance: dict[str, str]
    # Parameters of the model that the checkpoint lacks. None: weights were not there, so
    # the keys are those of the model's class.
    missing = ()

    @property
    def metadata(self) -> dict[str, str]:
        """Its record for the header of each shard."""
        record = json.dumps(self.provenance, sort_keys=True)
        return {"format": "pt", RECORD_KEY: record}

    @abstractmethod
    def to_dict(self) -> dict:
        """Plain values for JSON."""

    @abstractmethod
    def config(self, source: Checkpoint) -> str:
        """The text of the config.json that is made of an open checkpoint's."""

    @abstractmethod
    def tensors(self, source: Checkpoint) -> dict[str, Lazy]:
        """The tensors that are made of those of an open checkpoint."""

    @abstractmethod
    def describe(self, folder: Path, verification: Verification) -> None:
        """Add a section to the model card of a folder that passed, and the plan."""
