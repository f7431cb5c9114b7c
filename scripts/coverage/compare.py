"""One type of model: built, run, patched, compared and unpatched; and with what surrounds
its norms fused, beside norms that are swapped one by one.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import hf_rmsnorm
from benchmarks.counting import Operators

from .inputs import inputs_of, tensors
from .models import Made, classes_of, stand_in_for_timm, tiny_model
from .runs import line
from .unreported import why_not_a_norm

UNEXAMINED = {"built": False, "ran": False, "error": None, "runs": []}


def examine(model_type: str, mapping: str, interpreter: str = "") -> dict:
    """Build, run, patch, compare and unpatch one type.

    Args:
        interpreter: "fusion" to run fused models in Triton's interpreter besides.

    Returns:
        ``{"type", "mapping", "model_class", "built", "ran", "error", "runs": [...]}``;
        a type with optional features
        has one run with them and one without.
    """
    started = time.monotonic()
    result = {"type": model_type, "mapping": mapping, **UNEXAMINED, "runs": []}
    try:
        stand_in_for_timm()
        cls, config = classes_of(model_type, mapping)
    except Exception as error:  # an optional dependency is missing, whatever it raises
        return {**result, "error": line(error)}
    result["model_class"] = cls.__name__
    for features in (True, False):
        try:
            made = tiny_model(model_type, cls, config, features)
        except Exception as error:  # any constructor may refuse a size in its own way
            result["error"] = line(error)
            continue
        if made is None:
            continue
        run = _compare(made, model_type, interpreter)
        result["runs"].append(run)
        result["built"] = True
        # A model without a forward counts as run if its parts ran every norm.
        swapped = sum(n for *_, n in run["swapped"])
        by_parts = bool(run["parts_run"]) and run["norms_run"] == swapped
        result["ran"] |= made.arguments is not None or by_parts
        result["error"] = result["error"] or made.error
    if result["ran"]:
        result["error"] = None
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _compare(made: Made, model_type: str, interpreter: str) -> dict:
    model = made.model
    dtype = str(model.dtype).removeprefix("torch.")
    run = {"features": made.features, "dtype": dtype}
    formulas = _patch_once(model, run)
    norms = {path: model.get_submodule(path) for path in formulas}
    scenes, before, seen = _scenes(made, norms)
    run["parts_run"] = [path for path, *_ in scenes]
    run["norms_run"] = len(seen)
    _compare_outputs(model, run, scenes, before)
    _compare_norms(model, run, norms, seen, formulas)
    if interpreter == "fusion" and made.arguments is not None and _is_fused(run):
        run["fusion"] = compare_fusion(model, made.arguments)
    return run


def _patch_once(model, run: dict) -> dict[str, str]:
    """Patch the model and undo it; returns the formula of each norm by path. `run` gets
    the contents of the report.
    """
    classes = [type(m) for m in model.modules()]
    saved = _saved_bytes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without any norm is a result here
        report = hf_rmsnorm.patch_model(model)
    run["swapped"] = _counted((r.class_name, str(r.formula)) for r in report.swapped)
    run["left_alone"] = _counted((r.class_name, r.reason) for r in report.skipped)
    run["layers"] = _counted(
        (r.class_name, r.fused or f"not fused: {r.reason}") for r in report.layers
    )
    run["not_norms"] = _counted(
        _not_norms(model, {r.path for r in (*report.swapped, *report.skipped)})
    )
    run["saved_equal"] = saved == _saved_bytes(model)
    hf_rmsnorm.unpatch_model(model)
    run["classes_restored"] = classes == [type(m) for m in model.modules()]
    return {r.path: str(r.formula) for r in report.swapped}


def _not_norms(model, reported: set[str]) -> Iterator[tuple[str, str | None]]:
    """(class, reason) of each module that has "norm" in its class's name and is not
    reported.
    """
    for path, module in model.named_modules():
        if path and path not in reported and "norm" in type(module).__name__.lower():
            yield type(module).__name__, why_not_a_norm(path, module, reported)


def _is_fused(run: dict) -> bool:
    return any("not fused" not in how for _, how, _ in run["layers"])


def _scenes(
    made: Made, norms: dict
) -> tuple[list[tuple], list[list], dict[str, tuple]]:
    """([(path, module, arguments)], the outputs of each, the first arguments of each
    norm): the model, and models inside it that hold norms which nothing has run yet.
    """
    seen: dict[str, tuple] = {}
    handles = [
        m.register_forward_hook(_recorder(seen, p), with_kwargs=True)
        for p, m in norms.items()
    ]
    scenes, outputs = [], []
    for path, part in made.model.named_modules():
        arguments = made.arguments
        if path:
            idle = any(p.startswith(f"{path}.") and p not in seen for p in norms)
            if not idle or not isinstance(part, transformers.PreTrainedModel):
                continue
            arguments = _arguments_of_part(part)
        if arguments is not None:
            outputs.append(_outputs(part, arguments))
            scenes.append((path, part, arguments))
    for handle in handles:
        handle.remove()
    return scenes, outputs, seen


def _arguments_of_part(part: transformers.PreTrainedModel) -> dict | None:
    """Arguments that a part runs on; None where there are none."""
    try:
        arguments = inputs_of(part, part.config.model_type)
        _outputs(part, arguments)
    except Exception:  # of any kind, on inputs that do not suit it
        return None
    return arguments


def _patched(model, run: dict):
    """The model patched while the context is open, with kernels in plain torch."""
    stack = contextlib.ExitStack()
    if run["swapped"]:
        stack.enter_context(hf_rmsnorm.patched(model))
    stack.enter_context(hf_rmsnorm.use_backend("reference"))
    return stack


def _compare_outputs(model, run: dict, scenes: list[tuple], before: list[list]) -> None:
    again = _all_outputs(scenes)
    with _patched(model, run):
        patched = _all_outputs(scenes)
    after = _all_outputs(scenes)
    run["repeatable"] = list(map(_same_bits, before, again))
    run["bit_equal"] = list(map(_same_bits, before, patched))
    run["restored_equal"] = list(map(_same_bits, before, after))


def _compare_norms(
    model, run: dict, norms: dict, seen: dict, formulas: dict[str, str]
) -> None:
    """Each norm by itself, on the arguments of its first call."""
    before = {path: _alone(module, seen.get(path)) for path, module in norms.items()}
    with _patched(model, run):
        patched = {
            path: _alone(module, seen.get(path)) for path, module in norms.items()
        }
    alone = {path: outputs for path, outputs in patched.items() if outputs is not None}
    run["norms_unequal"] = [
        [path, type(norms[path]).__name__, formulas[path]]
        for path, outputs in alone.items()
        if not _same_bits(outputs, before[path])
    ]


def _all_outputs(scenes: list[tuple]) -> list[list[torch.Tensor]]:
    return [_outputs(module, arguments) for _, module, arguments in scenes]


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


def _outputs(model, arguments: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.detach().clone() for t in tensors(model(**copy.deepcopy(arguments)))]


def _alone(module, seen) -> list[torch.Tensor] | None:
    """The norm's own results: on its first call's arguments again, and where it takes
    them on rows of every scale.
    """
    weights = [
        p for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()
    ]
    dtype, width = (
        (weights[0].dtype, weights[0].shape[-1]) if weights else (torch.bfloat16, 64)
    )
    results = []
    with torch.no_grad():
        if seen is not None:
            args, kwargs = seen
            results += tensors(module(*args, **kwargs))
            x = next(
                a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)
            )
            dtype, width = x.dtype, x.shape[-1]
        rows = (
            torch.randn(64, width, generator=torch.Generator().manual_seed(1))
            * torch.logspace(-3, 2, 64)[:, None]
        )
        try:
            results.append(module((rows + 0.1).to(dtype)))
        except REFUSALS:
            # it accepts only the shape, the dtype or the arguments that its model gives
            # it
            return results or None
    return results


REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def _same_bits(a: list[torch.Tensor] | None, b: list[torch.Tensor] | None) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    return all(
        x.dtype == y.dtype and x.shape == y.shape and _bytes(x) == _bytes(y)
        for x, y in zip(a, b, strict=True)
    )


def _bytes(t: torch.Tensor) -> bytes:
    return (
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if t.numel()
        else b""
    )


def _saved_bytes(model) -> str:
    """A hash of the state_dict, and of the files that save_pretrained writes where the
    model has it and can.
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(
            f"{name} {value.dtype} {tuple(value.shape)}".encode() + _bytes(value)
        )
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        try:
            model.save_pretrained(folder)
        except Exception as error:
            # some cannot be saved in a config this small, neither before nor after
            digest.update(type(error).__name__.encode())
        for file in sorted(Path(folder).rglob("*")):
            digest.update(
                file.name.encode() + (file.read_bytes() if file.is_file() else b"")
            )
    return digest.hexdigest()


