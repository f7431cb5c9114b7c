"""Map parameters of a model to tensors of its checkpoint, by saving numbers in their
place.

Transformers renames, splits, stacks and drops parameters when it saves. So a copy of
the model gets a number for each parameter, is saved, and the saved numbers show what
became of it. Of one whose residual weights are centred, the tensors that are saved show
where their blocks are. `discover` asks for both; `plan_centring` ends with
`in_checkpoint`, which puts the plan into the names of the source's tensors.
"""

from __future__ import annotations

import copy
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ..errors import ConversionRefused
from ..plan import Centre, CentringPlan, Copy
from .model import ProxyModel, give_weights
from .run import quiet
from .shift_invariance import are_balanced, chosen_blocks, rows_by_axis

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:  # before Transformers 5, which renames by rules of each model
    conversion_mapping = core_model_loading = None

NUMBERS = torch.float32  # exact to 16 million; a model has fewer parameters


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes: key -> tensor."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        PreTrainedModel.save_pretrained(model, folder, max_shard_size="1TB")
        return load_file(f"{folder}/model.safetensors")


def keys_of(model: PreTrainedModel) -> dict[str, list[str]]:
    """Parameter -> the keys that hold elements of it; none if it is not saved."""
    model = copy.deepcopy(model)
    for buffer in model.buffers():
        buffer.zero_()
    parameters = dict(model.named_parameters())
    keys = {name: [] for name in parameters}
    named = dict(enumerate(parameters, 1))
    for number, name in named.items():
        shape = parameters[name].shape
        parameters[name].data = torch.full(shape, number, dtype=NUMBERS)
    for key, tensor in saved_tensors(model).items():
        numbers = tensor.unique_consecutive()  # few: `unique` alone would sort all
        for number in named.keys() & numbers.unique().tolist():
            keys[named[number]].append(key)
    return keys


def untied(tied: PreTrainedModel, model: PreTrainedModel) -> list[Copy]:
    """Copies for the tensors that a model saves, and that the same model with ties does
    not; both get other weights.
    """
    give_weights(tied)
    model.load_state_dict(tied.state_dict())
    saved_tied = saved_tensors(tied)
    saved_untied = saved_tensors(model)
    copies = []
    for key in sorted(saved_untied.keys() - saved_tied.keys()):
        value = saved_untied[key]
        same = [name for name, t in saved_tied.items() if torch.equal(t, value)]
        copies += [Copy(key, name) for name in same[:1]]
    return copies


def centred_blocks(model: PreTrainedModel, lengths: Iterable[int]) -> list[Centre]:
    """The blocks of these lengths that are centred in a model's saved state; its
    buffers are lost.
    """
    for buffer in model.buffers():
        buffer.zero_()
    steps = []
    for key, tensor in sorted(saved_tensors(model).items()):
        found = []
        # Two short blocks make a long one that is balanced too, so short ones go first.
        for length in sorted(lengths):
            for axis, rows in rows_by_axis(tensor, length):
                how = chosen_blocks(axis, length, are_balanced(rows))
                if how is not None:
                    found.append(Centre.of(key, **how))
        steps += found[:1]
    return steps


def naming(names: Collection[str], model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function from the name of a tensor that a model saves to its name in a
    checkpoint; it keeps a name that the checkpoint lacks.

    Args:
        names: every tensor of the checkpoint, as `from_pretrained` accepts it.
    """
    prefix = f"{model.base_model_prefix}."
    loaded_name = _loaded_name(model)
    loaded = defaultdict(list)  # parameter -> stored tensors
    for stored in names:
        loaded[loaded_name(stored)].append(stored)

    def name(key: str) -> str:
        for candidate in (key, key.removeprefix(prefix), prefix + key):
            if candidate in names:
                return candidate
        others = loaded[loaded_name(key)]
        return others[0] if len(others) == 1 else key

    return name


def _loaded_name(model: PreTrainedModel) -> Callable[[str], str]:
    """Name of a stored tensor -> the parameter that Transformers loads it into."""
    if conversion_mapping is None:
        return str
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    kind = core_model_loading.WeightConverter
    converters = [each for each in transforms if isinstance(each, kind)]
    renamings = [each for each in transforms if not isinstance(each, kind)]
    parameters = model.state_dict()
    where = renamings, converters, model.base_model_prefix, parameters

    def loaded_name(key: str) -> str:
        renamed, _ = core_model_loading.rename_source_key(key, *where)
        if renamed not in parameters and key in parameters:
            return key
        return renamed

    return loaded_name


def in_checkpoint(
    plan: CentringPlan, names: Collection[str], proxy: ProxyModel
) -> CentringPlan:
    """A plan for a proxy, in the blocks and the keys of its checkpoint.

    Args:
        names: those of `naming`. Without any, as of a hub's model without its weights, the
            proxy's keys stay.
    """
    name = naming(names, proxy.model)
    copies = tuple(Copy(name(step.key), name(step.source)) for step in plan.copy)
    known = {*names, *(copy.key for copy in copies)}
    steps = []
    for step in plan.centre:
        wide = replace(
            step, key=name(step.key), block=proxy.checkpoint_widths[step.block]
        )
        if names and wide.key not in known:
            raise ConversionRefused(
                f"tensor {step.key!r}, which such a model has, is missing from the "
                "checkpoint: add it, or download the checkpoint again"
            )
        steps.append(wide)
    undetermined = tuple(map(name, plan.undetermined))
    return replace(plan, centre=tuple(steps), copy=copies, undetermined=undetermined)
