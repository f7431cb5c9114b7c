"""Run both models on the same inputs and judge whether one may stand for the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from ..kernels import count_launches
from ..ops import chosen_backend, use_backend
from ..patching import patched, unpatch_model
from .context import max_positions
from .float64 import in_float64
from .modules import changed_modules, check_norms, recording, run_originals
from .noise import compare_logits
from .pieces import alone, check_gradients, check_pieces, recording_pieces
from .report import EquivalenceReport, GreedyComparison, GreedyDifference


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
) -> EquivalenceReport:
    """Decide whether a candidate computes what a reference does, up to the reference's own rounding.

    The verdict has two parts. (a) **Noise floor**: both models' logits are compared with a float64 run of the
    reference, in which also the float32 casts inside its modules are float64; the candidate's maximum and RMS error
    may be 1.5 times the reference's own (see `NoiseFloor`). (b) **Norm by norm**: each changed module runs on inputs
    recorded from the reference run and must agree with its original almost bit for bit (see `NormCheck`), which is
    what finds a wrong rounding order: logits alone cannot see it. What the candidate computes together, sums with
    norms and q with k, runs once more as it ran in the model, against the original's own arithmetic. Besides, greedy
    generation must give the same tokens, up to a tie within the noise floor: the part that runs the decoding path.

    Args:
        reference_model: a Transformers model that returns logits, in the dtype to judge. Fused modules in it never
            run as the reference: they are taken out for the reference's runs and put back.
        candidate_model: what to judge, on the same device with the same parameter names and shapes: a patched model
            or a changed copy. None means the reference model itself, patched (as it is, if it is patched already),
            so that no second copy is needed.
        inputs: token ids, a LongTensor of shape (batch, tokens) or (tokens,); or keyword arguments of the model, as
            a tokenizer returns them; or a list of either. A few hundred tokens are enough: logits are kept in float64.
            Where a two-dimensional attention mask is 0, logits are not compared.
        max_new_tokens: how many tokens to generate per prompt; 0 generates nothing.
        backend: what `use_backend` shall choose for the candidate; None leaves the choice in force.
        norms: which modules part (b) checks: True for every leaf module that differs between the two (in its class,
            its plain attributes, the forward and hooks it runs, or a parameter or buffer), or their paths; False to
            leave (b) out, and with it the demand that both models have the same parameters.
        rows_per_norm: about how many rows (vectors that a norm normalises) part (b) takes for each module.
        backward: also run one backward of each patched norm and of each fused piece: its gradients may have 1.5 times
            the error that eager's have against float64 (see `GradientCheck`).

    Returns:
        An `EquivalenceReport`: ``passed``, ``verdict``, ``to_dict()``, and a table when printed. Where the candidate is
        the reference patched and no kernel served it, there was nothing to verify, which is no pass.

    Raises:
        ValueError: no inputs, or empty ones, or token ids outside the vocabulary; a model without logits; models with
            different vocabularies, parameters or devices; a path in `norms` that is no module.
        TypeError: a model that is not a module, inputs that are neither tensors nor mappings.

    Both models are run in eval mode without gradients. Training flags, hooks, attributes and the patch are as before
    afterwards, after an error too.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_rmsnorm import verify_equivalence
        >>> from hf_rmsnorm.demo import demo_path
        >>> model = AutoModelForCausalLM.from_pretrained(demo_path("llama"))
        >>> verify_equivalence(model, inputs=torch.tensor([[72, 101, 108, 108, 111]]), max_new_tokens=4).passed
        True
    """
    if candidate_model is reference_model:
        candidate_model = None
    models = (reference_model,) if candidate_model is None else (reference_model, candidate_model)
    batches = _check(models, inputs, same_parameters=norms is not False)
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_evaluating(model))
        own_patch = stack.enter_context(_OwnPatch(reference_model))
        if candidate_model is not None:
            candidate_state, changed = nullcontext, None
        elif own_patch.paths:
            candidate_state, changed = own_patch.present, own_patch.paths
        else:
            candidate_state = partial(patched, reference_model)
            with candidate_state() as patch:
                changed = [record.path for record in patch.swapped if not record.converted]
        if candidate_model is None:
            candidate_model = reference_model
        paths = _paths(reference_model, candidate_model, changed, norms)
        class_names = {path: type(reference_model.get_submodule(path)).__name__ for path in paths or ()}

        with recording(reference_model, paths or (), rows_per_norm) as samples:
            reference_logits = [_logits(reference_model, batch) for batch in batches]
        with torch.no_grad():
            run_originals(reference_model, samples)
        with in_float64(reference_model):
            exact_logits = [_logits(reference_model, batch) for batch in batches]
        reference_tokens = [_generate(reference_model, batch, max_new_tokens) for batch in batches]

        chosen = nullcontext() if backend is None else use_backend(backend)
        with candidate_state(), chosen, count_launches() as launches:
            pieces: list = []
            recorder = recording_pieces(candidate_model, rows_per_norm) if paths is not None else nullcontext(pieces)
            with recorder as pieces:
                candidate_logits = [_logits(candidate_model, batch) for batch in batches]
                candidate_tokens = [_generate(candidate_model, batch, max_new_tokens) for batch in batches]
            with torch.no_grad():
                checks = check_norms(candidate_model, samples, class_names)
            fused = check_pieces(pieces)
            gradients = None
            if backward:
                gradients = check_gradients([*alone(candidate_model, samples), *pieces])
            idle = _runs_itself(candidate_model, paths or ()) and not launches and chosen_backend() != "reference"

    difference, floor = compare_logits(reference_logits, candidate_logits, exact_logits)
    # two logits of each model, each off by at most what it may be
    tie_margin = 2 * (floor.reference_max + min(floor.candidate_max, floor.allowed_max))
    greedy = _compare_greedy(reference_tokens, candidate_tokens, tie_margin)
    return EquivalenceReport(
        model=type(reference_model).__name__,
        dtype=str(_first_parameter(reference_model).dtype).removeprefix("torch."),
        device=str(_device(reference_model)),
        logits=difference,
        noise_floor=floor,
        norms=None if paths is None else checks,
        fused=fused,
        gradients=gradients,
        nothing_ran=idle,
        greedy=greedy,
        launches=dict(launches),
        backend=backend,
    )


# --- what is given ------------------------------------------------------------------------------------------------


def _check(models: tuple[nn.Module, ...], inputs, same_parameters: bool) -> list[dict]:
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify_equivalence needs loaded models, got {type(model).__name__}: load it first")
        if _device(model).type == "meta":
            raise ValueError(f"{type(model).__name__} is on the meta device and has no weights: load it with weights")
    sizes = [_vocabulary(model) for model in models]
    devices = [_device(model) for model in models]
    if len(models) == 2:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the vocabularies differ: {sizes[0]} words in the reference, {sizes[1]} in the candidate; compare "
                "models that share a tokenizer"
            )
        if devices[0] != devices[1]:
            raise ValueError(
                f"the reference is on {devices[0]} and the candidate on {devices[1]}: move one with .to({devices[0]!s})"
            )
        if same_parameters:
            _check_parameters(*models)
    return _batches(inputs, models[0], sizes[0], devices[0])


def _check_parameters(reference: nn.Module, candidate: nn.Module) -> None:
    ours = {name: tuple(p.shape) for name, p in reference.named_parameters()}
    theirs = {name: tuple(p.shape) for name, p in candidate.named_parameters()}
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"the architectures differ: {name} is {ours.get(name, 'missing')} in the reference "
                f"({type(reference).__name__}) and {theirs.get(name, 'missing')} in the candidate "
                f"({type(candidate).__name__}); pass norms=False to compare logits and generation alone"
            )


def _first_parameter(model: nn.Module) -> torch.Tensor:
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameters: nothing to verify")
    return parameter


def _device(model: nn.Module) -> torch.device:
    """Of the first parameter that is not offloaded; the CPU if accelerate offloads them all."""
    device = next((p.device for p in model.parameters() if not p.is_meta), _first_parameter(model).device)
    offloaded = hasattr(model, "hf_device_map") or hasattr(model, "_hf_hook")
    return torch.device("cpu") if device.type == "meta" and offloaded else device


def _vocabulary(model: nn.Module) -> int | None:
    try:
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    except NotImplementedError:
        raise TypeError(
            f"{type(model).__name__} has no token embeddings: verify_equivalence compares language models; of others, "
            "compare the outputs with and without a patch"
        ) from None
    weight = getattr(embedding, "weight", None)
    return None if weight is None else weight.shape[0]


def _batches(inputs, model: nn.Module, vocabulary: int | None, device: torch.device) -> list[dict]:
    if inputs is None:
        raise ValueError("no inputs: pass token ids (batch, tokens), what a tokenizer returns, or a list of either")
    if isinstance(inputs, (torch.Tensor, Mapping)):
        inputs = [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise TypeError(f"inputs is {type(inputs).__name__}: pass token ids or what a tokenizer returns for the text")
    batches = []
    for i, given in enumerate(inputs):
        if not isinstance(given, (torch.Tensor, Mapping)):
            raise TypeError(f"inputs[{i}] is {type(given).__name__}: pass token ids or a dict of tensors")
        batch = dict(given) if isinstance(given, Mapping) else {"input_ids": given}
        batch.pop("labels", None)
        batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for name, tensor in batch.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
                raise ValueError(f"inputs[{i}] is empty: {name} has shape {tuple(tensor.shape)}; pass tokens")
        ids = batch.get("input_ids")
        if ids is not None:
            if ids.is_floating_point() or ids.dim() not in (1, 2):
                raise ValueError(
                    f"inputs[{i}]: input_ids is {ids.dtype} of shape {tuple(ids.shape)}; pass integers (batch, tokens)"
                )
            if ids.dim() == 1:
                batch["input_ids"] = ids = ids[None]
            if vocabulary is not None and not 0 <= ids.min() <= ids.max() < vocabulary:
                raise ValueError(
                    f"inputs[{i}]: token ids from {ids.min()} to {ids.max()} where the model knows 0 to "
                    f"{vocabulary - 1}; use its own tokenizer"
                )
        batches.append(batch)
    if not any(isinstance(v, torch.Tensor) for batch in batches for v in batch.values()):
        raise ValueError("inputs are empty: pass at least one token")
    return batches


# --- the states a model is in -------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module):
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in training:
            module.training = flag


def _runs_itself(candidate: nn.Module, paths: Iterable[str]) -> bool:
    """Whether all that was changed of the reference is a patch whose norms run their own forwards where none serves."""
    return bool(paths) and all(_comparable(type(candidate.get_submodule(path))) for path in paths)


def _comparable(cls: type) -> bool:
    """Whether this is a patched norm that computes what its own class does; a converted checkpoint's does not."""
    recipe = getattr(cls, "_hf_rmsnorm_recipe", None)
    return recipe is not None and not recipe.as_rms


