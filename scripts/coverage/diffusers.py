"""Patch a tiny random model of every transformer in diffusers and compare it, bit for
bit, with the model before.
"""

from __future__ import annotations

import copy
import json
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch

import hf_rmsnorm
from hf_rmsnorm.fused import modulated

from . import BadOptions
from .diffusers_models import build, classes
from .inputs import tensors
from .workers import Job, line, run_all

TIME_LIMIT = 600  # seconds that a class may take in the interpreter
WARM = "DiTTransformer2DModel", "diffusers"
COUNTS = {
    "norms": "norms swapped",
    "alone": "norms left alone",
    "modulated": "norms launched with scale and shift",
    "sums": "of these, with the residual sum before",
    "gated": "of these, with a gate in that sum",
    "apart": "modulations that no launch served",
}


def examine(
    name: str, mapping: str, say: Callable[[str], None] = lambda stage: None
) -> dict:
    """Build, run, patch and compare one class in bfloat16; returns its entry of the
    JSON.
    """
    say("building")
    model, inputs = build(name, torch.bfloat16)
    say("running it before")
    expected = _outputs(model, inputs)
    launches = _Launches()
    say("patching")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without any norm is a result here
        patched = hf_rmsnorm.patched(model)
        report = patched.__enter__()
    say("running it patched")
    with hf_rmsnorm.use_backend("triton"), launches.counted():
        by_kernels = _outputs(model, inputs)
    patched.__exit__(None, None, None)
    say("running it backward")
    return {
        "type": name,
        "norms": len(report.swapped),
        "alone": len(report.skipped),
        **launches.counts,
        "differing": _differing(by_kernels, expected),
        "values": sum(t.numel() for t in expected),
        "verified": _verified(model, inputs),
        "reasons": dict(Counter(f"{r.class_name}: {r.reason}" for r in report.skipped)),
    }


class _Launches:
    """Counts the norms of a forward that are launched with their modulation, and with
    the sum before it.
    """

    def __init__(self):
        self.counts = {"modulated": 0, "sums": 0, "gated": 0, "apart": 0}

    def counted(self) -> AbstractContextManager:
        return mock.patch.object(
            modulated,
            "_launched_modulation",
            self._counting(modulated._launched_modulation),
        )

    def _counting(self, in_one_launch: Callable) -> Callable:
        def launch(piece, norm, x, scale, shift, gate=None, residual=None):
            both = in_one_launch(piece, norm, x, scale, shift, gate, residual)
            # A modulation that is not launched with its sum is tried without: it is
            # counted then.
            if both is None:
                self.counts["apart"] += residual is None
                return None
            self.counts["modulated"] += 1
            self.counts["sums"] += residual is not None
            self.counts["gated"] += gate is not None
            return both

        return launch


def _outputs(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.clone() for t in tensors(model(**copy.deepcopy(inputs)))]


def _differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    """How many values differ; NaNs are equal."""
    pairs = zip(a, b, strict=True)
    return sum(((x != y) & ~(x.isnan() & y.isnan())).sum().item() for x, y in pairs)


def _verified(model: torch.nn.Module, inputs: dict) -> str:
    """What `verify_equivalence` says, which runs forward and backward by the kernels:
    "PASS", or the reason.
    """
    try:
        with hf_rmsnorm.use_backend("triton"):
            report = hf_rmsnorm.verify_equivalence(
                model, inputs=inputs, max_new_tokens=0, backward=True
            )
    except NotImplementedError as error:  # an operator of the model has no float64
        return f"not compared with float64: {line(error)[:100]}"
    return report.verdict if report.passed else report.headline


def crashed(job: Job, error: str, stage: str, seconds: float) -> dict:
    """The entry of a class whose process gave none."""
    return {"type": job[0], "error": f"{error} while {stage}"}


