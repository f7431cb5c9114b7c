"""Run two models on the same inputs and compare their results."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from ..fused.norm import recipe_of
from ..ops import backend as backends
from ..ops import chosen_backend, use_backend
from ..patching import count_launches, patched, unpatch_model
from ..patching.numerics import SERVERS
from .checks import NormCheck, check_norm
from .context import evaluating
from .float64 import in_float64
from .gradients import GradientCheck, check_norm_gradients
from .inputs import checked_inputs, device_of, first_parameter
from .layers import LayerCheck, LayerComparison, comparing_layers
from .modules import changed_modules
from .noise import NoiseFloor, compare_logits
from .norms import (
    NormCall,
    keeps_formula,
    recording_norms,
    rounds_otherwise,
    rows_of,
    run_reference,
    run_stated_orders,
)
from .pictures import is_text_alone
from .quantised import counted, quantised_modules, recording_dtypes
from .report import EquivalenceReport
from .runs import compare_greedy, generate, outputs_of


def verify_equivalence(
    reference_model: nn.Module,
    candidate_model: nn.Module | None = None,
    inputs: Mapping | torch.Tensor | Sequence | None = None,
    *,
    max_new_tokens: int = 32,
    backend: str | None = None,
    norms: bool | Iterable[str] = True,
    rows_per_norm: int = 64,
    backward: bool = False,
    numerics: str = "model",
    progress: Callable[[str], object] = str,
) -> EquivalenceReport:
    """Check that a candidate computes the same results as a reference, up to the
    reference's own rounding.

    Four things are compared:

    - the outputs of both models, with a float64 run of the reference (`NoiseFloor`);
    - each changed module, on inputs recorded in the reference's run, almost bit for bit
      (`NormCheck`). This finds a wrong order of rounding, which logits do not show;
    - each fused layer of the candidate with the same layer unfused (`LayerCheck`);
    - greedy generation: the same tokens, up to a tie within the rounding error.

    Args:
        reference_model: a Transformers model, in the dtype to compare. It runs without
            its patch. If it returns no logits, its last and pooled hidden states are
            compared.
        candidate_model: a patched model or a changed copy, on the same device, with the
            same parameter names and shapes. None: the reference model itself, patched,
            or with its patch if it has one.
        inputs: token ids, a LongTensor of shape (batch, tokens) or (tokens,); or
            keyword arguments of the model, as a tokenizer returns them; or a list of
            either. A few hundred tokens are enough: logits are kept in float64. Where a
            two-dimensional attention mask is 0, logits are not compared. None: random
            images, audio or token ids, of the sizes in the model's config; and a text
            with a picture in it where the model takes such.
        max_new_tokens: how many tokens to generate per prompt; 0 generates nothing.
        backend: what `use_backend` shall choose for the candidate; None leaves the
            choice in force.
        norms: the modules to compare one by one: their paths, or True for every leaf
            module that differs. False compares none, and the two models need not have
            the same parameters then.
        rows_per_norm: about how many rows (vectors that a norm normalises) are compared
            for each module.
        backward: also compare the gradients of each patched norm and fused layer: at
            most 1.5 times eager's error against float64 (`GradientCheck`).
        numerics: as in `patch_model`, for a reference model that is patched here. Norms
            that round as a server does are compared with that order of rounding in
            plain torch, not with their originals.
        progress: is called with the name of each step, seven times.

    Returns:
        An `EquivalenceReport`: ``passed``, ``verdict``, ``to_dict()``; printed, the
            verdict and a table. If no kernel
        ran for a patched candidate, nothing was verified, and ``passed`` is False.

    Raises:
        ValueError: an unknown backend; empty inputs, or token ids outside the
            vocabulary; a model of unknown inputs, or without outputs to compare; models
            with different vocabularies, parameters or devices; a path in `norms` that
            is no module.
        TypeError: a model that is not a module, inputs that are neither tensors nor
            mappings.

    Both models are run in eval mode without gradients. Training flags, hooks,
    attributes and the patch are as before afterwards, after an error too.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_rmsnorm import verify_equivalence
        >>> from hf_rmsnorm.demo import demo_path
        >>> model = AutoModelForCausalLM.from_pretrained(demo_path("llama"))
        >>> verify_equivalence(model, inputs=torch.tensor([[72, 101, 108, 108, 111]]), max_new_tokens=4).passed
        True
    """
    if candidate_model is None:
        candidate_model = reference_model
    if inputs is None and getattr(
        getattr(reference_model, "config", None), "is_encoder_decoder", False
    ):
        # it would generate from the decoder's start token, not from a text
        max_new_tokens = 0
    chosen = nullcontext() if backend is None else use_backend(backend)
    batches = checked_inputs(
        reference_model, candidate_model, inputs, max_new_tokens, norms is not False
    )
    with ExitStack() as stack:
        for model in dict.fromkeys((reference_model, candidate_model)):
            stack.enter_context(evaluating(model))
        candidate = stack.enter_context(
            _candidate_state(reference_model, candidate_model, numerics)
        )
        work = _Work(
            reference_model,
            candidate_model,
            batches,
            max_new_tokens,
            backward,
            progress,
        )
        paths = _paths(reference_model, candidate, norms)
        reference = work.run_reference(paths, rows_per_norm)
        with (
            candidate.state(),
            chosen,
            count_launches() as launches,
            warnings.catch_warnings(),
        ):
            result = work.run_candidate(paths, reference.calls)
            orders = _other_orders(candidate_model)
            ran_itself = not orders and _is_itself(candidate_model, paths)
            idle = ran_itself and not launches and chosen_backend() != "reference"
    logits = reference.logits, result.logits, reference.exact_logits
    quantised = quantised_modules(reference_model)
    difference, floor = compare_logits(
        *logits, reference.are_logits, quantised=bool(quantised)
    )
    device = device_of(reference_model)
    rotations = tuple(
        check.path.partition(":")[0] for check in result.layers if "rot" in check.path
    )
    return EquivalenceReport(
        model=type(reference_model).__name__,
        dtype=str(first_parameter(reference_model).dtype).removeprefix("torch."),
        device=str(device),
        logits=difference,
        noise_floor=floor,
        norms=None if paths is None else result.norms,
        greedy=compare_greedy(
            reference.texts, result.texts, _tie_margin(floor, bool(quantised))
        ),
        launches=dict(launches),
        backend=backend,
        fused=result.layers,
        gradients=result.gradients,
        nothing_ran=idle,
        numerics=" and ".join(SERVERS[name] for name in sorted(orders)),
        why_nothing_ran=why_nothing_ran(device) if idle else "",
        text_positions=rotations if is_text_alone(reference_model, batches) else (),
        quantised=counted(quantised),
    )


@dataclass
class _Reference:
    """The results of the reference. `calls`: those of each module that is compared by
    itself, by its path.
    """

    logits: list[torch.Tensor]
    are_logits: bool
    exact_logits: list[torch.Tensor]
    texts: list
    calls: dict[str, list[NormCall]]


@dataclass
class _Result:
    """The results of the candidate."""

    logits: list[torch.Tensor]
    texts: list
    norms: tuple[NormCheck, ...]
    layers: tuple[LayerCheck, ...]
    gradients: tuple[GradientCheck, ...] | None


@dataclass
class _Work:
    """Both models, their inputs and the options of the comparison."""

    reference: nn.Module
    candidate: nn.Module
    batches: list[dict]
    max_new_tokens: int
    backward: bool
    progress: Callable[[str], object]

    def run_reference(self, paths: list[str] | None, rows: int) -> _Reference:
        """Run the reference, in its dtype and in float64, while it is unpatched."""
        self.progress("the reference")
        recorder = recording_norms(self.reference, self.candidate, paths or (), rows)
        with (
            recorder as calls,
            recording_dtypes(quantised_modules(self.reference)) as dtypes,
        ):
            logits, are_logits = outputs_of(self.reference, self.batches)
        run_reference(call for of_module in calls.values() for call in of_module)
        self.progress("float64")
        with in_float64(self.reference, dtypes):
            exact_logits, _ = outputs_of(self.reference, self.batches)
        self.progress("the reference's text")
        return _Reference(
            logits, are_logits, exact_logits, self._texts(self.reference), calls
        )

    def run_candidate(
        self, paths: list[str] | None, calls: dict[str, list[NormCall]]
    ) -> _Result:
        """Run the candidate, with its patch, and compare its norms, layers and
        gradients.
        """
        comparing = nullcontext(LayerComparison(self.backward))
        if paths is not None:
            comparing = comparing_layers(self.candidate, self.backward)
        with comparing as layers:
            self.progress("the candidate")
            logits, _ = outputs_of(self.candidate, self.batches)
            self.progress("its text")
            texts = self._texts(self.candidate)
        self.progress("norms")
        # a norm by itself is given none
        warnings.filterwarnings("ignore", "this .* reads residual sums unrounded")
        run_stated_orders(call for of_module in calls.values() for call in of_module)
        norms = []
        for path, of_module in calls.items():
            class_name = type(self.reference.get_submodule(path)).__name__
            norms.append(check_norm(path, class_name, of_module))
        self.progress("gradients")
        gradients = (
            (*self._norm_gradients(calls), *layers.gradients) if self.backward else None
        )
        return _Result(
            logits, texts, tuple(norms), tuple(layers.checks.values()), gradients
        )

    def _texts(self, model: nn.Module) -> list:
        return [generate(model, batch, self.max_new_tokens) for batch in self.batches]

    def _norm_gradients(
        self, calls: dict[str, list[NormCall]]
    ) -> Iterator[GradientCheck]:
        for path, of_module in calls.items():
            rows = rows_of(of_module)
            if rows is not None:
                yield from check_norm_gradients(
                    path, self.candidate.get_submodule(path), rows
                )


def _tie_margin(floor: NoiseFloor, quantised: bool) -> float:
    """The largest lead of one logit over another that counts as a tie."""
    if quantised:  # a step may tip behind the prompt that did not tip in it
        return 4 * floor.allowed_max
    # two logits of each model, each with the largest error that is allowed
    return 2 * (floor.reference_max + min(floor.candidate_max, floor.allowed_max))


def _other_orders(model: nn.Module) -> set[str]:
    """The servers by whose order of rounding norms of the model compute."""
    return {
        recipe_of(module).numerics
        for module in model.modules()
        if rounds_otherwise(module)
    }


def _is_itself(candidate: nn.Module, paths: list[str] | None) -> bool:
    """Whether the candidate is the reference patched, so that without a kernel both run
    the same code.
    """
    return bool(paths) and all(
        keeps_formula(type(candidate.get_submodule(path))) for path in paths
    )


def why_nothing_ran(device: torch.device) -> str:
    """That no kernel ran on a device, the reason, and the cure."""
    refusal = backends.device_refusal(device.type, device.index)
    if refusal is None:
        return 'no kernel ran, as none serves these norms in this dtype: pass backend="reference"'
    cure = (
        "set TRITON_INTERPRET=1 before Python starts"
        if find_spec("triton")
        else "install triton"
    )
    return f'no kernel ran, as {refusal}: {cure}, or pass backend="reference"'


@dataclass
class _CandidateState:
    """The state in which the candidate is compared.

    Attributes:
        state: ``state()`` is a context in which it is that.
        changed: paths of its norms if it is the reference patched; None if the two
            models are to be compared.
    """

    model: nn.Module
    state: Callable[[], AbstractContextManager]
    changed: list[str] | None = None


@contextmanager
def _candidate_state(
    reference: nn.Module, candidate: nn.Module, numerics: str
) -> Iterator[_CandidateState]:
    """Inside, the reference is unpatched. Where the candidate is the same model, its
    patch is left to `state`.
    """
    with _unpatched(reference) as (own_paths, own_patch):
        if candidate is not reference:
            yield _CandidateState(candidate, nullcontext)
        elif own_paths:
            yield _CandidateState(candidate, own_patch, own_paths)
        else:
            state = partial(patched, reference, numerics=numerics)
            with state() as report:
                changed = [
                    record.path for record in report.swapped if not record.converted
                ]
            yield _CandidateState(candidate, state, changed)


@contextmanager
def _unpatched(model: nn.Module):
    """Inside, the model runs its original forwards. Gives the patched norms' paths, and
    a context in which they are.
    """
    before = [
        (path, module, type(module), dict(vars(module)))
        for path, module in model.named_modules()
    ]

    def put_back():
        for _, module, cls, attributes in before:
            if type(module) is not cls:
                module.__class__ = cls
                # bound methods, which unpatching exchanges
                kept = attributes.keys() & {"forward", "_old_forward"}
                vars(module).update({name: attributes[name] for name in kept})

    @contextmanager
    def present():
        put_back()
        try:
            yield
        finally:
            unpatch_model(model)

    try:
        unpatch_model(model)
        yield (
            [
                path
                for path, module, cls, _ in before
                if type(module) is not cls and keeps_formula(cls)
            ],
            present,
        )
    finally:
        put_back()


def _paths(reference: nn.Module, candidate: _CandidateState, norms) -> list[str] | None:
    """Paths of the modules that are judged one by one; None where none are to be."""
    if norms is False:
        return None
    if norms is True:
        return (
            changed_modules(reference, candidate.model)
            if candidate.changed is None
            else candidate.changed
        )
    paths, known = list(norms), dict(reference.named_modules())
    unknown = [path for path in paths if path not in known]
    if unknown:
        raise ValueError(
            f"norms names {unknown[0]!r}, which is no module of {type(reference).__name__}"
        )
    return paths
