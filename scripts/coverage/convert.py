"""Convert a tiny random model of every type in Transformers and prove it, in float64, as LayerNorm and as RMSNorm.

    python scripts/coverage.py --convert --out scripts/results/convert-5.23.0.json
    python scripts/coverage.py --convert --only gpt2,bloom

Every type with a LayerNorm is in the table: converted in full, in part, or refused with the reason. Types of the base
mapping are tried where the causal mapping does not have them. Each runs in a process of its own with a limit of time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
import traceback
from collections import Counter
from multiprocessing import connection, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from coverage_compare import MAPPINGS, line  # noqa: E402
from coverage_inputs import find_inputs  # noqa: E402
from coverage_models import STYLES, Shrinker, build, config_class, model_class  # noqa: E402

import hf_rmsnorm  # noqa: E402
from hf_rmsnorm.conversion.plan import ConversionRefused  # noqa: E402
from hf_rmsnorm.conversion.twin.discover import discover  # noqa: E402
from hf_rmsnorm.conversion.twin.prove import prove  # noqa: E402
from hf_rmsnorm.conversion.twin.twin import make_twin  # noqa: E402

TIME_LIMIT = 120  # seconds a type may take
MEMORY_LIMIT = 6 * 2**30  # bytes beyond what the parent holds
NO_LAYER_NORM = "computes no LayerNorm"


def _with_patches(model) -> torch.Tensor:
    """Two examples of four places for patches of an image and eight words."""
    places = torch.full((2, 4), model.config.image_token_id)
    return torch.cat([places, torch.arange(3, 19).view(2, 8)], dim=1)


# By type: arguments of its forward that reach what those found by its signature do not, as in `coverage_hints.INPUTS`.
INPUTS: dict[str, dict] = {
    "efficientloftr": {"pixel_values": (2, 2, 3, 64, 64)},
    "fuyu": {
        "input_ids": _with_patches,
        "pixel_values": lambda m: torch.randn(2, 4, m.config.patch_size**2 * m.config.num_channels),
    },
    "table-transformer": {"pixel_values": (2, 3, 64, 64)},
}


def examine(model_type: str, mapping: str) -> dict:
    """One type, with its optional features (q/k norms and the like) and without.

    Returns:
        ``{"type", "mapping", "model_class", "variants": [...], "error"}``; each variant has ``verdict``: "converted"
        (every norm), "partly", "refused", "no LayerNorm" or "failed".
    """
    started = time.monotonic()
    result = {"type": model_type, "mapping": mapping, "variants": [], "error": None}
    try:
        cls, config = model_class(MAPPINGS[mapping][model_type], model_type), config_class(model_type)
        own = getattr(cls, "config_class", None)
        config = own if own is not None and not issubclass(config, own) else config
    except Exception as error:  # an optional dependency is missing, whatever it raises
        return {**result, "error": line(error)}
    result["model_class"] = cls.__name__
    for features in (False, True):
        made = _tiny(cls, config, features, started + TIME_LIMIT / 4 * (1 + features))
        if isinstance(made, str):
            result["error"] = result["error"] or made
            if not result["variants"] and not features:
                with contextlib.suppress(Exception):  # nor can the type's own config be built: the error above says why
                    result["variants"].append({"features": [], **_convert(cls, config(), None)})
        elif made is not None:
            model, arguments, switched = made
            result["variants"].append({"features": switched, **_convert(cls, model.config, arguments)})
    if result["variants"]:
        result["error"] = None
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _tiny(cls, config, features: bool, deadline: float):
    """(model, arguments it runs on, features switched on); None if there are none; the first error if no size runs."""
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
            except Exception as error:  # any constructor may refuse a size in its own way: the next style is tried
                first = first or f"{style}: {line(error)}"
                if not shrinker.repair(line(error)):
                    break
                continue
            arguments, error = find_inputs(model, torch.float32, budget=2, hints=INPUTS.get(config.model_type))
            if arguments is not None:
                return model, arguments, sorted(shrinker.switched)
            first = first or f"{style}: {error if isinstance(error, str) else '; '.join(error[:2])}"
            break
    return first or "not built in time"


def _convert(cls, config, arguments: dict) -> dict:
    try:
        twin = make_twin(config, model_class=cls, inputs=None if arguments is None else lambda model: arguments)
    except ConversionRefused as refusal:
        if arguments is None:
            raise RuntimeError("its own config makes no twin") from refusal
        return {"verdict": "refused", "reason": str(refusal)}
    try:
        plan = discover(twin)
        proof = prove(plan, twin)
    except ConversionRefused as refusal:
        verdict = "no LayerNorm" if NO_LAYER_NORM in str(refusal) else "refused"
        return {"verdict": verdict, "reason": str(refusal)}
    stays = {n.path: n.reason for n in plan.norms if not n.becomes_rms}
    found = {
        "norms": len(plan.norms),
        "rms_norms": len(plan.norms) - len(stays),
        "stock": proof.stock,
        "rms": proof.rms,
        "largest_mean": max((v for k, v in proof.means.items() if k not in stays), default=0.0),
        "margins": plan.margins,
        "centred": len(plan.centre),
        "scaled": len(plan.scale),
        "copied": len(plan.copy),
        "undetermined": len(plan.undetermined),
        "reason": "; ".join(dict.fromkeys(stays.values())),
    }
    verdict = "failed" if not proof.passed else "partly" if stays else "converted"
    return {"verdict": verdict, **found}


def _child(pipe, job) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        result = examine(*job)
    except BaseException as error:  # whatever stops this one type is that type's result
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        result = {"type": job[0], "mapping": job[1], "variants": [], "error": f"{line(error)} at {where}"}
    pipe.send(result)
    pipe.close()
    os._exit(0)


def run_all(jobs: list[tuple[str, str]], workers: int, tell=lambda result: None) -> list[dict]:
    """`examine` for each (type, mapping) in a forked process of its own; what does not end in time is stopped."""
    torch.set_num_threads(1)
    examine("gpt2", "causal")  # imports, once and for all children, what every model needs
    context, waiting, running, results = get_context("fork"), list(jobs), {}, {}
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, job))
            process.start()
            theirs.close()
            running[ours] = (job, process, time.monotonic())
        ended = {}
        for pipe in connection.wait(list(running), timeout=0.5):
            try:
                ended[pipe] = pipe.recv()
            except EOFError:
                ended[pipe] = "the process died"
        for pipe, (_, _, start) in running.items():
            if time.monotonic() - start > TIME_LIMIT and pipe not in ended:
                ended[pipe] = f"not done after {TIME_LIMIT} s"
        for pipe, result in ended.items():
            job, process, _ = running.pop(pipe)
            process.kill()
            process.join()
            pipe.close()
            if isinstance(result, str):
                result = {"type": job[0], "mapping": job[1], "variants": [], "error": result}
            results[job] = result
            tell(result)
    return [results[job] for job in jobs]


def verdict(result: dict) -> str:
    """The best of a type's variants: one that is converted counts for the type."""
    order = ("failed", "converted", "partly", "refused", "no LayerNorm")
    found = {v["verdict"] for v in result["variants"]}
    return next((v for v in order if v in found), "not run")


