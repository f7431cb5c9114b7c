"""Run both models on the same inputs and judge whether one may stand for the other."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from ..fused.norm import recipe_of
from ..kernels import count_launches
from ..ops import backend as backends
from ..ops import chosen_backend, use_backend
from ..patching import patched, unpatch_model
from ..patching.numerics import SERVERS
from .checks import check_norm
from .context import GREEDY, default_inputs, evaluating, in_dtype_of, is_float, max_positions, output_tensors
from .float64 import in_float64
from .gradients import check_norm_gradients
from .layers import LayerComparison, comparing_layers
from .modules import changed_modules
from .noise import compare_logits
from .norms import keeps_formula, recording_norms, rounds_otherwise, rows_of, run_reference, run_stated_orders
from .quantised import counted, quantised_modules, recording_dtypes
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
    numerics: str = "model",
    progress: Callable[[str], object] = str,
) -> EquivalenceReport:
    """Decide whether a candidate computes what a reference does, up to the reference's own rounding.

    The verdict has two parts. (a) **Noise floor**: both models' logits against a float64 run of the reference, in which
    also the float32 casts inside its modules are float64 (see `NoiseFloor`). (b) **Norm by norm**: each changed module
    on inputs recorded from the reference's run, almost bit for bit (see `NormCheck`); it finds a wrong rounding order,
    which logits cannot see. Each layer that the candidate fuses runs fused and unfused on the input that it got in the
    model (see `LayerCheck`). Besides, greedy generation must give the same tokens, up to a tie within the noise floor.

    Args:
        reference_model: a Transformers model, in the dtype to judge. It runs without its patch. One that returns no
            logits is judged by what else it returns: its last hidden state, a pooled one.
        candidate_model: what to judge, on the same device with the same parameter names and shapes: a patched model
            or a changed copy. None: the reference model itself, patched, or with the patch that it has.
        inputs: token ids, a LongTensor of shape (batch, tokens) or (tokens,); or keyword arguments of the model, as
            a tokenizer returns them; or a list of either. A few hundred tokens are enough: logits are kept in float64.
            Where a two-dimensional attention mask is 0, logits are not compared. None: random images, audio or token
            ids, of the sizes in the model's config.
        max_new_tokens: how many tokens to generate per prompt; 0 generates nothing.
        backend: what `use_backend` shall choose for the candidate; None leaves the choice in force.
        norms: which modules part (b) checks: True for every leaf module that differs between the two (in its class,
            its plain attributes, the forward and hooks it runs, or a parameter or buffer), or their paths; False to
            leave (b) out, and with it the demand that both models have the same parameters.
        rows_per_norm: about how many rows (vectors that a norm normalises) part (b) takes for each module.
        backward: also run one backward of each patched norm and of each fused layer: its gradients may have 1.5 times
            the error that eager's have against float64 (see `GradientCheck`).
        numerics: as in `patch_model`, for a reference model that is to be patched here. Norms that round as a server
            does are compared with that order in plain torch, not with their originals.
        progress: is told what runs next, seven times.

    Returns:
        An `EquivalenceReport`: ``passed``, ``verdict``, ``to_dict()``; printed, the verdict and a table. Where the
        candidate is the reference patched and no kernel served it, nothing was verified, which is no pass. Modules
        with quantised weights run in their own dtype in the float64 run too, as the report says.

    Raises:
        ValueError: an unknown backend; empty inputs, or token ids outside the vocabulary; a model whose inputs are not
            known, or that returns nothing to compare; models with different vocabularies, parameters or devices; a path
            in `norms` that is no module.
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
    one_model = candidate_model is None or candidate_model is reference_model
    chosen = nullcontext() if backend is None else use_backend(backend)
    models = (reference_model,) if one_model else (reference_model, candidate_model)
    if inputs is None and getattr(getattr(reference_model, "config", None), "is_encoder_decoder", False):
        max_new_tokens = 0  # it would generate from the decoder's start token, not from a text
    batches = _check(models, inputs, max_new_tokens, same_parameters=norms is not False)
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        own_paths, own_patch = stack.enter_context(_unpatched(reference_model))
        if not one_model:
            candidate_state, changed = nullcontext, None
        elif own_paths:
            candidate_state, changed = own_patch, own_paths
        else:
            candidate_state = partial(patched, reference_model, numerics=numerics)
            with candidate_state() as patch:
                changed = [record.path for record in patch.swapped if not record.converted]
        candidate_model = models[-1]
        paths = _paths(reference_model, candidate_model, changed, norms)
        class_names = {path: type(reference_model.get_submodule(path)).__name__ for path in paths or ()}

        progress("the reference")
        quantised = quantised_modules(reference_model)
        recorder = recording_norms(reference_model, candidate_model, class_names, rows_per_norm)
        with recorder as calls, recording_dtypes(quantised) as dtypes:
            reference_logits, are_logits = _outputs(reference_model, batches)
        recorded = [call for of_module in calls.values() for call in of_module]
        run_reference(recorded)
        progress("float64")
        with in_float64(reference_model, dtypes):
            exact_logits, _ = _outputs(reference_model, batches)
        progress("the reference's text")
        reference_tokens = [_generate(reference_model, batch, max_new_tokens) for batch in batches]

        with candidate_state(), chosen, count_launches() as launches, warnings.catch_warnings():
            comparing = nullcontext(LayerComparison(backward))
            if paths is not None:
                comparing = comparing_layers(candidate_model, backward)
            with comparing as layers:
                progress("the candidate")
                candidate_logits, _ = _outputs(candidate_model, batches)
                progress("its text")
                candidate_tokens = [_generate(candidate_model, batch, max_new_tokens) for batch in batches]
            progress("norms")
            warnings.filterwarnings("ignore", "this .* reads residual sums unrounded")  # a norm by itself is given none
            run_stated_orders(recorded)
            checks = tuple(check_norm(path, class_names[path], of_module) for path, of_module in calls.items())
            fused = tuple(layers.checks.values())
            gradients = None
            progress("gradients")
            if backward:
                gradients = []
                for path, of_module in calls.items():
                    if (rows := rows_of(of_module)) is not None:
                        gradients += check_norm_gradients(path, candidate_model.get_submodule(path), rows)
                gradients = (*gradients, *layers.gradients)
            changes = [type(candidate_model.get_submodule(path)) for path in class_names]
            # The candidate is the reference patched, and its norms run their own forwards where nothing serves them.
            others = {recipe_of(module).numerics for module in candidate_model.modules() if rounds_otherwise(module)}
            itself = bool(changes) and all(map(keeps_formula, changes)) and not others
            idle = itself and not launches and chosen_backend() != "reference"

    logits = reference_logits, candidate_logits, exact_logits
    difference, floor = compare_logits(*logits, are_logits, quantised=bool(quantised))
    # two logits of each model, each off by at most what it may be
    tie_margin = 2 * (floor.reference_max + min(floor.candidate_max, floor.allowed_max))
    if quantised:  # a step may tip behind the prompt that did not tip in it
        tie_margin = 4 * floor.allowed_max
    greedy = _compare_greedy(reference_tokens, candidate_tokens, tie_margin)
    model, dtype = type(reference_model).__name__, str(_first_parameter(reference_model).dtype).removeprefix("torch.")
    found = (difference, floor, None if paths is None else checks, greedy, dict(launches), backend, fused, gradients)
    order = " and ".join(SERVERS[name] for name in sorted(others))
    device = _device(reference_model)
    why = why_nothing_ran(device) if idle else ""
    return EquivalenceReport(model, dtype, str(device), *found, idle, order, why, counted(quantised))