def run(options) -> int:
    """What ``python -m scripts.coverage diffusers`` does; returns 1 where a patch
    changed a result.
    """
    if options.page:
        print(page_table(json.loads(options.page.read_text(encoding="utf-8"))))
        return 0
    names = options.only.split(",") if options.only else list(classes())
    if unknown := set(names) - set(classes()):
        raise BadOptions(
            f"diffusers {version('diffusers')} has no class {', '.join(sorted(unknown))}"
        )
    entries = (
        json.loads(options.update.read_text(encoding="utf-8"))["types"]
        if options.update
        else []
    )
    results = {entry["type"]: entry for entry in entries}

    def tell(entry: dict) -> None:
        results[entry["type"]] = entry
        print(f"{entry['type']}: {verdict(entry)}", file=sys.stderr, flush=True)
        if options.out:
            _write(options.out, results)

    jobs = [(name, "diffusers") for name in names]
    run_all(
        jobs,
        examine,
        crashed,
        warm=WARM,
        workers=options.jobs,
        seconds=TIME_LIMIT,
        tell=tell,
    )
    print(text_table(_document(results)["types"]))
    return 1 if any(is_wrong(entry) for entry in results.values()) else 0


def _document(results: dict[str, dict]) -> dict:
    packages = ("hf_rmsnorm", "diffusers", "torch")
    versions = {name: version(name.replace("_", "-")) for name in packages}
    return {
        "versions": {**versions, "python": platform.python_version()},
        "types": [results[name] for name in sorted(results)],
    }


def _write(path: Path, results: dict[str, dict]) -> None:
    document = _document(results)
    lines = ",\n".join(json.dumps(entry) for entry in document["types"])
    head = json.dumps({**document, "types": "<types>"}, indent=1)
    path.write_text(
        head.replace('"<types>"', f"[\n{lines}\n]") + "\n", encoding="utf-8"
    )
    path.with_suffix(".txt").write_text(text_table(document["types"]), encoding="utf-8")


def is_wrong(entry: dict) -> bool:
    """Whether a patch changed what it must not."""
    return "error" not in entry and entry["verified"].startswith("FAIL")


def verdict(entry: dict) -> str:
    """What became of a class, in words."""
    if "error" in entry:
        return f"not run: {entry['error'][:100]}"
    if is_wrong(entry):
        return entry["verified"][:100]
    differing = (
        f"{entry['differing']} of {entry['values']} values rounded otherwise"
        if entry["differing"]
        else ""
    )
    not_compared = (
        ""
        if entry["verified"].startswith("PASS")
        else entry["verified"].partition(":")[0]
    )
    return "; ".join(part for part in (differing or "bit-equal", not_compared) if part)


def text_table(entries: list[dict]) -> str:
    """The table for a terminal."""
    lines = [f"{'class':<40} {' '.join(f'{name:>9}' for name in COUNTS)}  result"]
    for entry in entries:
        counts = " ".join(f"{entry.get(name, ''):>9}" for name in COUNTS)
        lines.append(f"{entry['type']:<40} {counts}  {verdict(entry)}")
    lines += ["", *(f"{name}: {words}" for name, words in COUNTS.items())]
    reasons = [
        (entry["type"], reason)
        for entry in entries
        for reason in entry.get("reasons", ())
    ]
    lines += ["", "left alone:", *(f"  {name}: {reason}" for name, reason in reasons)]
    return "\n".join(lines) + "\n"


def page_table(document: dict) -> str:
    """The table for the documentation: a row for each class, alike classes in one row."""
    rows: dict[tuple, list[str]] = {}
    for entry in document["types"]:
        counts = tuple(
            entry.get(name, "") for name in ("norms", "alone", "modulated", "sums")
        )
        rows.setdefault((*counts, verdict(entry)), []).append(_short(entry["type"]))
    lines = [
        f"| diffusers {document['versions']['diffusers']} | norms swapped | skipped | with scale and shift | "
        "with the sum before | result |",
        "|---|---|---|---|---|---|",
    ]
    for (*counts, result), names in sorted(rows.items(), key=lambda row: row[1]):
        lines.append(
            f"| {', '.join(names)} | {' | '.join(map(str, counts))} | {result} |"
        )
    return "\n".join(lines)


def _short(name: str) -> str:
    return re.sub(r"(Transformer)?(1D|2D|3D)?(Model)?$", "", name) or name
