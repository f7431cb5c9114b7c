"""Runs a command's jobs, each in a forked process with a limit of time and of memory,
and writes their results.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import TimeoutError as NoAnswer
from multiprocessing import get_context
from pathlib import Path

import torch

Job = tuple[str, str]  # a type and its mapping
MEMORY_LIMIT = 6 * 2**30  # bytes more than the parent has
GRACE = 30  # seconds that a job has to stop, once its time is over


def line(error: BaseException) -> str:
    """An error as one line, which a table has room for."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True)
class Task:
    """What a command does with every type.

    Args:
        examine: of (type, mapping) the result.
        verdict: a result in a few words.
        is_wrong: whether a result shows a fault of this package.
        text: the JSON of all results, by job.
        warm: a job that is run first, before the others are forked: it imports, once
            and for all, what every model needs.
        seconds: that a job may take.
        unexamined: what the result of a job that raised has besides its error.
    """

    examine: Callable[[str, str], dict]
    verdict: Callable[[dict], str]
    is_wrong: Callable[[dict], object]
    text: Callable[[dict[Job, dict]], str]
    warm: Job
    seconds: int
    unexamined: dict = field(default_factory=dict)


def take(task: Task, jobs: list[Job], found: dict[Job, dict], options) -> int:
    """Run the jobs, and write the JSON that ``--out`` asks for.

    Args:
        found: earlier results, by job; gets those of the jobs.

    Returns:
        1 where a result is wrong.
    """
    torch.set_num_threads(1)
    task.examine(*task.warm)
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
            found[job] = result
            words = f"{number} of {len(jobs)}, {job[0]}: {task.verdict(result)}"
            print(words, file=sys.stderr, flush=True)
            # a run of half an hour that is stopped leaves its results
            if options.out and (number % 25 == 0 or number == len(jobs)):
                options.out.write_text(task.text(found), encoding="utf-8")
    return int(any(map(task.is_wrong, found.values())))


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


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def lines_of(results: list[dict]) -> str:
    """JSON with a line for each type, so that a change of one is a line of a diff."""
    lines = (json.dumps(result, separators=(",", ":")) for result in results)
    return "[\n" + ",\n".join(lines) + "\n]"


def in_document(document: dict, results: list[dict], name: str = "types") -> str:
    """The JSON of a document that has results by this name, a line for each."""
    text = json.dumps({**document, name: "<results>"}, indent=1)
    return text.replace('"<results>"', lines_of(results)) + "\n"
