"""Where a model comes from, as a user names it: a local folder, a hub id, or one of the
demos.
"""

import json
import re
import sys
import textwrap
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .demo import DEMO_MODELS, demo_path
from .paths import did_you_mean

# The weights of a checkpoint in one file, or the index of its shards.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
WEIGHTS += ("adapter_model.safetensors", "adapter_model.bin")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class SourceError(ValueError):
    """An error in the name of a model or in its folder, in one line."""


class Source(NamedTuple):
    """Where a model comes from: ``name`` as typed, ``where`` for `from_pretrained`."""

    name: str
    where: str
    is_local: bool
    trust_remote_code: bool

    @property
    def kwargs(self) -> dict:
        """Arguments for every `from_pretrained`; only a hub id may reach for the
        network.
        """
        return {
            "local_files_only": self.is_local or not hub_answers(),
            "trust_remote_code": self.trust_remote_code,
        }


@cache
def hub_answers() -> bool:
    """Whether the hub answers; tried once, as the client's retries take half a minute
    without a network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)  # any answer will do
    except Exception:
        # which one depends on the client underneath, and that has changed: no answer is
        # no answer
        return False
    return True


def find(model: str, trust_remote_code: bool = False) -> Source:
    """The source of a model that a user named; the network is not used.

    Raises:
        SourceError: it is neither a folder with a model, nor a hub id, nor one of the
            demos.
    """
    if not model.strip():
        raise SourceError(
            "MODEL is empty: pass a local folder, a hub id such as org/name, or demo:llama"
        )
    if model.startswith("demo:"):
        name = model.removeprefix("demo:")
        if name not in DEMO_MODELS:
            known = ", ".join(f"demo:{n}" for n in DEMO_MODELS)
            raise SourceError(
                f"no demo {name!r}: choose one of {known}{did_you_mean(name, DEMO_MODELS)}"
            )
        return Source(model, str(demo_path(name)), True, False)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise SourceError(
                    f"{model} is an adapter: merge_and_unload it into its base, save that, and pass it"
                )
            raise SourceError(
                f"{model} has no config.json: pass the folder that save_pretrained wrote"
            )
        return Source(model, str(folder), True, trust_remote_code)
    if folder.exists():
        raise SourceError(f"{model} is a file: pass the folder that holds it")
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        raise SourceError(
            f"there is no folder {model}: pass a local folder, a hub id such as org/name, or demo:llama"
        )
    return Source(model, model, False, trust_remote_code)


def _cached(hub_id: str, weights: bool) -> bool:
    """Whether the cache of the hub has the config of a model here, or all its weights."""
    from huggingface_hub import try_to_load_from_cache

    for name in WEIGHTS if weights else ("config.json",):
        if isinstance(found := try_to_load_from_cache(hub_id, name), str):
            shards = (
                json.loads(Path(found).read_text())["weight_map"].values()
                if "index" in name
                else ()
            )
            return all(Path(found).with_name(shard).is_file() for shard in shards)
    return False


@cache
def _say_download(name: str) -> None:
    print(f"downloading {name} from the Hub", file=sys.stderr, flush=True)


@contextmanager
def loading(source: Source, what: str, weights: bool = False):
    """Turn whatever transformers raises about a checkpoint into one line; a download is
    said where no bar shows it.
    """
    try:
        if (
            not (source.is_local or sys.stderr.isatty())
            and hub_answers()
            and not _cached(source.where, weights)
        ):
            _say_download(source.name)
        yield
    except Exception as error:
        hub = "check the id and the network, or pass a local folder or demo:llama"
        cure = "repair the folder, or pass another one" if source.is_local else hub
        if "trust_remote_code" in str(error):
            cure = "it brings its own code: read that, then pass --trust-remote-code"
        short = textwrap.shorten(str(error), 300, placeholder="...")
        told = f"{type(error).__name__}: {short}"
        if isinstance(error, OSError) and not source.is_local and not hub_answers():
            # the hub's own advice is another
            told = "the hub does not answer, and its cache here has not all of it"
        raise SourceError(
            f"cannot load {what} of {source.name}: {cure} ({told})"
        ) from error


def on_disk(source: Source, ignored: tuple[str, ...]) -> Source:
    """The same in a folder: a hub's files, but for those patterns, are downloaded into
    its cache.
    """
    if source.is_local:
        return source
    from huggingface_hub import snapshot_download

    with loading(source, "the files", weights="*.safetensors" not in ignored):
        where = snapshot_download(
            source.where, ignore_patterns=ignored, local_files_only=not hub_answers()
        )
    return source._replace(where=where, is_local=True)
