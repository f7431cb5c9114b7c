"""Proves that nothing decides what a module computes which no probe can try out: sizes, devices, values, modes."""

from __future__ import annotations

import contextlib

import torch

from ...formula import HALF_DTYPES
from ...fused.recipe import Recipe
from .inputs import NotInFamily, Trial
from .probe import CHANGES_STATE, Unusable
from .watch import DEVICE, LENGTH, SIZE, STRIDES, VALUES, Watch, deciding

# (train mode, with gradients, in what)
PLAIN, GRADIENTS = (False, False, contextlib.nullcontext), (True, True, contextlib.nullcontext)
MODES = (
    *(PLAIN, GRADIENTS, (False, True, contextlib.nullcontext), (True, False, contextlib.nullcontext)),
    *((False, False, torch.inference_mode), (False, False, lambda: torch.autocast("cpu", torch.bfloat16))),
)
WORDS = {
    SIZE: "it does something else with input of another size",
    LENGTH: "it does something else with input of another size",
    STRIDES: "it does something else with input that lies in memory in another way",
    DEVICE: "it does something else on another device",
    VALUES: "it takes values of a tensor into Python, to decide by them",
}


def check_questions(trial: Trial, recipe: Recipe) -> None:
    """Run the forward in every mode with each answer turned round that it gets about its input.

    Raises:
        NotInFamily: an answer decides what it computes, or it puts hooks on gradients.
    """
    trial.spread(recipe)
    fixed = () if recipe.weight is None else (trial.size, trial.group, trial.probe.head_dim)
    two, three = [n for n in (2, 3, 5, 7) if n not in fixed][:2]
    x = trial.normal(two * three, trial.size) * torch.logspace(-3, 5, two * three)[:, None]
    for mode in MODES:
        _check(trial, recipe, x.view(two, three, -1), mode, fixed)
    for leading in ((two * three,), (two, three, 1)):
        _check(trial, recipe, x.view(*leading, -1), PLAIN, fixed)
    for dtype in () if recipe.only_float32 else HALF_DTYPES:
        trial.probe.set(**{name: tensor.to(dtype) for name, tensor in trial.tensors.items()})
        _check(trial, recipe, x.view(two, three, -1).to(dtype), PLAIN, fixed)
    trial.randomise()


def _check(trial: Trial, recipe: Recipe, x: torch.Tensor, mode: tuple, fixed: tuple) -> None:
    probe, (train, gradients, context) = trial.probe, mode
    gate = trial.gate_for(x, recipe)
    dy = trial.normal(*x.shape) * torch.logspace(-4, 4, x.shape[-1]) if gradients else None
    parameters = [p for p in probe.module._parameters.values() if p is not None and p.is_floating_point()]

    def run(watch: Watch) -> list[torch.Tensor | None]:
        state = probe.state()
        with context(), torch.set_grad_enabled(gradients):
            given = probe.present(x.clone()).requires_grad_(gradients)
            beside = None if gate is None else probe.present(gate)
            with watch:
                y = probe.run_as_given(given, beside)
                if probe.state() != state:  # on a branch that was never taken, perhaps
                    probe.blame(CHANGES_STATE)
                if not y.requires_grad:
                    return [y]
                got = torch.autograd.grad(y, [given, *parameters], dy.view(y.shape).to(y.dtype), allow_unused=True)
            return [y.detach(), *got]

    for parameter in parameters:
        parameter.requires_grad_(gradients)
    probe.module.training = train
    try:
        for stand_ins in (True, False):
            try:
                about, watch = deciding(run, fixed=fixed, stand_ins=stand_ins)
            except (Unusable, RuntimeError):  # what stands in for a device or a shape is none to all of torch
                continue
            if about is None and any(function.__code__ in watch.tables for function in probe.code.functions):
                about = SIZE
            if about is not None:
                raise NotInFamily(WORDS[about])
            if watch.hooks:
                raise NotInFamily("its forward puts a hook on a gradient")
            return
    finally:
        probe.module.training = False
        for parameter in parameters:
            parameter.requires_grad_(False)
