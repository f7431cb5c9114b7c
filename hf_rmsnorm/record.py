"""Whether a converted checkpoint is still what makes its RMSNorms equal to LayerNorms: all that writes to the residual
stream has zero mean. Fine-tuning moves it out of that set.

The record that a conversion leaves in config.json, under `RECORD_KEY`, names parameters of the model as
``named_parameters()`` does. A number in a name that stands for all numbers there is written ``*``, and the entry has
the ``count`` of its parameters. What an adapter of PEFT adds to a writer has to have zero mean too.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

Entries = Mapping[str, dict]  # by parameter or module path, or by what several of them are called together
RECORD_KEY = "hf_rmsnorm"
TRAINED_AS_RMS = "rms_norm"  # what the record says that the checkpoint computes, where training made it so
VERSION = 1
# Of a row's mean size: what centring in float64 and taking the mean again leave besides the rounding to its dtype.
ARITHMETIC = 64 * torch.finfo(torch.float64).eps
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# How PEFT names a module's own tensors once it has wrapped it, a trained copy of them, and what LoRA adds to it; the
# name of the adapter is there in a model, and not in a file.
_KEPT = re.compile(r"\.(?:base_layer|original_module)(?=\.)")
_COPIED = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_LORA = re.compile(r"\.lora_(?:embedding_([AB])(?:\.[^.]+)?|([AB])(?:\.[^.]+)?\.(?:weight|bias))$")
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


def make_record(
    writers: Entries,
    norms: Entries,
    parameters: Iterable[str],
    paths: Iterable[str],
    neurons: Entries | None = None,
) -> dict:
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
    record = {"version": VERSION, "computes": "layer_norm"}
    record |= {"writers": _counted(writers, parameters), "rms_norms": shorten(norms, paths)}
    return {**record, "neurons": _counted(neurons, parameters)} if neurons else record


def _counted(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    counts = Counter(map(_alike, entries))
    short = shorten(entries, names)
    return {text: how if text in entries else {**how, "count": counts[text]} for text, how in short.items()}


def _alike(name: str) -> str:
    return _NUMBER.sub("*", name)


def trained_as_rms(record) -> bool:
    """Whether this, of a config under `RECORD_KEY`, says that training, no approximate fit, made its norms RMSNorms."""
    return isinstance(record, dict) and record.get("computes") == TRAINED_AS_RMS and not record.get("approximate")


def recorded_norms(record: Mapping, paths: Iterable[str]) -> dict[str, dict]:
    """Of these module paths, those that the record calls an RMSNorm: path -> ``{"eps", "hidden_size"}``."""
    return _matching(record["rms_norms"], paths)


def uncentred(tensors: Mapping[str, torch.Tensor], record: Mapping) -> list[str]:
    """Names of recorded writers and neurons that are missing, be it from one layer, have another shape, have lost their
    zero mean or are no longer what they were; none if all is well.

    `tensors` are by parameter name, of any dtype, on any device. A record of another version raises a ValueError.
    """
    if record.get("version") != VERSION:
        raise ValueError(f"the record has version {record.get('version')!r}, this package reads version {VERSION}")
    there = Counter(text for name in tensors for text in {name, _alike(name)})
    recorded = {**record.get("neurons", {}), **record["writers"]}
    gone = [text for text, how in recorded.items() if there[text] < how.get("count", 1)]
    found = [(name, how) for name, how in promises(record, tensors) if name not in gone]
    return list(dict.fromkeys([*gone, *(name for name, how in found if not _holds(tensors[name], how))]))


def promises(record: Mapping, names: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """(parameter, what the record says of it), of writers first: what `uncentred` looks at and `mend_` puts back."""
    names = list(names)
    for entries in (record["writers"], record.get("neurons", {})):
        yield from _matching(entries, names).items()


def complaint(tensors: Mapping[str, torch.Tensor], record: Mapping) -> str:
    """What `uncentred` finds, in words and with what to do about it; "" if all is well."""
    if not (names := uncentred(tensors, record)):
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
        if exact and _holds(narrow, how):
            stored, wide = (str(dtype).removeprefix("torch.") for dtype in (stored, tensor.dtype))
            cure = f'load it with dtype="auto", or convert the {wide} original'
            return f"{which} has {stored} values, whose rounding leaves more of a mean than {wide} does: {cure}"
    return f"{which} no longer has zero mean along the residual stream, by fine-tuning perhaps"


@torch.no_grad()
def _holds(tensor: torch.Tensor, how: Mapping) -> bool:
    """Whether a writer has zero mean, or neurons are what they were."""
    if "values" not in how:
        return is_centred(_without_added(tensor, how), how["axis"], how["block"], how["blocks"])
    whole = tensor.ndim > how["axis"] and tensor.shape[how["axis"]] == how["first"] + len(how["values"])
    return whole and bool(torch.eq(*_neurons(tensor, how)).all())


@torch.no_grad()
def mend_(tensor: torch.Tensor, how: Mapping) -> None:
    """Put a tensor back in place to what `promises` or `Writers.changed_by` says; it has to be whole along its axis."""
    if "values" not in how:
        return centre_(_without_added(tensor, how), how["axis"], how["block"], how["blocks"])
    slices, values = _neurons(tensor, how)
    slices.copy_(values.expand_as(slices))


def _neurons(tensor: torch.Tensor, how: Mapping) -> tuple[torch.Tensor, torch.Tensor]:
    slices = tensor.movedim(how["axis"], -1)[..., how["first"] :]
    return slices, torch.tensor(how["values"], dtype=torch.float64).to(slices)


def _without_added(tensor: torch.Tensor, how: Mapping) -> torch.Tensor:
    """A writer without the slices that were added to it and have a mean on purpose."""
    but = how.get("but")
    if but is not None and tensor.ndim > but["axis"] and tensor.shape[but["axis"]] > but["first"]:
        return tensor.narrow(but["axis"], 0, but["first"])
    return tensor


@torch.no_grad()
def is_centred(tensor: torch.Tensor, axis: int, block: int, blocks) -> bool:
    """Whether each block along the axis (`Centre` says which) has zero mean, but for the rounding of its elements."""
    fits = tensor.is_floating_point() and tensor.ndim > axis and not tensor.shape[axis] % block
    if not fits or (blocks is not None and max(blocks) >= tensor.shape[axis] // block):
        return False
    unit = torch.finfo(tensor.dtype).eps / 2
    smallest = torch.finfo(tensor.dtype).smallest_normal * unit
    for piece in _blocks(tensor, axis, block, blocks):
        wide = piece.double()
        # Each element is off by at most half an ulp. Not by chance in either direction: where the source's elements lie
        # on one coarse grid, all of a row are rounded alike, and nothing averages out.
        bound = (unit + ARITHMETIC) * wide.abs().mean(-1) + smallest
        if not bool(((wide.mean(-1).abs() <= bound) & bound.isfinite()).all()):
            return False
    return True


@torch.no_grad()
def centre_(tensor: torch.Tensor, axis: int, block: int, blocks) -> None:
    """Take the mean off each block along the axis, in place; in float64, rounded to the tensor's dtype."""
    for piece in _blocks(tensor, axis, block, blocks):
        wide = piece.double()
        piece.copy_(wide - wide.mean(-1, keepdim=True))


