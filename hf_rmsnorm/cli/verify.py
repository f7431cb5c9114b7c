"""Check that MODEL computes the same results with its norms fused: PASS or FAIL.

Without a GPU the Triton kernels run in Triton's interpreter, which is exact and slow
(see --max-tokens). The exit code is 1 on FAIL, and where no kernel ran.
"""

from dataclasses import replace
from pathlib import Path

from ..paths import fitted
from ..sources import find
from . import models
from .common import (
    DTYPES,
    Result,
    add_count,
    add_device,
    add_model,
    add_verbose,
    interpret_on_cpu,
    pick_device,
    steps,
)
from .inspect import read_text

# The last line on a converted checkpoint.
_CONVERTED = {
    "centred": "converted: {count} of its LayerNorms run as RMSNorm, with the same results",
    "trained": "converted, then trained as RMSNorm (config.json): compared with {count} RMSNorms in plain PyTorch. "
    "Without patch_model it computes LayerNorm, which gives other results",
    "doubted": "converted, but each norm that the conversion recorded {doubt}",
}


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompt", help="the text to compare on (default: Python's own help texts)"
    )
    text = "a .safetensors file with the arguments of the model's forward (default: the prompt, images or audio)"
    parser.add_argument("--inputs", metavar="FILE", type=Path, help=text)
    text = "the weights' dtype, or all for fp32 and bf16 (default: as stored; all for a demo)"
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], help=text)
    add_count(parser, "--max-tokens", 64, "use the first N tokens of the prompt")
    add_count(
        parser,
        "--max-new-tokens",
        32,
        "compare N greedily generated tokens, 0 for none",
        least=0,
    )
    parser.add_argument(
        "--no-backward", action="store_true", help="do not check gradients"
    )
    text = "the order of rounding: model, vllm, sglang or torch (default: model)"
    parser.add_argument("--numerics", metavar="NAME", default="model", help=text)
    add_device(parser)
    add_verbose(parser, "every number and every norm")


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    interpret_on_cpu(device)
    models.quieten()
    from ..ops.backend import runs_on, where_norms_run

    where = runs_on(device)
    backend = where["backend"]
    if backend != "triton":  # its own forward against itself would prove nothing
        backend = "reference"
    dtypes = _dtypes(args)
    with steps(args, 8 * len(dtypes)) as step:
        runs = [_verify(args, source, each, device, backend, step) for each in dtypes]
    # A conversion is judged by its own formula, in whatever runs it; of the others the
    # kernels are in question.
    if backend != "triton" and not any(conversion for _, conversion in runs):
        runs = [(_as_idle(report, device), None) for report, _ in runs]
    passed = all(report.passed for report, _ in runs)
    data = {
        "model": source.name,
        "passed": passed,
        "device": str(device),
        "backend": backend,
        "backend_reason": where["reason"],
        "runs": [_data(report, conversion) for report, conversion in runs],
    }
    parts = [
        _text(source.name, report, conversion, args.verbose)
        for report, conversion in runs
    ]
    (ran,) = where_norms_run([where])
    return Result(
        data,
        "\n\n".join([*parts, fitted(f"The norms ran on {ran}.")]),
        0 if passed else 1,
    )


def _dtypes(args) -> tuple[str, ...]:
    """The dtypes to verify in: the one that is asked for, else the stored one; two for
    a demo.
    """
    dtype = args.dtype or ("all" if args.model.startswith("demo:") else "auto")
    return ("float32", "bfloat16") if dtype == "all" else (DTYPES.get(dtype, dtype),)


def _verify(args, source, dtype: str, device, backend: str, step) -> tuple:
    """(the report on the model in one dtype, its conversion or None)."""
    from .. import patch_model, verify_equivalence
    from ..patching.converted import conversion_of
    from ..verification.recorded import as_recorded

    step(f"loading {source.name}")
    model = models.load_model(source, dtype, device)
    new_tokens = 0 if model.config.is_encoder_decoder else args.max_new_tokens
    conversion = conversion_of(model)
    pair, norms = (model, None), True
    if conversion and conversion.trained:  # its own forward computes LayerNorm
        pair, norms = (as_recorded(model), model), False
        patch_model(model)
    report = verify_equivalence(
        *pair,
        inputs=_inputs(args, source, model),
        max_new_tokens=new_tokens,
        backend=backend,
        norms=norms,
        backward=norms and not args.no_backward,
        numerics=args.numerics,
        progress=lambda what: step(f"{dtype}: {what}"),
    )
    if new_tokens < args.max_new_tokens:
        why = "not compared: it would generate from the decoder's start token, not from a text"
        report = replace(report, greedy=replace(report.greedy, reason=why))
    return report, conversion


def _inputs(args, source, model):
    """The inputs of both models: a file's tensors, the prompt, or images or audio."""
    from ..verification.context import prompt_length

    inputs = models.other_inputs(model, args.inputs)
    if inputs is not None:
        return inputs
    prompt = read_text(None) if args.prompt is None else args.prompt
    length = prompt_length(model.config, args.max_tokens, args.max_new_tokens)
    ids = models.tokens(model, models.load_tokenizer(source), prompt, length)
    return (
        {"input_ids": ids, "decoder_input_ids": ids}
        if model.config.is_encoder_decoder
        else ids
    )


def _as_idle(report, device):
    """The report of a run in plain PyTorch, which verifies no kernel."""
    from ..verification.equivalence import why_nothing_ran

    why = f"{why_nothing_ran(device).partition(', or pass')[0]}; in plain PyTorch the formulas agree"
    return replace(report, nothing_ran=True, why_nothing_ran=why)


def _state(conversion) -> str | None:
    if not conversion:
        return None
    if conversion.trained:
        return "trained"
    return "doubted" if conversion.why_not else "centred"


def _text(name: str, report, conversion, verbose: bool) -> str:
    """The text of one run."""
    text = report.to_text(verbose, name)
    if not conversion:
        return text
    said = _CONVERTED[_state(conversion)].format(
        count=len(conversion.norms), doubt=conversion.why_not
    )
    return text + "\n" + fitted("  " + said)


def _data(report, conversion) -> dict:
    doubt = conversion.why_not if conversion else ""
    return {
        **report.to_dict(),
        "conversion": _state(conversion),
        "conversion_doubt": doubt,
    }
