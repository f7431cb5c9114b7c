"""Run many jobs, each in a forked process with a limit of time and of memory."""

from __future__ import annotations

import os
import resource
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path

import torch

Job = tuple[str, str]  # a type and its mapping
MEMORY_LIMIT = 6 * 2**30  # bytes more than the parent has


def line(error: BaseException) -> str:
    """An error as one line, which a table has room for."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _child(pipe, job: Job, examine: Callable) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        message = {
            "result": examine(*job, say=lambda stage: pipe.send({"stage": stage}))
        }
    except BaseException as error:  # whatever stops this one type is that type's result
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = {
            "crash": f"{line(error)} at {Path(place.filename).name}:{place.lineno}"
        }
    pipe.send(message)
    pipe.close()
    os._exit(0)


def run_all(
    jobs: list[Job],
    examine: Callable,
    crashed: Callable,
    *,
    warm: Job,
    workers: int,
    seconds: float,
    tell: Callable,
) -> list[dict]:
    """`examine` for each job; what does not end in time is stopped.

    Args:
        examine: of (type, mapping, say=) the result; `say` tells the stage that it has
            come to.
        crashed: of (job, error in one line, last stage, seconds) the result of one that
            gave none.
        warm: a job that is run here first: it imports, once and for all children, what
            every model needs.
        tell: told of each result when it is there.

    Returns:
        The results in the order of `jobs`.
    """
    torch.set_num_threads(1)
    examine(*warm)
    context, waiting, running, results = get_context("fork"), list(jobs), {}, {}

    def finish(pipe, message: dict) -> None:
        job, process, start, stage = running.pop(pipe)
        process.kill()
        process.join()
        pipe.close()
        if "crash" in message:
            message["result"] = crashed(
                job, message["crash"], stage, round(time.monotonic() - start, 1)
            )
        results[job] = message["result"]
        tell(message["result"])

    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, job, examine))
            process.start()
            theirs.close()
            running[ours] = [job, process, time.monotonic(), "starting"]
        for pipe in connection.wait(list(running), timeout=0.5):
            try:
                message = pipe.recv()
            except EOFError:
                message = {"crash": "the process died"}
            if "stage" in message:
                running[pipe][3] = message["stage"]
            else:
                finish(pipe, message)
        for pipe in [
            p
            for p, (_, _, start, _) in running.items()
            if time.monotonic() - start > seconds
        ]:
            finish(pipe, {"crash": f"not done after {seconds} s"})
    return [results[job] for job in jobs]
