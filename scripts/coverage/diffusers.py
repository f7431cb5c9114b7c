"""Patch a tiny random model of every transformer in diffusers and compare it, bit for
bit, with the model before.

`scripts/data/diffusers_models.json` has for each class the arguments of its constructor
and of its forward, whose tensors are written as `models` reads them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import re
import warnings
from collections import Counter
from pathlib import Path

import torch

import hf_rmsnorm
from benchmarks.tables import markdown
from hf_rmsnorm.cli.env import versions
from hf_rmsnorm.verification.report import NOTHING_VERIFIED

from . import launches
from .models import cast, outputs, value_of
from .runs import Task, chosen, line, take

DATA = Path(__file__).resolve().parents[1] / "data" / "diffusers_models.json"
TIME_LIMIT = 600  # seconds that a class may take in the interpreter
MAPPING = "diffusers"
WARM = "DiTTransformer2DModel", MAPPING


def examine(name: str, mapping: str) -> dict:
    """Build, run, patch and compare one class in bfloat16; returns its entry of the
    JSON.
    """
    launched = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, inputs = build(name, dtype)
        words = str(dtype).removeprefix("torch.")
        launched[words] = launches.of_forwards(model, [(model, inputs)])
    expected = outputs(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without any norm is a result here
        report = hf_rmsnorm.patch_model(model)
    with hf_rmsnorm.use_backend("triton"):
        by_kernels = outputs(model, inputs)
    hf_rmsnorm.unpatch_model(model)
    return {
        "type": name,
        "norms": len(report.swapped),
        "alone": len(report.skipped),
        "launched": launched,
        "differing": _differing(by_kernels, expected),
        "values": sum(t.numel() for t in expected),
        "verified": _verified(model, inputs),
        "reasons": dict(Counter(f"{r.class_name}: {r.reason}" for r in report.skipped)),
    }


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


def run(options) -> int:
    """What ``python -m scripts.coverage diffusers`` does; returns 1 where a patch
    changed a result, or launches less than in the file of ``--check``.
    """
    names = chosen(options.only, classes())
    task = Task(examine, verdict, document, WARM, TIME_LIMIT)
    results = take(task, [(name, MAPPING) for name in names], options)
    print("\n".join(page_table(document(results))))
    fails = any(map(is_wrong, results))
    if options.check:
        before = launches.read(options.check)["types"]
        fails |= launches.print_falls(_launched(before), _launched(results))
    return int(fails)


def _launched(entries: list[dict]) -> dict[str, launches.Counts]:
    return {e["type"]: launches.flat(e.get("launched", {})) for e in entries}


def document(results: list[dict]) -> dict:
    """The JSON."""
    return {"versions": versions(("diffusers", "torch")), "types": results}


def is_wrong(entry: dict) -> bool:
    """Whether a patch changed what it must not."""
    return "error" not in entry and entry["verified"].startswith("FAIL")


def verdict(entry: dict) -> str:
    """What became of a class, in words."""
    if "error" in entry:
        return f"not run: {entry['error'][:100]}"
    if is_wrong(entry):
        return entry["verified"][:100]
    words = "bit-equal"
    if entry["differing"]:
        words = f"{entry['differing']} of {entry['values']} values rounded otherwise"
    if entry["verified"].startswith(NOTHING_VERIFIED):
        words += "; no kernel serves bfloat16"
    elif not entry["verified"].startswith("PASS"):
        words += f"; {entry['verified'].partition(':')[0]}"
    return words


def page_table(document: dict) -> list[str]:
    """The table for the documentation: a row for each class, alike classes in one row."""
    alike: dict[tuple, list[str]] = {}
    for entry in document["types"]:
        launched = entry.get("launched", {}).get("bfloat16", {})
        counts = (launched.get(kind, 0) for kind in ("modulations", "sums"))
        cells = entry.get("norms", ""), entry.get("alone", ""), *counts, verdict(entry)
        alike.setdefault(cells, []).append(_short(entry["type"]))
    head = [f"diffusers {document['versions']['diffusers']}", "norms swapped"]
    head += ["skipped", "with scale and shift", "with the sum before", "result"]
    rows = sorted((names, cells) for cells, names in alike.items())
    return markdown(head, ([", ".join(names), *cells] for names, cells in rows))


def _short(name: str) -> str:
    return re.sub(r"(Transformer)?(1D|2D|3D)?(Model)?$", "", name) or name


@functools.cache
def classes() -> dict[str, type]:
    """The transformers of the installed diffusers, by name."""
    from diffusers import ModelMixin
    from diffusers.models import transformers

    found = {}
    for module in pkgutil.iter_modules(transformers.__path__):
        name = f"{transformers.__name__}.{module.name}"
        for cls in vars(importlib.import_module(name)).values():
            own = inspect.isclass(cls) and cls.__module__ == name
            if own and issubclass(cls, ModelMixin):
                found[cls.__name__] = cls
    return dict(sorted(found.items()))


def build(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict]:
    """(model, arguments of its forward), the same each time; in its dtype but for the
    parts that stay in float32.

    Raises:
        KeyError: the JSON has no such class.
    """
    entry = json.loads(DATA.read_text(encoding="utf-8"))[name]
    torch.manual_seed(0)
    model = classes()[name](**_tuples(entry["config"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # as if trained: zeros would hide gates and modulations
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)
    cast(model, dtype, model._keep_in_fp32_modules or ())
    given = entry["inputs"].items()
    return model, {key: value_of(value, dtype) for key, value in given}


def _tuples(value):
    """The JSON's lists as the tuples that constructors expect."""
    if isinstance(value, dict):
        return {key: _tuples(part) for key, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
