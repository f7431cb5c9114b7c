"""The steps of a conversion, in the checkpoint's own keys: found on a proxy model,
carried out by streaming.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


class ConversionRefused(ValueError):
    """A model cannot be converted; the message is one line that names it, says why and
    what can be done.
    """


class ConversionError(Exception):
    """An error and its cure, in one line. DST does not exist and SRC is as it was."""


class BadTensor(ConversionError):
    """A tensor of the source holds what cannot be converted."""


AGAIN = "convert again, it goes on where it stopped"
CURES = {
    errno.ENOSPC: f"free some space and {AGAIN}",
    errno.EDQUOT: f"free some of the quota and {AGAIN}",
    errno.EFBIG: f"raise the limit of the file size and {AGAIN}",
    errno.ENOENT: "put it there, or repair the link that leads to it, and convert again",
    errno.EROFS: "choose a DST on a file system that can be written",
    errno.EACCES: "give permission to it, or choose another DST",
    errno.EPERM: "give permission to it, or choose another DST",
}


@contextmanager
def clear_errors(where: Path) -> Iterator[None]:
    """Turn an error of the file system into one line with the cure."""
    try:
        yield
    except OSError as error:
        reason = " ".join((error.strerror or str(error)).split())
        cure = CURES.get(error.errno, f"see to it and {AGAIN}")
        reason = reason[:1].lower() + reason[1:]
        raise ConversionError(f"{error.filename or where}: {reason}: {cure}") from error


@dataclass(frozen=True)
class Centre:
    """Subtract its mean from each block of `block` elements along `axis` of a tensor
    that writes to the stream.
    """

    key: str
    axis: int
    block: int
    # indices of the blocks to centre, in order; None for all
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scale:
    """Multiply a tensor along `axis` by the one-dimensional tensor `by`, whose own
    value then becomes ones.

    So a layer scale is folded into the linear before it; it happens before any `Centre`
    of the same tensor.
    """

    key: str
    axis: int
    by: str


@dataclass(frozen=True)
class Copy:
    """A new tensor `key` with the value that `source` has in the source checkpoint: an
    untied head.
    """

    key: str
    source: str


@dataclass(frozen=True)
class NormRecord:
    """One norm of the model: its size and eps, and whether it may be an RMSNorm after
    the conversion.
    """

    path: str
    hidden_size: int
    eps: float
    becomes_rms: bool  # its input has zero mean after the conversion
    reason: str = ""  # why it stays a LayerNorm


def rms_norms(norms: Iterable[NormRecord]) -> dict[str, dict]:
    """Module path -> ``{"eps", "hidden_size"}`` of those that become RMSNorms, as the record has them."""
    return {
        n.path: {"eps": n.eps, "hidden_size": n.hidden_size}
        for n in norms
        if n.becomes_rms
    }


@dataclass(frozen=True)
class CentringPlan:
    """Everything that is done to a checkpoint; a tensor that no step names is copied.
    Equal plans give equal bytes.

    Args:
        config: keys to set in config.json (``tie_word_embeddings`` and the record of
            this package).
        undetermined: tensors that no output depends on; they are copied.
        margins: how clearly residual weights differ from the rest: ``{"invariant_max":
            ..., "dependent_min": ...}``.
        notes: sentences for people: what changes besides the norms,
            ``output_hidden_states differs`` and the like.
    """

    centre: tuple[Centre, ...] = ()
    scale: tuple[Scale, ...] = ()
    copy: tuple[Copy, ...] = ()
    norms: tuple[NormRecord, ...] = ()
    config: dict = field(default_factory=dict)
    undetermined: tuple[str, ...] = ()
    margins: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal plan."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CentringPlan:
        """The plan that `to_json` wrote; ValueError for any other text."""
        try:
            data = json.loads(text)
            for name, kind in _STEPS.items():
                data[name] = [kind(**_tuples(step)) for step in data[name]]
            return cls(**_tuples(data))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"this is no conversion plan: {type(error).__name__}: {error}"
            ) from error


_STEPS = {"centre": Centre, "scale": Scale, "copy": Copy, "norms": NormRecord}


def _tuples(data: dict) -> dict:
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.items()
    }
