"""Write one shard of the result while its source is read: bounded memory, every byte hashed on its way."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .arithmetic import changed_bytes
from .recipe import Job
from .source import COPIED, FLOATS, SafetensorsShard, Source, changed, fingerprint
from .staging import durable_file, write_all


@dataclass(frozen=True)
class WrittenShard:
    """SHA-256 of a shard and of the file that it was made from, and its size in bytes."""

    sha256: str
    source_sha256: str
    size: int


class _Sha256:
    """A hash that is computed beside the reading and writing; it holds at most one piece that waits."""

    def __init__(self, pool: ThreadPoolExecutor):
        self._sha, self._pool, self._running = hashlib.sha256(), pool, Future()
        self._running.set_result(None)

    def update(self, data) -> None:
        self._running.result()
        self._running = self._pool.submit(self._sha.update, data)

    def hexdigest(self) -> str:
        self._running.result()
        return self._sha.hexdigest()


def header_of(job: Job, shard: SafetensorsShard, metadata: Mapping[str, str] | None) -> bytes:
    """The header of a shard of the result: the source's own bytes where nothing in it changes."""
    tensors = job.layout(shard)
    if shard.header and not metadata and len(tensors) == len(shard.tensors):
        return shard.header
    kept = {**(shard.metadata or {}), **(metadata or {})}
    header: dict = {"__metadata__": kept} if kept else {}
    at = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_factors(job: Job) -> dict[str, torch.Tensor]:
    """The tensors that others are multiplied by, in float64."""
    factors = {}
    for name in {scale.by for scale in job.plan.scale}:
        shard, tensor = job.source.tensors[name]
        with shard.reading() as read:
            raw = read(tensor, 0, tensor.nbytes)
        factors[name] = torch.frombuffer(raw, dtype=FLOATS[tensor.dtype]).double()
    return factors


def write_shard(
    job: Job, shard: SafetensorsShard, target: Path, header: bytes, factors: dict[str, torch.Tensor]
) -> Generator[tuple[int, int], None, WrittenShard]:
    """Write a shard to a temporary file, flush it to the disk, and rename it to `target`.

    Yields:
        Tensors and bytes done since the last time.

    Returns:
        What was read and written.

    Raises:
        ConversionError: the source is not as it was when it was opened.
        OSError: as the system says.
    """
    _check_one(job.source, shard)
    size = len(header)
    with (
        ThreadPoolExecutor(2) as pool,
        shard.reading() as read,
        durable_file(target) as file,
    ):
        written = _Sha256(pool)
        write_all(file, header)
        written.update(header)
        seen = None  # hashed apart only where the bytes read are all of the file and not the bytes written
        if shard.header and (shard.header != header or any(name in job.recipes for name in shard.tensors)):
            seen = _Sha256(pool)
            seen.update(shard.header)
        for name, tensor in job.layout(shard):
            for raw, made in _pieces(job, read, name, tensor, factors):
                write_all(file, made)
                written.update(made)
                if seen and name == tensor.name:
                    seen.update(raw)
                size += len(made)
                yield 0, len(made)
            yield 1, 0
        sha256 = written.hexdigest()
        source_sha256 = seen.hexdigest() if seen else sha256 if shard.header else sha256_of(shard.path)
        _check_one(job.source, shard)  # before the rename: a mixture never gets a shard's name
    return WrittenShard(sha256, source_sha256, size)


def _check_one(source: Source, shard: SafetensorsShard) -> None:
    name = os.path.relpath(shard.path, source.folder)
    if fingerprint(shard.path) != source.fingerprints[name]:
        raise changed(shard.path)


def sha256_of(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(COPIED):
            sha.update(data)
    return sha.hexdigest()


def _pieces(job, read, name, tensor, factors):
    if name in job.recipes:
        yield from changed_bytes(read, tensor, job.recipes[name], factors)
        return
    size = tensor.nbytes
    for first in range(0, size, COPIED):
        raw = read(tensor, first, min(size, first + COPIED))
        yield raw, raw
