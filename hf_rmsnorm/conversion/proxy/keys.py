"""Map parameters of a model to tensors of its checkpoint, by saving numbers that
identify their places.

Transformers renames, splits, stacks and drops parameters when it saves. So each element
of all parameters gets another number, the model is saved, and each saved number gives
the parameter and the place in it.
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

from ..checkpoint.source import open_checkpoint
from ..plan import Centre, CentringPlan, ConversionRefused, Copy, Scale
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
        files = sorted(Path(folder).glob("*.safetensors"))
        return {
            key: tensor for file in files for key, tensor in load_file(file).items()
        }


class KeyMap:
    """Where each element of each parameter of a model is saved; refused if it saves
    numbers of no parameter.
    """

    def __init__(self, model: PreTrainedModel):
        numbered, first, self.total = copy.deepcopy(model), {}, 0
        named = list(numbered.named_parameters(remove_duplicate=False))
        self.aliases: dict[str, str] = {
            name: first.setdefault(id(p), name) for name, p in named
        }
        self.shapes: dict[str, torch.Size] = {}
        self.offsets: dict[str, int] = {}
        for name, p in numbered.named_parameters():
            self.shapes[name], self.offsets[name] = p.shape, self.total
            self.total += p.numel()
            p.data = torch.arange(
                self.offsets[name], self.total, dtype=torch.float64
            ).reshape(p.shape)
        self.saved = self._numbers_saved(numbered)
        self._keys: dict[str, list[str]] = {}
        for key, index in self.saved.items():
            for name in self._parameters_in(index):
                self._keys.setdefault(name, []).append(key)

    def _numbers_saved(self, numbered: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Key of the checkpoint -> numbers that it holds, for those that hold numbers of parameters."""
        buffers = {name for name, _ in numbered.named_buffers()}
        ends = tuple(name.rpartition(".")[2] for name in buffers)
        saved = {}
        for key, tensor in saved_tensors(numbered).items():
            if key in buffers:
                continue
            index = tensor.long() if tensor.dtype == torch.float64 else None
            if (
                index is None
                or not torch.equal(index.double(), tensor)
                or not self._in_range(index)
            ):
                if not key.endswith(ends):
                    raise ConversionRefused(
                        f"{type(numbered).__name__} saves {key!r}, which no parameter of it holds"
                    )
            elif int((index - index.min()).flatten().bincount().max()) == 1:
                # all differ
                saved[key] = index
        return saved

    def _in_range(self, index: torch.Tensor) -> bool:
        if not index.numel():
            return False
        return int(index.min()) >= 0 and int(index.max()) < self.total

    def _parameters_in(self, index: torch.Tensor) -> list[str]:
        """Parameters of which a tensor holds numbers."""
        names, starts = list(self.offsets), torch.tensor(list(self.offsets.values()))
        places = torch.searchsorted(starts, index.flatten(), right=True).bincount()
        return [names[place - 1] for place in places.nonzero().flatten().tolist()]

    def of(self, parameter: str) -> list[str]:
        """The keys that hold elements of a parameter; empty if it is not saved."""
        return self._keys.get(parameter, [])

    def unsaved(self) -> set[str]:
        """Parameters of which some element is in no tensor of the checkpoint."""
        present = torch.zeros(self.total, dtype=torch.bool)
        for index in self.saved.values():
            present[index.flatten()] = True
        parts = present.split([shape.numel() for shape in self.shapes.values()])
        return {
            name
            for name, part in zip(self.shapes, parts, strict=True)
            if not part.all()
        }

    def centre(self, residual_weights: list[ResidualWeight]) -> tuple[Centre, ...]:
        """Their blocks in checkpoint tensors, as long as here; refused if a block is no
        row of one tensor.
        """
        group = torch.full((self.total,), -1, dtype=torch.long)
        size = torch.zeros(self.total, dtype=torch.long)
        count = 0
        for weight in residual_weights:
            shape = self.shapes[weight.parameter]
            start = self.offsets[weight.parameter]
            here = slice(start, start + shape.numel())
            group[here] = -1
            along = group[here].view(shape).movedim(weight.axis, -1)
            rows = along.unflatten(-1, (-1, weight.block)).movedim(-2, 0)
            for block in weight.blocks:  # each row of it gets a number
                numbers = torch.arange(count, count + rows[block, ..., 0].numel())
                rows[block] = numbers.view(rows.shape[1:-1])[..., None]
                count += len(numbers)
            size[here] = weight.block
        done, covered = [], 0
        for key, index in sorted(self.saved.items()):
            marks = group[index]
            if bool((marks < 0).all()):
                continue
            lengths = size[index][marks >= 0]
            length = int(lengths[0])
            found = _blocks(marks, length) if bool((lengths == length).all()) else None
            if found is None:
                raise ConversionRefused(
                    f"{key!r} of the checkpoint holds rows of the stream in an order unknown"
                )
            axis, blocks = found
            covered += len(lengths)
            done.append(
                Centre(
                    key,
                    axis,
                    length,
                    None if len(blocks) == marks.shape[axis] // length else blocks,
                )
            )
        if covered != int((group >= 0).sum()):
            raise ConversionRefused(
                "a parameter that writes to the residual stream is only partly in the checkpoint"
            )
        return tuple(done)

    def scale(self, parameter: str, axis: int, by: str) -> list[Scale]:
        """A parameter times the vector `by` along `axis`; refused if either is stored
        in another order.
        """
        (by_key, *more), start = self.of(by), self.offsets[by]
        wanted = torch.arange(start, start + self.shapes[by].numel())
        shape = self.shapes[parameter]
        view = [1] * len(shape)
        view[axis] = shape[axis]
        place = torch.arange(shape[axis]).reshape(view).expand(shape).flatten()
        done = []
        if not more and torch.equal(self.saved[by_key].flatten(), wanted):
            for key in self.of(parameter):
                here = place[self.saved[key] - self.offsets[parameter]]
                axes = (a for a in range(here.ndim) if here.shape[a] == len(wanted))
                axes = [
                    a
                    for a in axes
                    if bool((here.movedim(a, -1) == torch.arange(len(wanted))).all())
                ]
                done += [Scale(key, a, by_key) for a in axes[:1]]
            if len(done) == len(self.of(parameter)):
                return done
        raise ConversionRefused(
            f"the layer scale {by!r} is stored in another order than {parameter!r}"
        )

    def untie(self, tied: KeyMap) -> tuple[Copy, ...]:
        """Copies for the tensors that this model saves, and that `tied`, the same model
        with ties, does not.
        """
        copies = []
        for key in sorted(self.saved.keys() - tied.saved.keys()):
            source = self._source_in(tied, key)
            if source is None:
                raise ConversionRefused(
                    f"{key!r} is tied to something that the checkpoint does not hold"
                )
            copies.append(Copy(key, source))
        return tuple(copies)

    def _source_in(self, tied: KeyMap, key: str) -> str | None:
        """The tensor of a tied model that holds the parameter which this one saves as
        `key`.
        """
        names = [name for name in self.offsets if key in self.of(name)]
        if len(names) != 1:
            return None
        name = names[0]
        other = tied.aliases.get(name)
        if tied.shapes.get(other) != self.shapes[name]:
            return None
        wanted = self.saved[key] - self.offsets[name] + tied.offsets[other]
        return next(
            (k for k, index in tied.saved.items() if torch.equal(index, wanted)), None
        )


