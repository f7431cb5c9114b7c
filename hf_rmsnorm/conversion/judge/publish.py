"""The last step before a folder becomes DST: it is judged, and its model card says what was done."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import transformers

from ... import __version__
from ..checkpoint.shard import ConversionError
from .folder import Verification

SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[^/]+)$")  # in the cache of the hub


class VerificationFailed(ConversionError):
    """The written checkpoint does not compute what the source does; it was not published."""

    def __init__(self, text: str, verification: Verification):
        super().__init__(text)
        self.verification = verification


def provenance(src: str | os.PathLike) -> dict[str, str]:
    """Where a result comes from and what made it, for its config, its shards' metadata and its model card."""
    source = Path(os.path.realpath(src))
    cached = SNAPSHOT.search(source.as_posix())
    return {
        "source": f"{cached['id'].replace('--', '/')}@{cached['commit']}" if cached else source.name,
        "converted_by": f"hf-rmsnorm {__version__}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def add_to_card(folder: Path, heading: str, text: str, made: dict[str, str]) -> None:
    """Put a section at the end of the model card, instead of one of this heading that is there.

    Args:
        made: what `provenance` says.
    """
    card = folder / "README.md"
    # As bytes and not as text: neither line ends nor what is no UTF-8 changes.
    before = card.read_bytes().decode("utf-8", "surrogateescape") if card.exists() else ""
    before = re.sub(rf"(?ms)^{re.escape(heading)}[ \r]*\n.*?(?=^## |\Z)", "", before).rstrip()
    by = f"{made['converted_by']}, PyTorch {made['torch']} and Transformers {made['transformers']}"
    section = f"{heading}\n\n{text.rstrip()}\n\nMade from `{made['source']}` with {by}.\n"
    card.write_bytes((f"{before}\n\n{section}" if before else section).encode("utf-8", "surrogateescape"))
