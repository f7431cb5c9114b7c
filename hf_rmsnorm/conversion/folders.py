"""A checkpoint as a folder on this disk: a path, a demo or a hub id, which is
downloaded first; and its files.
"""

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from torch.nn import Module

from ..sources import SourceError, find, on_disk
from .plan import ConversionError, ConversionRefused

CHECKPOINT = "pass the folder of a checkpoint, a hub id, or demo:gpt2"
INDEX = "model.safetensors.index.json"
# As Transformers and PEFT look for the weights.
MODEL_FILES = (
    "model.safetensors",
    INDEX,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# Suffixes of weights in other formats; those of exports are of a whole model.
EXPORTS = {
    ".ckpt",
    ".h5",
    ".gguf",
    ".ggml",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
}
PICKLES = {".bin", ".pt", ".pth"}
OTHER_WEIGHTS = EXPORTS | PICKLES
WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "consolidated*.pth")
TRAINING = (
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "random_states*",
    "scaler.pt",
)
# folders with this model, as it was or exported
COPIES = ("checkpoint*", "global_step*", "openvino*", "original")
NOT_OF_THE_MODEL = {".git", ".cache", "__pycache__"}
OLD = "weights of the model before the conversion"
OF_TRAINING = "state of the training before the conversion"
OF_ADAPTER = (
    "an adapter of the model before the conversion: convert it with convert_adapter"
)
UNKNOWN = "may hold weights of the model before the conversion: copy it by hand if it does not"


def check_source(argument: str, source) -> None:
    """Refuse what cannot name a checkpoint."""
    _check_path(argument, source, CHECKPOINT)
    if _is_here(source) and not os.path.isdir(os.path.expanduser(source)):
        raise ConversionError(
            f"{argument}: {source} is a file: pass the folder that holds it"
        )


def check_destination(dst) -> None:
    """Refuse what cannot name a folder."""
    _check_path("dst", dst, "pass the path of the folder to make")


def destination(src: str | os.PathLike | None, dst: str | os.PathLike) -> Path:
    """DST as an absolute path; refused inside of the source, and if it exists or cannot
    be made.
    """
    dst = Path(os.path.abspath(dst))
    if src is not None and Path(os.path.realpath(dst.parent)).is_relative_to(
        os.path.realpath(src)
    ):
        raise ConversionError(
            f"{dst}: lies inside of the source, which is only read: choose another DST"
        )
    if os.path.lexists(dst) and not os.path.lexists(f"{dst}.converting"):
        raise exists_already(dst)
    home = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        what = (
            "is read-only, or gives no permission to write"
            if home.is_dir()
            else "is no folder"
        )
        raise ConversionError(f"{dst}: {home} {what}: choose another DST")
    return dst


def exists_already(dst: Path) -> ConversionError:
    return ConversionError(
        f"{dst}: exists already: choose another DST, or move it away"
    )


def local(source) -> Path | None:
    """The path of a checkpoint that is on this disk; None for a word that has to be
    looked up.
    """
    if not isinstance(source, str) or _is_here(source):
        return Path(source).expanduser()
    return None


def folder_of(source, *, allow_pickle: bool = False, weights: bool = True) -> Path:
    """The folder of a checkpoint that `check_source` has let pass; a hub's files are
    downloaded into its cache.

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
    # in folders: of earlier steps
    safetensors = ("*/*.safetensors",) if weights else ("*.safetensors", "*.index.json")
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


def files_of(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Paths of all files below a folder and the folders that it links to; and those
    left out, with the reason.
    """
    if not folder.is_dir():
        raise ConversionError(
            f"{folder}: no such folder: pass a local checkpoint folder"
        )
    files: list[str] = []
    left_out: dict[str, str] = {}
    followed = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        here = os.path.relpath(parent, folder)
        for name in sorted(folders):
            path = os.path.join(parent, name)
            if reason := _why_not_followed(path, followed):
                left_out[os.path.normpath(os.path.join(here, name))] = reason
                folders.remove(name)
            followed.add(os.path.realpath(path))
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            relative = os.path.normpath(os.path.join(here, name))
            if os.path.exists(path) and not os.path.isfile(path):
                left_out[relative] = "no regular file"
            else:
                files.append(relative)
    return files, left_out


def _why_not_followed(path: str, followed: set[str]) -> str:
    if os.path.basename(path) in NOT_OF_THE_MODEL:
        return "not of the model"
    if os.path.islink(path) and os.path.realpath(path) in followed:
        return "a link to a folder that is in the checkpoint already"
    return ""


