"""Write one shard of the result while its source is read: bounded memory, every byte hashed on its way."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .arithmetic import changed_bytes
from .recipe import Job
from .source import COPIED, FLOATS, SafetensorsShard, Source, changed, fingerprint
from .staging import durable_file, reserve, write_all


@dataclass(frozen=True)
class WrittenShard:
    """SHA-256 of a shard, and its size in bytes."""

    sha256: str
    size: int


class _Lane:
    """Calls one function with piece after piece beside the reading; it holds at most one piece that waits."""

    def __init__(self, pool: ThreadPoolExecutor, function: Callable):
        self._pool, self._function, self._running = pool, function, Future()
        self._running.set_result(None)

    def __call__(self, data) -> None:
        self.wait()
        self._running = self._pool.submit(self._function, data)

    def wait(self) -> None:
        """Until nothing is left to do; raises what the function raised."""
        self._running.result()


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
    factors = {name: tensor.double() for name, tensor in job.factors.items()}
    for name in {scale.by for scale in job.plan.scale} - factors.keys():
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
    size = len(header) + sum(tensor.nbytes for _, tensor in job.layout(shard))
    sha = hashlib.sha256()
    with durable_file(target) as file, shard.reading() as read, ThreadPoolExecutor(2) as pool:
        reserve(file, size)
        write, hash_made = _Lane(pool, partial(write_all, file)), _Lane(pool, sha.update)
        write(header)
        hash_made(header)
        for name, tensor in job.layout(shard):
            for made in _pieces(job, read, name, tensor, factors):
                write(made)
                hash_made(made)
                yield 0, len(made)
            yield 1, 0
        for lane in (write, hash_made):
            lane.wait()
        _check_one(job.source, shard)  # before the rename: a mixture never gets a shard's name
    return WrittenShard(sha.hexdigest(), size)


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
        yield read(tensor, first, min(size, first + COPIED))
