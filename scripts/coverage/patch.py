"""Patch a tiny random model of every type in Transformers and compare it, bit for bit,
with the model before.
"""

from __future__ import annotations

import json
import platform
import sys
from functools import partial
from pathlib import Path

import torch
import transformers

import hf_rmsnorm

from . import BadOptions
from .compare import MAPPINGS, TIME_LIMIT, chosen, examine
from .report import by_reason, dumped, table, totals, wrong
from .scan import not_built
from .workers import Job, run_all


def crashed(job: Job, error: str, stage: str, seconds: float) -> dict:
    """The result of a type whose process gave none."""
    built = "inputs" in stage or stage[:3] in ("pat", "com", "run")
    return {
        "type": job[0], "mapping": job[1], "built": built, "ran": False,
        "error": f"{error} while {stage}", "runs": [], "seconds": seconds,
    }  # fmt: skip


def versions() -> dict:
    return {
        "hf_rmsnorm": hf_rmsnorm.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run(options) -> int:
    """What ``python -m scripts.coverage patch`` does; returns 1 where a type gave a
    wrong result.
    """
    transformers.logging.set_verbosity_error()
    only = chosen(options.only)
    found: dict[str, dict[str, dict]] = {}
    if options.update:
        old = json.loads(options.update.read_text(encoding="utf-8"))
        if old["versions"] != versions():
            raise BadOptions(
                f"{options.update} was made with {old['versions']}, this is {versions()}"
            )
        found = {
            mapping: {r["type"]: r for r in part["types"]}
            for mapping, part in old["mappings"].items()
        }
    for mapping in MAPPINGS if options.mapping == "all" else (options.mapping,):
        jobs = [(t, mapping) for t in MAPPINGS[mapping] if only is None or t in only]
        results = found.setdefault(mapping, {})
        done = []

        def tell(result, results=results, done=done, count=len(jobs)):  # noqa: B008 - one count a mapping is meant
            results[result["type"]] = result
            done.append(result["type"])
            verdict = "; ".join(wrong(result)[:2]) or (
                "ok" if result["ran"] else result["error"]
            )
            text = f"{len(done)} of {count}, {result['type']}: {verdict} ({result.get('seconds')} s)"
            print(text, file=sys.stderr, flush=True)
            if options.out and len(done) % 25 == 0:
                # a run of half an hour that is stopped leaves its results
                _write(options.out, found)

        run_all(
            jobs, partial(examine, interpreter=options.interpreter), crashed,
            warm=("llama", "causal"), workers=options.jobs,
            seconds=TIME_LIMIT * (3 if options.interpreter else 1), tell=tell,
        )  # fmt: skip
    if options.out:
        _write(options.out, found)
    print(_table(found))
    return (
        1
        if any(wrong(r) for results in found.values() for r in results.values())
        else 0
    )


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
    path.write_text(dumped(document), encoding="utf-8")
    path.with_suffix(".txt").write_text(_table(found), encoding="utf-8")


def _table(found: dict[str, dict[str, dict]]) -> str:
    texts = []
    for mapping, by_type in found.items():
        results = [by_type[t] for t in MAPPINGS[mapping] if t in by_type]
        texts.append(f"{mapping} mapping\n\n{table(results)}\n")
    return "\n".join(texts)
