"""Patch a tiny random model of every type in Transformers and compare it, bit for bit, with the model before.

    python scripts/coverage.py                                  every causal LM and base type
    python scripts/coverage.py --mapping causal --only llama,t5 --out /tmp/two.json
    python scripts/coverage.py --mapping causal --interpreter   also float32 through the kernels, in Triton's interpreter

Each type runs in a process of its own, forked from this one, with a limit of time and of memory. The table goes to the
terminal, or beside the JSON as text where --out is given.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from multiprocessing import connection, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
if "--interpreter" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

import hf_rmsnorm  # noqa: E402
from coverage_inputs import find_inputs, tensors  # noqa: E402
from coverage_models import STYLES, Shrinker, build, config_class, model_class, to_bfloat16  # noqa: E402

MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "base": MODEL_MAPPING_NAMES}
TIME_LIMIT, MEMORY_LIMIT = 60, 6 * 2**30  # seconds, bytes beyond what the parent holds


# One model


def examine(model_type: str, mapping: str, interpreter: bool = False, say=lambda stage: None) -> dict:
    """Build, run, patch, compare and unpatch one type.

    Returns:
        ``{"type", "mapping", "model_class", "built", "ran", "error", "runs": [...]}``; a type with optional features
        has one run with them and one without.
    """
    started = time.monotonic()
    result = {"type": model_type, "mapping": mapping, "built": False, "ran": False, "error": None, "runs": []}
    try:
        cls = model_class(MAPPINGS[mapping][model_type])
        config = config_class(model_type)
    except Exception as error:  # an optional dependency is missing, whatever it raises
        return {**result, "error": _line(error)}
    result["model_class"] = cls.__name__
    done: set[tuple] = set()
    for features in (True, False):
        run = _first_that_runs(cls, config, features, started, done, result, say)
        if run is not None:
            result["runs"].append(_compare(*run, interpreter, say))
            done.add(tuple(run[2]["features"]))
    if result["ran"]:
        result["error"] = None
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _first_that_runs(cls, config, features, started, done, result, say):
    """(model, arguments, how it was made) in the first style that runs, or None."""
    best = None
    for style in STYLES:
        if time.monotonic() - started > TIME_LIMIT * (0.6 if features else 0.4):
            break
        say(f"building in style {style}, features {features}")
        shrinker = Shrinker(style, features)
        try:
            tiny = shrinker.make(config)
            if tuple(sorted(shrinker.switched)) in done or (features and not shrinker.switched):
                return None
            model = to_bfloat16(build(cls, tiny))
        except Exception as error:  # any constructor may refuse a size in its own way: the next style is tried
            result["error"] = result["error"] or f"{style}: {_line(error)}"
            continue
        how = {"style": style, "features": sorted(shrinker.switched), "dtype": "bfloat16"}
        result["built"] = True
        say(f"finding inputs in style {style}, features {features}")
        for dtype in (torch.bfloat16, torch.float32):
            arguments, error = find_inputs(model.to(dtype) if dtype == torch.float32 else model, dtype, budget=6)
            if arguments is not None:
                break
            result["error"] = f"{style}: {error[:300]}"
        if arguments is None:
            best = best or (build(cls, tiny).bfloat16(), None, how)
            continue
        result["ran"] = True
        return model, arguments, {**how, "dtype": str(dtype).removeprefix("torch.")}
    return best if not result["ran"] else None


def _compare(model, arguments, how: dict, interpreter: bool, say) -> dict:
    say("patching")
    run = {**how, "arguments": sorted(arguments or ()), "parameters": sum(p.numel() for p in model.parameters())}
    classes = [type(m) for m in model.modules()]
    saved = _saved_bytes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without any norm is a result here
        report = hf_rmsnorm.patch_model(model)
    run["swapped"] = [[r.class_name, str(r.formula), r.path] for r in report.swapped]
    run["left_alone"] = [[r.class_name, r.reason, r.path] for r in report.skipped]
    named = {r.path for r in (*report.swapped, *report.skipped)}
    run["unreported"] = dict(Counter(
        type(m).__name__ for p, m in model.named_modules() if "norm" in type(m).__name__.lower() and p not in named
    ))
    norms = {r.path: model.get_submodule(r.path) for r in report.swapped}
    run["saved_equal"] = saved == _saved_bytes(model)
    hf_rmsnorm.unpatch_model(model)
    run["classes_restored"] = classes == [type(m) for m in model.modules()]

    say("comparing")
    seen: dict[str, tuple] = {}
    handles = [m.register_forward_hook(_recorder(seen, p), with_kwargs=True) for p, m in norms.items()]
    scenes = [("", model, arguments)] if arguments is not None else []
    before = [_outputs(m, a) for _, m, a in scenes]
    for path, part in _idle_parts(model, norms, seen):
        found, _ = find_inputs(part, next(part.parameters()).dtype, budget=3, most=60)
        if found is not None:
            before.append(_outputs(part, found))
            scenes.append((path, part, found))
    for handle in handles:
        handle.remove()
    again = [_outputs(m, a) for _, m, a in scenes]
    alone_before = {p: _alone(m, seen.get(p)) for p, m in norms.items()}
    with hf_rmsnorm.patched(model) if norms else _nothing(), hf_rmsnorm.use_backend("reference"):
        patched = [_outputs(m, a) for _, m, a in scenes]
        alone = {p: _alone(m, seen.get(p)) for p, m in norms.items()}
    after = [_outputs(m, a) for _, m, a in scenes]
    run["parts_run"] = [path for path, *_ in scenes]
    run["norms_run"] = len(seen)
    run["repeatable"] = [_same_bits(a, b) for a, b in zip(before, again, strict=True)]
    run["bit_equal"] = [_same_bits(a, b) for a, b in zip(before, patched, strict=True)]
    run["restored_equal"] = [_same_bits(a, b) for a, b in zip(before, after, strict=True)]
    run["finite"] = [all(bool(t.isfinite().all()) for t in ts if t.is_floating_point()) for ts in before]
    run["norms_unequal"] = [
        [p, type(m).__name__, next(r[1] for r in run["swapped"] if r[2] == p)]
        for p, m in norms.items() if alone[p] is not None and not _same_bits(alone[p], alone_before[p])
    ]
    run["norms_alone"] = sum(a is not None for a in alone.values())
    if interpreter and norms:
        say("running the kernels in the interpreter")
        run["interpreter"] = _in_interpreter(model.float(), scenes[:1], norms, report)
    return run


def _recorder(seen: dict, path: str):
    def hook(module, args, kwargs, output):
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if x is not None and path not in seen and isinstance(output, torch.Tensor) and len(args) + len(kwargs) == 1:
            seen[path] = (x.detach(), output.dtype)

    return hook


def _idle_parts(model, norms: dict, seen: dict):
    """(path, part) of sub-models that hold norms which nothing has run yet, asked one after the other."""
    for path, part in model.named_modules():
        if path and isinstance(part, transformers.PreTrainedModel) and len(list(part.parameters())):
            if any(p.startswith(f"{path}.") and p not in seen for p in norms):
                yield path, part


def _outputs(model, arguments: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.detach().clone() for t in tensors(model(**arguments))]


def _alone(module, seen) -> list[torch.Tensor] | None:
    """The norm's own results on rows of every scale, in the dtype and the width that it is used with."""
    weights = [p for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()]
    if seen is not None:
        dtype, width = seen[0].dtype, seen[0].shape[-1]
    elif weights:
        dtype, width = weights[0].dtype, weights[0].shape[-1]
    else:
        dtype, width = torch.bfloat16, 64
    rows = torch.randn(64, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 64)[:, None]
    try:
        with torch.no_grad():
            return [module((rows + 0.1).to(dtype))]
    except REFUSALS:
        return None  # it accepts only the shape or dtype that its model gives it


REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def _same_bits(a: list[torch.Tensor] | None, b: list[torch.Tensor] | None) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    return all(x.dtype == y.dtype and x.shape == y.shape and _bytes(x) == _bytes(y) for x, y in zip(a, b, strict=True))


def _bytes(t: torch.Tensor) -> bytes:
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def _saved_bytes(model) -> str:
    """A hash of the state_dict, and of the files that save_pretrained writes where the model has it and can."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + _bytes(value))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        try:
            model.save_pretrained(folder)
        except Exception as error:  # some types cannot be saved in a config this small: then before and after fail alike
            digest.update(type(error).__name__.encode())
        for file in sorted(Path(folder).rglob("*")):
            digest.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()


def _in_interpreter(model, scenes, norms: dict, report) -> dict:
    """Every swapped norm that runs, in float32 through the kernels, against float64 and the original's own error."""
    from tolerance import assert_as_accurate

    from hf_rmsnorm.reference import reference_norm

    def single(value):
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    seen: dict[str, tuple] = {}
    handles = [m.register_forward_hook(_recorder(seen, p), with_kwargs=True) for p, m in norms.items()]
    scenes = [(path, part, {n: single(v) for n, v in arguments.items()}) for path, part, arguments in scenes]
    eager = [_outputs(m, a) for _, m, a in scenes]
    for handle in handles:
        handle.remove()
    rows = {p: x.reshape(-1, x.shape[-1])[:32] if x.dim() else x for p, (x, _) in seen.items()}
    with torch.no_grad():
        originals = {p: norms[p](x) for p, x in rows.items()}
        with hf_rmsnorm.patched(model), hf_rmsnorm.use_backend("triton"):
            fused = {p: norms[p](x) for p, x in rows.items()}
            outputs = [_outputs(m, a) for _, m, a in scenes]
    formulas, failures = {r.path: r.formula for r in report.swapped}, []
    for path, x in rows.items():
        tensors_of = [t.double() for t in norms[path].parameters()]
        spec = formulas[path]
        weight = tensors_of[0] if spec.has_weight and tensors_of else None
        bias = tensors_of[1] if spec.has_bias and len(tensors_of) > 1 else None
        if x.numel() == 0 or (spec.has_weight and weight is None) or (spec.has_bias and bias is None):
            continue
        try:
            assert_as_accurate(fused[path], originals[path], reference_norm(x.double(), weight, bias, spec), path)
        except AssertionError as error:
            failures.append(str(error))
    largest = [max((_relative(a, b) for a, b in zip(x, y, strict=True)), default=0.0)
               for x, y in zip(eager, outputs, strict=True)]
    return {"norms": len(rows), "failures": failures, "largest_output_difference": max(largest, default=0.0)}


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.is_floating_point() or a.numel() == 0:
        return 0.0
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# All models


