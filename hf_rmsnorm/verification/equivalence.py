"""Run two models on the same inputs and compare their results: the entry of the folder,
for Python, ``hf-rmsnorm verify`` and a conversion.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from ..ops import backend, chosen_backend
from ..patching import count_launches, is_patched, patched
from ..patching.swap import layer_part
from .calls import keeps_formula, unpatched
from .checks import Check
from .context import evaluating, leaves_of
from .float64 import in_float64
from .inputs import checked_inputs, device_of
from .noise import NoiseFloor, noise_floor
from .parts import Modules, Parts
from .quantised import first_dtype, quantised_modules
from .report import EquivalenceReport
from .runs import compare_greedy, generate, outputs_of, why_not_generate


def verify_equivalence(
    reference_model: nn.Module,
    candidate_model: nn.Module | None = None,
    inputs: Mapping | torch.Tensor | Sequence | None = None,
    *,
    max_new_tokens: int = 32,
    norms: bool = True,
    backward: bool = False,
    progress: Callable[[str], object] = str,
) -> EquivalenceReport:
    """Check that a candidate computes the same results as a reference, up to the
    reference's own rounding.

    Four things are compared:

    - the outputs of both models, with a float64 run of the reference (`NoiseFloor`);
    - each patched or changed norm with the original, on the inputs that it gets in the
      candidate, almost bit for bit. This finds a wrong order of rounding, which logits
      do not show;
    - each fused layer of the candidate with the same layer unfused;
    - greedy generation: the same tokens, up to a tie within the rounding error.

    The kernels run where they can; ``with use_backend("reference"):`` compares the
    formulas in plain PyTorch on any machine.

    Args:
        reference_model: a Transformers model, in the dtype to compare. It runs without
            its patch. If it returns no logits, its last and pooled hidden states are
            compared.
        candidate_model: a patched model or a changed copy, on the same device. None:
            the reference model itself, patched, or with its patch if it has one.
        inputs: token ids, a LongTensor of shape (batch, tokens) or (tokens,); or
            keyword arguments of the model, as a tokenizer returns them; or a list of
            either. A few hundred tokens are enough: logits are kept in float64. Where a
            two-dimensional attention mask is 0, logits are not compared. None: random
            images, audio or token ids, of the sizes in the model's config; and a text
            with a picture in it where the model takes such.
        max_new_tokens: how many tokens to generate per prompt; 0 generates nothing, and
            neither does an encoder-decoder.
        norms: also compare the norms and the fused layers one by one. Other leaf
            modules are listed too if their output differs from the reference's.
        backward: also compare the gradients of each patched norm, fused layer and fused
            piece of a layer (q and k, summands, scale and shift): at most 1.5 times
            eager's error against float64.
        progress: is called with the name of each step, four times.

    Returns:
        An `EquivalenceReport`: ``passed``, ``verdict``, ``to_dict()``; printed, the
        verdict and a table. If no kernel ran for a patched candidate, nothing was
        verified, and ``passed`` is False.

    Raises:
        ValueError: empty inputs, or token ids outside the vocabulary; a model of
            unknown inputs, or without outputs to compare; models with different
            vocabularies; different modules, unless norms is False; backward with a
            candidate that is not patched.
        TypeError: a model that is not a module, inputs that are neither tensors nor
            mappings.

    Both models are run in eval mode without gradients. Training flags, hooks,
    attributes and the patch are as before afterwards, after an error too.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_rmsnorm import use_backend, verify_equivalence
        >>> from hf_rmsnorm.demo import demo_path
        >>> model = AutoModelForCausalLM.from_pretrained(demo_path("llama"))
        >>> with use_backend("reference"):
        ...     verify_equivalence(model, inputs=torch.tensor([[72, 101, 108]]), max_new_tokens=4).passed
        True
    """
    reference = reference_model
    candidate = reference if candidate_model is None else candidate_model
    batches = checked_inputs(reference, candidate, inputs, max_new_tokens)
    if backward and candidate is not reference and not is_patched(candidate):
        raise ValueError(
            "backward=True compares the gradients of patched norms, and the candidate "
            "has none: patch it, or compare its outputs by backward=False"
        )
    why_no_text = why_not_generate(reference, batches, max_new_tokens)
    prompts = [] if why_no_text else batches
    with ExitStack() as stack:
        for model in {reference, candidate}:
            stack.enter_context(evaluating(model))
        if candidate is not reference:
            stack.enter_context(unpatched(*reference.modules()))
        elif not is_patched(reference):
            stack.enter_context(patched(reference))
        leaves, originals = _norms(reference, candidate) if norms else ({}, {})
        layers = _fused_layers(candidate) if norms else {}
        by_norm = Parts(leaves, originals, backward)
        by_layer = Parts(layers, {}, backward)
        progress("patched model")
        with count_launches() as launches:
            with by_layer.watched():
                outputs = outputs_of(candidate, batches)
                texts = generate(candidate, prompts, max_new_tokens)
            progress("norms")
            if leaves:
                # a norm with a hook is not fused with its surroundings
                with by_norm.watched():
                    outputs_of(candidate, batches)
        # while the candidate is patched, which may end here
        norm_checks = by_norm.checks()
        layer_checks = by_layer.checks()
        nothing_ran = "" if launches else why_nothing_ran(candidate)
        stack.enter_context(unpatched(*reference.modules()))
        progress("original")
        own_outputs = outputs_of(reference, batches)
        own_texts = generate(reference, prompts, max_new_tokens)
        progress("float64")
        with in_float64(reference):
            exact = outputs_of(reference, batches)
    quantised = Counter(type(m).__name__ for m in quantised_modules(reference))
    floor = noise_floor(own_outputs, outputs, exact, bool(quantised))
    greedy = Check("", True, why_no_text)
    if not why_no_text:
        greedy = compare_greedy(own_texts, texts, _tie_margin(floor, bool(quantised)))
    return EquivalenceReport(
        model=type(reference).__name__,
        dtype=str(first_dtype(reference)).removeprefix("torch."),
        device=str(device_of(reference)),
        noise_floor=floor,
        norms=tuple(norm_checks),
        fused=tuple(layer_checks),
        gradients=(*by_norm.gradients, *by_layer.gradients),
        greedy=greedy,
        launches=dict(launches),
        nothing_ran=nothing_ran,
        quantised=dict(quantised),
    )


def _norms(reference: nn.Module, candidate: nn.Module) -> tuple[Modules, Modules]:
    """The patched norms of the candidate, by path. If the reference is another model:
    all leaf modules, and those of the reference.
    """
    if candidate is reference:
        modules = candidate.named_modules()
        return {path: norm for path, norm in modules if keeps_formula(norm)}, {}
    leaves = leaves_of(candidate)
    others = leaves_of(reference)
    alone = sorted(leaves.keys() ^ others.keys())
    if alone:
        raise ValueError(
            f"the architectures differ: one of the models has no {alone[0]}; pass "
            "norms=False to compare outputs alone"
        )
    return leaves, others


def _fused_layers(model: nn.Module) -> Modules:
    """The layers that are fused, by path and fused pieces."""
    layers = {}
    for path, module in model.named_modules():
        part = layer_part(type(module))
        if part is not None:
            layers[f"{path}: {part._hf_rmsnorm_fusion.words}"] = module
    return layers


def _tie_margin(floor: NoiseFloor, quantised: bool) -> float:
    """The largest lead of one logit over another that counts as a tie."""
    if quantised:  # a step may tip behind the prompt that did not tip in it
        return 4 * floor.allowed_max
    # two logits of each model, each with the largest error that is allowed
    return 2 * (floor.reference_max + min(floor.candidate_max, floor.allowed_max))


def why_nothing_ran(model: nn.Module) -> str:
    """Where no kernel was launched: that, the reason, and the cure; "" if the model ran
    something else than its own code.
    """
    # without a kernel a patched norm runs its own forward
    if chosen_backend() == "reference" or not any(map(keeps_formula, model.modules())):
        return ""
    cure = 'verify under use_backend("reference")'
    device = device_of(model)
    refusal = backend.device_refusal(device.type, device.index)
    if refusal is None:
        return f"no kernel ran, as none serves these norms in this dtype: {cure}"
    return (
        f"no kernel ran, as {refusal}: set TRITON_INTERPRET=1 before Python starts, or "
        f"{cure}"
    )
