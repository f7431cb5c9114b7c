"""One type of model: built, run, patched, compared and unpatched."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import signal
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

import hf_rmsnorm

from . import BadOptions
from .fusion import compare_fusion
from .hints import CONFIG, INPUTS
from .inputs import find_inputs, fresh, tensors
from .models import FIXED, STYLES, Shrinker, build, config_class, model_class
from .reasons import why_not_a_norm
from .timm import stand_in_for_timm
from .workers import line

MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "base": MODEL_MAPPING_NAMES}
TIME_LIMIT = 90  # seconds a type may take
DTYPE_ERROR = re.compile(r"dtype|[Bb]float16|BFloat16|same type|scalar type|Half|FFT")


def chosen(only: str | None) -> set[str] | None:
    """The types of a comma-separated list; None, for all of them, without a list."""
    types = set(only.split(",")) if only else None
    if types and (unknown := types - {*MAPPINGS["causal"], *MAPPINGS["base"]}):
        raise BadOptions(f"Transformers {transformers.__version__} has no type {', '.join(sorted(unknown))}")
    return types


def examine(model_type: str, mapping: str, interpreter: str = "", say=lambda stage: None) -> dict:
    """Build, run, patch, compare and unpatch one type.

    Args:
        interpreter: what to run in Triton's interpreter besides: "norms", each alone; "fusion", the model as a whole.

    Returns:
        ``{"type", "mapping", "model_class", "built", "ran", "error", "runs": [...]}``; a type with optional features
        has one run with them and one without.
    """
    started = time.monotonic()
    result = {"type": model_type, "mapping": mapping, "built": False, "ran": False, "error": None}
    result |= {"errors": [], "runs": []}
    try:
        stand_in_for_timm()
        cls = model_class(MAPPINGS[mapping][model_type], model_type)
        config = config_class(model_type)
        own = getattr(cls, "config_class", None)
        if own is not None and not issubclass(config, own):
            config = own  # the decoder of a composite type has another config
    except Exception as error:  # an optional dependency is missing, whatever it raises
        return {**result, "error": line(error)}
    result["model_class"] = cls.__name__
    done: set[tuple] = set()
    for features in (True, False):
        run = _first_that_runs(cls, config, features, started, done, result, say)
        if run is not None:
            compared = _compare(*run, interpreter, say)
            result["runs"].append(compared)
            # A model without a forward counts as run if its parts ran every norm.
            swapped = sum(n for *_, n in compared["swapped"])
            result["ran"] |= bool(compared["parts_run"]) and compared["norms_run"] == swapped
            done.add(tuple(run[2]["features"]))
    if result["ran"]:
        result["error"] = None
    result["errors"] = [] if result["ran"] else result["errors"]
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _first_that_runs(cls, config, features, started, done, result, say):
    """(model, arguments, how it was made) in the first style that runs, or None."""
    best, kinds = None, defaultdict(set)
    for style in STYLES:
        if any(len(styles) > 2 for styles in kinds.values()) and style != STYLES[-1]:
            continue  # three ways of choosing sizes gave the same error: the size is not the cause
        if time.monotonic() - started > TIME_LIMIT / 4 * (2 - features):
            break
        say(f"building in style {style}, features {features}")
        try:
            built = _build(cls, config, style, features, done, CONFIG.get(result["type"], {}))
        except Exception as error:  # any constructor may refuse a size in its own way: the next style is tried
            result["errors"].append(f"{style}: {line(error)}")
            result["error"] = result["error"] or result["errors"][0]
            continue
        if built is None:
            return None
        model, switched = built
        how = {"style": style, "features": switched, "dtype": "bfloat16"}
        result["built"] = True
        say(f"finding inputs in style {style}, features {features}")
        for dtype in (torch.bfloat16, torch.float32):
            try:
                with _seconds(20):
                    model = model.float() if dtype == torch.float32 else model
                    arguments, errors = find_inputs(model, dtype, budget=4, hints=INPUTS.get(result["type"]))
            except TimeoutError as timeout:
                arguments, errors = None, [line(timeout)]
            if arguments is not None:
                break
            result["errors"].append(f"{style}, {dtype}: {errors[0][:300]}")
            kinds[re.sub(r"\d+", "#", errors[0])[:80]].add("fixed" if style in FIXED else style)
            if not any(DTYPE_ERROR.search(error) for error in errors):
                break
        result["error"] = result["errors"][-1] if result["errors"] else None
        if arguments is None:
            best = best or (model.bfloat16(), None, how)
            continue
        result["ran"] = True
        return model, arguments, {**how, "dtype": str(dtype).removeprefix("torch.")}
    return best if not result["ran"] else None


def _build(cls, config, style: str, features: bool, done: set, hints: dict, repairs: int = 5):
    """(model in bfloat16, the features switched on), or None if there are none or those were done before.

    What an error asks for is tried before it is raised.
    """
    shrinker = Shrinker(style, features, hints)
    for attempt in range(repairs):
        try:
            tiny = shrinker.make(config)
            switched = tuple(sorted(shrinker.switched))
            if switched in done or (features and not switched):
                return None
            with _seconds(15):
                return to_bfloat16(build(cls, tiny, small=style not in ("shallow", "default"))), list(switched)
        except Exception as error:  # see there
            if attempt == repairs - 1 or not shrinker.repair(line(error)):
                raise


def _compare(model, arguments, how: dict, interpreter: str, say) -> dict:
    say("patching")
    run = {**how, "arguments": sorted(arguments or ()), "parameters": sum(p.numel() for p in model.parameters())}
    classes = [type(m) for m in model.modules()]
    saved = _saved_bytes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without any norm is a result here
        report = hf_rmsnorm.patch_model(model)
    run["swapped"] = _counted((r.class_name, str(r.formula)) for r in report.swapped)
    run["left_alone"] = _counted((r.class_name, r.reason) for r in report.skipped)
    run["layers"] = _counted((r.class_name, r.fused or f"not fused: {r.reason}") for r in report.layers)
    named = {r.path for r in (*report.swapped, *report.skipped)}
    run["not_norms"] = _counted(
        (type(m).__name__, why_not_a_norm(p, m, named))
        for p, m in model.named_modules()
        if p and p not in named and "norm" in type(m).__name__.lower()
    )
    norms = {r.path: model.get_submodule(r.path) for r in report.swapped}
    run["saved_equal"] = saved == _saved_bytes(model)
    hf_rmsnorm.unpatch_model(model)
    run["classes_restored"] = classes == [type(m) for m in model.modules()]

    say("comparing")
    seen: dict[str, tuple] = {}
    handles = [m.register_forward_hook(_recorder(seen, p), with_kwargs=True) for p, m in norms.items()]
    scenes = [("", model, arguments)] if arguments is not None else []
    before = [_outputs(m, a) for _, m, a in scenes]
    deadline = time.monotonic() + TIME_LIMIT / 4
    for path, part in _idle_parts(model, norms, seen, every=arguments is None):
        if time.monotonic() > deadline:
            break
        found, _ = find_inputs(part, next(part.parameters()).dtype, budget=3, most=60)
        if found is not None:
            before.append(_outputs(part, found))
            scenes.append((path, part, found))
    for handle in handles:
        handle.remove()
    again = [_outputs(m, a) for _, m, a in scenes]
    alone_before = {p: _alone(m, seen.get(p)) for p, m in norms.items()}
    with hf_rmsnorm.patched(model) if norms else contextlib.nullcontext(), hf_rmsnorm.use_backend("reference"):
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
        [p, type(m).__name__, next(str(r.formula) for r in report.swapped if r.path == p)]
        for p, m in norms.items()
        if alone[p] is not None and not _same_bits(alone[p], alone_before[p])
    ]
    run["norms_alone"] = sum(a is not None for a in alone.values())
    if interpreter == "fusion" and any("not fused" not in how for _, how, _ in run["layers"]) and arguments is not None:
        say("running fused layers in the interpreter")
        run["fusion"] = compare_fusion(model, arguments, _same_bits)
    if interpreter == "norms" and norms:
        say("running the kernels in the interpreter")
        run["interpreter"] = _in_interpreter(model.float(), scenes[:1], norms)
    return run


def _counted(pairs) -> list[list]:
    return [[*pair, count] for pair, count in Counter(pairs).items()]


def _recorder(seen: dict, path: str):
    """A hook that keeps the arguments of a norm's first call."""

    def hook(module, args, kwargs, output):
        if path not in seen and isinstance(output, torch.Tensor):
            seen[path] = copy.deepcopy((_detached(args), _detached(kwargs)))

    return hook