class _OwnPatch:
    """The patch that a model came with, which is taken out and put back without being worked out again.

    In a ``with`` the model runs its original forwards; `present` gives the patch back for a while. ``paths`` are those
    of the patched modules.
    """

    _FORWARDS = ("forward", "_old_forward")  # bound methods on the instance, which unpatching exchanges

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules = list(model.named_modules())
        self._before = [(type(module), self._forwards(module)) for _, module in self._modules]

    def _forwards(self, module: nn.Module) -> dict:
        return {name: vars(module)[name] for name in self._FORWARDS if name in vars(module)}

    def __enter__(self):
        try:
            unpatch_model(self._model)
        except BaseException:
            self._put_back()
            raise
        self.paths = [
            path for (path, module), (cls, _) in zip(self._modules, self._before, strict=True)
            if type(module) is not cls and _comparable(cls)
        ]  # fmt: skip
        return self

    def __exit__(self, *error):
        self._put_back()

    @contextmanager
    def present(self):
        self._put_back()
        try:
            yield
        finally:
            unpatch_model(self._model)

    def _put_back(self):
        for (_, module), (cls, forwards) in zip(self._modules, self._before, strict=True):
            if type(module) is not cls:
                module.__class__ = cls
                vars(module).update(forwards)


def _paths(reference: nn.Module, candidate: nn.Module, changed: list[str] | None, norms) -> list[str] | None:
    if norms is False:
        return None
    if norms is not True:
        paths, known = list(norms), dict(reference.named_modules())
        for path in paths:
            if path not in known:
                raise ValueError(f"norms names {path!r}, which is no module of {type(reference).__name__}")
        return paths
    return changed_modules(reference, candidate) if changed is None else changed


