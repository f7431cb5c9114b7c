"""Map parameters of a model to tensors of its checkpoint, by saving numbers in their
place.

Transformers renames, splits, stacks and drops parameters when it saves. So a copy of
the model gets a number for each parameter, or for each row of the stream, is saved, and
the saved numbers show what became of it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ..plan import Centre, CentringPlan, ConversionRefused, Copy
from .run import quiet

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # before Transformers 5, which renames by rules of each model
    conversion_mapping = core_model_loading = None


@dataclass(frozen=True)
class ResidualWeight:
    """Blocks of a parameter that write to the stream: as `plan.Centre`, by the
    parameter's name in the model.
    """

    parameter: str
    axis: int
    block: int
    blocks: tuple[int, ...]


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes: key -> tensor."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        PreTrainedModel.save_pretrained(model, folder, max_shard_size="1TB")
        tensors = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
        return tensors


class KeyMap:
    """Where each parameter of a model is saved."""

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model)
        first: dict[int, str] = {}
        # name -> the name of the parameter that it is tied to, or its own
        self.aliases = {
            name: first.setdefault(id(p), name)
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        for buffer in self.model.buffers():
            buffer.zero_()
        numbered = dict(enumerate(self.shapes, 1))
        values = {}
        for number, name in numbered.items():
            values[name] = torch.full(self.shapes[name], number, dtype=torch.float64)
        # name -> key -> how many of its elements are there
        self.held: dict[str, dict[str, int]] = {name: {} for name in self.shapes}
        for key, tensor in self._saved(values).items():
            numbers, counts = tensor.unique(return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                if number in numbered:
                    self.held[numbered[number]][key] = count
                elif number:
                    what = f"saves {key!r}, which no parameter of it holds"
                    raise ConversionRefused(f"{type(model).__name__} {what}")

    def _saved(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Key -> what is saved there of the model with these values."""
        for name, parameter in self.model.named_parameters():
            parameter.data = values[name]
        return saved_tensors(self.model)

    def of(self, parameter: str | None) -> list[str]:
        """The keys that hold elements of a parameter; empty if it is not saved."""
        return list(self.held.get(parameter, ()))

    def unsaved(self) -> set[str]:
        """Parameters of which some element is in no tensor of the checkpoint."""
        unsaved = set()
        for name, keys in self.held.items():
            if sum(keys.values()) < self.shapes[name].numel():
                unsaved.add(name)
        return unsaved

    def centre(self, residual_weights: list[ResidualWeight]) -> tuple[Centre, ...]:
        """Their blocks in checkpoint tensors, as long as here; refused if a block is no
        row of one tensor.
        """
        rows = {}
        for name, shape in self.shapes.items():
            rows[name] = torch.zeros(shape, dtype=torch.float64)
        lengths: dict[str, int] = {}
        count = 0
        for weight in residual_weights:
            blocks = _split(rows[weight.parameter], weight.axis, weight.block)
            for block in weight.blocks:  # each row of it gets a number
                size = blocks[block, ..., 0].numel()
                numbers = torch.arange(count + 1, count + size + 1)
                blocks[block] = numbers.view(*blocks.shape[1:-1], 1)
                count += size
            lengths |= dict.fromkeys(self.of(weight.parameter), weight.block)
        done = []
        for key, saved in sorted(self._saved(rows).items()):
            if not saved.any():
                continue
            found = _blocks(saved, lengths[key])
            if found is None:
                what = "holds rows of the stream in an order unknown"
                raise ConversionRefused(f"{key!r} of the checkpoint {what}")
            axis, blocks = found
            if len(blocks) * lengths[key] == saved.shape[axis]:
                blocks = None
            done.append(Centre(key, axis, lengths[key], blocks))
        return tuple(done)

    def untie(self, tied: KeyMap) -> tuple[Copy, ...]:
        """Copies for the tensors that this model saves, and that `tied`, the same model
        with ties, does not.
        """
        there = set().union(*tied.held.values())
        copies = []
        for name, keys in self.held.items():
            source = tied.of(tied.aliases.get(name))
            for key in keys.keys() - there:
                if len(source) != 1:
                    what = "is tied to something that the checkpoint does not hold"
                    raise ConversionRefused(f"{key!r} {what}")
                copies.append(Copy(key, source[0]))
        return tuple(sorted(copies, key=lambda copy: copy.key))


def _split(tensor: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """A view of blocks along an axis: (blocks, other axes, length)."""
    return tensor.movedim(axis, -1).unflatten(-1, (-1, length)).movedim(-2, 0)


def _blocks(rows: torch.Tensor, length: int) -> tuple[int, tuple[int, ...]] | None:
    """(axis, indices) of the blocks that equal numbers, above 0, make along one axis."""
    for axis in range(rows.ndim):
        if rows.shape[axis] % length:
            continue
        blocks = _split(rows, axis, length)
        is_uniform = torch.equal(blocks, blocks[..., :1].expand_as(blocks))
        chosen = [index for index, block in enumerate(blocks) if block.any()]
        if is_uniform and blocks[chosen].all():
            return axis, tuple(chosen)
    return None


def naming(names: Collection[str], model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function from the name of a tensor that a model saves to its name in a
    checkpoint; it keeps a name that the checkpoint lacks.

    Args:
        names: every tensor of the checkpoint, as `from_pretrained` accepts it.
    """
    prefix = model.base_model_prefix
    loaded_name = _loaded_name(model)
    loaded: dict[str, list[str]] = {}
    for stored in names:
        loaded.setdefault(loaded_name(stored), []).append(stored)

    def name(key: str) -> str:
        for candidate in (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}"):
            if candidate in names:
                return candidate
        others = loaded.get(loaded_name(key), ())
        return others[0] if len(others) == 1 else key

    return name


def _loaded_name(model: PreTrainedModel) -> Callable[[str], str]:
    """Name of a stored tensor -> the parameter that Transformers loads it into."""
    if conversion_mapping is None:
        return str
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    kinds: dict[bool, list] = {True: [], False: []}
    for transform in transforms:
        is_converter = isinstance(transform, core_model_loading.WeightConverter)
        kinds[is_converter].append(transform)
    parameters = model.state_dict()
    where = kinds[False], kinds[True], model.base_model_prefix, parameters

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
    new = {step.key for step in plan.copy}
    centre, copies = [], []
    for step in plan.centre:
        centre.append(replace(step, key=name(step.key)))
        if names and name(step.key) not in names and step.key not in new:
            what = f"tensor {step.key!r}, which such a model has, is missing from the checkpoint"
            cure = "add it, or download the checkpoint again"
            raise ConversionRefused(f"{what}: {cure}")
    for step in plan.copy:
        copies.append(Copy(name(step.key), name(step.source)))
    return replace(
        plan,
        centre=tuple(centre),
        copy=tuple(copies),
        undetermined=tuple(map(name, plan.undetermined)),
    )