def _blocks(marks: torch.Tensor, length: int) -> tuple[int, tuple[int, ...]] | None:
    """(axis, indices) of the blocks that equal marks, 0 or more, make along one axis."""
    for axis in range(marks.ndim):
        if marks.shape[axis] % length:
            continue
        count = marks.shape[axis] // length
        rows = marks.movedim(axis, -1).reshape(-1, count, length)
        chosen = rows[..., 0] >= 0
        is_uniform = torch.equal(rows, rows[..., :1].expand_as(rows))
        is_alike = torch.equal(chosen, chosen[:1].expand_as(chosen))
        if is_uniform and is_alike:
            return axis, tuple(chosen[0].nonzero().flatten().tolist())
    return None


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors that `from_pretrained` loads from a folder; empty if its
    weights are not here.
    """
    return {*open_checkpoint(folder, allow_pickle=True, weights=False).tensors}


def naming(
    names: Collection[str], model: PreTrainedModel, optional: Collection[str] = ()
) -> Callable[[str], str]:
    """Return a function from the name of a tensor that a model saves to its name in a
    checkpoint.

    Args:
        names: every tensor of the checkpoint, as `from_pretrained` accepts it; if
            empty, each keeps its name.
        optional: tensors that keep their name if they are missing; any other missing
            tensor is refused.
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
        if len(others) == 1:
            return others[0]
        if key in optional or not names:
            return key
        missing = (
            f"tensor {key!r}, which such a model has, is missing from the checkpoint"
        )
        raise ConversionRefused(f"{missing}: add it, or download the checkpoint again")

    return name


def _loaded_name(model: PreTrainedModel) -> Callable[[str], str]:
    """Name of a stored tensor -> the parameter that Transformers loads it into."""
    if conversion_mapping is None:
        return str
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    converters = [
        each
        for each in transforms
        if isinstance(each, core_model_loading.WeightConverter)
    ]
    renamings = [
        each
        for each in transforms
        if not isinstance(each, core_model_loading.WeightConverter)
    ]
    parameters = model.state_dict()
    where = model.base_model_prefix, parameters

    def loaded_name(key: str) -> str:
        renamed, _ = core_model_loading.rename_source_key(
            key, renamings, converters, *where
        )
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
    name = naming(names, model, {*(c.key for c in plan.copy), *plan.undetermined})
    return replace(
        plan,
        centre=tuple(replace(c, key=name(c.key)) for c in plan.centre),
        scale=tuple(replace(s, key=name(s.key), by=name(s.by)) for s in plan.scale),
        copy=tuple(
            replace(c, key=name(c.key), source=name(c.source)) for c in plan.copy
        ),
        undetermined=tuple(name(key) for key in plan.undetermined),
    )