def summary(results: list[dict]) -> dict:
    return dict(Counter(verdict(r) for r in results))


def table(results: list[dict]) -> str:
    rows = [f"{'type':32} {'norms':>9} {'LayerNorm':>10} {'RMSNorm':>10}  verdict"]
    for r in results:
        for v in r["variants"]:
            if v["verdict"] == "no LayerNorm":
                continue
            name = r["type"] + (f" + {','.join(v['features'])}" if v["features"] else "")
            counts = f"{v['rms_norms']}/{v['norms']}" if "norms" in v else ""
            errors = f"{v['stock']:10.1e} {v['rms']:10.1e}" if "stock" in v else f"{'':10} {'':10}"
            rows.append(f"{name[:32]:32} {counts:>9} {errors}  {v['verdict']}{': ' * bool(v['reason'])}{v['reason']}")
        if not r["variants"]:
            rows.append(f"{r['type'][:32]:32} {'':9} {'':10} {'':10}  not run: {r['error']}")
    return "\n".join([*rows, "", ", ".join(f"{n} {k}" for k, n in summary(results).items()), ""])


def jobs_of(only: set[str] | None) -> list[tuple[str, str]]:
    causal, base = MAPPINGS["causal"], MAPPINGS["base"]
    jobs = [(t, "causal") for t in causal] + [(t, "base") for t in base if t not in causal]
    return [job for job in jobs if only is None or job[0] in only]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--mapping", choices=("causal", "base", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the JSON; the table goes beside it as .txt")
    parser.add_argument("--update", type=Path, help="a JSON made earlier, whose results stay where they are not redone")
    parser.add_argument("--rest", action="store_true", help="only what --update does not have")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    found: dict[tuple[str, str], dict] = {}
    if options.update:
        found = {(r["type"], r["mapping"]): r for r in json.loads(options.update.read_text())["types"]}
    jobs = jobs_of(set(options.only.split(",")) if options.only else None)
    jobs = [job for job in jobs if options.mapping in ("all", job[1]) and not (options.rest and job in found)]
    count = 0

    def tell(result: dict) -> None:
        nonlocal count
        count += 1
        found[result["type"], result["mapping"]] = result
        text = f"{count} of {len(jobs)}, {result['type']}: {verdict(result)} ({result.get('seconds')} s)"
        print(text, file=sys.stderr, flush=True)
        if options.out and count % 25 == 0:  # a run of half an hour that is stopped leaves what it found
            _write(options.out, found)

    run_all(jobs, options.jobs, tell)
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
    document = {"versions": versions, "summary": summary(results), "types": results}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
