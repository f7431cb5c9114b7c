"""A checkpoint folder, opened read-only: its shards, its other files, and what is wrong with them in one line."""

import json
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from .shard import ConversionError, SafetensorsShard, StoredTensor, changed, fingerprint, open_pickled, open_safetensors

INDEX = "model.safetensors.index.json"
MODEL_FILES = ("config.json", "model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "", "adapter_model.bin", "")
# Not part of this checkpoint, and no longer the same model once it is converted.
OTHER_WEIGHTS = {
    ".bin", ".pt", ".pth", ".ckpt", ".h5", ".gguf", ".ggml", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite"
}  # fmt: skip
# Of a whole model: a module of sentence-transformers, say, is never stored as one of them.
EXPORTS = OTHER_WEIGHTS - {".bin", ".pt", ".pth"}
COPIES = ("checkpoint*", "global_step*", "openvino*", "original")  # folders with this model, as it was or exported
NOT_OF_THE_MODEL = {".git", ".cache", "__pycache__"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, opened; paths are relative to it."""

    folder: Path
    shards: tuple[SafetensorsShard, ...]  # in the order of their names
    tensors: dict[str, tuple[SafetensorsShard, StoredTensor]]
    index: dict | None  # the parsed file `index_name`; None for a checkpoint in one file
    index_name: str
    config: dict  # the parsed file `config_name`
    config_name: str
    others: tuple[str, ...]  # files to copy
    not_copied: tuple[str, ...]  # this model's weights in other formats, or from earlier in its training
    fingerprints: dict[str, list[int]]  # size and mtime_ns of every file that is read

    def check_unchanged(self) -> None:
        """Raise ConversionError where a file is no longer as it was when the folder was opened."""
        for path, before in ((self.folder / name, before) for name, before in self.fingerprints.items()):
            if not path.exists() or fingerprint(path) != before:
                raise changed(path)


def open_checkpoint(folder: str | os.PathLike, *, allow_pickle: bool = False, adapter: bool = False) -> Checkpoint:
    """Read the headers, the index and the config of a checkpoint folder and check that they fit together.

    Args:
        folder: holds config.json and ``model.safetensors``, or the shards that its index names.
        allow_pickle: without them, read ``pytorch_model.bin`` or its shards.
        adapter: it is the folder of a PEFT adapter, with adapter_config.json and ``adapter_model.safetensors``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConversionError(f"{folder}: no such folder: pass a local checkpoint folder")
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - NOT_OF_THE_MODEL)
        files += [os.path.relpath(os.path.join(parent, name), folder) for name in sorted(names)]
    config_name, single, index_name, *pickles = ADAPTER_FILES if adapter else MODEL_FILES
    if config_name not in files:
        what = "PEFT adapter" if adapter else "Transformers checkpoint"
        raise ConversionError(f"{folder}: no {config_name}: pass the folder of a {what}")
    config = read_json(folder / config_name)
    for part in (config, *config.values()):
        if isinstance(part, dict) and part.get("quantization_config"):
            where = folder / config_name
            raise ConversionError(f"{where}: quantised: convert the unquantised model, then quantise that")
    if pickled := single not in files and index_name not in files:
        if not any(name in files for name in pickles):
            missing = f"neither {single} nor {index_name} is there" if index_name else f"{single} is not there"
            raise ConversionError(f"{folder}: {missing}: download the weights, pickles with allow_pickle=True")
        single, index_name = pickles
        if not allow_pickle:
            cure = "pass allow_pickle=True to read them by torch.load(weights_only=True), or save them as safetensors"
            raise ConversionError(f"{folder}: the weights are pickles, which can run code: {cure}")
    index, names, read = None, [single], {single, config_name}
    if single not in files:
        index = read_json(folder / index_name)
        names = _shard_names(folder, index_name, index)
        read = {*names, index_name, config_name}
    fingerprints = {name: fingerprint(folder / name) for name in files}
    shards = tuple((open_pickled if pickled else open_safetensors)(folder / name) for name in names)
    held = {shard.path.name: shard.tensors for shard in shards}
    for key, name in index["weight_map"].items() if index else ():
        if key not in held[name]:
            raise ConversionError(f"{folder / index_name}: {key} is not in {name}: download both again")
    not_copied = tuple(name for name in files if name not in read and _is_old_model(folder, name, config))
    others = tuple(name for name in files if name not in read and name not in not_copied)
    fingerprints = {name: fingerprints[name] for name in sorted({*read, *others})}
    tensors: dict[str, tuple[SafetensorsShard, StoredTensor]] = {}
    for shard in shards:
        if both := [name for name in shard.tensors if name in tensors]:
            where = f"{tensors[both[0]][0].path.name} and {shard.path.name}"
            raise ConversionError(f"{folder}: {both[0]} is in two shards, {where}: remove the stale one")
        tensors |= {name: (shard, tensor) for name, tensor in shard.tensors.items()}
    return Checkpoint(folder, shards, tensors, index, index_name, config, config_name, others, not_copied, fingerprints)


def _is_old_model(folder: Path, name: str, config: dict) -> bool:
    """Whether a file holds weights of this model; in a subfolder they are another module's, unless it is a copy."""
    suffix = os.path.splitext(name.removesuffix(".index.json"))[1]
    if suffix != ".safetensors" and suffix not in OTHER_WEIGHTS:
        return False
    *parents, _ = Path(name).parts
    return not parents or suffix in EXPORTS or any(
        any(fnmatch(parent, copy) for copy in COPIES) or _is_config_of(folder.joinpath(*parents[: i + 1]), config)
        for i, parent in enumerate(parents)
    )  # fmt: skip


def _is_config_of(folder: Path, config: dict) -> bool:
    if not (folder / "config.json").is_file():
        return False
    other, wanted = read_json(folder / "config.json"), config.get("architectures")
    same_type = "model_type" in other and other["model_type"] == config.get("model_type")
    return same_type and other.get("architectures", wanted) == wanted


def read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path}: not JSON ({error}): download it again") from error
    if not isinstance(data, dict):
        raise ConversionError(f"{path}: a JSON object is wanted: download it again")
    return data


def _shard_names(folder: Path, index_name: str, index: dict) -> list[str]:
    where = folder / index_name
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConversionError(f"{where}: no weight_map from tensors to files: download it again")
    for key, name in names.items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ConversionError(f"{where}: {key} is in {name!r}, which is no file beside it: download it again")
        if not (folder / name).is_file():
            raise ConversionError(f"{where}: {key} is in {name}, which is missing: download that file")
    return sorted(set(names.values()))
