"""The record of a conversion in config.json, and the parameters that it names.

RMSNorm equals LayerNorm while all residual weights, which write to the residual stream,
have zero mean along it. Fine-tuning gives them a mean. The record, under `RECORD_KEY`,
names parameters as ``named_parameters()`` does. ``*`` matches any number, and the entry
then has the ``count`` of its parameters. What an adapter of PEFT adds to a residual
weight must have zero mean too.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

Entries = Mapping[str, dict]  # by parameter or module path, or by a pattern of several
RECORD_KEY = "hf_rmsnorm"
# the value of "computes" if the model was trained as RMSNorm
TRAINED_AS_RMS = "rms_norm"
VERSION = 1
# Of a row's mean size: the error of centring in float64 and taking the mean again.
ARITHMETIC = 64 * torch.finfo(torch.float64).eps
# elements that are widened to float64 at a time: 2 MiB, which stay in the cache
PIECE = 2**18
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# How PEFT names the tensors of a module that it wraps, a trained copy of them, and the
# matrices of LoRA. The adapter's name is there in a model, and not in a file.
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_LORA = re.compile(r"\.lora_(?:embedding_)?([AB])(?![^.])")


def make_record(
    residual_weights: Entries,
    norms: Entries,
    parameters: Iterable[str],
    paths: Iterable[str],
) -> dict:
    """The record: JSON data for config.json.

    Args:
        residual_weights: parameter -> ``{"axis", "block", "blocks"}`` as in a plan, `block` in the checkpoint's size.
        norms: module path -> ``{"eps"}`` of each LayerNorm whose input has zero mean.
        parameters: all parameters of the model.
        paths: all LayerNorms of the model.
    """
    return {
        "version": VERSION,
        "computes": "layer_norm",
        "residual_weights": _shortened(residual_weights, parameters),
        "rms_norms": _shortened(norms, paths),
    }


def _pattern(name: str) -> str:
    """A name with ``*`` for each number."""
    return _NUMBER.sub("*", name)


def _shortened(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    """The entries; those that differ in numbers alone become one pattern, if it matches
    no other name.
    """
    similar = defaultdict(set)
    for name in names:
        similar[_pattern(name)].add(name)
    short = {}
    for name, how in entries.items():
        pattern = _pattern(name)
        group = similar[pattern]
        if len(group) > 1 and all(entries.get(other) == how for other in group):
            short[pattern] = {**how, "count": len(group)}
        else:
            short[name] = how
    return short


def matching(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    """Of these names, those that have an entry or match a pattern -> the entry."""
    matches = {}
    for name in names:
        entry = entries.get(name) or entries.get(_pattern(name))
        if entry is not None:
            matches[name] = {key: entry[key] for key in entry if key != "count"}
    return matches


def trained_as_rms(record) -> bool:
    """Whether a record says that training, and no approximate fit, made the norms
    RMSNorms.
    """
    return (
        isinstance(record, dict)
        and not record.get("approximate")
        and record.get("computes") == TRAINED_AS_RMS
    )


def check_centring(axis, block, blocks, count=1) -> None:
    """Raise TypeError for an entry of a residual weight that no conversion writes."""
    numbers = [axis, block - 1, count, *(blocks or ())]
    if blocks == [] or not all(type(n) is int and n >= 0 for n in numbers):
        raise TypeError(f"{(axis, block, blocks, count)} is no centring")


def explain_missing(record: Mapping, names: Iterable[str]) -> str:
    """The first residual weight that is not among these names of parameters; "" if all
    are.
    """
    names = set(names)
    present = Counter(names) + Counter(map(_pattern, names))
    for name, how in record["residual_weights"].items():
        if present[name] < how.get("count", 1):
            return (
                f"{name}: not all of it is here under the name that it was converted by"
            )
    return ""


@torch.no_grad()
def is_centred(tensor: torch.Tensor, axis: int, block: int, blocks) -> bool:
    """Whether each block along the axis (`Centre` says which) has zero mean, but for
    the rounding of its elements.
    """
    if not tensor.is_floating_point() or tensor.ndim <= axis:
        return False
    count, rest = divmod(tensor.shape[axis], block)
    if rest or (blocks is not None and max(blocks) >= count):
        return False
    info = torch.finfo(tensor.dtype)
    unit = info.eps / 2
    smallest = info.smallest_normal * unit
    for piece in _pieces(tensor, axis, block, blocks):
        wide = piece.double()
        # Each element is off by at most half an ulp. The errors need not average out:
        # where the source's elements lie on one coarse grid, all of a row are rounded
        # in one direction.
        size = wide.abs().mean(-1)
        mean = wide.mean(-1).abs()
        bound = (unit + ARITHMETIC) * size + smallest
        if not ((mean <= bound) & bound.isfinite()).all():
            return False
    return True


@torch.no_grad()
def centre_(tensor: torch.Tensor, axis: int, block: int, blocks) -> None:
    """Take the mean off each block along the axis, in place; in float64, rounded to the
    tensor's dtype.
    """
    for piece in _pieces(tensor, axis, block, blocks):
        wide = piece.double()
        piece.copy_(wide - wide.mean(-1, keepdim=True))


def rows_of(tensor: torch.Tensor, axis: int, block: int) -> torch.Tensor:
    """A view of the blocks along an axis: (other axes, blocks, block)."""
    return tensor.movedim(axis, -1).unflatten(-1, (-1, block))


def _pieces(tensor: torch.Tensor, axis: int, block: int, blocks) -> Iterator:
    """Views of the blocks, which are their last dimension; in pieces, so that no large
    table is widened whole.
    """
    rows = rows_of(tensor, axis, block)
    parts = [rows]
    if blocks is not None:
        parts = [rows.narrow(-2, index, 1) for index in blocks]
    for part in parts:
        yield from part.split(max(1, PIECE // max(1, part[:1].numel())))


def centred_by(
    record: Mapping, names: Iterable[str]
) -> Iterator[tuple[str, dict, str]]:
    """(parameter, how to centre it, the residual weight in whose dtype it writes), of
    residual weights and of what PEFT adds to them: a trained copy, and of LoRA's
    ``B A x`` the B, whose columns need zero mean along the output.

    Raises:
        ValueError: an adapter may add a mean in another way.
    """
    plain = {name: _WRAPPED.sub("", name) for name in names}
    recorded = matching(record["residual_weights"], plain.values())
    wrapped = {
        name[: found.start()] for name in plain for found in _WRAPPED.finditer(name)
    }
    for name, weight in plain.items():
        if weight in recorded:
            yield name, recorded[weight], weight
        else:
            yield from _added_by(name, wrapped, recorded)


def _added_by(
    name: str, wrapped: set[str], recorded: Mapping
) -> Iterator[tuple[str, dict, str]]:
    """As `centred_by`, of a parameter that is no residual weight: one of an adapter, or
    one that changes none.
    """
    owner = name  # the wrapped module that an adapter's parameter is in
    while owner and owner not in wrapped:
        owner = owner.rpartition(".")[0]
    if not owner or _WRAPPED.match(name, len(owner)):
        return  # one of the model's own
    inside = _WRAPPED.sub("", f"{owner}.")
    touched = [other for other in recorded if other.startswith(inside)]
    if not touched:
        return
    weight = f"{inside}weight"
    lora = _LORA.match(name, len(owner))
    if lora is None or weight not in recorded:
        raise ValueError(
            f"{name} changes {touched[0]} in a way that can give it a mean"
        )
    if lora[1] == "B":
        yield name, {**recorded[weight], "axis": 0}, weight
