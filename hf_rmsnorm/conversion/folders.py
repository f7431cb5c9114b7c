"""A checkpoint as a folder on this disk, and the folder of the result. Each file is one
of the weights, is copied, or is left out.
"""

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from ..sources import Source, SourceError, find, on_disk
from .plan import ConversionError, ConversionRefused

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# As Transformers looks for the weights.
MODEL_FILES = ("model.safetensors", INDEX, *PICKLES)
NOT_OF_THE_MODEL = {".git", ".cache", "__pycache__"}
# Folders with this model, as it was or exported; others are of other modules.
COPIES = ("checkpoint*", "coreml*", "global_step*", "onnx*", "openvino*", "original")
OLD = "weights of the model before the conversion"
TRAINING = "state of the training before the conversion"
ADAPTER = "an adapter of the model before the conversion: merge it before converting"
UNKNOWN = "may hold weights of the model before the conversion: copy it by hand if it does not"
OF_TRAINING = (
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "random_states*",
    "scaler.pt",
)
WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "consolidated*.pth")
OTHER_FORMATS = (
    "*.ckpt",
    "*.h5",
    "*.gguf",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.tflite",
)
# The first pattern that matches a file's name says why it is not copied.
NOT_COPIED = dict.fromkeys(OF_TRAINING, TRAINING)
NOT_COPIED["adapter_model.*"] = ADAPTER
NOT_COPIED |= dict.fromkeys((*WEIGHTS, *OTHER_FORMATS), OLD)
NOT_COPIED |= dict.fromkeys(("*.bin", "*.pt", "*.pth"), UNKNOWN)
MERGE = (
    "merge it into its base by PEFT's merge_and_unload, and convert the merged model"
)


def source_of(src: str | os.PathLike) -> Source:
    """Where a checkpoint is; the network is not used."""
    if not isinstance(src, str):
        src = os.path.abspath(src)  # a path is no id of the hub
    try:
        return find(src)
    except SourceError as error:
        raise ConversionError(str(error)) from None


def downloaded(source: Source, allow_pickle: bool, weights: bool = True) -> Path:
    """The folder of a checkpoint; a hub's files are downloaded into its cache."""
    try:
        return Path(on_disk(source, ignored(allow_pickle, weights)).where)
    except SourceError as error:
        raise ConversionError(str(error)) from None


def ignored(allow_pickle: bool, weights: bool) -> tuple[str, ...]:
    """Patterns of the hub's files that a conversion does not read."""
    patterns = (*OTHER_FORMATS, "*.pt", "*.pth")
    if not weights:
        return (*patterns, *WEIGHTS)
    if not allow_pickle:
        patterns += ("*.bin",)
    return (*patterns, "*/*.safetensors")  # in folders: of earlier steps


def destination(source: Source, dst: str | os.PathLike) -> Path:
    """DST as an absolute path; refused inside of the source, and if it exists or cannot
    be made.
    """
    dst = Path(os.path.abspath(dst))
    inside = Path(os.path.realpath(dst.parent))
    if source.is_local and inside.is_relative_to(os.path.realpath(source.where)):
        raise ConversionError(
            f"{dst}: lies inside of the source, which is only read: choose another DST"
        )
    is_unfinished = os.path.lexists(f"{dst}.converting")
    if os.path.lexists(dst) and not is_unfinished:
        raise exists_already(dst)
    home = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not home.is_dir():
        raise ConversionError(f"{dst}: {home} is no folder: choose another DST")
    if not os.access(home, os.W_OK | os.X_OK):
        raise ConversionError(
            f"{dst}: {home} is read-only, or gives no permission to write: choose "
            "another DST"
        )
    return dst


def exists_already(dst: Path) -> ConversionError:
    return ConversionError(
        f"{dst}: exists already: choose another DST, or move it away"
    )


def files_of(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Paths of all files below a folder and the folders that it links to; and of the
    folders left out, with the reason.
    """
    files = []
    left_out = {}
    followed = {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        inside = os.path.relpath(parent, folder)
        for name in sorted(folders):
            path = os.path.normpath(os.path.join(inside, name))
            real = os.path.realpath(folder / path)
            if name in NOT_OF_THE_MODEL:
                left_out[path] = "not of the model"
            elif real in followed:
                left_out[path] = "a link to a folder that is in the checkpoint already"
            if path in left_out:
                folders.remove(name)
            followed.add(real)
        for name in sorted(names):
            files.append(os.path.normpath(os.path.join(inside, name)))
    return files, left_out


def config_of_folder(folder: Path, files: list[str]) -> dict:
    """The config; refused without one, and if the weights are quantised."""
    if "adapter_config.json" in files:
        raise ConversionError(f"{folder}: holds an adapter: {MERGE}")
    if CONFIG not in files:
        raise ConversionError(
            f"{folder}: no {CONFIG}: pass the folder that save_pretrained wrote"
        )
    config = read_json(folder / CONFIG)
    for part in (config, *config.values()):
        if isinstance(part, dict) and part.get("quantization_config"):
            raise ConversionRefused(
                f"{folder / CONFIG}: quantised: convert the unquantised model, then "
                "quantise that"
            )
    return config


def main_file(folder: Path, files: list[str], allow_pickle: bool) -> str | None:
    """The file of the weights, or of their index; None if there are no weights."""
    for main in MODEL_FILES:
        if main in PICKLES and main in files and not allow_pickle:
            raise ConversionError(
                f"{folder}: the weights are pickles: save the model as safetensors, or "
                "pass allow_pickle=True"
            )
        if main in files:
            return main
    here = [name for name in files if not os.path.dirname(name)]
    for name in here:
        if not name.endswith((".safetensors", ".bin")):
            continue
        raise ConversionError(
            f"{folder}: neither model.safetensors nor {INDEX} beside {name}: download "
            "what is missing, or rename a variant"
        )
    return None


def shards_of(
    folder: Path, main: str | None, files: list[str]
) -> tuple[dict | None, list[str]]:
    """The index, and the files that it names; refused if it is broken, or names others
    than those of the folder.
    """
    if main is None:
        return None, []
    if not main.endswith(".json"):
        return None, [main]
    path = folder / main
    index = read_json(path)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConversionError(f"{path}: no weight_map: download it again")
    for key, name in names.items():
        if name not in files:
            raise ConversionError(
                f"{path}: {key} is in {name!r}, which is missing in its folder: "
                "download that file, or the index again"
            )
    return index, sorted(set(names.values()))


def copied_of(files: list[str], weights: set) -> tuple[list[str], dict[str, str]]:
    """The files to copy, besides the config and the weights; and why others are no part
    of the result.
    """
    copied = []
    left_out = {}
    for name in sorted({*files} - weights - {CONFIG}):
        reason = _why_not_copied(name)
        if reason:
            left_out[name] = reason
        else:
            copied.append(name)
    return copied, left_out


def _why_not_copied(name: str) -> str:
    """Why a file is no part of the result; "" for one that is copied, as those of other
    modules in folders of their own.
    """
    top, *rest = Path(name).parts
    if rest and not any(fnmatch(top, pattern) for pattern in COPIES):
        return ""
    for pattern, why in NOT_COPIED.items():
        if fnmatch(os.path.basename(name), pattern):
            return why
    return ""


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
