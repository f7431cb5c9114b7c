"""A checkpoint as a folder on this disk: a path, one of the demos, or a hub id, whose files are downloaded first."""

import os
from pathlib import Path

from torch.nn import Module

from ..sources import SourceError, find, on_disk
from .checkpoint.shard import ConversionError
from .checkpoint.source import OTHER_WEIGHTS
from .plan import ConversionRefused

CHECKPOINT = "pass the folder of a checkpoint, a hub id, or demo:gpt2"


def check_source(argument: str, source) -> None:
    """Refuse what cannot name a checkpoint."""
    _check_path(argument, source, CHECKPOINT)
    if _is_here(source) and not os.path.isdir(os.path.expanduser(source)):
        raise ConversionError(f"{argument}: {source} is a file: pass the folder that holds it")


def check_destination(dst) -> None:
    """Refuse what cannot name a folder."""
    _check_path("dst", dst, "pass the path of the folder to make")


def local(source) -> Path | None:
    """The path of a checkpoint that is on this disk; None for a word that has to be looked up."""
    if not isinstance(source, str) or _is_here(source):
        return Path(source).expanduser()
    return None


def folder_of(source, *, allow_pickle: bool = False, weights: bool = True) -> Path:
    """The folder of a checkpoint that `check_source` has let pass; a hub's files are downloaded into its cache.

    Raises:
        ConversionError: it leads to no checkpoint, or the hub does not answer.
    """
    if (path := local(source)) is not None:
        return path
    try:
        return Path(on_disk(find(source), ignored(allow_pickle, weights)).where)
    except SourceError as error:
        raise ConversionError(str(error)) from None


def ignored(allow_pickle: bool, weights: bool) -> tuple[str, ...]:
    """Patterns of the hub's files that a conversion does not read."""
    kinds = OTHER_WEIGHTS - {".bin"} if allow_pickle and weights else OTHER_WEIGHTS
    safetensors = ("*/*.safetensors",) if weights else ("*.safetensors", "*.index.json")  # in folders: of earlier steps
    return (*(f"*{kind}" for kind in sorted(kinds)), *safetensors)


def _is_here(source) -> bool:
    return os.path.exists(os.path.expanduser(source))


def _check_path(argument: str, path, cure: str) -> None:
    if isinstance(path, (str, os.PathLike)):
        return
    if isinstance(path, Module) and cure == CHECKPOINT:
        cure = "pass the folder of a checkpoint; save_pretrained writes one"
    kind = type(path).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    what = "None" if path is None else f"{article} {kind}"
    raise ConversionRefused(f"{argument} is {what}: {cure}")
