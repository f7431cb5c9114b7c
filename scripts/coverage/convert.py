"""Convert a tiny random model of every type in Transformers and prove it, in float64,
as LayerNorm and as RMSNorm.

Every type with a LayerNorm is in the table: converted in full, in part, or refused with
the reason. Types of the base mapping are tried where the causal mapping does not have
them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter

import torch
import transformers

import hf_rmsnorm
from hf_rmsnorm.conversion.plan import ConversionRefused
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import prove

from .compare import MAPPINGS, chosen, classes_of
from .inputs import find_inputs
from .making import build_in
from .numbers import STYLES
from .runs import Job, Task, in_document, line, take

TIME_LIMIT = 120  # seconds a type may take
LONGEST_ERROR = 300  # characters
# Verdict -> words of the refusal.
WITHOUT = {"RMSNorm": "it uses RMSNorm already", "no LayerNorm": "it has no LayerNorm"}
NOT_MADE = ("could not be made here", "cannot be made from this config")
UNREACHED = ("the inputs reached", "the inputs made no use of")


def _with_patches(model) -> torch.Tensor:
    """Two examples of four places for patches of an image and eight words."""
    places = torch.full((2, 4), model.config.image_token_id)
    return torch.cat([places, torch.arange(3, 19).view(2, 8)], dim=1)


# By type: arguments of its forward that reach what those found by its signature do not,
# as in `hints.INPUTS`.
INPUTS: dict[str, dict] = {
    "efficientloftr": {"pixel_values": (2, 2, 3, 64, 64)},
    "fun_asr_nano_encoder": {
        "input_features": lambda m: torch.randn(2, 12, m.config.input_size),
        "input_features_mask": lambda: torch.ones(2, 12, dtype=torch.long),
    },
    "fuyu": {
        "input_ids": _with_patches,
        "pixel_values": lambda m: torch.randn(
            2, 4, m.config.patch_size**2 * m.config.num_channels
        ),
    },
    "table-transformer": {"pixel_values": (2, 3, 64, 64)},
    # of more it says what takes minutes
    "vits": {"input_ids": lambda: torch.tensor([[3]])},
}


def examine(model_type: str, mapping: str, say=lambda stage: None) -> dict:
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
        made = _tiny(cls, config, features, started + TIME_LIMIT / 4 * (1 + features))
        if isinstance(made, str):
            result["error"] = result["error"] or made[:LONGEST_ERROR]
            if not result["variants"] and not features:
                result["variants"] += _of_its_own_config(cls, config)
        elif made is not None:
            model, arguments, switched = made
            variant = _convert(cls, model.config, arguments)
            result["variants"].append({"features": switched, **variant})
    if result["variants"]:
        result["error"] = None
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _of_its_own_config(cls, config) -> list[dict]:
    """A variant of a type of which nothing tiny runs, if its own config can be built."""
    with contextlib.suppress(Exception):
        found = _convert(cls, config(), None)
        if not any(words in found["reason"] for words in NOT_MADE):
            return [{"features": [], **found}]
    return []


def _tiny(cls, config, features: bool, deadline: float):
    """(model, arguments it runs on, features switched on); None if there are none; the
    first error if no size runs.
    """
    errors = []
    hints = INPUTS.get(config.model_type)
    for style in STYLES:
        if time.monotonic() > deadline:
            break
        try:
            made = build_in(style, cls, config, features)
        except Exception as error:
            # any constructor may refuse a size in its own way: the next style is tried
            errors.append(f"{style}: {line(error)}")
            continue
        if made is None:
            return None
        model, switched = made
        found, met = find_inputs(model, torch.float32, budget=2, hints=hints)
        if found is not None:
            return model, found, switched
        errors.append(f"{style}: {'; '.join(met[:2])}")
    return errors[0] if errors else "not built in time"


def _convert(cls, config, arguments: dict | None) -> dict:
    """The verdict with these inputs, or with those that the package makes where these
    reach no tower.
    """
    if arguments is None:
        return _planned(cls, config, None)
    result = _planned(cls, config, lambda model: arguments)
    if not any(words in result["reason"] for words in UNREACHED):
        return result
    with_towers = _planned(cls, config, None)
    if any(words in with_towers["reason"] for words in (*UNREACHED, *NOT_MADE)):
        return result
    return with_towers


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
    found = {
        "norms": len(plan.norms),
        "rms_norms": len(plan.norms) - len(stays),
        "stock": proof.stock,
        "rms": proof.rms,
        "largest_mean": max(
            (v for k, v in proof.means.items() if k not in stays), default=0.0
        ),
        "reason": "; ".join(dict.fromkeys(stays.values())),
    }
    verdict = "failed" if not proof.passed else "partly" if stays else "converted"
    return {"verdict": verdict, **found}


def crashed(job: Job, error: str, stage: str, seconds: float) -> dict:
    """The result of a type whose process gave none."""
    return {"type": job[0], "mapping": job[1], "variants": [], "error": error}


def verdict(result: dict) -> str:
    """The best of a type's variants: one that is converted counts for the type."""
    order = ("failed", "converted", "partly", "refused", *WITHOUT)
    found = {v["verdict"] for v in result["variants"]}
    return next((v for v in order if v in found), "not run")


def summary(results: list[dict]) -> dict:
    return dict(Counter(verdict(r) for r in results))


def jobs_of(only: set[str] | None) -> list[Job]:
    """The types of the causal mapping, and those that only the base mapping has."""
    causal, base = MAPPINGS["causal"], MAPPINGS["base"]
    jobs = [(t, "causal") for t in causal]
    jobs += [(t, "base") for t in base if t not in causal]
    return [job for job in jobs if only is None or job[0] in only]


def run(options) -> int:
    """What ``python -m scripts.coverage convert`` does; returns 1 where a conversion
    fails its proof.
    """
    transformers.logging.set_verbosity_error()
    found: dict[Job, dict] = {}
    if options.update:
        earlier = json.loads(options.update.read_text(encoding="utf-8"))["types"]
        found = {(result["type"], result["mapping"]): result for result in earlier}
    jobs = jobs_of(chosen(options.only))
    jobs = [job for job in jobs if options.mapping in ("all", job[1])]
    task = Task(
        examine,
        crashed,
        verdict,
        lambda result: verdict(result) == "failed",
        text,
        warm=("gpt2", "causal"),
        seconds=TIME_LIMIT,
    )
    code = take(task, jobs, found, options)
    counts = summary(list(found.values()))
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return code


def text(found: dict[Job, dict]) -> str:
    """The JSON, with a line for each type."""
    results = [found[job] for job in jobs_of(None) if job in found]
    versions = {
        "hf_rmsnorm": hf_rmsnorm.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    document = {"versions": versions, "summary": summary(results)}
    return in_document(document, results)
