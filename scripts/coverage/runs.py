"""Runs a command's jobs, each in a forked process with a limit of time and of memory,
and writes their results.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Task:
    """What a command does with every type.

    Args:
        examine: of (type, mapping, say=) the result; `say` tells the stage that it has
            come to.
        crashed: of (job, error in one line, last stage, seconds) the result of one that
            gave none.
        verdict: a result in a few words.
        is_wrong: whether a result shows a fault of this package.
        text: the JSON of all results, by job.
        warm: a job that is run first, before the others are forked: it imports, once
            and for all, what every model needs.
        seconds: that a job may take.
    """

    examine: Callable
    crashed: Callable
    verdict: Callable[[dict], str]
    is_wrong: Callable[[dict], object]
    text: Callable[[dict[Job, dict]], str]
    warm: Job
    seconds: float


def take(task: Task, jobs: list[Job], found: dict[Job, dict], options) -> int:
    """Run the jobs, and write the JSON that ``--out`` asks for.

    Args:
        found: earlier results, by job; gets those of the jobs.

    Returns:
        1 where a result is wrong.
    """
    done = []

    def write() -> None:
        if options.out:
            options.out.write_text(task.text(found), encoding="utf-8")

    def tell(job: Job, result: dict) -> None:
        found[job] = result
        done.append(job)
        text = f"{len(done)} of {len(jobs)}, {job[0]}: {task.verdict(result)}"
        if "seconds" in result:
            text += f" ({result['seconds']} s)"
        print(text, file=sys.stderr, flush=True)
        # a run of half an hour that is stopped leaves its results
        if len(done) % 25 == 0:
            write()

    _run_all(task, jobs, options.jobs, tell)
    write()
    return int(any(map(task.is_wrong, found.values())))


def _run_all(task: Task, jobs: list[Job], workers: int, tell: Callable) -> None:
    """Examine each job in a process of its own; what does not end in time is stopped."""
    torch.set_num_threads(1)
    task.examine(*task.warm)
    context, waiting, running = get_context("fork"), list(jobs), {}

    def finish(pipe, message: dict) -> None:
        job, process, start, stage = running.pop(pipe)
        process.kill()
        process.join()
        pipe.close()
        if "crash" in message:
            seconds = round(time.monotonic() - start, 1)
            message["result"] = task.crashed(job, message["crash"], stage, seconds)
        tell(job, message["result"])

    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, job, task.examine))
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
        now = time.monotonic()
        for pipe, (_, _, start, _) in list(running.items()):
            if now - start > task.seconds:
                finish(pipe, {"crash": f"not done after {task.seconds} s"})


def lines_of(results: list[dict]) -> str:
    """JSON with a line for each type, so that a change of one is a line of a diff."""
    lines = (json.dumps(result, separators=(",", ":")) for result in results)
    return "[\n" + ",\n".join(lines) + "\n]"


def in_document(document: dict, results: list[dict]) -> str:
    """The JSON of a document whose "types" are results, a line for each."""
    text = json.dumps({**document, "types": "<types>"}, indent=1)
    return text.replace('"<types>"', lines_of(results)) + "\n"