def _child(pipe, job, interpreter: bool) -> None:
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
        result = {"crash": f"{_line(error)} at {Path(place.filename).name}:{place.lineno}"}
    pipe.send(result)
    pipe.close()
    os._exit(0)


def run_all(jobs: list[tuple[str, str]], workers: int = 1, interpreter: bool = False, tell=lambda result: None) -> list:
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
        message = {"type": job[0], "mapping": job[1], "built": "inputs" in stage or stage[:3] in ("pat", "com", "run"),
                   "ran": False, "error": f"{message['crash']} while {stage}", "runs": [],
                   "seconds": round(time.monotonic() - start, 1)}
    results[job] = message
    tell(message)


def wrong(result: dict) -> list[str]:
    """What a patch changed that it must not have, in words."""
    found = []
    for run in result["runs"]:
        for key in ("bit_equal", "restored_equal"):
            found += [f"{part or 'model'}: not {key}" for part, equal, repeatable in
                      zip(run["parts_run"], run[key], run["repeatable"], strict=True) if repeatable and not equal]
        found += [f"{p} ({c}): {formula} is not bit-equal" for p, c, formula in run["norms_unequal"]]
        found += [word for word in ("saved_equal", "classes_restored") if not run[word]]
        found += run.get("interpreter", {}).get("failures", [])
    return list(dict.fromkeys(found))


def totals(results: list[dict]) -> dict:
    runs = [run for r in results for run in r["runs"][:1]]
    return {
        "tried": len(results),
        "built": sum(bool(r["built"]) for r in results),
        "run": sum(bool(r["ran"]) for r in results),
        "bit_equal": sum(bool(r["ran"]) and not wrong(r) for r in results),
        "with_wrong_results": sum(bool(wrong(r)) for r in results),
        "not_repeatable": sum(not all(run["repeatable"]) for run in runs),
        "norms_swapped": sum(len(run["swapped"]) for run in runs),
        "norms_left_alone": sum(len(run["left_alone"]) for run in runs),
        "swapped_by_formula": dict(Counter(f for run in runs for _, f, _ in run["swapped"]).most_common()),
    }


