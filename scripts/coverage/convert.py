"""Convert a tiny random model of every type in Transformers and prove it, in float64,
as LayerNorm and as RMSNorm.

Every type with a LayerNorm is in the table: converted in full, in part, or refused with
the reason. Types of the base mapping are tried where the causal mapping does not have
them.
"""

from __future__ import annotations

import time
from collections import Counter

import transformers

from hf_rmsnorm.cli.env import versions
from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import prove

from .configs import tiny_config
from .models import GIVEN, MAPPINGS, classes_of, inputs_of
from .runs import Job, Task, chosen, line, take

PACKAGES = ("torch", "transformers")
TIME_LIMIT = 120  # seconds a type may take
# Verdict -> words of the refusal.
WITHOUT = {"RMSNorm": "it uses RMSNorm already", "no LayerNorm": "it has no LayerNorm"}
# Words of a refusal that has to do with the inputs, or with the sizes.
NOT_MADE = (
    "could not be made here",
    "cannot be made from this config",
    "no narrower model",
    "it does not run on these",
)
UNREACHED = ("the inputs reached", "the inputs made no use of")


def examine(model_type: str, mapping: str) -> dict:
    """One type, with its optional features (q/k norms and the like) and without.

    Returns:
        ``{"type", "mapping", "model_class", "variants": [...], "error"}``; each variant
        has ``verdict``: "converted"
        (every norm), "partly", "refused", "RMSNorm" (it has no LayerNorm), "no
        LayerNorm" (nor this) or "failed".
    """
    started = time.monotonic()
    result = {"type": model_type, "mapping": mapping, "variants": [], "error": None}
    try:
        cls, config = classes_of(model_type, mapping)
    except Exception as error:  # an optional dependency is missing, whatever it raises
        return {**result, "error": line(error)}
    result["model_class"] = cls.__name__
    for features in (False, True):
        try:
            tiny, switched = tiny_config(config, features, model_type)
        except Exception as error:  # any constructor may refuse a size in its own way
            result["error"] = line(error)
            continue
        if features and not switched:
            continue
        variant = _convert(cls, tiny, model_type)
        if _lacks_inputs(variant, *NOT_MADE):
            result["error"] = variant["reason"]
            continue
        result["variants"].append({"features": switched, **variant})
    if result["variants"]:
        result["error"] = None
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _convert(cls, config, model_type: str) -> dict:
    """The verdict with the inputs of the table, or with those that the package makes
    where these do not fit, or reach no tower.
    """
    found = []
    if model_type in GIVEN:
        found.append(_planned(cls, config, lambda m: inputs_of(m, model_type)))
        if not _lacks_inputs(found[0], *NOT_MADE, *UNREACHED):
            return found[0]
    found.append(_planned(cls, config, None))
    if _lacks_inputs(found[-1], *NOT_MADE):
        return found[0]
    return found[-1]


def _lacks_inputs(result: dict, *words: str) -> bool:
    return any(part in result["reason"] for part in words)


def _planned(cls, config, inputs) -> dict:
    try:
        proxy = make_proxy(config, model_class=cls, inputs=inputs)
        plan = discover(proxy)
        proof = prove(plan, proxy)
    except ConversionRefused as refusal:
        reason = str(refusal)
        kinds = [kind for kind, words in WITHOUT.items() if words in reason]
        return {"verdict": kinds[0] if kinds else "refused", "reason": reason}
    stays = {n.path: n.reason for n in plan.norms if not n.becomes_rms}
    verdict = "failed" if not proof.passed else "partly" if stays else "converted"
    return {
        "verdict": verdict,
        "norms": len(plan.norms),
        "rms_norms": len(plan.norms) - len(stays),
        "stock": proof.stock,
        "rms": proof.rms,
        "reason": "; ".join(dict.fromkeys(stays.values())),
    }


def verdict(result: dict) -> str:
    """The best of a type's variants: one that is converted counts for the type."""
    order = ("failed", "converted", "partly", "refused", *WITHOUT)
    found = {v["verdict"] for v in result["variants"]}
    return next((v for v in order if v in found), "not run")


def summary(results: list[dict]) -> dict:
    return dict(Counter(verdict(r) for r in results))


def jobs_of(mapping: str) -> list[Job]:
    """The types of the causal mapping, and those that only the base mapping has."""
    causal, base = MAPPINGS["causal"], MAPPINGS["base"]
    jobs = [(t, "causal") for t in causal]
    jobs += [(t, "base") for t in base if t not in causal]
    return [job for job in jobs if mapping in ("all", job[1])]


def run(options) -> int:
    """What ``python -m scripts.coverage convert`` does; returns 1 where a conversion
    fails its proof.
    """
    transformers.logging.set_verbosity_error()
    jobs = jobs_of(options.mapping)
    types = chosen(options.only, [t for t, _ in jobs])
    task = Task(
        examine,
        verdict,
        document,
        warm=("gpt2", "causal"),
        seconds=TIME_LIMIT,
        unexamined={"variants": []},
    )
    results = take(task, [job for job in jobs if job[0] in types], options)
    counts = summary(results)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int("failed" in counts)


def document(results: list[dict]) -> dict:
    """The JSON."""
    about = {"versions": versions(PACKAGES), "summary": summary(results)}
    return about | {"types": results}