def config_of_folder(folder: Path, files: list[str], adapter: bool) -> tuple[str, dict]:
    """Name of the config and the config; refused without one, and if the weights are
    quantised.
    """
    name = ADAPTER_CONFIG if adapter else MODEL_CONFIG
    if name not in files and adapter:
        raise ConversionError(f"{folder}: no {name}: pass the folder of a PEFT adapter")
    if name not in files:
        cure = 'pass the folder of a Transformers checkpoint, such as hf_rmsnorm.demo.demo_path("gpt2")'
        raise ConversionRefused(f"{folder} has no {name}: {cure}")
    if not adapter and ADAPTER_CONFIG in files:
        cure = "move the adapter to a folder of its own, and convert it with convert_adapter"
        raise ConversionError(
            f"{folder}: holds an adapter too, whose base from_pretrained would load: {cure}"
        )
    config = read_json(folder / name)
    for part in (config, *config.values()):
        if isinstance(part, dict) and part.get("quantization_config"):
            cure = "convert the unquantised model, then quantise that"
            raise ConversionRefused(f"{folder / name}: quantised: {cure}")
    return name, config


def main_file(
    folder: Path,
    files: list[str],
    config: dict,
    adapter: bool,
    weights: bool,
    allow_pickle: bool,
) -> str | None:
    """The file of the weights or of their index; None if there is none and no `weights`
    are wanted.
    """
    named = config.get("transformers_weights")
    candidates = (str(named),) if named else ADAPTER_FILES if adapter else MODEL_FILES
    main = next((name for name in candidates if name in files), None)
    in_folder = any(
        name.endswith((".safetensors", ".bin"))
        for name in files
        if not os.path.dirname(name)
    )
    if main is None and (weights or in_folder):
        raise ConversionError(f"{folder}: {_without_weights(files, candidates)}")
    if main in (*MODEL_FILES[2:], ADAPTER_FILES[1]) and not allow_pickle:
        cure = "pass allow_pickle=True to read them by torch.load(weights_only=True), or save them as safetensors"
        raise ConversionError(
            f"{folder}: the weights are pickles, which can run code: {cure}"
        )
    return main


def _without_weights(files: list[str], candidates: tuple[str, ...]) -> str:
    """Why Transformers would find no weights among these files, and what to do."""
    here = [name for name in files if not os.path.dirname(name)]
    shard = next(
        (
            name
            for name in here
            if fnmatch(name, "*-of-*.safetensors") or fnmatch(name, "*-of-*.bin")
        ),
        None,
    )
    if shard is not None:
        return f"{shard} is there, and no index of the shards: download {INDEX} too"
    variant = next(
        (name for name in here if fnmatch(name, "model.*.safetensors")), None
    )
    if variant is not None:
        return f"Transformers loads {variant} as a variant alone: rename it to model.safetensors"
    missing = (
        f"{candidates[0]} is not there"
        if len(candidates) == 1
        else f"neither {' nor '.join(candidates)} is there"
    )
    return f"{missing}: download the weights, or write them by save_pretrained"


def shards_of(folder: Path, main: str | None) -> tuple[dict | None, list[str]]:
    """The index, and the files that it names; refused if it is broken, or if a file is
    missing or out of the folder.
    """
    if main is None or not main.endswith(".json"):
        return None, [] if main is None else [main]
    path = folder / main
    index = read_json(path)
    names = index.get("weight_map")
    is_map = (
        isinstance(names, dict)
        and names
        and all(isinstance(name, str) for name in names.values())
    )
    if not is_map:
        raise ConversionError(
            f"{path}: no weight_map from tensors to files: download it again"
        )
    for key, name in names.items():
        if (
            os.path.isabs(name)
            or os.path.normpath(name) != name
            or name.startswith("..")
        ):
            raise ConversionError(
                f"{path}: {key} is in {name!r}, which is no file in its folder: download it again"
            )
        if not (folder / name).is_file():
            raise ConversionError(
                f"{path}: {key} is in {name}, which is missing: download that file"
            )
    return index, sorted(set(names.values()))


def why_not_copied(folder: Path, name: str, config: dict) -> str:
    """Why a file is no part of the result; "" for one that is copied.

    A file in a subfolder is another module's, unless the folder holds a copy of this
    model or an export.
    """
    *parents, base = Path(name).parts
    suffix = Path(base.removesuffix(".index.json")).suffix
    above = [folder.joinpath(*parents[: i + 1]) for i in range(len(parents))]
    of_model = not parents or any(_is_copy(path, config) for path in above)
    if of_model and _matches(base, TRAINING):
        return OF_TRAINING
    if fnmatch(base, "adapter_model.*"):
        return OF_ADAPTER
    if suffix in EXPORTS or (of_model and _matches(base, WEIGHTS)):
        return OLD
    return UNKNOWN if of_model and suffix in PICKLES else ""


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_copy(folder: Path, config: dict) -> bool:
    """Whether a subfolder holds this model, from earlier in its training or exported."""
    if any(fnmatch(folder.name, pattern) for pattern in COPIES):
        return True
    if not (folder / MODEL_CONFIG).is_file():
        return False
    other, wanted = read_json(folder / MODEL_CONFIG), config.get("architectures")
    same_type = "model_type" in other and other["model_type"] == config.get(
        "model_type"
    )
    return same_type and other.get("architectures", wanted) == wanted


def read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(
            f"{path}: not JSON ({error}): download it again"
        ) from error
    if not isinstance(data, dict):
        raise ConversionError(f"{path}: a JSON object is wanted: download it again")
    return data