def left_alone(results: list[dict]) -> list[dict]:
    """Per class and reason: how many modules, in which types."""
    groups: dict[tuple[str, str], dict] = {}
    for result in results:
        for class_name, reason, path in {tuple(e) for run in result["runs"] for e in run["left_alone"]}:
            group = groups.setdefault((class_name, reason), {"modules": 0, "types": {}})
            group["modules"] += 1
            group["types"].setdefault(result["type"], path)
    return [{"class": c, "reason": reason, **g} for (c, reason), g in sorted(groups.items())]


def unreported(results: list[dict]) -> dict[str, list[str]]:
    """Modules with "norm" in their class's name that the report does not mention, by class."""
    found: dict[str, set] = {}
    for result in results:
        for run in result["runs"]:
            for name in run["unreported"]:
                found.setdefault(name, set()).add(result["type"])
    return {name: sorted(types) for name, types in sorted(found.items())}


def table(results: list[dict]) -> str:
    lines = [f"{'type':<34} {'norms':>5} {'alone':>5} {'run':>5}  {'style':<9} result"]
    for r in results:
        run = r["runs"][0] if r["runs"] else None
        verdict = "; ".join(wrong(r)[:3]) or ("bit-equal" if r["ran"] else f"not run: {(r['error'] or '')[:110]}")
        if not r["built"]:
            verdict = f"not built: {(r['error'] or '')[:110]}"
        if run is None:
            lines.append(f"{r['type']:<34} {'':>5} {'':>5} {'':>5}  {'':<9} {verdict}")
            continue
        lines.append(f"{r['type']:<34} {len(run['swapped']):>5} {len(run['left_alone']):>5} {run['norms_run']:>5}  "
                     f"{run['style']:<9} {verdict}")
    lines += ["", "left alone:"]
    lines += [f"  {g['modules']:>4} x {g['class']}: {g['reason']}  [{', '.join(list(g['types'])[:4])}]"
              for g in left_alone(results)]
    lines += ["", "named norm but not in the report:"]
    lines += [f"  {name}: {', '.join(types[:5])} ({len(types)} types)" for name, types in unreported(results).items()]
    lines += ["", *(f"{k}: {v}" for k, v in totals(results).items() if k != "swapped_by_formula")]
    return "\n".join(lines)


def compact(result: dict) -> dict:
    """A result for the JSON: modules alike counted instead of listed."""
    def counted(entries):
        return [[*key, n] for key, n in Counter((c, what) for c, what, _ in entries).items()]

    runs = [{**run, "swapped": counted(run["swapped"]), "left_alone": counted(run["left_alone"])}
            for run in result["runs"]]
    return {**result, "runs": runs, "wrong": wrong(result)}


def versions() -> dict:
    return {"hf_rmsnorm": hf_rmsnorm.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
            "python": platform.python_version()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mapping", choices=("causal", "base", "all"), default="all")
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the JSON; the table goes beside it as .txt")
    parser.add_argument("--interpreter", action="store_true", help="also run the kernels in Triton's interpreter")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    only = set(options.only.split(",")) if options.only else None
    document = {"versions": versions(), "mappings": {}}
    texts, bad = [], 0
    for mapping in MAPPINGS if options.mapping == "all" else (options.mapping,):
        jobs = [(t, mapping) for t in MAPPINGS[mapping] if only is None or t in only]
        done = []

        def tell(result, done=done, count=len(jobs)):
            done.append(result)
            verdict = "; ".join(wrong(result)[:2]) or ("ok" if result["ran"] else result["error"])
            print(f"{len(done)}/{count} {result['type']}: {verdict} ({result.get('seconds')} s)", file=sys.stderr, flush=True)

        results = run_all(jobs, options.jobs, options.interpreter, tell)
        document["mappings"][mapping] = {
            "totals": totals(results), "left_alone": left_alone(results), "unreported": unreported(results),
            "types": [compact(r) for r in results],
        }
        bad += sum(bool(wrong(r)) for r in results)
        texts.append(f"{mapping} mapping\n\n{table(results)}\n")
    print("\n".join(texts))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".txt").write_text("\n".join(texts), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
