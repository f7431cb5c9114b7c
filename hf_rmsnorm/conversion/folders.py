"""A checkpoint as a folder on this disk. Each file is one of the weights, is copied, or
is left out. `open_checkpoint` asks.
"""

import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path

from ..sources import Location, find, on_disk
from .errors import ConversionError, ConversionRefused

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
# in the cache of the hub, whose snapshots are links
CACHED = re.compile(r"(?P<repository>.*/models--[^/]+)/snapshots/[^/]+")


def locate(src: str | os.PathLike) -> Location:
    """Where a checkpoint is; the network is not used."""
    return find(
        src if isinstance(src, str) else os.path.abspath(src)
    )  # no id of the hub


def downloaded(source: Location, allow_pickle: bool, weights: bool) -> Path:
    """The folder of a checkpoint; a hub's files are downloaded into its cache."""
    return Path(on_disk(source, ignored(allow_pickle, weights)).where)


def ignored(allow_pickle: bool, weights: bool) -> tuple[str, ...]:
    """Patterns of the hub's files that a conversion does not read."""
    patterns = (*OTHER_FORMATS, "*.pt", "*.pth")
    if not weights:
        return (*patterns, *WEIGHTS)
    pickles = () if allow_pickle else ("*.bin",)
    return (*patterns, *pickles, "*/*.safetensors")  # in folders: of earlier steps


def files_of_weights(
    folder: Path, names: list[str], allow_pickle: bool
) -> tuple[str, list[str]]:
    """(the file that Transformers looks for, the files that hold the tensors); without
    any, "" and none. Refused if the index is broken, or names files of elsewhere.
    """
    main = next((name for name in MODEL_FILES if name in names), "")
    if main in PICKLES and not allow_pickle:
        raise ConversionError(
            f"{folder}: the weights are pickles: save the model as safetensors, or "
            "pass allow_pickle=True"
        )
    if not main.endswith(".json"):
        return main, [main] if main else []
    index = folder / main
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConversionError(f"{index}: no weight_map: download it again")
    for key, name in files.items():
        if name not in names:
            raise ConversionError(
                f"{index}: {key} is in {name!r}, which is missing in its folder: "
                "download that file, or the index again"
            )
    return main, sorted(set(files.values()))


def files_below(folder: Path) -> tuple[list[str], dict[str, str]]:
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
    """The config; refused beside an adapter, and if the weights are quantised."""
    if "adapter_config.json" in files:
        raise ConversionError(
            f"{folder}: holds an adapter: merge it into its base by PEFT's "
            "merge_and_unload, and convert the merged model"
        )
    config = read_json(folder / CONFIG)
    for part in (config, *config.values()):
        if isinstance(part, dict) and part.get("quantization_config"):
            raise ConversionRefused(
                f"{folder / CONFIG}: quantised: convert the unquantised model, then "
                "quantise that"
            )
    return config


def why_not_copied(name: str) -> str:
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


def refuse_elsewhere(folder: Path, name: str) -> None:
    """Refuse a file that is not of its folder: a link that leads out of it, or to
    nothing, and a pipe or a device. Links of the hub's cache lead to its ``blobs``.
    """
    path = folder / name
    content = Path(os.path.realpath(path))
    allowed = [Path(os.path.realpath(folder))]
    if cached := CACHED.match(allowed[0].as_posix()):
        allowed.append(Path(os.path.realpath(cached["repository"])) / "blobs")
    is_inside = any(content.is_relative_to(parent) for parent in allowed)
    if not (is_inside and content.is_file()):
        raise ConversionError(
            f"{path}: a link out of the checkpoint or to nothing, or no plain file: put "
            "that file itself there, or remove the link"
        )


def read_json(path: Path) -> dict:
    """The object in a JSON file of a checkpoint."""
    refuse_elsewhere(path.parent, path.name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(
            f"{path}: not JSON ({error}): download it again"
        ) from error
    if not isinstance(data, dict):
        raise ConversionError(f"{path}: a JSON object is wanted: download it again")
    return data
