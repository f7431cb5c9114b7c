"""What every conversion is between its plan and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..checkpoint.layout import ShardLayout
from ..checkpoint.values import Values
from ..judge.folder import Verification
from ..judge.pair import Running


@dataclass(frozen=True)
class PlannedConversion(ABC):
    """A conversion that is planned and proven; nothing is written yet.

    Args:
        made: what `provenance` says of its source.
    """

    made: dict[str, str]
    keeps_shards: ClassVar[bool] = False  # whether the result's shards are the source's

    @abstractmethod
    def to_dict(self) -> dict:
        """Plain values for JSON."""

    @abstractmethod
    def result(self, values: Values, max_shard_size: int | str | None) -> tuple[ShardLayout, str | None]:
        """The tensors and the text of config.json that are made of an open checkpoint; None for its own config.

        Args:
            max_shard_size: where the shards are not those of the source; None for what suits.

        Raises:
            ConversionError: the checkpoint is not the one that was planned for.
        """

    @abstractmethod
    def judge(self, src: str | Path, folder: Path, how: Running) -> tuple[Verification, PlannedConversion]:
        """The verdict on what was written, and the plan as it was carried out."""

    @abstractmethod
    def describe(self, folder: Path, verdict: Verification) -> None:
        """Add to what passed: a section of its model card, and the plan."""
