"""The origin of a result, as written into it: its source, the versions that made it,
and the section of its model card. Both kinds of `PlannedConversion` write it.
"""

import re
from pathlib import Path

import torch
import transformers

from .. import __version__
from ..converted.record import RECORD_KEY
from .folders import CONFIG, read_json

# in the cache of the hub
SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[^/]+)$")
BY = (
    "Made from `{source}` with {converted_by}, PyTorch {torch} and Transformers "
    "{transformers}."
)


def provenance(src: Path) -> dict[str, str]:
    """The source of a result and the versions that made it, for its config, its shards'
    metadata and its model card.
    """
    return {
        "source": _origin(src.resolve()),
        "converted_by": f"hf-rmsnorm {__version__}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _origin(folder: Path) -> str:
    """The source of an earlier conversion of a folder; else its name on the hub, or the
    folder's name.
    """
    record = read_json(folder / CONFIG).get(RECORD_KEY) or {}
    if "source" in record:
        return record["source"]
    cached = SNAPSHOT.search(folder.as_posix())
    if cached is None:
        return folder.name
    return f"{cached['id']}@{cached['commit']}".replace("--", "/")


def add_to_card(
    folder: Path, heading: str, text: str, origin: dict[str, str], *proofs: object
) -> None:
    """Put a section at the end of the model card, instead of one of this heading; the
    proofs are set below the text.
    """
    card = folder / "README.md"
    # As bytes and not as text: neither line ends nor bytes that are not UTF-8 change.
    before = card.read_bytes() if card.exists() else b""
    old = rf"(?ms)^{re.escape(heading)}[ \r]*\n.*?(?=^## |\Z)"
    before = re.sub(old.encode(), b"", before).rstrip()
    shown = "\n".join(["```", *map(str, proofs), "```"])
    section = f"{heading}\n\n{text}\n\n{shown}\n\n{BY.format(**origin)}\n"
    card.write_bytes(b"\n\n".join(filter(None, (before, section.encode()))))
