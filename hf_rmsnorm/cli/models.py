"""From MODEL on the command line to a model: its folder or hub id, its config, its weights, its tokenizer."""

import json
import os
import re
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..demo import DEMO_MODELS, demo_path
from .common import CliError, one_line

# The weights of a checkpoint in one file, or the index of its shards.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHTS += ("adapter_model.safetensors", "adapter_model.bin")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(NamedTuple):
    """Where a model comes from: ``name`` as typed, ``where`` for `from_pretrained`."""

    name: str
    where: str
    is_local: bool
    trust_remote_code: bool

    @property
    def kwargs(self) -> dict:
        """Arguments for every `from_pretrained`; only a hub id may reach for the network."""
        return {"local_files_only": self.is_local or not _hub_answers(), "trust_remote_code": self.trust_remote_code}


@cache
def _hub_answers() -> bool:
    """Asked once and without the client's own retries, which take half a minute where there is no network."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)  # any answer will do
    except Exception:  # which one depends on the client underneath, and that has changed: no answer is no answer
        return False
    return True


def find(model: str, trust_remote_code: bool = False) -> Source:
    """Resolve MODEL without touching the network."""
    if not model.strip():
        raise CliError("MODEL is empty: pass a local folder, a hub id such as org/name, or demo:llama")
    if model.startswith("demo:"):
        name = model.removeprefix("demo:")
        if name not in DEMO_MODELS:
            raise CliError(f"no demo {name!r}: choose one of {', '.join(f'demo:{n}' for n in DEMO_MODELS)}")
        return Source(model, str(demo_path(name)), True, False)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise CliError(f"{model} is an adapter: merge_and_unload it into its base, save that, and pass it")
            raise CliError(f"{model} has no config.json: pass the folder that save_pretrained wrote")
        return Source(model, str(folder), True, trust_remote_code)
    if folder.exists():
        raise CliError(f"{model} is a file: pass the folder that holds it")
    if not HUB_ID.fullmatch(model) or model.startswith("."):
        raise CliError(f"there is no folder {model}: pass a local folder, a hub id such as org/name, or demo:llama")
    return Source(model, model, False, trust_remote_code)


def _cached(hub_id: str, weights: bool) -> bool:
    """Whether the cache of the hub has the config of a model here, or all its weights."""
    from huggingface_hub import try_to_load_from_cache

    for name in WEIGHTS if weights else ("config.json",):
        if isinstance(found := try_to_load_from_cache(hub_id, name), str):
            shards = json.loads(Path(found).read_text())["weight_map"].values() if "index" in name else ()
            return all(Path(found).with_name(shard).is_file() for shard in shards)
    return False


@cache
def _say_download(name: str) -> None:
    print(f"downloading {name} from the Hub", file=sys.stderr, flush=True)


@contextmanager
def _loading(source: Source, what: str, weights: bool = False):
    """Turn whatever transformers raises about a checkpoint into one line; a download is said where no bar shows it."""
    try:
        if not (source.is_local or sys.stderr.isatty()) and _hub_answers() and not _cached(source.where, weights):
            _say_download(source.name)
        yield
    except Exception as error:
        hub = "check the id and the network, or pass a local folder or demo:llama"
        cure = "mend the folder, or pass another one" if source.is_local else hub
        if "trust_remote_code" in str(error):
            cure = "it brings its own code: read that, then pass --trust-remote-code"
        told = f"{type(error).__name__}: {one_line(error, 300)}"
        if isinstance(error, OSError) and not source.is_local and not _hub_answers():  # the hub's own advice is another
            told = "the hub does not answer, and its cache here has not all of it"
        raise CliError(f"cannot load {what} of {source.name}: {cure} ({told})") from error


def on_disk(source: Source, ignored: tuple[str, ...]) -> Source:
    """The same in a folder: a hub's files, but for those patterns, are downloaded into its cache."""
    if source.is_local:
        return source
    from huggingface_hub import snapshot_download

    with _loading(source, "the files", weights="*.safetensors" not in ignored):
        where = snapshot_download(source.where, ignore_patterns=ignored, local_files_only=not _hub_answers())
    return source._replace(where=where, is_local=True)


