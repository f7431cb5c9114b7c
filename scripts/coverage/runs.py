"""Runs a command's jobs, each in a forked process with a limit of time and of memory,
and writes their results.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing import TimeoutError as NoAnswer
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.compact import write_result

Job = tuple[str, str]  # a type and its mapping
MEMORY_LIMIT = 6 * 2**30  # bytes more than the parent has
GRACE = 30  # seconds that a job has to stop, once its time is over
WIDTH = 8_000  # characters of a line: a type has one, and a change is a line of a diff


def line(error: BaseException) -> str:
    """An error as one line, which a table has room for."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def chosen(only: str | None, known: Collection[str]) -> list[str]:
    """The names of a comma-separated list; without one all that are known."""
    names = only.split(",") if only else list(known)
    if unknown := set(names) - set(known):
        sys.exit(f"--only: there is no {', '.join(sorted(unknown))}")
    return names


@dataclass(frozen=True)
class Task:
    """What a command does with every type.

    Args:
        examine: of (type, mapping) the result.
        verdict: a result in a few words.
        document: the JSON of all results, which are in the order of the jobs.
        warm: a job that is run first, before the others are forked: it imports, once
            and for all, what every model needs.
        seconds: that a job may take.
        unexamined: what the result of a job that raised has besides its error.
    """

    examine: Callable[[str, str], dict]
    verdict: Callable[[dict], str]
    document: Callable[[list[dict]], dict]
    warm: Job
    seconds: int
    unexamined: dict = field(default_factory=dict)


def take(task: Task, jobs: list[Job], options) -> list[dict]:
    """Run the jobs, and write the JSON that ``--out`` asks for; returns the results."""
    torch.set_num_threads(1)
    task.examine(*task.warm)
    results = []
    with get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        limited = [(task.examine, job, task.seconds) for job in jobs]
        running = [pool.apply_async(_examined, job) for job in limited]
        for number, (job, answer) in enumerate(zip(jobs, running, strict=True), 1):
            try:
                result = answer.get(task.seconds + GRACE)
            except NoAnswer:
                result = {"error": "the process died, or did not stop in time"}
            if result.keys() == {"error"}:
                names = {"type": job[0], "mapping": job[1]}
                result = names | task.unexamined | result
            results.append(result)
            words = f"{number} of {len(jobs)}, {job[0]}: {task.verdict(result)}"
            print(words, file=sys.stderr, flush=True)
            # a run of half an hour that is stopped leaves its results
            if options.out and (number % 25 == 0 or number == len(jobs)):
                write_result(options.out, task.document(results), WIDTH)
    return results


def _examined(examine: Callable, job: Job, seconds: int) -> dict:
    """The result of a job, or what stopped it as its ``error``."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)

    def stop(*_):
        raise TimeoutError(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    # and again, where the first was taken for an error of the model
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)
    try:
        return examine(*job)
    except BaseException as error:  # whatever stops this one type is that type's result
        place = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{line(error)} at {Path(place.filename).name}:{place.lineno}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
