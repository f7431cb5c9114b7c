"""Whether a converted checkpoint is still what makes its RMSNorms equal to LayerNorms: all that writes to the residual
stream has zero mean. Fine-tuning moves it out of that set.

The record that a conversion leaves in config.json, under `RECORD_KEY`, names parameters of the model as
``named_parameters()`` does. A number in a name that stands for all numbers there is written ``*``, and the entry has
the ``count`` of its parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

RECORD_KEY = "hf_rmsnorm"
VERSION = 1
# Of a row's mean size: what centring in float64 and taking the mean again leave besides the rounding to its dtype.
ARITHMETIC = 64 * torch.finfo(torch.float64).eps
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


def make_record(
    writers: Mapping[str, dict],
    norms: Mapping[str, dict],
    parameters: Iterable[str],
    paths: Iterable[str],
    neurons: Mapping[str, dict] | None = None,
):
    """The record: JSON data for config.json.

    Args:
        writers: parameter -> ``{"axis", "block", "blocks"}`` as in a plan, `block` in the checkpoint's own size; and,
            where slices of it were added that have a mean on purpose, ``"but": {"axis", "first"}``, the first of them.
        norms: module path -> ``{"eps", "hidden_size"}`` of each LayerNorm whose input has zero mean.
        parameters: all parameters of the model.
        paths: all LayerNorms of the model.
        neurons: parameter -> ``{"axis", "first", "values"}``: its slices along `axis`, from `first` to the last, hold
            one value each; they are neurons that cancel the mean of what is added to them.
    """
    parameters = list(parameters)
    record = {
        "version": VERSION,
        "computes": "layer_norm",
        "writers": _counted(writers, parameters),
        "rms_norms": shorten(norms, paths),
    }
    return {**record, "neurons": _counted(neurons, parameters)} if neurons else record


def _counted(entries: Mapping[str, dict], names: Iterable[str]) -> dict[str, dict]:
    counts = Counter(_NUMBER.sub("*", name) for name in entries)
    return {
        text: how if text in entries else {**how, "count": counts[text]}
        for text, how in shorten(entries, names).items()
    }


def recorded_norms(record: Mapping, paths: Iterable[str]) -> dict[str, dict]:
    """Of these module paths, those that the record calls an RMSNorm: path -> ``{"eps", "hidden_size"}``."""
    return _matching(record["rms_norms"], paths)


def uncentred(tensors: Mapping[str, torch.Tensor], record: Mapping) -> list[str]:
    """Names of recorded writers and neurons that are missing, be it from one layer, have another shape, have lost their
    zero mean or are no longer what they were; none if all is well.

    Args:
        tensors: by parameter name, as ``dict(model.named_parameters())`` or ``model.state_dict()``; of any dtype, on
            any device.
        record: what `make_record` made.

    Raises:
        ValueError: the record is of another version of this package.
    """
    if record.get("version") != VERSION:
        raise ValueError(f"the record has version {record.get('version')!r}, this package knows {VERSION}")
    neurons = record.get("neurons", {})
    there = Counter(text for name in tensors for text in {name, _NUMBER.sub("*", name)})
    recorded = {**neurons, **record["writers"]}
    wrong = [text for text, how in recorded.items() if there[text] < how.get("count", 1)]
    for name, how in _matching(record["writers"], tensors).items():
        tensor, but = tensors[name], how.get("but")
        if but is not None and tensor.ndim > but["axis"] and tensor.shape[but["axis"]] > but["first"]:
            tensor = tensor.narrow(but["axis"], 0, but["first"])
        if not is_centred(tensor, how["axis"], how["block"], how["blocks"]):
            wrong.append(name)
    for name, how in _matching(neurons, tensors).items():
        if name not in wrong and not _constant(tensors[name], how["axis"], how["first"], how["values"]):
            wrong.append(name)
    return wrong


def complaint(tensors: Mapping[str, torch.Tensor], record: Mapping) -> str:
    """What `uncentred` finds, in words and with what to do about it; "" if all is well.

    Raises:
        ValueError: as `uncentred`.
    """
    names = uncentred(tensors, record)
    if not names:
        return ""
    name, how = names[0], _matching(record["writers"], names[:1]).get(names[0])
    which = f"{name} and {len(names) - 1} more" if len(names) > 1 else name
    if name not in tensors:
        return f"{which}: not all of it is here under the name that it was converted by"
    tensor = tensors[name]
    if not bool(tensor.isfinite().all()):
        return f"{which} holds NaN or infinity"
    for stored in _NARROW if how and "but" not in how else ():
        narrow = tensor.to(stored)
        exact = stored != tensor.dtype and torch.equal(narrow.to(tensor.dtype), tensor)
        if exact and is_centred(narrow, how["axis"], how["block"], how["blocks"]):
            stored, wide = (str(dtype).removeprefix("torch.") for dtype in (stored, tensor.dtype))
            return (
                f"{which} has {stored} values, whose rounding leaves more of a mean than {wide} does: load it with "
                f'dtype="auto", or convert the {wide} original'
            )
    return f"{which} no longer has zero mean along the stream, by fine-tuning perhaps"


@torch.no_grad()
def _constant(tensor: torch.Tensor, axis: int, first: int, values: list[float]) -> bool:
    if tensor.ndim <= axis or tensor.shape[axis] != first + len(values):
        return False
    slices = tensor.movedim(axis, -1)[..., first:]
    return bool((slices == torch.tensor(values, dtype=torch.float64).to(slices)).all())


@torch.no_grad()
def is_centred(tensor: torch.Tensor, axis: int, block: int, blocks) -> bool:
    """Whether each block along the axis (`Centre` says which) has zero mean, but for the rounding of its elements."""
    if not tensor.is_floating_point() or tensor.ndim <= axis or tensor.shape[axis] % block:
        return False
    moved = tensor.movedim(axis, -1)
    rows = moved.reshape(*moved.shape[:-1], -1, block)
    if blocks is not None:
        if max(blocks) >= rows.shape[-2]:
            return False
        rows = rows[..., list(blocks), :]
    unit = torch.finfo(tensor.dtype).eps / 2
    smallest = torch.finfo(tensor.dtype).smallest_normal * unit
    for part in rows.flatten(0, -2).split(max(1, 2**24 // block)):  # a table of embeddings is not widened whole
        part = part.double()
        # Each element is off by at most half an ulp. Not by chance in either direction: where the source's elements lie
        # on one coarse grid, all of a row are rounded alike, and nothing averages out.
        bound = (unit + ARITHMETIC) * part.abs().mean(-1) + smallest
        if not bool(((part.mean(-1).abs() <= bound) & bound.isfinite()).all()):
            return False
    return True


def _pattern(text: str) -> re.Pattern:
    return re.compile(r"\d+".join(re.escape(part) for part in text.split("*")))


def _matching(entries: Mapping[str, dict], names: Iterable[str]) -> dict[str, dict]:
    exact = {text: how for text, how in entries.items() if "*" not in text}
    patterns = [(_pattern(text), how) for text, how in entries.items() if "*" in text]
    found = {}
    for name in names:
        how = exact.get(name) or next((how for pattern, how in patterns if pattern.fullmatch(name)), None)
        if how is not None:
            found[name] = how
    return found


def shorten(entries: Mapping[str, dict], names: Iterable[str]) -> dict[str, dict]:
    """Equal entries of names that differ in numbers only as one, where it matches none of the other names."""
    every: dict[str, set[str]] = {}
    for name in names:
        every.setdefault(_NUMBER.sub("*", name), set()).add(name)
    short: dict[str, dict] = {}
    for name, how in entries.items():
        pattern = _NUMBER.sub("*", name)
        alike = every.get(pattern, set())
        whole = len(alike) > 1 and all(entries.get(other) == how for other in alike)
        short[pattern if whole else name] = how
    return short
