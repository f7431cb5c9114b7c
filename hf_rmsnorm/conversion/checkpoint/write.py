"""Write the tensors of a native target to shards while those of the source are read, row by row."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from .arithmetic import as_bytes
from .expressions import Expression, Stored
from .files import copy_others
from .shards import sha256_of
from .source import COPIED, FLOATS, INDEX, ConversionError, Source, open_source
from .staging import Staging, already_exists, clear_errors, destination, durable_file, staging_for, write_all
from .stream import run_check

MAX_SHARD_SIZE = "5GB"
FORMAT = 1  # of the bytes that expressions give: a staging folder of another one is not taken up


@dataclass(frozen=True)
class Written:
    """What `write_computed` wrote.

    Args:
        shards: for each file name, its SHA-256.
        unused: tensors of the source that nothing is computed from.
        not_copied: files of the source with weights in other formats, which would be the old model.
        resumed: how many shards a run before this one had written.
    """

    dst: Path
    shards: dict[str, str]
    tensors: int
    bytes: int
    unused: tuple[str, ...]
    not_copied: tuple[str, ...]
    resumed: int

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        lists = {"unused": list(self.unused), "not_copied": list(self.not_copied)}
        sizes = {"tensors_written": self.tensors, "bytes": self.bytes, "shards_resumed": self.resumed}
        return {"dst": str(self.dst), **sizes, **lists}

    def __str__(self) -> str:
        lines = [f"{self.dst}: {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB"]
        if self.resumed:
            lines.append(f"{self.resumed} of {len(self.shards)} shards were there from a run before this one")
        if self.unused:
            lines.append(f"tensors of no use to the result: {', '.join(self.unused)}")
        if self.not_copied:
            lines.append(f"not copied, as they hold the old weights: {', '.join(self.not_copied)}")
        return "\n".join(lines)


def write_computed(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    tensors: dict[str, Expression],
    config: str | None,
    *,
    metadata: dict[str, str],
    aliases: dict[str, str],
    check: Callable[[Path], None],
    allow_pickle: bool = False,
    restart: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> Written:
    """Write a checkpoint whose tensors are computed from those of another, as `carry_out` does with a plan.

    Args:
        tensors: those of the result; equal texts of `config` and `metadata` have to mean equal tensors, as a run that
            stopped is taken up by them.
        config: text of config.json; None for the source's own.
        metadata: ``__metadata__`` of every shard.
        aliases: other names of tensors of the source.
        check, allow_pickle, restart, progress: as in `carry_out`; `check` is not called where DST had just appeared.

    Raises:
        ConversionError: as in `carry_out`.
    """
    dst = destination(src, dst)
    with ExitStack() as stack:
        with clear_errors(Path(src)):
            source = open_source(src, allow_pickle=allow_pickle)
            layout = Layout(tensors, Folder(source, stack, aliases), max_shard_size)
            config = (source.folder / "config.json").read_text(encoding="utf-8") if config is None else config
        text = json.dumps([FORMAT, config, metadata, sorted(tensors), str(max_shard_size)], sort_keys=True)
        identity = {"plan": hashlib.sha256(text.encode()).hexdigest(), "source": source.fingerprints}
        with clear_errors(dst):
            staging = stack.enter_context(staging_for(dst, identity, restart=restart))
        resumed: list[str] = []
        if staging.published:
            with clear_errors(dst):
                staging.clean_up()
        else:
            done = at = 0
            with closing(write_shards(layout, staging, metadata, resumed)) as steps:
                for more_tensors, more_bytes in steps:
                    done, at = done + more_tensors, at + more_bytes
                    if progress is not None:
                        progress(done, at, sum(layout.sizes.values()))
            with clear_errors(staging.model):
                write_other_files(layout, config, staging.model)
                source.check_unchanged()
            run_check(check, staging)
            with clear_errors(dst):
                if os.path.lexists(dst):
                    raise already_exists(dst)
                staging.publish()
        used = set(aliases.values()).union(*(made.keys() for made in tensors.values()))
        return Written(
            dst, {name: done["sha256"] for name, done in staging.journal["shards"].items()}, len(tensors),
            sum(layout.sizes.values()), tuple(sorted(source.tensors.keys() - used)), source.not_copied, len(resumed),
        )  # fmt: skip


class Folder:
    """The tensors of a checkpoint folder as `Values`; its shards stay open until `stack` closes.

    Args:
        aliases: other names that a tensor may have in the folder.
    """

    def __init__(self, source: Source, stack: ExitStack, aliases: dict[str, str]):
        self.source, self.aliases = source, aliases
        self._reads = {shard.name: stack.enter_context(shard.reading()) for shard in source.shards}

    def stored(self, key: str):
        """The shard and the header entry of a tensor."""
        name = key if key in self.source.tensors else self.aliases.get(key, key)
        if name not in self.source.tensors:
            raise ConversionError(
                f"{self.source.folder}: no tensor {key}: the checkpoint is not whole, download it again"
            )
        return self.source.tensors[name]

    def floating(self, key: str):
        """As `stored`, for a tensor that is to be computed with.

        Raises:
            ConversionError: it is quantised.
        """
        shard, tensor = self.stored(key)
        if tensor.dtype not in FLOATS:
            raise ConversionError(
                f"{shard.path}: {key} is {tensor.dtype}: it is quantised; convert the unquantised model, then quantise "
                "it"
            )
        return shard, tensor

    def raw(self, key: str) -> Iterator[bytearray]:
        """The bytes of a tensor, in pieces."""
        shard, tensor = self.stored(key)
        for first in range(0, tensor.nbytes, COPIED):
            yield self._reads[shard.name](tensor, first, min(tensor.nbytes, first + COPIED))

    def shape(self, key):
        return self.stored(key)[1].shape

    def rows(self, key, first, last):
        shard, tensor = self.floating(key)
        dtype, size = FLOATS[tensor.dtype], prod(tensor.shape[1:])
        width = size * dtype.itemsize
        raw = self._reads[shard.name](tensor, first * width, last * width)
        return torch.frombuffer(raw, dtype=dtype).double().view(last - first, *tensor.shape[1:])


class Layout:
    """Which tensor lies in which shard: dtypes, shapes and names of files, known before a byte is written.

    A tensor that is `Stored` as it is keeps its bytes.
    """

    def __init__(self, tensors: dict[str, Expression], values: Folder, max_shard_size: int | str):
        self.tensors, self.values = tensors, values
        self.dtypes = {name: values.stored(made.like)[1].dtype for name, made in tensors.items()}
        self.shapes = {name: made.shape(values) for name, made in tensors.items()}
        self.sizes = {
            name: values.stored(made.like)[1].nbytes
            if isinstance(made, Stored)
            else prod(self.shapes[name]) * FLOATS[values.floating(made.like)[1].dtype].itemsize
            for name, made in tensors.items()
        }
        split = split_state_dict_into_shards_factory(
            self.sizes,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self.shards: dict[str, list[str]] = split.filename_to_tensors

    def index(self) -> dict:
        """What ``model.safetensors.index.json`` holds."""
        names = {tensor: shard for shard, held in self.shards.items() for tensor in held}
        metadata = {
            "total_size": sum(self.sizes.values()),
            "total_parameters": sum(prod(shape) for shape in self.shapes.values()),
        }
        return {"metadata": metadata, "weight_map": dict(sorted(names.items()))}

    def header(self, shard: str, metadata: dict[str, str]) -> bytes:
        """Length and JSON, padded so that every tensor is aligned."""
        header: dict = {"__metadata__": metadata}
        at = 0
        for name in self.shards[shard]:
            offsets = [at, at + self.sizes[name]]
            header[name] = {"dtype": self.dtypes[name], "shape": list(self.shapes[name]), "data_offsets": offsets}
            at += self.sizes[name]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def write_shards(
    layout: Layout, staging: Staging, metadata: dict[str, str], resumed: list[str]
) -> Iterator[tuple[int, int]]:
    """Write what the journal of `staging` does not have, and yield tensors and bytes done since the last time."""
    finished = staging.journal["shards"]
    for shard, names in layout.shards.items():
        target = staging.model / shard
        with clear_errors(target):
            # What a run that did not end says it wrote is read back: the disk may have lost it.
            if shard in finished and target.exists() and sha256_of(target) == finished[shard]["sha256"]:
                resumed.append(shard)
                yield len(names), sum(layout.sizes[name] for name in names)
                continue
            sha256 = yield from _write_shard(layout, shard, target, metadata)
            finished[shard] = {"sha256": sha256, "size": os.path.getsize(target)}
            staging.save()


def _write_shard(
    layout: Layout, shard: str, target: Path, metadata: dict[str, str]
) -> Generator[tuple[int, int], None, str]:
    sha = hashlib.sha256()
    with durable_file(target) as file:
        header = layout.header(shard, metadata)
        write_all(file, header)
        sha.update(header)
        for name in layout.shards[shard]:
            for data in _bytes(layout, name):
                write_all(file, data)
                sha.update(data)
                yield 0, len(data)
            yield 1, 0
        layout.values.source.check_unchanged()  # before the rename: a mixture never gets a shard's name
    return sha.hexdigest()


def _bytes(layout: Layout, name: str) -> Iterator[bytearray | memoryview]:
    made, values = layout.tensors[name], layout.values
    if isinstance(made, Stored):
        yield from values.raw(made.like)
    else:
        for piece in made.pieces(values):
            yield as_bytes(piece.reshape(-1), FLOATS[layout.dtypes[name]])


def write_other_files(layout: Layout, config: str, folder: Path) -> None:
    """Put everything but the shards in place, and remove what a run that did not end left there."""
    source = layout.values.source
    sharded = len(layout.shards) > 1
    expected = {*layout.shards, *source.others, "config.json", *([INDEX] if sharded else [])}
    copy_others(source, folder, expected)
    if sharded:
        (folder / INDEX).write_text(json.dumps(layout.index(), indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