def _config_and_class(source: Source):
    """The config, and the class that it was saved from, where transformers has it; else an auto class that takes it."""
    import transformers

    with _loading(source, "the config"):
        config = transformers.AutoConfig.from_pretrained(source.where, **source.kwargs)
    remote = getattr(config, "auto_map", None) or {}
    for name in () if remote else getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return config, named
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"):
        cls = getattr(transformers, auto)
        if type(config) in cls._model_mapping or auto in remote:
            return config, cls
    return config, transformers.AutoModel


def empty_model(source: Source):
    """The model's modules without their weights: on the meta device, so that the size does not matter."""
    from accelerate import init_empty_weights

    config, cls = _config_and_class(source)
    with _loading(source, "the modules"), init_empty_weights():
        if hasattr(cls, "from_config"):  # an auto class
            return cls.from_config(config, trust_remote_code=source.trust_remote_code).eval()
        return cls(config).eval()


def load_model(source: Source, dtype: str, device, instead: str = ""):
    """A model with its weights, in evaluation mode; `instead` is said of one that takes something else than a text."""
    _, cls = _config_and_class(source)
    with _loading(source, "the weights", weights=True):
        model = cls.from_pretrained(source.where, dtype=dtype, **source.kwargs).to(device).eval()
    if instead and (takes := model.main_input_name) != "input_ids":
        raise CliError(f"{source.name} is a {type(model).__name__}, which takes {takes} and not a text: {instead}")
    return model


def load_tokenizer(source: Source):
    """The tokenizer, or None where the checkpoint has none."""
    from transformers import AutoTokenizer

    if source.is_local and not any(any(Path(source.where).glob(names)) for names in ("*token*", "vocab*")):
        return None
    with _loading(source, "the tokenizer"):
        return AutoTokenizer.from_pretrained(source.where, **source.kwargs)


def tokens(model, tokenizer, text: str, limit: int | None):
    """Token ids of text, (1, n) on the model's device, n at most limit; seeded random ids without a tokenizer."""
    import torch

    if tokenizer is None:
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (1, limit or 64), generator=torch.Generator().manual_seed(0))
    else:
        # No token is as long as that, and tokenizers take their time over a whole book.
        ids = tokenizer(text[: 40 * limit] if limit else text, return_tensors="pt").input_ids[:, :limit]
        if ids.shape[1] == 0:
            raise CliError("the prompt has no tokens: pass some text with --prompt")
    return ids.to(model.device)


def other_inputs(model, file: Path | None) -> dict | None:
    """What a model is given that needs more than a text: the tensors of `file`, else random images or audio."""
    from ..verification.context import default_inputs, in_dtype_of

    if file is not None:
        given = _tensors(file)
    else:
        try:
            given = default_inputs(model)
        except ValueError as error:
            raise CliError(str(error).replace("pass", "pass its") + " with --inputs") from error
        if not set(given) - {"input_ids", "decoder_input_ids", "use_cache"}:
            return None
    return in_dtype_of(model, given)


def _tensors(file: Path) -> dict:
    from safetensors.torch import load_file

    try:
        given = load_file(file)
    except Exception as error:  # of safetensors or of the system
        told = f"{one_line(error, 200)}; pass a .safetensors file of the arguments of the model's forward, by name"
        raise CliError(f"cannot read {file}: {told}") from error
    if not given:
        raise CliError(f"{file} holds no tensors: pass the arguments of the model's forward, by name")
    return given


def quieten():
    """No progress bars and no advice from transformers: what matters is printed by the subcommand, and a download."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from huggingface_hub import constants
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # and those of downloads
    if sys.stderr.isatty() and not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()
