"""Where a model comes from, as a user names it: a local folder, a hub id, or one of the
demos.
"""

import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .demo import DEMO_MODELS, demo_path
from .paths import did_you_mean, error_line

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class SourceError(ValueError):
    """An error in the name of a model or in its folder, in one line."""


class Location(NamedTuple):
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


def find(model: str, trust_remote_code: bool = False) -> Location:
    """The source of a model that a user named; the network is not used.

    Raises:
        SourceError: it is neither a folder with a model, nor a hub id, nor one of the
            demos.
    """
    if model.startswith("demo:"):
        name = model.removeprefix("demo:")
        if name not in DEMO_MODELS:
            known = ", ".join(f"demo:{name}" for name in DEMO_MODELS)
            like = did_you_mean(name, DEMO_MODELS)
            raise SourceError(f"no demo {name!r}: choose one of {known}{like}")
        return Location(model, str(demo_path(name)), True, False)
    folder = Path(model).expanduser()
    if model.strip() and folder.is_dir():
        if (folder / "config.json").is_file():
            return Location(model, str(folder), True, trust_remote_code)
        fault = "has no config.json: pass the folder that save_pretrained wrote"
        if (folder / "adapter_config.json").is_file():
            fault = "is an adapter: merge_and_unload it into its base, save that, and pass it"
        raise SourceError(f"{model} {fault}")
    if folder.is_file():
        raise SourceError(f"{model} is a file: pass the folder that holds it")
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        what = f"there is no folder {model}" if model.strip() else "MODEL is empty"
        raise SourceError(
            f"{what}: pass a local folder, a hub id such as org/name, or demo:llama"
        )
    return Location(model, model, False, trust_remote_code)


@cache
def _say_that_it_loads(name: str) -> None:
    print(f"loading {name} from the Hub or its cache", file=sys.stderr, flush=True)


@contextmanager
def loading(source: Location, what: str):
    """Turn whatever transformers raises about a checkpoint into one line; where no bar
    shows a download, one line says that it may come.
    """
    if not (source.is_local or sys.stderr.isatty()) and hub_answers():
        _say_that_it_loads(source.name)
    try:
        yield
    except Exception as error:
        text = error_line(error, 300)
        cure = "check the id and the network, or pass a local folder or demo:llama"
        if source.is_local:
            cure = "repair the folder, or pass another one"
        elif isinstance(error, OSError) and not hub_answers():
            # the hub's own advice is another
            text = "the hub does not answer, and its cache here has not all of it"
        if "trust_remote_code" in str(error):
            cure = "it brings its own code: read that, then pass --trust-remote-code"
        raise SourceError(
            f"cannot load {what} of {source.name}: {cure} ({text})"
        ) from error


def without_weights(make: Callable):
    """Return the model of ``make()`` with its parameters on the meta device.

    It is made there, as where Transformers loads a model. If its code reads values of a
    tensor as it is made, each parameter is made on the CPU and dropped at once.
    """
    import torch
    from accelerate import init_empty_weights

    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
    # torch has refused to read a tensor that has no values
    with init_empty_weights():
        return make()


def on_disk(source: Location, ignored: tuple[str, ...]) -> Location:
    """The same in a folder: a hub's files, but for those patterns, are downloaded into
    its cache.
    """
    if source.is_local:
        return source
    from huggingface_hub import snapshot_download

    with loading(source, "the files"):
        where = snapshot_download(
            source.where, ignore_patterns=ignored, local_files_only=not hub_answers()
        )
    return source._replace(where=where, is_local=True)
