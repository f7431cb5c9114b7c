"""Patch a tiny random model of every type in Transformers and compare it, bit for bit, with the model before.

    python scripts/coverage.py                                  every causal LM and base type
    python scripts/coverage.py --mapping causal --only llama,gpt2 --out two.json
    python scripts/coverage.py --mapping causal --interpreter norms   also the kernels, in float32 in the interpreter
    python scripts/coverage.py --mapping causal --interpreter fusion  also fused layers there, and their operators

Each type runs in a process of its own, forked from this one, with a limit of time and of memory. The table goes to the
terminal, or beside the JSON as text where --out is given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
import traceback
from multiprocessing import connection, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]
if "--interpreter" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from coverage_compare import MAPPINGS, TIME_LIMIT, examine, line  # noqa: E402
from coverage_report import by_reason, table, totals, wrong  # noqa: E402
from coverage_scan import not_built  # noqa: E402

import hf_rmsnorm  # noqa: E402

MEMORY_LIMIT = 6 * 2**30  # bytes beyond what the parent holds


def _child(pipe, job, interpreter: str) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        result = examine(*job, interpreter=interpreter, say=lambda stage: pipe.send({"stage": stage}))
    except BaseException as error:  # whatever stops this one type is that type's result
        place = traceback.extract_tb(error.__traceback__)[-1]
        result = {"crash": f"{line(error)} at {Path(place.filename).name}:{place.lineno}"}
    pipe.send(result)
    pipe.close()
    os._exit(0)


def run_all(jobs: list[tuple[str, str]], workers: int = 1, interpreter: str = "", tell=lambda result: None) -> list:
    """`examine` for each (type, mapping) in a forked process of its own; what does not end in time is stopped.

    Returns:
        The results in the order of `jobs`.
    """
    torch.set_num_threads(1)
    examine("llama", "causal", interpreter)  # imports, once and for all children, what every model needs
    context, waiting, running, results = get_context("fork"), list(jobs), {}, {}
    limit = TIME_LIMIT * (3 if interpreter else 1)
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, job, interpreter))
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
                continue
            _finish(running, pipe, message, results, tell)
        for pipe in [p for p, (_, _, start, _) in running.items() if time.monotonic() - start > limit]:
            _finish(running, pipe, {"crash": f"not done after {limit} s"}, results, tell)
    return [results[job] for job in jobs]


def _finish(running: dict, pipe, message: dict, results: dict, tell) -> None:
    job, process, start, stage = running.pop(pipe)
    process.kill()
    process.join()
    pipe.close()
    if "crash" in message:
        message = {
            "type": job[0],
            "mapping": job[1],
            "built": "inputs" in stage or stage[:3] in ("pat", "com", "run"),
            "ran": False,
            "error": f"{message['crash']} while {stage}",
            "runs": [],
            "seconds": round(time.monotonic() - start, 1),
        }
    results[job] = message
    tell(message)


def versions() -> dict:
    return {
        "hf_rmsnorm": hf_rmsnorm.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--convert", action="store_true", help="convert instead: see coverage_convert.py")
    parser.add_argument("--mapping", choices=("causal", "base", "all"), default="all")
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the JSON; the table goes beside it as .txt")
    parser.add_argument(
        "--interpreter", choices=("norms", "fusion"), default="", help="also run the kernels in Triton's interpreter"
    )
    parser.add_argument("--update", type=Path, help="a JSON made earlier, whose results stay where --only names others")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    only = set(options.only.split(",")) if options.only else None
    if only and (unknown := only - {*MAPPINGS["causal"], *MAPPINGS["base"]}):
        parser.error(f"Transformers {transformers.__version__} has no type {', '.join(sorted(unknown))}")
    found: dict[str, dict[str, dict]] = {}
    if options.update:
        old = json.loads(options.update.read_text(encoding="utf-8"))
        if old["versions"] != versions():
            parser.error(f"{options.update} was made with {old['versions']}, this is {versions()}")
        found = {mapping: {r["type"]: r for r in part["types"]} for mapping, part in old["mappings"].items()}
    for mapping in MAPPINGS if options.mapping == "all" else (options.mapping,):
        jobs = [(t, mapping) for t in MAPPINGS[mapping] if only is None or t in only]
        results = found.setdefault(mapping, {})
        done = []

        def tell(result, results=results, done=done, count=len(jobs)):  # noqa: B008 - one count a mapping is meant
            results[result["type"]] = result
            done.append(result["type"])
            verdict = "; ".join(wrong(result)[:2]) or ("ok" if result["ran"] else result["error"])
            text = f"{len(done)} of {count}, {result['type']}: {verdict} ({result.get('seconds')} s)"
            print(text, file=sys.stderr, flush=True)
            if options.out and len(done) % 25 == 0:  # a run of half an hour that is stopped leaves what it found
                _write(options.out, found)

        run_all(jobs, options.jobs, options.interpreter, tell)
    if options.out:
        _write(options.out, found)
    print(_table(found))
    return 1 if any(wrong(r) for results in found.values() for r in results.values()) else 0


def _write(path: Path, found: dict[str, dict[str, dict]]) -> None:
    document = {"versions": versions(), "mappings": {}}
    for mapping, by_type in found.items():
        results = [by_type[t] for t in MAPPINGS[mapping] if t in by_type]
        document["mappings"][mapping] = {
            "totals": {"types": len(MAPPINGS[mapping]), **totals(results)},
            "left_alone": by_reason(results, "left_alone"),
            "not_norms": by_reason(results, "not_norms"),
            "types": [{**r, "wrong": wrong(r)} for r in results],
        }
    document["not_built"] = not_built(document)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text(_table(found), encoding="utf-8")


def _table(found: dict[str, dict[str, dict]]) -> str:
    texts = []
    for mapping, by_type in found.items():
        results = [by_type[t] for t in MAPPINGS[mapping] if t in by_type]
        texts.append(f"{mapping} mapping\n\n{table(results)}\n")
    return "\n".join(texts)


if __name__ == "__main__":
    if "--convert" in sys.argv:  # with the options of that script
        from coverage_convert import main as convert

        sys.exit(convert([argument for argument in sys.argv[1:] if argument != "--convert"]))
    sys.exit(main())
