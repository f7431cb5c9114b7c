"""Check that MODEL computes the same results with its norms fused: PASS or FAIL.

Without a GPU the Triton kernels run in Triton's interpreter, which is exact and slow,
on fewer tokens. The exit code is 1 on FAIL, and where no kernel ran.
"""

import inspect
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
    interpret_on_cpu,
    pick_device,
    progress_bar,
)
from .plot import add_plot, draw_errors

STEPS = 6  # of each dtype: loading, the layers, and four of `verify_equivalence`


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompt", help="the text to compare on (default: Python's own help texts)"
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE",
        type=Path,
        help="a .safetensors file with the arguments of the model's forward "
        "(default: the prompt, images or audio)",
    )
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES, "all"],
        help="the weights' dtype, or all for fp32 and bf16 (default: as stored)",
    )
    add_count(
        parser,
        "--max-tokens",
        None,
        "use the first N tokens of the prompt (default 64, on a CPU 16)",
    )
    add_count(
        parser,
        "--max-new-tokens",
        None,
        "compare N greedily generated tokens, 0 for none (default 32, on a CPU 4)",
        least=0,
    )
    parser.add_argument(
        "--no-backward", action="store_true", help="do not check gradients"
    )
    add_device(parser)
    add_plot(parser, "the error behind each layer beside the original's own")
    parser.add_argument(
        "--verbose", action="store_true", help="print every number and every norm"
    )


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    interpret_on_cpu(device)
    if args.max_tokens is None:
        args.max_tokens = 16 if device.type == "cpu" else 64
    if args.max_new_tokens is None:
        args.max_new_tokens = 4 if device.type == "cpu" else 32
    models.quieten()
    from ..ops.backend import runs_on, where_norms_run

    where = runs_on(device)
    records, texts, layers = [], [], {}
    dtypes = [DTYPES.get(args.dtype, "auto")]  # as stored
    if args.dtype == "all":
        dtypes = ["float32", "bfloat16"]
    with progress_bar(STEPS * len(dtypes), "loading") as bar:
        for dtype in dtypes:
            report, errors, said = _verify(args, source, dtype, device, bar)
            layers[report.dtype] = errors
            records.append({**report.to_dict(), "conversion": said})
            name = f"{source.name} in {report.dtype}"
            texts += [f"{name}: {report.to_text(args.verbose)}", said]
    passed = all(record["passed"] for record in records)
    if args.plot:
        draw_errors(args.plot, f"{source.name} on {device}", layers)
    (ran,) = where_norms_run([where])
    texts.append(f"The norms ran on {ran}.")
    text = "\n\n".join(filter(None, texts))
    data = {
        "model": source.name,
        "passed": passed,
        "device": str(device),
        "backend": where["backend"],
        "backend_reason": where["reason"],
        "runs": records,
    }
    return Result(data, fitted(text), int(not passed))


def _verify(args, source, dtype: str, device, bar) -> tuple:
    """(the report in one dtype, the errors behind its layers for a plot, a note on a
    converted model or "").
    """
    from .. import patch_model, verify_equivalence
    from ..converted.follow import conversion_of
    from ..verification.layer_errors import errors_by_layer
    from ..verification.recorded import as_recorded

    model = models.load_model(source, dtype, device)
    name = str(model.dtype).removeprefix("torch.")

    def step(what: str) -> None:
        bar.set_description(f"{name}: {what}", refresh=False)
        bar.update()  # the step before is done

    conversion = conversion_of(model)
    trained = conversion is not None and conversion.trained
    pair = (model, None)
    if trained:  # its own forward computes LayerNorm
        pair = (as_recorded(model), model)
    patch_model(model)
    inputs = _inputs(args, source, model)
    step("layers")
    layers = errors_by_layer(*pair, inputs) if args.plot else []
    report = verify_equivalence(
        *pair,
        inputs=inputs,
        max_new_tokens=args.max_new_tokens,
        norms=not trained,
        backward=not (trained or args.no_backward),
        progress=step,
    )
    step("done")
    return report, layers, _told_of(conversion)


def _inputs(args, source, model):
    """The inputs of both models: a file's tensors, or the prompt; None for a model that
    takes images or audio, which gets random ones.
    """
    from ..verification.context import in_dtype_of, prompt_length

    if args.inputs is not None:
        return in_dtype_of(model, models.read_tensors(args.inputs))
    takes_pictures = "pixel_values" in inspect.signature(model.forward).parameters
    prompt = args.prompt
    if model.main_input_name != "input_ids" or (takes_pictures and prompt is None):
        return None
    length = prompt_length(model.config, args.max_tokens, args.max_new_tokens)
    ids = models.tokens(model, source, length, prompt)
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids}
    return ids


def _told_of(conversion) -> str:
    """The state of a converted checkpoint in one sentence; "" for another one."""
    if conversion is None:
        return ""
    count = len(conversion.norms)
    if conversion.trained:
        return (
            "converted, then trained as RMSNorm (config.json): compared with "
            f"{count} RMSNorms in plain PyTorch. Without patch_model it computes "
            "LayerNorm, which gives other results"
        )
    if why_not := conversion.why_not:
        return f"converted, but each norm that the conversion recorded {why_not}"
    return f"converted: {count} of its LayerNorms run as RMSNorm, with the same results"
