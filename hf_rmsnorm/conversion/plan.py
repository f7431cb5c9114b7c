"""The steps of a conversion, which `proxy/discover.py` finds and `tensors.py` carries out.

First their keys and blocks are those of the proxy's own checkpoint. On that they are
proven. Then `in_checkpoint` gives them those of the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Centre:
    """Subtract its mean from each block of `block` elements along `axis` of a tensor
    that writes to the stream.
    """

    key: str  # of a tensor in the checkpoint
    axis: int
    block: int
    # indices of the blocks to centre, in order; None for all
    blocks: tuple[int, ...] | None = None

    @classmethod
    def of(cls, key: str, axis: int, block: int, blocks: list[int] | None) -> Centre:
        """The step of a tensor by the arguments of `centre_`."""
        return cls(key, axis, block, None if blocks is None else tuple(blocks))

    @property
    def how(self) -> dict:
        """The entry of the record, and the arguments of its `centre_`."""
        blocks = None if self.blocks is None else list(self.blocks)
        return {"axis": self.axis, "block": self.block, "blocks": blocks}


@dataclass(frozen=True)
class Copy:
    """A new tensor `key` with the value that `source` has in the source checkpoint: an
    untied head.
    """

    key: str
    source: str


@dataclass(frozen=True)
class NormRecord:
    """One norm of the model: its eps, and whether it may be an RMSNorm after the
    conversion.
    """

    path: str
    eps: float
    becomes_rms: bool  # its input has zero mean after the conversion
    reason: str = ""  # why it stays a LayerNorm


def rms_norms(norms: Iterable[NormRecord]) -> dict[str, dict]:
    """Module path -> ``{"eps"}`` of those that become RMSNorms, as the record has them."""
    return {norm.path: {"eps": norm.eps} for norm in norms if norm.becomes_rms}


@dataclass(frozen=True)
class CentringPlan:
    """Everything that is done to a checkpoint; a tensor that no step names is copied.
    Equal plans give equal bytes.

    Args:
        config: keys to set in config.json (``tie_word_embeddings`` and the record of
            this package).
        undetermined: tensors that no output depends on; they are copied.
        notes: sentences for people: what changes besides the norms,
            ``output_hidden_states differs`` and the like.
    """

    centre: tuple[Centre, ...] = ()
    copy: tuple[Copy, ...] = ()
    norms: tuple[NormRecord, ...] = ()
    config: dict = field(default_factory=dict)
    undetermined: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