def why_nothing_ran(device: torch.device) -> str:
    """That no kernel ran on a device, the reason, and the cure."""
    refusal = backends.device_refusal(device.type, device.index)
    if refusal is None:
        return 'no kernel ran, as none serves these norms in this dtype: pass backend="reference"'
    cure = "set TRITON_INTERPRET=1 before Python starts" if find_spec("triton") else "install triton"
    return f'no kernel ran, as {refusal}: {cure}, or pass backend="reference"'


def _check(models: tuple[nn.Module, ...], inputs, new_tokens: int, same_parameters: bool) -> list[dict]:
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify_equivalence needs loaded models, got {type(model).__name__}: load it first")
        if _device(model).type == "meta":
            raise ValueError(f"{type(model).__name__} is on the meta device and has no weights: load it with weights")
    sizes, devices = [_vocabulary(model) for model in models], [_device(model) for model in models]
    if sizes[0] != sizes[-1]:
        words = f"{sizes[0]} words in the reference, {sizes[1]} in the candidate"
        raise ValueError(f"the vocabularies differ: {words}; compare models that share a tokenizer")
    if devices[0] != devices[-1]:
        ours, theirs = devices[0], devices[-1]
        raise ValueError(f"the reference is on {ours} and the candidate on {theirs}: move one with .to({ours!s})")
    ours, theirs = ({name: tuple(p.shape) for name, p in models[at].named_parameters()} for at in (0, -1))
    for name in (*ours, *theirs) if same_parameters else ():
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"the architectures differ: {name} is {ours.get(name, 'missing')} in the reference "
                f"({type(models[0]).__name__}) and {theirs.get(name, 'missing')} in the candidate "
                f"({type(models[-1]).__name__}); pass norms=False to compare logits and generation alone"
            )
    if inputs is None:
        inputs = in_dtype_of(models[0], default_inputs(models[0], new_tokens=new_tokens))
    return _batches(inputs, sizes[0], devices[0])


