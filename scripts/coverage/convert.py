"""Convert a tiny random model of every type in Transformers and prove it, in float64,
as LayerNorm and as RMSNorm.

Every type with a LayerNorm is in the table: converted in full, in part, or refused with
the reason. Types of the base mapping are tried where the causal mapping does not have
them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

import hf_rmsnorm
from hf_rmsnorm.conversion.plan import ConversionRefused
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.prove import prove

from .compare import MAPPINGS, chosen
from .inputs import find_inputs
from .models import Shrinker, build, config_class, model_class
from .numbers import STYLES
from .report import lines_of
from .workers import Job, line, run_all

TIME_LIMIT = 120  # seconds a type may take
LONGEST_ERROR = 300  # characters
# Verdict -> words of the refusal.
WITHOUT = {"RMSNorm": "it uses RMSNorm already", "no LayerNorm": "it has no LayerNorm"}
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
        cls, config = (
            model_class(MAPPINGS[mapping][model_type], model_type),
            config_class(model_type),
        )
        own = getattr(cls, "config_class", None)
        config = own if own is not None and not issubclass(config, own) else config
    except Exception as error:  # an optional dependency is missing, whatever it raises
        return {**result, "error": line(error)}
    result["model_class"] = cls.__name__
    for features in (False, True):
        made = _tiny(cls, config, features, started + TIME_LIMIT / 4 * (1 + features))
        if isinstance(made, str):
            result["error"] = result["error"] or made[:LONGEST_ERROR]
            if not result["variants"] and not features:
                with contextlib.suppress(Exception):
                    # nor can the type's own config be built: the error above says why
                    found = _convert(cls, config(), None)
                    if "could not be made here" not in found["reason"]:
                        result["variants"].append({"features": [], **found})
        elif made is not None:
            model, arguments, switched = made
            result["variants"].append(
                {"features": switched, **_convert(cls, model.config, arguments)}
            )
    if result["variants"]:
        result["error"] = None
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _tiny(cls, config, features: bool, deadline: float):
    """(model, arguments it runs on, features switched on); None if there are none; the
    first error if no size runs.
    """
    first = None
    for style in STYLES:
        if time.monotonic() > deadline:
            break
        shrinker = Shrinker(style, features)
        for _ in range(5):
            try:
                tiny = shrinker.make(config)
                if features and not shrinker.switched:
                    return None
                model = build(cls, tiny, small=style not in ("shallow", "default"))
            except Exception as error:
                # any constructor may refuse a size in its own way: the next style is
                # tried
                first = first or f"{style}: {line(error)}"
                if not shrinker.repair(line(error)):
                    break
                continue
            arguments, error = find_inputs(
                model, torch.float32, budget=2, hints=INPUTS.get(config.model_type)
            )
            if arguments is not None:
                return model, arguments, sorted(shrinker.switched)
            first = (
                first
                or f"{style}: {error if isinstance(error, str) else '; '.join(error[:2])}"
            )
            break
    return first or "not built in time"


def _convert(cls, config, arguments: dict | None) -> dict:
    """The verdict with these inputs, or with those that the package makes where these
    reach no tower.
    """
    if arguments is None:
        return _planned(cls, config, None)
    result = _planned(cls, config, lambda model: arguments)
    if any(words in result["reason"] for words in UNREACHED):
        with_towers = _planned(cls, config, None)
        reached = not any(
            words in with_towers["reason"]
            for words in (*UNREACHED, "could not be made here")
        )
        result = with_towers if reached else result
    return result


def _planned(cls, config, inputs) -> dict:
    try:
        proxy = make_proxy(config, model_class=cls, inputs=inputs)
        plan = discover(proxy)
        proof = prove(plan, proxy)
    except ConversionRefused as refusal:
        reason = str(refusal)
        return {
            "verdict": next(
                (v for v, words in WITHOUT.items() if words in reason), "refused"
            ),
            "reason": reason,
        }
    stays = {n.path: n.reason for n in plan.norms if not n.becomes_rms}
    found = {
        "norms": len(plan.norms),
        "rms_norms": len(plan.norms) - len(stays),
        "stock": proof.stock,
        "rms": proof.rms,
        "largest_mean": max(
            (v for k, v in proof.means.items() if k not in stays), default=0.0
        ),
        "centred": len(plan.centre),
        "copied": len(plan.copy),
        "undetermined": len(plan.undetermined),
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


def table(results: list[dict]) -> str:
    rows = [f"{'type':32} {'norms':>9} {'LayerNorm':>10} {'RMSNorm':>10}  verdict"]
    for r in results:
        for v in r["variants"]:
            if v["verdict"] in WITHOUT:
                continue
            name = r["type"] + (
                f" + {','.join(v['features'])}" if v["features"] else ""
            )
            counts = f"{v['rms_norms']}/{v['norms']}" if "norms" in v else ""
            errors = (
                f"{v['stock']:10.1e} {v['rms']:10.1e}"
                if "stock" in v
                else f"{'':10} {'':10}"
            )
            rows.append(
                f"{name[:32]:32} {counts:>9} {errors}  {v['verdict']}{': ' * bool(v['reason'])}{v['reason']}"
            )
        if not r["variants"]:
            rows.append(
                f"{r['type'][:32]:32} {'':9} {'':10} {'':10}  not run: {r['error']}"
            )
    return "\n".join(
        [*rows, "", ", ".join(f"{n} {k}" for k, n in summary(results).items()), ""]
    )


def jobs_of(only: set[str] | None) -> list[Job]:
    causal, base = MAPPINGS["causal"], MAPPINGS["base"]
    jobs = [(t, "causal") for t in causal] + [
        (t, "base") for t in base if t not in causal
    ]
    return [job for job in jobs if only is None or job[0] in only]


def run(options) -> int:
    """What ``python -m scripts.coverage convert`` does; returns 1 where a conversion
    fails its proof.
    """
    transformers.logging.set_verbosity_error()
    found: dict[tuple[str, str], dict] = {}
    if options.update:
        found = {
            (r["type"], r["mapping"]): r
            for r in json.loads(options.update.read_text())["types"]
        }
    jobs = jobs_of(chosen(options.only))
    jobs = [
        job
        for job in jobs
        if options.mapping in ("all", job[1]) and not (options.rest and job in found)
    ]
    count = 0

    def tell(result: dict) -> None:
        nonlocal count
        count += 1
        found[result["type"], result["mapping"]] = result
        text = f"{count} of {len(jobs)}, {result['type']}: {verdict(result)} ({result.get('seconds')} s)"
        print(text, file=sys.stderr, flush=True)
        if options.out and count % 25 == 0:
            # a run of half an hour that is stopped leaves its results
            _write(options.out, found)

    run_all(
        jobs, examine, crashed, warm=("gpt2", "causal"), workers=options.jobs,
        seconds=TIME_LIMIT, tell=tell,
    )  # fmt: skip
    if options.out:
        _write(options.out, found)
    print(table(_ordered(found)))
    return 1 if any(verdict(r) == "failed" for r in found.values()) else 0


def _ordered(found: dict) -> list[dict]:
    return [found[job] for job in jobs_of(None) if job in found]


def _write(path: Path, found: dict) -> None:
    results = _ordered(found)
    versions = {"hf_rmsnorm": hf_rmsnorm.__version__}
    versions |= {"transformers": transformers.__version__, "torch": torch.__version__}
    document = {"versions": versions, "summary": summary(results), "types": "<types>"}
    text = json.dumps(document, indent=1).replace('"<types>"', lines_of(results))
    path.write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text(table(results), encoding="utf-8")
