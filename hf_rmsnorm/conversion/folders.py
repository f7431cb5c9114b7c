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
NOT_COPIED = {
    **dict.fromkeys(OF_TRAINING, TRAINING),
    "adapter_model.*": ADAPTER,
    **dict.fromkeys((*WEIGHTS, *OTHER_FORMATS), OLD),
    **dict.fromkeys(("*.bin", "*.pt", "*.pth"), UNKNOWN),
}
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
    pickles = () if allow_pickle else ("*.bin",)
    return (*patterns, *pickles, "*/*.safetensors")  # in folders: of earlier steps


def destination(source: Source, dst: str | os.PathLike) -> Path:
    """DST as an absolute path; refused inside of the source, and if it exists or cannot
    be made.
    """
    dst = Path(os.path.abspath(dst))
    if source.is_local and dst.parent.resolve().is_relative_to(
        Path(source.where).resolve()
    ):
        raise ConversionError(
            f"{dst}: lies inside of the source, which is only read: choose another DST"
        )
    if os.path.lexists(dst) and not os.path.lexists(f"{dst}.converting"):
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
    """Paths of all files below a folder; and of the folders left out, with the reason."""
    files = []
    left_out = {}
    for parent, folders, names in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        for name in sorted(folders):
            if name in NOT_OF_THE_MODEL:
                left_out[str(inside / name)] = "not of the model"
                folders.remove(name)
            elif os.path.islink(os.path.join(parent, name)):  # which is not followed
                left_out[str(inside / name)] = "a link to a folder: copy it by hand"
        files += [str(inside / name) for name in sorted(names)]
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


def weights_of(
    folder: Path, files: list[str], allow_pickle: bool
) -> tuple[dict | None, list[str], list[str]]:
    """The index, the files of the weights, and all of these files, which are not
    copied; refused if the index is broken, or names others than those of the folder.
    """
    main = next((name for name in MODEL_FILES if name in files), None)
    if main in PICKLES and not allow_pickle:
        raise ConversionError(
            f"{folder}: the weights are pickles: save the model as safetensors, or "
            "pass allow_pickle=True"
        )
    if main is None:
        for name in files:
            if not os.path.dirname(name) and name.endswith((".safetensors", ".bin")):
                raise ConversionError(
                    f"{folder}: neither model.safetensors nor {INDEX} beside {name}: "
                    "download what is missing, or rename a variant"
                )
        return None, [], []
    if not main.endswith(".json"):
        return None, [main], [main]
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
    shards = sorted(set(names.values()))
    return index, shards, [main, *shards]


def copied_of(files: list[str], weights: list[str]) -> tuple[list[str], dict[str, str]]:
    """The files to copy, besides the config and the weights; and why others are no part
    of the result.
    """
    others = sorted({*files} - {*weights, CONFIG})
    left_out = {name: why for name in others if (why := _why_not_copied(name))}
    return [name for name in others if name not in left_out], left_out


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
