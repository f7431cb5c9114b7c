"""A converted model in fine-tuning: kept where LayerNorm and RMSNorm are equal, or
trained as RMSNorm and marked so.
"""

import warnings

import torch

from ..ops.operators import is_dtensor
from .follow import STAYS, Recorded, conversion_of
from .record import RECORD_KEY, TRAINED_AS_RMS, centre_

TRAINED = (
    "a model that is trained as RMSNorm computes LayerNorm, which is another function, where what is saved of it is "
    "loaded without hf_rmsnorm.patch_model; hf-rmsnorm convert FOLDER DST --target native writes a whole model as one "
    "that needs no package, where there is such an architecture"
)


_CANNOT = "this model cannot be kept centred"


class Recentre:
    """Subtracts the mean that an optimizer's step gave a converted model's residual
    weights.

    A LayerNorm removes that mean, so the logits do not change. Without a mean, RMSNorm
    computes the same (Jiang et al. 2023). Call it after each step, on every process:

        >>> recentre = Recentre(model)          # once; after adapters were added  # doctest: +SKIP
        >>> optimizer.step()                                                       # doctest: +SKIP
        >>> recentre()                                                             # doctest: +SKIP

    Means are computed in float64, and parameters are changed in place in their own
    dtype. The B of a LoRA adapter is centred if it is added to a residual weight.
    Parameters without gradient are not changed. Under `fully_shard` a parameter that is
    sharded along the residual stream is gathered, one at a time. A model that has moved
    already is centred at once.

    Args:
        model: a converted model, or one that holds it: under PEFT, DDP,
            `torch.compile`, `fully_shard`.

    Raises:
        TypeError: this is no module.
        ValueError: no conversion is recorded; the model was trained as RMSNorm; another
            module may give the residual stream a mean; or FSDP1 or ZeRO-3 manage the
            parameters.
    """

    def __init__(self, model: torch.nn.Module):
        recorded = _recorded(model, "Recentre")
        _check_serves(model, recorded)
        if why_not := recorded.in_the_way():
            raise ValueError(f"{_CANNOT}: {why_not}")
        self._model = recorded.model
        parameter_of = recorded.model.get_parameter
        # (name, how to centre it, its shape)
        self._steps = [
            (name, how, parameter_of(name).shape) for name, how, _ in recorded.parts
        ]
        if any(is_dtensor(parameter_of(name)) for name, *_ in self._steps):
            return
        if recorded.moved():
            self._run(frozen=True)
        if why_not := recorded.moved():
            raise ValueError(f"{_CANNOT}: {why_not}")

    def __call__(self) -> None:
        """Centre the parameters that are trained; raises ValueError where one is no
        longer here whole.
        """
        self._run(frozen=False)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where an optimizer updates copies of the parameters:
        DeepSpeed's would undo the centring.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = {id(p) for p in self._model.parameters()}
        for name, *_ in self._steps:
            parameter = self._model.get_parameter(name)
            is_missed = parameter.requires_grad and id(parameter) not in stepped
            if is_missed and stepped - ours:
                raise ValueError(
                    f"this optimizer updates copies of the parameters, and not {name} "
                    "itself: the centring would be undone; use one that updates the "
                    "parameters, or train as RMSNorm (train_as_rms)"
                )

    @torch.no_grad()
    def _run(self, frozen: bool) -> None:
        for name, how, shape in self._steps:
            parameter = self._model.get_parameter(name)
            if parameter.shape != shape or parameter.is_meta:
                raise ValueError(
                    f"{name} is not here whole, as under FSDP1 and ZeRO-3, or was "
                    "resized: build Recentre after that, under fully_shard or DDP, or "
                    "train as RMSNorm (train_as_rms)"
                )
            if frozen or parameter.requires_grad:
                _centre(parameter, how)


def _centre(parameter: torch.Tensor, how: dict) -> None:
    """Take the mean off a parameter, in place."""
    if not is_dtensor(parameter):
        centre_(parameter, **how)
    elif not any(place.is_shard(how["axis"]) for place in parameter.placements):
        # A shard has some of the rows whole.
        centre_(parameter.to_local(), **how)
    else:
        from torch.distributed.tensor import distribute_tensor

        whole = parameter.full_tensor()
        centre_(whole, **how)
        mesh, placements = parameter.device_mesh, parameter.placements
        shards = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        parameter.to_local().copy_(shards.to_local())


def _check_serves(model: torch.nn.Module, recorded: Recorded) -> None:
    """Raise ValueError for a model under FSDP1, or one that was trained as RMSNorm."""
    names = [type(module).__name__ for module in model.modules()]
    if "FullyShardedDataParallel" in names:
        raise ValueError(
            "FSDP1 keeps parameters as pieces of a flat one, without rows to centre: "
            "use FSDP2 (fully_shard), or train as RMSNorm (train_as_rms)"
        )
    if recorded.followed:
        raise ValueError(
            "this model's config says that it was trained as RMSNorm: its weights may "
            "have any mean, and taking it off would change what the model computes"
        )


def train_as_rms(model: torch.nn.Module) -> None:
    """Mark a converted model as one that is trained as RMSNorm. `patch_model` then
    always runs its norms as RMSNorm.

    Call it before `patch_model` and before training; the mark is in the config, as
    ``"computes": "rms_norm"``, and `save_pretrained` keeps it. Adapters do not hold it:
    mark the base before an adapter is loaded that was trained so.

    Args:
        model: a converted model, or one that holds it.

    Raises:
        TypeError: this is no module.
        ValueError: no conversion is recorded; or the model computes something else as
            RMSNorm, since it has moved.

    Warns:
        UserWarning: a plain load of the saved model computes LayerNorm; with the cure.
    """
    mark_as_rms(model)
    warnings.warn(TRAINED, stacklevel=2)


def mark_as_rms(model: torch.nn.Module, trained: bool = False) -> None:
    """`train_as_rms`, without the warning; `trained`: the weights are known to be
    trained as RMSNorm already.
    """
    recorded = _recorded(model, "train_as_rms")
    if recorded.why_not and not trained:
        raise ValueError(
            "as RMSNorm this model would compute something else than it does now: "
            f"{recorded.why_not.removeprefix(STAYS)}"
        )
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, RECORD_KEY, None) == recorded.record:
            setattr(config, RECORD_KEY, {**recorded.record, "computes": TRAINED_AS_RMS})


def _recorded(model: torch.nn.Module, function: str) -> Recorded:
    if not isinstance(model, torch.nn.Module):
        what = f"{function} needs a torch.nn.Module, got {type(model).__name__}"
        raise TypeError(f"{what}: load the model first")
    recorded = conversion_of(model)
    if recorded is None:
        raise ValueError(
            f"the config of this {type(model).__name__} records no conversion: make a "
            "checkpoint with hf-rmsnorm convert, and load that"
        )
    return recorded
