"""One type of model: built, run, patched, compared and unpatched; and with what surrounds
its norms fused, beside norms that are swapped one by one.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import io
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

from . import launches
from .models import (
    Made,
    classes_of,
    inputs_of,
    outputs,
    stand_in_for_timm,
    tensors,
    tiny_model,
)
from .runs import line

UNEXAMINED = {"built": False, "ran": False, "error": None, "runs": []}


def examine(model_type: str, mapping: str) -> dict:
    """Build, run, patch, compare and unpatch one type; a causal language model also runs
    fused in Triton's interpreter.

    Returns:
        ``{"type", "mapping", "model_class", "built", "ran", "error", "runs": [...]}``;
        a type with optional features has one run with them and one without.
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
        run = _compare(made, fusion=mapping == "causal")
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


def _compare(made: Made, fusion: bool) -> dict:
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
    is_fused = any("not fused" not in how for _, how, _ in run["layers"])
    if fusion and is_fused and made.arguments is not None:
        run["fusion"] = compare_fusion(model, made.arguments)
    forwards = [(part, arguments) for _, part, arguments in scenes]
    run["launched"] = launches.in_each_dtype(model, forwards)
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


def _scenes(made: Made, norms: dict) -> tuple[list, list[list], dict[str, tuple]]:
    """([(path, module, arguments)], the outputs of each, the first arguments of each
    norm): the model, and models inside it that hold norms which nothing has run yet.
    """
    seen: dict[str, tuple] = {}
    handles = []
    for path, norm in norms.items():
        hook = _recorder(seen, path)
        handles.append(norm.register_forward_hook(hook, with_kwargs=True))
    scenes, given = [], []
    for path, part in made.model.named_modules():
        arguments = made.arguments
        if path:
            idle = any(p.startswith(f"{path}.") and p not in seen for p in norms)
            if not idle or not isinstance(part, transformers.PreTrainedModel):
                continue
            arguments = _arguments_of_part(part)
        if arguments is not None:
            given.append(outputs(part, arguments))
            scenes.append((path, part, arguments))
    for handle in handles:
        handle.remove()
    return scenes, given, seen


def _arguments_of_part(part: transformers.PreTrainedModel) -> dict | None:
    """Arguments that a part runs on; None where there are none."""
    try:
        arguments = inputs_of(part, part.config.model_type)
        outputs(part, arguments)
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
    run["norms_unequal"] = []
    with _patched(model, run):
        for path, module in norms.items():
            if not _same_bits(_alone(module, seen.get(path)), before[path]):
                what = [path, type(module).__name__, formulas[path]]
                run["norms_unequal"].append(what)


def _all_outputs(scenes: list[tuple]) -> list[list[torch.Tensor]]:
    return [outputs(module, arguments) for _, module, arguments in scenes]


def _counted(pairs) -> list[list]:
    return [[*pair, count] for pair, count in Counter(pairs).items()]


def _recorder(seen: dict, path: str):
    """A hook that keeps the arguments of a norm's first call."""

    def hook(module, args, kwargs, output):
        if path not in seen and isinstance(output, torch.Tensor):
            seen[path] = copy.deepcopy((args, kwargs))

    return hook


@torch.no_grad()
def _alone(module, seen: tuple | None) -> list[torch.Tensor]:
    """The norm's own results: on its first call's arguments again, and where it takes
    them on rows of every scale.
    """
    results = []
    floats = (*module.parameters(), *module.buffers())
    floats = [weight for weight in floats if weight.is_floating_point()]
    example = floats[0] if floats else torch.empty(64, dtype=torch.bfloat16)
    if seen is not None:
        args, kwargs = seen
        results += tensors(module(*args, **kwargs))
        given = (*args, *kwargs.values())
        example = next(a for a in given if isinstance(a, torch.Tensor))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, example.shape[-1], generator=generator)
    rows = rows * torch.logspace(-3, 2, 64)[:, None] + 0.1
    # it may accept only the shape, the dtype or the arguments that its model gives it
    with contextlib.suppress(Exception):
        results.append(module(rows.to(example.dtype)))
    return results


def _same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(_equal_bits, a, b))


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


def _saved_bytes(model) -> str:
    """A hash of the state_dict, and of the files that save_pretrained writes where the
    model has it and can.
    """
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    digest = hashlib.sha256(state.getvalue())
    with tempfile.TemporaryDirectory() as folder:
        # some cannot be saved in a config this small, neither before nor after
        with contextlib.suppress(Exception):
            model.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*.*")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