def _first_parameter(model: nn.Module) -> torch.Tensor:
    if (parameter := next(model.parameters(), None)) is None:
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
    except NotImplementedError:  # it reads images or audio
        return None
    weight = getattr(embedding, "weight", None)
    return None if weight is None else weight.shape[0]


def _batches(inputs, vocabulary: int | None, device: torch.device) -> list[dict]:
    if isinstance(inputs, (torch.Tensor, Mapping)):
        inputs = [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise TypeError(f"inputs is {type(inputs).__name__}: pass token ids or what a tokenizer returns for the text")
    batches = []
    for i, given in enumerate(inputs):
        if not isinstance(given, (torch.Tensor, Mapping)):
            raise TypeError(f"inputs[{i}] is {type(given).__name__}: pass token ids or a dict of tensors")
        batch = dict(given) if isinstance(given, Mapping) else {"input_ids": given}
        batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items() if k != "labels"}
        for name, tensor in batch.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
                raise ValueError(f"inputs[{i}] is empty: {name} has shape {tuple(tensor.shape)}; pass tokens")
        if (ids := batch.get("input_ids")) is not None:
            kind = f"{ids.dtype} of shape {tuple(ids.shape)}"
            if ids.is_floating_point() or ids.dim() not in (1, 2):
                raise ValueError(f"inputs[{i}]: input_ids is {kind}; pass integers (batch, tokens)")
            if vocabulary is not None and not 0 <= ids.min() <= ids.max() < vocabulary:
                there, known = f"{ids.min()} to {ids.max()}", f"0 to {vocabulary - 1}"
                where = f"token ids from {there} where the model knows {known}"
                raise ValueError(f"inputs[{i}]: {where}; use its own tokenizer")
            batch["input_ids"] = torch.atleast_2d(ids)
        batches.append(batch)
    if not any(isinstance(v, torch.Tensor) for batch in batches for v in batch.values()):
        raise ValueError("inputs are empty: pass at least one token")
    return batches