def _blocks(tensor: torch.Tensor, axis: int, block: int, blocks) -> Iterator[torch.Tensor]:
    """Views of the blocks, which are their last dimension; in parts, so that a table of words is not widened whole."""
    rows = tensor.movedim(axis, -1).unflatten(-1, (-1, block))
    for part in (rows,) if blocks is None else [rows.select(-2, index) for index in blocks]:
        yield from part.split(max(1, 2**24 // max(1, part[:1].numel()))) if part.dim() > 1 else (part,)


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Those of the names of a model's parameters that adapters did not add: name -> what it is called without them."""
    names = list(names)
    wrapped = {name[: match.start()] for name in names for match in _KEPT.finditer(name)}
    own = (name for name in names if all(_KEPT.match(name, len(path)) for path in wrapped & _above([name])))
    return {name: _KEPT.sub("", name) for name in own}


class Writers:
    """What a record says of a model's own parameters (`names`), asked for the tensors that an adapter brings."""

    def __init__(self, record: Mapping, names: Iterable[str]):
        self.names = set(names)
        self.modules = _above(self.names)
        self.how = dict(promises(record, self.names))

    def home(self, name: str) -> str:
        """The parameter that a tensor of an adapter stands in for, else the module that it is added to; "" for none."""
        path = _plain(name)
        if lora := _LORA.search(path):
            path = path[: lora.start()]
            return path if path in self.modules else ""
        while path and path not in self.names and path not in self.modules:
            path = path.rpartition(".")[0]
        return path

    def changed_by(self, name: str) -> tuple[str, dict] | None:
        """The writer that a tensor of an adapter changes, and axis, block and blocks along which to centre the tensor.

        LoRA adds ``B A x``, of the mean of B's columns along its output. None where no writer gets a mean by it; a
        ValueError where one does in another way.
        """
        home = self.home(name)
        whole = home in self.names
        touched = [home] if home in self.how else [writer for writer in self.how if writer.startswith(f"{home}.")]
        if not touched:
            return None
        lora = _LORA.search(_plain(name))
        writer = home if whole else f"{home}.weight"
        how = self.how.get(writer, {})
        if "block" in how and (lora or (whole and "but" not in how)):
            if lora and "A" in lora.groups():
                return None
            return writer, {"axis": 0 if lora else how["axis"], "block": how["block"], "blocks": how["blocks"]}
        raise ValueError(f"{name} changes {touched[0]} in a way that can give it a mean")


def _plain(name: str) -> str:
    return _COPIED.sub("", _KEPT.sub("", name))


def _above(names: Iterable[str]) -> set[str]:
    """Paths of all modules that hold these tensors."""
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}


def _matching(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    patterns = [(re.compile(re.escape(t).replace(r"\*", r"\d+")), how) for t, how in entries.items() if "*" in t]
    found = {n: [entries.get(n), *(how for pattern, how in patterns if pattern.fullmatch(n))] for n in names}
    return {name: how for name, each in found.items() if (how := next(filter(None, each), None)) is not None}


def shorten(entries: Entries, names: Iterable[str]) -> dict[str, dict]:
    """Equal entries of names that differ in numbers only as one, where it matches none of the other names."""
    every: dict[str, set[str]] = defaultdict(set)
    for name in names:
        every[_alike(name)].add(name)
    short: dict[str, dict] = {}
    for name, how in entries.items():
        alike = every[_alike(name)]
        whole = len(alike) > 1 and all(entries.get(other) == how for other in alike)
        short[_alike(name) if whole else name] = how
    return short
