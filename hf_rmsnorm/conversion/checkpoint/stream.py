"""Carry out a conversion plan on a checkpoint that is never loaded, so that a kill at any time costs one shard."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..plan import ConversionPlan
from .files import write_other_files
from .recipe import Job, make_job
from .shards import WrittenShard, header_of, read_factors, sha256_of, write_shard
from .source import ConversionError, open_source
from .staging import REPORT, Staging, clear_errors, destination, staging_for

FORMAT = 1  # of the bytes that a plan gives: a staging folder of another one is not taken up


@dataclass(frozen=True)
class Result:
    """What a conversion wrote.

    Args:
        dst: the new folder.
        shards: for each file name, the SHA-256 of the shard and its bytes.
        changed: names of the tensors with new values.
        added: names of the tensors that the source has not.
        not_copied: files of the source with weights in other formats, which would be the old model.
        tensors: how many tensors were written.
        bytes: how many bytes of tensors were written.
        resumed: how many shards a run before this one had written.
    """

    dst: Path
    shards: dict[str, WrittenShard]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    not_copied: tuple[str, ...]
    tensors: int
    bytes: int
    resumed: int


def carry_out(
    plan: ConversionPlan,
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    allow_pickle: bool = False,
    check: Callable[[Path], None] | None = None,
    restart: bool = False,
    adapter: bool = False,
    factors: Mapping[str, torch.Tensor] | None = None,
) -> Result:
    """Write the checkpoint that a plan makes of another one.

    Tensors that the plan names are scaled and centred in float64 and rounded once to their own dtype; the others keep
    their bytes. Shards keep their names, headers and ``__metadata__``; copies of tensors join the shard of their
    source. Memory does not grow with the checkpoint. Equal plans, sources and metadata give equal bytes.

    Everything is written to ``DST.converting``, and one rename at the end makes DST appear. Killed at any time, or out
    of disk space, the same call again goes on after the last whole shard.

    Args:
        plan: in the keys of this checkpoint.
        src: a folder with config.json and safetensors, in one file or in shards with an index. It is only read.
        dst: does not exist yet; not inside of `src`.
        metadata: strings to add to the ``__metadata__`` of every shard.
        progress: called as ``progress(tensors, bytes, total_bytes)`` with what is done so far.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file, without running code in it.
        check: called with the folder that is to become DST. Where it raises, DST does not appear, its error is
            raised, and the staging folder is kept with the error's text in ``report.txt``. What it writes into the
            folder becomes a part of DST.
        restart: drop the unfinished conversion of another plan or source into the same DST.
        adapter: as in `open_source`.
        factors: layer scales of the plan that are not tensors of the source.

    Raises:
        ConversionError: the source, the plan or the destination does not fit, the source changed meanwhile, or the
            system refused (disk full, no permission): what, where, and the cure.
    """
    dst = destination(src, dst)
    with ExitStack() as stack:
        with clear_errors(Path(src)):
            source = open_source(src, allow_pickle=allow_pickle, adapter=adapter)
            job = make_job(plan, source, factors)
            _check_metadata(metadata)
            with clear_errors(dst):
                identity = _identity(plan, source.fingerprints, metadata, job.factors)
                staging = stack.enter_context(staging_for(dst, identity, restart=restart))
        resumed: list[str] = []
        if staging.published:
            with clear_errors(dst):
                staging.clean_up()
            return _result(job, staging, len(source.shards))
        tensors = at = 0
        total = sum(tensor.nbytes for _, tensor in job.tensors())
        with closing(_write_shards(job, staging, metadata, resumed)) as steps:
            for more_tensors, more_bytes in steps:
                tensors, at = tensors + more_tensors, at + more_bytes
                if progress is not None:
                    progress(tensors, at, total)
        with clear_errors(staging.model):
            write_other_files(job, staging.model)
            source.check_unchanged()
        if check is not None:
            run_check(check, staging)
        with clear_errors(dst):
            staging.publish()
        return _result(job, staging, len(resumed))


def _write_shards(
    job: Job, staging: Staging, metadata: Mapping[str, str] | None, resumed: list[str]
) -> Iterator[tuple[int, int]]:
    """Write what the journal does not have, and yield tensors and bytes done since the last time."""
    with clear_errors(job.source.folder):
        factors = read_factors(job)
    finished = staging.journal["shards"]
    for shard in job.source.shards:
        target = staging.model / shard.name
        with clear_errors(target):
            # What a run that did not end says it wrote is read back: the disk may have lost it.
            if shard.name in finished and target.exists() and sha256_of(target) == finished[shard.name]["sha256"]:
                resumed.append(shard.name)
                tensors = job.layout(shard)
                yield len(tensors), sum(tensor.nbytes for _, tensor in tensors)
                continue
            header = header_of(job, shard, metadata)
            written = yield from write_shard(job, shard, target, header, factors)
            finished[shard.name] = asdict(written)
            staging.save()


def run_check(check: Callable[[Path], None], staging: Staging) -> None:
    try:
        check(staging.model)
    except Exception as error:
        with clear_errors(staging.folder):
            (staging.folder / REPORT).write_text(f"{error}\n", encoding="utf-8")
        raise


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConversionError(f"metadata {key!r}: safetensors keeps strings only: pass json.dumps of the value")


def _identity(plan: ConversionPlan, fingerprints: dict, metadata: Mapping[str, str] | None, factors: Mapping) -> dict:
    values = [{name: tensor.tolist() for name, tensor in factors.items()}] if factors else []
    text = json.dumps([FORMAT, plan.to_json(), dict(metadata or {}), *values], sort_keys=True)
    return {"plan": hashlib.sha256(text.encode()).hexdigest(), "source": fingerprints}


def _result(job: Job, staging: Staging, resumed: int) -> Result:
    tensors = [tensor for _, tensor in job.tensors()]
    return Result(
        dst=staging.dst,
        shards={name: WrittenShard(**done) for name, done in staging.journal["shards"].items()},
        changed=tuple(job.recipes),
        added=tuple(job.added),
        not_copied=job.source.not_copied,
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        resumed=resumed,
    )