# --- runs ---------------------------------------------------------------------------------------------------------


def _logits(model: nn.Module, batch: dict) -> torch.Tensor:
    """(tokens kept by the attention mask, vocabulary) in the dtype the model returns."""
    with torch.no_grad():
        out = model(**batch)
    logits = getattr(out, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"{type(model).__name__} returns no logits: load it with a head, as AutoModelForCausalLM does")
    mask = batch.get("attention_mask")
    if mask is not None and logits.dim() == 3 and mask.shape == logits.shape[:2]:
        return logits[mask.bool()]
    return logits.reshape(-1, logits.shape[-1])


def _generate(model: nn.Module, batch: dict, max_new_tokens: int) -> tuple[torch.Tensor, torch.Tensor] | str:
    """New tokens (batch, steps) and the logits behind them (batch, steps, vocabulary); or why there are none."""
    if max_new_tokens <= 0:
        return "not asked for"
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return f"{type(model).__name__} does not generate"
    if "input_ids" in batch and not model.config.is_encoder_decoder:
        most = max_positions(model.config)
        max_new_tokens = min(max_new_tokens, most - batch["input_ids"].shape[1])
        if max_new_tokens <= 0:
            return f"the prompt fills the {most} positions of the model"
    config = model.generation_config
    pad = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    pad = pad[0] if isinstance(pad, (list, tuple)) else pad
    if "input_ids" in batch and "attention_mask" not in batch and not model.config.is_encoder_decoder:
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}  # every token given is meant
    out = model.generate(
        **batch,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=pad,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, -len(out.logits) :], torch.stack(out.logits, 1)


def _compare_greedy(reference: list, candidate: list, tie_margin: float) -> GreedyComparison:
    sequences = steps = 0
    first = None
    for index, (ours, theirs) in enumerate(zip(reference, candidate, strict=True)):
        if isinstance(ours, str):
            return GreedyComparison(0, 0, reason=ours)
        tokens, logits = ours
        sequences, steps = sequences + len(tokens), max(steps, tokens.shape[1])
        shared = min(tokens.shape[1], theirs[0].shape[1])
        unequal = (tokens[:, :shared] != theirs[0][:, :shared]).nonzero()
        if first is not None or not len(unequal):
            continue
        row, step = min(unequal.tolist(), key=lambda place: place[1])
        a, b = tokens[row, step].item(), theirs[0][row, step].item()
        scores = logits[row, step].double()
        first = GreedyDifference(index, row, step, a, b, (scores[a] - scores[b]).item(), tie_margin)
    return GreedyComparison(sequences, steps, first)
