"""The record of a conversion in config.json, and a check that the weights still agree
with it.

RMSNorm equals LayerNorm while all residual weights, which write to the residual stream,
have zero mean along it. Fine-tuning gives them a mean. The record, under `RECORD_KEY`,
names parameters as ``named_parameters()`` does. ``*`` matches any number, and the entry
then has the ``count`` of its parameters. What an adapter of PEFT adds to a residual
weight must have zero mean too.
"""

import math
import re
import reprlib
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
# How PEFT names a wrapped module's own tensors, a trained copy of them, and the
# matrices of LoRA. The adapter's name is there in a model, and not in a file.
_KEPT = re.compile(r"\.(?:base_layer|original_module)(?=\.)")
_COPIED = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_LORA = re.compile(
    r"\.lora_(?:embedding_([AB])(?:\.[^.]+)?|([AB])(?:\.[^.]+)?\.(?:weight|bias))$"
)
_MEAN = (
    "no longer has zero mean along the residual stream: it was trained, or is in "
    'another dtype than it is stored in (load it with dtype="auto")'
)


def make_record(
    residual_weights: Entries,
    norms: Entries,
    parameters: Iterable[str],
    paths: Iterable[str],
) -> dict:
    """The record: JSON data for config.json.

    Args:
        residual_weights: parameter -> ``{"axis", "block", "blocks"}`` as in a plan, `block` in the checkpoint's size.
        norms: module path -> ``{"eps", "hidden_size"}`` of each LayerNorm whose input has zero mean.
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


def explain_malformed(record: Mapping) -> str:
    """The first entry that is not as `make_record` writes it, and what to do about it;
    "" if all are.
    """
    for part, is_right in (("rms_norms", _is_norm), ("residual_weights", _is_centre)):
        entries = record[part]
        if not isinstance(entries, dict):
            return _malformed(part, entries)
        for name, how in entries.items():
            count = how.get("count", 1) if isinstance(how, dict) else None
            if not _is_count(count) or not is_right(how):
                return _malformed(f"{part}[{name!r}]", how)
    return ""


def _malformed(place: str, value) -> str:
    return (
        f"{RECORD_KEY} in its config.json is no record that this package reads: {place} "
        f"is {reprlib.repr(value)}: convert the original again, or take {RECORD_KEY} out"
    )


def _is_norm(how: dict) -> bool:
    eps = how.get("eps")
    return isinstance(eps, (int, float)) and 0 <= eps < math.inf


def _is_centre(how: dict) -> bool:
    if how.keys() - {"count"} != {"axis", "block", "blocks"}:
        return False
    blocks = how["blocks"]
    if blocks is not None:
        if not isinstance(blocks, list) or not blocks:
            return False
        if not all(map(_is_count, blocks)):
            return False
    return _is_count(how["axis"]) and _is_count(how["block"]) and how["block"] > 0


def _is_count(value) -> bool:
    return type(value) is int and value >= 0


def explain_violation(tensors: Mapping[str, torch.Tensor], record: Mapping) -> str:
    """The first residual weight that is missing, has another shape or a mean, and what
    to do about it; "" if all is well.

    `tensors` are by parameter name, of any dtype, on any device. A record of another
    version raises a ValueError.
    """
    version = record.get("version")
    if version != VERSION:
        raise ValueError(
            f"the record has version {version!r}, this package reads version {VERSION}: "
            "install the release that wrote it"
        )
    recorded = record["residual_weights"]
    present = Counter(tensors.keys()) + Counter(map(_pattern, tensors))
    for name, how in recorded.items():
        if present[name] < how.get("count", 1):
            return (
                f"{name}: not all of it is here under the name that it was converted by"
            )
    for name, how in matching(recorded, tensors).items():
        tensor = tensors[name]
        if not is_centred(tensor, **how):
            is_finite = tensor.isfinite().all()
            return f"{name} {_MEAN if is_finite else 'holds NaN or infinity'}"
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


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Of the names of a model's parameters, those that no adapter added: name -> its name without the adapter's."""
    names = list(names)
    wrapped = {name[: kept.start()] for name in names for kept in _KEPT.finditer(name)}
    own = {}
    for name in names:
        inside = wrapped & _above([name])
        if all(_KEPT.match(name, len(path)) for path in inside):
            own[name] = _KEPT.sub("", name)
    return own


class ResidualWeights:
    """The residual weights among a model's own parameters (`names`), for the tensors
    that an adapter adds.
    """

    def __init__(self, record: Mapping, names: Iterable[str]):
        self.names = set(names)
        self.places = self.names | _above(self.names)
        self.how = matching(record["residual_weights"], self.names)

    def changed_by(self, name: str) -> tuple[str, dict] | None:
        """(the residual weight that an adapter's tensor changes, how to centre that
        tensor).

        LoRA adds ``B A x``, of the mean of B's columns along its output. None where no
        residual weight gets a mean by it; a ValueError where one does in another way.
        """
        path = _COPIED.sub("", _KEPT.sub("", name))
        # the parameter that it replaces, or the module that it is added to
        owner = path
        while owner and owner not in self.places:
            owner = owner.rpartition(".")[0]
        touched = [w for w in self.how if f"{w}.".startswith(f"{owner}.")]
        if not touched:
            return None
        if owner == path:  # a trained copy in its place
            return owner, self.how[owner]
        weight = f"{owner}.weight"
        lora = _LORA.fullmatch(path, len(owner))
        if lora is None or weight not in self.how:
            raise ValueError(
                f"{name} changes {touched[0]} in a way that can give it a mean"
            )
        if "A" in lora.groups():
            return None
        return weight, {**self.how[weight], "axis": 0}


def _above(names: Iterable[str]) -> set[str]:
    """Paths of all modules that hold these tensors."""
    paths = set()
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            paths.add(name)
    return paths