def _detached(values):
    if isinstance(values, dict):
        return {name: _detached(v) for name, v in values.items()}
    if isinstance(values, tuple):
        return tuple(map(_detached, values))
    return values.detach() if isinstance(values, torch.Tensor) else values


def _idle_parts(model, norms: dict, seen: dict, every: bool):
    """(path, part) of parts that hold norms which nothing has run yet, asked one after the other.

    Args:
        every: also parts that are no models by themselves, for a model that could not be run as a whole.
    """
    for kind in (transformers.PreTrainedModel, torch.nn.Module)[: 1 + every]:
        for path, part in model.named_modules():
            idle = path and any(p.startswith(f"{path}.") and p not in seen for p in norms)
            listed = isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict))
            if idle and not listed and isinstance(part, kind) and any(True for _ in part.parameters()):
                yield path, part


def _outputs(model, arguments: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.detach().clone() for t in tensors(model(**fresh(arguments)))]


def _alone(module, seen) -> list[torch.Tensor] | None:
    """The norm's own results: on its first call's arguments again, and where it takes them on rows of every scale."""
    weights = [p for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()]
    dtype, width = (weights[0].dtype, weights[0].shape[-1]) if weights else (torch.bfloat16, 64)
    results = []
    with torch.no_grad():
        if seen is not None:
            args, kwargs = seen
            results += tensors(module(*args, **kwargs))
            x = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            dtype, width = x.dtype, x.shape[-1]
        rows = torch.randn(64, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 64)[:, None]
        try:
            results.append(module((rows + 0.1).to(dtype)))
        except REFUSALS:  # it accepts only the shape, the dtype or the arguments that its model gives it
            return results or None
    return results


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
        except Exception as error:  # some cannot be saved in a config this small, neither before nor after
            digest.update(type(error).__name__.encode())
        for file in sorted(Path(folder).rglob("*")):
            digest.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _in_interpreter(model, scenes, norms: dict) -> dict:
    """Every swapped norm that runs, in float32 through the kernels, against float64 and the original's own error."""
    from tolerance import assert_as_accurate

    def single(value):
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    seen: dict[str, tuple] = {}
    handles = [m.register_forward_hook(_recorder(seen, p), with_kwargs=True) for p, m in norms.items()]
    scenes = [(path, part, {n: single(v) for n, v in arguments.items()}) for path, part, arguments in scenes]
    eager = [_outputs(m, a) for _, m, a in scenes]
    for handle in handles:
        handle.remove()
    failures = []
    with torch.no_grad():
        originals = {p: norms[p](*args, **kwargs) for p, (args, kwargs) in seen.items()}
        with hf_rmsnorm.patched(model):
            with hf_rmsnorm.use_backend("triton"):
                fused = {p: norms[p](*args, **kwargs) for p, (args, kwargs) in seen.items()}
                outputs = [_outputs(m, a) for _, m, a in scenes]
            with hf_rmsnorm.use_backend("reference"):  # float64 stays that throughout
                for path, (args, kwargs) in seen.items():
                    doubled = {n: _double(v) for n, v in kwargs.items()}
                    exact = copy.deepcopy(norms[path]).double()(*map(_double, args), **doubled)
                    if exact.numel() == 0:
                        continue
                    try:
                        assert_as_accurate(fused[path], originals[path], exact, path)
                    except AssertionError as error:
                        failures.append(str(error))
    largest = [
        max((_relative(a, b) for a, b in zip(x, y, strict=True)), default=0.0)
        for x, y in zip(eager, outputs, strict=True)
    ]
    return {"norms": len(seen), "failures": failures, "largest_output_difference": max(largest, default=0.0)}


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.is_floating_point() or a.numel() == 0:
        return 0.0
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()


@contextlib.contextmanager
def _seconds(limit: float):
    """TimeoutError in the main thread of a child that spends more than this inside."""

    def stop(*_):
        raise TimeoutError(f"not done after {limit} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def to_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """What ``from_pretrained(dtype=torch.bfloat16)`` gives: bfloat16 but for the modules that are kept in float32."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    pattern = re.compile("|".join(rf"(^|\.){re.escape(k)}($|\.)" for k in kept)) if kept else None
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (pattern and pattern.search(name)):
            parameter.data = parameter.data.to(torch.bfloat16)
    saved = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        # Rotary frequencies and the like are made in float32 and are not in the checkpoint, so they stay so.
        if name in saved and buffer.is_floating_point() and not (pattern and pattern.search(name)):
            buffer.data = buffer.data.to(torch.bfloat16)
    return model
