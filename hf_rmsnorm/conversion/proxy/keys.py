"""Map parameters of a model to tensors of its checkpoint, by saving numbers in their
place.

Transformers renames, splits, stacks and drops parameters when it saves. So a copy of
the model gets a number for each parameter, or for each row of the stream, is saved, and
the saved numbers show what became of it.
"""

from __future__ import annotations

import copy
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ...record import rows_of
from ..plan import Centre, CentringPlan, ConversionRefused, Copy
from .run import quiet

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # before Transformers 5, which renames by rules of each model
    conversion_mapping = core_model_loading = None

NUMBERS = torch.float32  # exact to 16 million; a proxy model has fewer rows


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes: key -> tensor."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        PreTrainedModel.save_pretrained(model, folder, max_shard_size="1TB")
        tensors = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
        return tensors


class KeyMap:
    """Where each parameter of a model is saved.

    Attributes:
        aliases: name of a parameter -> the name of the one that it is tied to, or its
            own.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model)
        first = {}
        self.shapes = {}
        self._keys = {}
        for name, parameter in self.model.named_parameters():
            first[id(parameter)] = name
            self.shapes[name] = parameter.shape
            self._keys[name] = []
        everything = self.model.named_parameters(remove_duplicate=False)
        self.aliases = {name: first[id(p)] for name, p in everything}
        for buffer in self.model.buffers():
            buffer.zero_()
        numbered = dict(enumerate(self.shapes, 1))
        values = {}
        for number, name in numbered.items():
            shape = self.shapes[name]
            values[name] = torch.full(shape, number, dtype=NUMBERS)
        saved = self._saved(values)
        for key, tensor in saved.items():
            numbers = tensor.unique_consecutive()  # few: `unique` alone would sort all
            for number in numbers.unique().tolist():
                if number == 0:
                    continue
                if number not in numbered:
                    raise ConversionRefused(
                        f"{type(model).__name__} saves {key!r}, which no parameter of "
                        "it holds"
                    )
                name = numbered[number]
                self._keys[name].append(key)

    def _saved(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Key -> what is saved there of the model with these values."""
        for name, parameter in self.model.named_parameters():
            parameter.data = values[name]
        saved = saved_tensors(self.model)
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0)
        return saved

    def of(self, parameter: str | None) -> list[str]:
        """The keys that hold elements of a parameter; empty if it is not saved."""
        return self._keys.get(parameter, [])

    def centre(self, residual_weights: list[Centre]) -> list[Centre]:
        """Their blocks in checkpoint tensors, as long as here; refused if a block is no
        row of one tensor.
        """
        values = {}
        for name, shape in self.shapes.items():
            values[name] = torch.zeros(shape, dtype=NUMBERS)
        lengths = {}
        last = 0
        for weight in residual_weights:
            rows = rows_of(values[weight.key], weight.axis, weight.block)
            chosen = weight.blocks or range(rows.shape[-2])
            for block in chosen:  # each row of it gets a number
                row = rows[..., block, :]
                count = row[..., 0].numel()
                first = last + 1
                last += count
                numbers = torch.arange(first, last + 1)
                numbers = numbers.view(*row.shape[:-1], 1)
                row.copy_(numbers)
            for key in self.of(weight.key):
                lengths[key] = weight.block
        steps = []
        saved = self._saved(values)
        for key, tensor in sorted(saved.items()):
            if tensor.any():
                step = _numbered_blocks(key, tensor, lengths[key])
                steps.append(step)
        return steps

    def untie(self, tied: KeyMap) -> list[Copy]:
        """Copies for the tensors that this model saves, and that `tied`, the same model
        with ties, does not.
        """
        there = set()
        for keys in tied._keys.values():
            there.update(keys)
        copies = []
        for name, keys in self._keys.items():
            alias = tied.aliases.get(name)
            source = tied.of(alias)
            if not source:
                continue
            for key in keys:
                if key not in there:
                    copies.append(Copy(key, source[0]))
        return sorted(copies, key=lambda copy: copy.key)


def _numbered_blocks(key: str, tensor: torch.Tensor, length: int) -> Centre:
    """The blocks of a tensor that equal numbers above 0 make along one axis; refused if
    there is no such axis.
    """
    for axis, size in enumerate(tensor.shape):
        if size % length:
            continue
        rows = rows_of(tensor, axis, length)
        first = rows[..., :1].expand_as(rows)
        if not torch.equal(rows, first):
            continue
        numbers = rows[..., 0]
        numbers = numbers.reshape(-1, size // length)
        numbered = numbers.any(0)
        if not numbers[:, numbered].all():
            continue
        if numbered.all():
            return Centre(key, axis, length)
        blocks = numbered.nonzero().flatten().tolist()
        return Centre(key, axis, length, tuple(blocks))
    raise ConversionRefused(
        f"{key!r} of the checkpoint holds rows of the stream in an order unknown"
    )


def naming(names: Collection[str], model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function from the name of a tensor that a model saves to its name in a
    checkpoint; it keeps a name that the checkpoint lacks.

    Args:
        names: every tensor of the checkpoint, as `from_pretrained` accepts it.
    """
    prefix = model.base_model_prefix
    loaded_name = _loaded_name(model)
    loaded = defaultdict(list)  # parameter -> stored tensors
    for stored in names:
        parameter = loaded_name(stored)
        loaded[parameter].append(stored)

    def name(key: str) -> str:
        without = key.removeprefix(f"{prefix}.")
        for candidate in (key, without, f"{prefix}.{key}"):
            if candidate in names:
                return candidate
        parameter = loaded_name(key)
        others = loaded[parameter]
        if len(others) == 1:
            return others[0]
        return key

    return name


def _loaded_name(model: PreTrainedModel) -> Callable[[str], str]:
    """Name of a stored tensor -> the parameter that Transformers loads it into."""
    if conversion_mapping is None:
        return str
    renamings = []
    converters = []
    for transform in conversion_mapping.get_model_conversion_mapping(model):
        if isinstance(transform, core_model_loading.WeightConverter):
            converters.append(transform)
        else:
            renamings.append(transform)
    parameters = model.state_dict()
    where = renamings, converters, model.base_model_prefix, parameters

    def loaded_name(key: str) -> str:
        renamed, _ = core_model_loading.rename_source_key(key, *where)
        if renamed not in parameters and key in parameters:
            return key
        return renamed

    return loaded_name


def named_as_stored(
    plan: CentringPlan, names: Collection[str], model: PreTrainedModel
) -> CentringPlan:
    """The plan with each key as the checkpoint has it; the arguments are those of
    `naming`.
    """
    name = naming(names, model)
    copies = []
    new = set()
    for step in plan.copy:
        new.add(step.key)
        step = Copy(name(step.key), name(step.source))
        copies.append(step)
    centre = []
    for step in plan.centre:
        key = name(step.key)
        if names and key not in names and step.key not in new:
            raise ConversionRefused(
                f"tensor {step.key!r}, which such a model has, is missing from the "
                "checkpoint: add it, or download the checkpoint again"
            )
        centre.append(replace(step, key=key))
    undetermined = map(name, plan.undetermined)
    return replace(
        plan,
        centre=tuple(centre),
        copy=tuple(copies),
        undetermined=tuple(undetermined),
    )