@contextmanager
def _unpatched(model: nn.Module):
    """Inside, the model runs its original forwards. Gives the patched norms' paths, and a context in which they are."""
    before = [(path, module, type(module), dict(vars(module))) for path, module in model.named_modules()]

    def put_back():
        for _, module, cls, attributes in before:
            if type(module) is not cls:
                module.__class__ = cls
                kept = attributes.keys() & {"forward", "_old_forward"}  # bound methods, which unpatching exchanges
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
        yield [path for path, module, cls, _ in before if type(module) is not cls and keeps_formula(cls)], present
    finally:
        put_back()


def _paths(reference: nn.Module, candidate: nn.Module, changed: list[str] | None, norms) -> list[str] | None:
    if norms is False:
        return None
    if norms is True:
        return changed_modules(reference, candidate) if changed is None else changed
    paths, known = list(norms), dict(reference.named_modules())
    if unknown := [path for path in paths if path not in known]:
        raise ValueError(f"norms names {unknown[0]!r}, which is no module of {type(reference).__name__}")
    return paths


def _outputs(model: nn.Module, batches: list[dict]) -> tuple[list[torch.Tensor], bool]:
    """((tokens kept by the attention mask, size) of all that is to be compared, whether that is logits)."""
    rows, are_logits = [], False
    for batch in batches:
        with torch.no_grad():
            out = model(**batch)
        are_logits = is_float(logits := getattr(out, "logits", None))
        if hasattr(out, "logits_per_image"):  # products of these, and so few that their largest error is chance
            found = [out.text_embeds, out.image_embeds]
        else:
            found = [logits] if are_logits else [y for y in output_tensors(out) if y.dim()]
        if not found:
            raise ValueError(f"{type(model).__name__} returns no logits and no hidden state: nothing can be compared")
        mask = batch.get("attention_mask")
        for y in found:
            masked = mask is not None and y.dim() == 3 and mask.shape == y.shape[:2]
            rows.append(y[mask.bool()] if masked else y.reshape(-1, y.shape[-1]))
    return rows, are_logits


def _generate(model: nn.Module, batch: dict, max_new_tokens: int) -> tuple[torch.Tensor, torch.Tensor] | str:
    """New tokens (batch, steps) and the logits behind them (batch, steps, vocabulary); or why there are none."""
    if max_new_tokens <= 0:
        return "not asked for"
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return f"{type(model).__name__} does not generate"
    if "input_ids" in batch and not model.config.is_encoder_decoder:
        batch = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}  # every token given is meant
        most = max_positions(model.config)
        max_new_tokens = min(max_new_tokens, most - batch["input_ids"].shape[1])
        if max_new_tokens <= 0:
            return f"the prompt fills the {most} positions of the model"
    config = model.generation_config
    pad = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    pad = pad[0] if isinstance(pad, (list, tuple)) else pad
    how = {"max_new_tokens": max_new_tokens, "pad_token_id": pad, "return_dict_in_generate": True, **GREEDY}
    out = model.generate(**batch, **how, output_logits=True)
    return out.sequences[:, -len(out.logits) :], torch.stack(out.logits, 1)


def _compare_greedy(reference: list, candidate: list, tie_margin: float) -> GreedyComparison:
    sequences = steps = 0
    first = None
    for index, (ours, theirs) in enumerate(zip(reference, candidate, strict=True)):
        if isinstance(ours, str):
            return GreedyComparison(0, 0, reason=ours)
        (tokens, logits), (others, _) = ours, theirs
        sequences, steps = sequences + len(tokens), max(steps, tokens.shape[1])
        shared = min(tokens.shape[1], others.shape[1])
        unequal = (tokens[:, :shared] != others[:, :shared]).nonzero().tolist()
        if first is None and unequal:
            row, step = min(unequal, key=lambda place: place[1])
            a, b = tokens[row, step].item(), others[row, step].item()
            margin = logits[row, step, a].double() - logits[row, step, b].double()
            first = GreedyDifference(index, row, step, a, b, margin.item(), tie_margin)
    return GreedyComparison(sequences, steps, first)