NEW_TOKENS = 3


def compare_fusion(model, arguments: dict) -> dict:
    """Run a model in Triton's interpreter with its norms alone swapped, and with what
    surrounds them fused.

    Returns:
        ``bit_equal``: of all outputs, hidden states included where the model returns
            them, and ``tokens_equal`` of greedy ones, or why there are none.
            ``rotation``: as of `_rotation`.
    """
    results, tokens = [], []
    with hf_rmsnorm.use_backend("triton"):
        for fused in (False, True):
            hf_rmsnorm.patch_model(model, fuse_residual=fused)
            with hf_rmsnorm.count_launches(model) as launched:
                results.append(_hidden_outputs(model, arguments))
            tokens.append(_generated(model, arguments))
    rotation = _rotation(model, launched)
    hf_rmsnorm.unpatch_model(model)
    return {
        "bit_equal": _same_bits(*results),
        "tokens_equal": tokens[1]
        if isinstance(tokens[1], str)
        else _same_bits(*tokens),
        "rotation": rotation,
    }


def _hidden_outputs(model, arguments: dict) -> list[torch.Tensor]:
    try:
        return outputs(model, {**arguments, "output_hidden_states": True})
    except TypeError:
        return outputs(model, arguments)


def _generated(model, arguments: dict) -> list[torch.Tensor] | str:
    """Greedy tokens, or why there are none."""
    torch.manual_seed(0)
    given = copy.deepcopy(arguments)
    count = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    try:
        return [model.generate(**given, **count, do_sample=False)]
    except Exception as error:  # whatever it is that this type cannot generate from
        return line(error)[:100]


def _rotation(model, launched) -> str:
    """Of the rotary embeddings of a model: ``"fused"``, alone or with norms, or why one
    is not; "" where it has none.
    """
    found = ""
    for piece in launched.pieces:  # some layers may have no positions
        if "rotary" in piece.what and piece.missed:
            return piece.reason
        if "rotary" in piece.what and piece.has_run:
            found = "fused"
    if found:
        return found
    for module in model.modules():
        code = inspect.unwrap(type(module).forward).__code__
        for name in code.co_names:
            if re.search("rotary_pos_emb|rotary_emb$|_rope", name) and name in vars(
                sys.modules[type(module).__module__]
            ):
                return f"{name} is called or rotates in another way"
    return ""


# torch's own, by what their statistics are taken over; a subclass computes the same
# where it keeps the forward.
MODULES = torch.nn.modules
TORCH = {
    MODULES.instancenorm._InstanceNorm: "normalises each channel over all places",
    MODULES.batchnorm._NormBase: "normalises over the batch",
    MODULES.GroupNorm: "normalises groups of channels over all places",
}
REDUCTION = re.compile(
    r"\b(mean|sum|cumsum|var|std|var_mean|norm|layer_norm|rms_norm|normalize)\("
)


def why_not_a_norm(
    path: str, module: torch.nn.Module, reported: set[str]
) -> str | None:
    """A line for the module at `path`, whose name says norm and which is not among those
    that a patch has `reported`, swapped or left alone; None if there is none.
    """
    inside = [(p, m) for p, m in module.named_modules(prefix=path) if p != path]
    if any(p in reported or "norm" in type(m).__name__.lower() for p, m in inside):
        return "a container: the norms inside it are listed by themselves"
    for cls, words in TORCH.items():
        if isinstance(module, cls):
            return words
    if inside:
        kinds = {type(m).__name__ for _, m in inside if not any(m.children())}
        return f"made of {', '.join(sorted(kinds))}, none of which is a norm"
    return _of_one_module(module)


def _of_one_module(module: torch.nn.Module) -> str | None:
    if type(module).__module__.startswith("torch.nn.utils"):
        return "computes a weight of another module, from parameters alone"
    buffers = sorted(name for name, _ in module.named_buffers())
    if stored := [name for name in buffers if re.search(r"mean|var|std", name)]:
        return f"scales by what it has stored ({', '.join(stored)}), not by statistics of its input"
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind < 2]
    if len(needed) > 1:
        return f"takes several tensors at once ({', '.join(needed)})"
    code = inspect.getsource(type(module).forward)
    if "cumsum(" in code:
        return "normalises over all places up to the present one"
    if not REDUCTION.search(code):
        return "takes no mean, sum or norm of its input"
    return None
