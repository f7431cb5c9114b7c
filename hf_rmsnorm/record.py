"""The record of a conversion in config.json, and a check that the weights still agree
with it.

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
# How PEFT names a wrapped module's own tensors, a trained copy of them, and the
# matrices of LoRA. The adapter's name is there in a model, and not in a file.
_KEPT = re.compile(r"\.(?:base_layer|original_module)(?=\.)")
_COPIED = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_LORA = re.compile(
    r"\.lora_(?:embedding_([AB])(?:\.[^.]+)?|([AB])(?:\.[^.]+)?\.(?:weight|bias))$"
)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


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
    counts = Counter(map(_pattern, residual_weights))
    entries = {}
    for name, how in shorten(residual_weights, parameters).items():
        stands_for_many = name not in residual_weights
        entries[name] = {**how, "count": counts[name]} if stands_for_many else how
    return {
        "version": VERSION,
        "computes": "layer_norm",
        "residual_weights": entries,
        "rms_norms": shorten(norms, paths),
    }


def _pattern(name: str) -> str:
    """A name with ``*`` for each number."""
    return _NUMBER.sub("*", name)


def trained_as_rms(record) -> bool:
    """Whether a record says that training, and no approximate fit, made the norms
    RMSNorms.
    """
    return (
        isinstance(record, dict)
        and record.get("computes") == TRAINED_AS_RMS
        and not record.get("approximate")
    )


def recorded_norms(record: Mapping, paths: Iterable[str]) -> dict[str, dict]:
    """Of these module paths, those that the record calls an RMSNorm: path -> ``{"eps", "hidden_size"}``."""
    return _matching(record["rms_norms"], paths)


def constraints(record: Mapping, names: Iterable[str]) -> dict[str, dict]:
    """Of these parameters, the residual weights -> ``{"axis", "block", "blocks"}``, along which they have no mean."""
    return _matching(record["residual_weights"], names)


def uncentred(tensors: Mapping[str, torch.Tensor], record: Mapping) -> list[str]:
    """Residual weights that are missing, have another shape or a mean; none if all is
    well.

    `tensors` are by parameter name, of any dtype, on any device. A record of another
    version raises a ValueError.
    """
    if record.get("version") != VERSION:
        raise ValueError(
            f"the record has version {record.get('version')!r}, this package reads version {VERSION}"
        )
    present = Counter()
    for name in tensors:
        present.update({name, _pattern(name)})
    recorded = record["residual_weights"]
    missing = [
        name for name, how in recorded.items() if present[name] < how.get("count", 1)
    ]
    shifted = [
        name
        for name, how in constraints(record, tensors).items()
        if not _has_no_mean(tensors[name], how)
    ]
    return list(dict.fromkeys([*missing, *shifted]))


def explain_violation(tensors: Mapping[str, torch.Tensor], record: Mapping) -> str:
    """What `uncentred` lists, in words and with what to do about it; "" if all is well."""
    names = uncentred(tensors, record)
    if not names:
        return ""
    name = names[0]
    which = f"{name} and {len(names) - 1} more" if len(names) > 1 else name
    if name not in tensors:
        return f"{which}: not all of it is here under the name that it was converted by"
    tensor = tensors[name]
    if not bool(tensor.isfinite().all()):
        return f"{which} holds NaN or infinity"
    how = constraints(record, [name]).get(name)
    stored = _narrower_dtype(tensor, how) if how else None
    if stored is not None:
        stored, wide = (
            str(dtype).removeprefix("torch.") for dtype in (stored, tensor.dtype)
        )
        cure = f'load it with dtype="auto", or convert the {wide} original'
        return f"{which} has {stored} values, whose rounding leaves more of a mean than {wide} does: {cure}"
    return f"{which} no longer has zero mean along the residual stream, by fine-tuning perhaps"


def _narrower_dtype(tensor: torch.Tensor, how: Mapping) -> torch.dtype | None:
    """The narrower dtype that holds all values of a tensor, and in which it has no
    mean; None if there is none.
    """
    for stored in _NARROW:
        if stored == tensor.dtype:
            continue
        narrow = tensor.to(stored)
        if torch.equal(narrow.to(tensor.dtype), tensor) and _has_no_mean(narrow, how):
            return stored
    return None


def _has_no_mean(tensor: torch.Tensor, how: Mapping) -> bool:
    return is_centred(tensor, how["axis"], how["block"], how["blocks"])


def restore_(tensor: torch.Tensor, how: Mapping) -> None:
    """Take the mean off a residual weight, in place; it has to be whole along its axis."""
    centre_(tensor, how["axis"], how["block"], how["blocks"])


@torch.no_grad()
def is_centred(
    tensor: torch.Tensor,
    axis: int,
    block: int,
    blocks,
) -> bool:
    """Whether each block along the axis (`Centre` says which) has zero mean, but for
    the rounding of its elements.
    """
    if (
        not tensor.is_floating_point()
        or tensor.ndim <= axis
        or tensor.shape[axis] % block
    ):
        return False
    if blocks is not None and max(blocks) >= tensor.shape[axis] // block:
        return False
    unit = torch.finfo(tensor.dtype).eps / 2
    smallest = torch.finfo(tensor.dtype).smallest_normal * unit
    for piece in _blocks(tensor, axis, block, blocks):
        wide = piece.double()
        # Each element is off by at most half an ulp. The errors need not average out:
        # where the source's elements lie on one coarse grid, all of a row are rounded
        # in one direction.
        bound = (unit + ARITHMETIC) * wide.abs().mean(-1) + smallest
        within = (wide.mean(-1).abs() <= bound) & bound.isfinite()
        if not bool(within.all()):
            return False
    return True


@torch.no_grad()
def centre_(
    tensor: torch.Tensor,
    axis: int,
    block: int,
    blocks,
) -> None:
    """Take the mean off each block along the axis, in place; in float64, rounded to the
    tensor's dtype.
    """
    for piece in _blocks(tensor, axis, block, blocks):
        wide = piece.double()
        piece.copy_(wide - wide.mean(-1, keepdim=True))


def _blocks(
    tensor: torch.Tensor,
    axis: int,
    block: int,
    blocks,
) -> Iterator[torch.Tensor]:
    """Views of the blocks, which are their last dimension; in pieces, so that no large
    table is widened whole.
    """
    rows = tensor.movedim(axis, -1).unflatten(-1, (-1, block))
    chosen = (rows,) if blocks is None else [rows.select(-2, index) for index in blocks]
    for part in chosen:
        if part.dim() == 1:
            yield part
            continue
        yield from part.split(max(1, PIECE // max(1, part[:1].numel())))


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Of the names of a model's parameters, those that no adapter added: name -> its name without the adapter's."""
    names = list(names)
    wrapped = {
        name[: match.start()] for name in names for match in _KEPT.finditer(name)
    }
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
        self.modules = _above(self.names)
        self.how = constraints(record, self.names)

    def home(self, name: str) -> str:
        """The parameter that a tensor of an adapter replaces, or the module that it is
        added to; "" for none.
        """
        path = _without_adapter(name)
        if lora := _LORA.search(path):
            path = path[: lora.start()]
            return path if path in self.modules else ""
        while path and path not in self.names and path not in self.modules:
            path = path.rpartition(".")[0]
        return path

    def changed_by(self, name: str) -> tuple[str, dict] | None:
        """(the residual weight that an adapter's tensor changes, how to centre that
        tensor).

        LoRA adds ``B A x``, of the mean of B's columns along its output. None where no
        residual weight gets a mean by it; a ValueError where one does in another way.
        """
        home = self.home(name)
        replaces = home in self.names
        touched = (
            [home]
            if home in self.how
            else [weight for weight in self.how if weight.startswith(f"{home}.")]
        )
        if not touched:
            return None
        lora = _LORA.search(_without_adapter(name))
        weight = home if replaces else f"{home}.weight"
        if weight not in self.how or not (lora or replaces):
            raise ValueError(
                f"{name} changes {touched[0]} in a way that can give it a mean"
            )
        if lora and "A" in lora.groups():
            return None
        how = self.how[weight]
        return weight, {
            "axis": 0 if lora else how["axis"],
            "block": how["block"],
            "blocks": how["blocks"],
        }


def _without_adapter(name: str) -> str:
    return _COPIED.sub("", _KEPT.sub("", name))


def _above(names: Iterable[str]) -> set[str]:
    """Paths of all modules that hold these tensors."""
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}


def _matching(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    """Name -> its entry, for the names that an entry or a pattern matches."""
    patterns = [
        (re.compile(re.escape(text).replace(r"\*", r"\d+")), how)
        for text, how in entries.items()
        if "*" in text
    ]
    matching = {}
    for name in names:
        how = entries.get(name)
        if how is None:
            how = next(
                (how for pattern, how in patterns if pattern.fullmatch(name)), None
            )
        if how is not None:
            matching[name] = how
    return matching


def shorten(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    """The entries; those that differ in numbers alone become one pattern, if it matches
    no other name.
    """
    similar: dict[str, set[str]] = defaultdict(set)
    for name in names:
        similar[_pattern(name)].add(name)
    short: dict[str, dict] = {}
    for name, how in entries.items():
        group = similar[_pattern(name)]
        equal = len(group) > 1 and all(entries.get(other) == how for other in group)
        short[_pattern(name) if equal else name] = how
    return short