NEW_TOKENS = 3


def compare_fusion(model, arguments: dict) -> dict:
    """Run a model in Triton's interpreter with its norms alone swapped, and with what
    surrounds them fused.

    Returns:
        ``operators``: of one forward, views and allocations left out, kernel launches
            counted, as Hugging Face's,
        with norms alone, and fused. ``launches``: of these the last has so many.
            ``hidden_states``: whether the model
        returns them. ``bit_equal``: of all outputs, and ``tokens_equal`` of greedy
            ones, or why there are none. ``rotation``: as of `_rotation`.
    """
    found: dict = {"operators": [], "hidden_states": True}
    outputs, tokens = [], []
    try:
        with torch.no_grad():
            model(**copy.deepcopy(arguments), output_hidden_states=True)
        arguments = {**arguments, "output_hidden_states": True}
    except TypeError:
        found["hidden_states"] = False
    for options in (None, {"fuse_residual": False}, {"fuse_residual": True}):
        if options is not None:
            hf_rmsnorm.patch_model(model, **options)
        with hf_rmsnorm.use_backend("triton"), torch.no_grad():
            torch.manual_seed(0)
            of_model = model if options is not None else None
            with (
                Operators() as operators,
                hf_rmsnorm.count_launches(of_model) as launches,
            ):
                result = model(**copy.deepcopy(arguments))
            found["operators"].append(operators.computing + launches.total())
            outputs.append([t.detach().clone() for t in tensors(result)])
            if options is not None and "tokens" not in found:
                try:
                    torch.manual_seed(0)
                    tokens.append(_generate(model, arguments))
                except Exception as error:
                    # whatever it is that this type cannot generate from
                    found["tokens"] = f"{type(error).__name__}: {str(error)[:100]}"
    found["rotation"] = _rotation(model, launches)
    hf_rmsnorm.unpatch_model(model)
    found["launches"] = launches.total()
    found["bit_equal"] = _same_bits(outputs[1], outputs[2])
    found["tokens_equal"] = found.pop("tokens", None) or _same_bits(
        *([t] for t in tokens)
    )
    return found


def _rotation(model, launches) -> str:
    """Of the rotary embeddings of a model: ``"fused"``, alone or with norms, or why one
    is not; "" where it has none.
    """
    pieces = []
    for piece in launches.pieces:  # some layers may have no positions
        if "rotary" in piece.what and (piece.has_run or piece.missed):
            pieces.append(piece)
    for piece in pieces:
        if piece.missed:
            return piece.reason
    if pieces:
        return "fused"
    for module in model.modules():
        code = inspect.unwrap(type(module).forward).__code__
        for name in code.co_names:
            if re.search("rotary_pos_emb|rotary_emb$|_rope", name) and name in vars(
                sys.modules[type(module).__module__]
            ):
                return f"{name} is called or rotates in another way"
    return ""


def _generate(model, arguments: dict) -> torch.Tensor:
    given = {
        name: value
        for name, value in copy.deepcopy(arguments).items()
        if name != "output_hidden_states"
    }
    return model.generate(
        **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
