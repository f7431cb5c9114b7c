"""Whether MODEL computes the same with its norms fused: PASS or FAIL, and how far apart.

Without a GPU the Triton kernels run in Triton's interpreter, which is exact and slow (see --max-tokens). Exits with 1
on FAIL, and where no kernel ran.
"""

from dataclasses import replace
from pathlib import Path

from ..paths import fitted
from ..sources import find
from . import models
from .common import DTYPES, Result, Table, add_count, add_device, add_model, interpret_on_cpu, pick_device, steps
from .inspect import read_text

# What a converted checkpoint was found to be.
_SAID = {
    "centred": "converted and centred: {count} of its LayerNorms run as RMSNorm, which is the same",
    "trained": "converted, then trained as RMSNorm, as its config.json says: compared with {count} RMSNorms in plain "
    "torch; without patch_model it computes LayerNorm, which is another function",
    "doubted": "converted, but each norm that the conversion recorded {doubt}",
}


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", help="the text to compare on (default: Python's own help texts)")
    told = "a .safetensors file with the arguments of the model's forward (default: the prompt, images or audio)"
    parser.add_argument("--inputs", metavar="FILE", type=Path, help=told)
    told = "the weights' dtype, or all for fp32 and bf16 (default: as stored; all for a demo)"
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], help=told)
    add_count(parser, "--max-tokens", 64, "use the first N tokens of the prompt")
    add_count(parser, "--max-new-tokens", 32, "compare N greedily generated tokens, 0 for none", least=0)
    parser.add_argument("--no-backward", action="store_true", help="leave out the gradients of the fused norms")
    told = "round as vllm, sglang or torch does, and compare each norm with that order (default: model)"
    parser.add_argument("--numerics", metavar="NAME", default="model", help=told)
    add_device(parser)


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    interpret_on_cpu(device)
    models.quieten()
    from .. import patch_model, verify_equivalence
    from ..ops.backend import describe_backend
    from ..patching.converted import conversion_of
    from ..verification.context import prompt_length
    from ..verification.equivalence import why_nothing_ran
    from ..verification.recorded import as_recorded

    backend, reason = describe_backend(device)
    if backend != "triton":  # its own forward against itself would prove nothing
        backend = "reference"
        reason += "; so this compares the plain-torch formula, not the kernels"

    prompt = read_text(None) if args.prompt is None else args.prompt
    dtype = args.dtype or ("all" if args.model.startswith("demo:") else "auto")
    dtypes, runs = ("float32", "bfloat16") if dtype == "all" else (DTYPES.get(dtype, dtype),), []
    with steps(args, 8 * len(dtypes)) as step:
        for each in dtypes:
            step(f"loading {source.name}")
            model = models.load_model(source, each, device)
            new = args.max_new_tokens
            inputs = models.other_inputs(model, args.inputs)
            if inputs is None:
                length = prompt_length(model.config, args.max_tokens, new)
                inputs = models.tokens(model, models.load_tokenizer(source), prompt, length)
                if model.config.is_encoder_decoder:
                    inputs = {"input_ids": inputs, "decoder_input_ids": inputs}
            if model.config.is_encoder_decoder:
                new = 0
            conversion = conversion_of(model)
            pair, norms = (model, None), True
            if conversion and conversion.trained:  # its own forward is not what it computes
                pair, norms = (as_recorded(model), model), False
                patch_model(model)
            backward = not args.no_backward and norms
            how = {"backward": backward, "inputs": inputs, "backend": backend, "max_new_tokens": new, "norms": norms}
            how["numerics"] = args.numerics
            how["progress"] = lambda what, each=each: step(f"{each}: {what}")
            done = verify_equivalence(*pair, **how)
            if new < args.max_new_tokens:
                why = "not compared: it would generate from the decoder's start token, not from a text"
                done = replace(done, greedy=replace(done.greedy, reason=why))
            runs.append((done, conversion))
            del model, pair

    # A conversion is judged by its own formula, in whatever runs it; of the others the kernels are in question.
    idle = backend != "triton" and not any(conversion for _, conversion in runs)
    if idle:
        why = f"{why_nothing_ran(device).partition(', or pass')[0]}; in plain torch the formulas agree"
        runs = [(replace(report, nothing_ran=True, why_nothing_ran=why), None) for report, _ in runs]
    passed = all(report.passed for report, _ in runs)
    told, blocks = [], []
    for report, conversion in runs:
        state = conversion and ("trained" if conversion.trained else "doubted" if conversion.doubt else "centred")
        doubt = conversion.doubt if conversion else ""
        told.append({**report.to_dict(), "conversion": state, "conversion_doubt": doubt})
        head = fitted(f"{source.name} in {report.dtype}: {report.headline}", 4)
        blocks += [head, Table(report.rows(), report.table)]
        blocks += [fitted("  " + _SAID[state].format(count=len(conversion.norms), doubt=doubt))] if conversion else []
        blocks.append("")
    blocks.append(fitted(f"Backend {backend} on {device}: {reason}."))
    data = {"model": source.name, "passed": passed, "device": str(device)}
    data |= {"backend": backend, "backend_reason": reason, "runs": told}
    return Result(data, blocks, 0 if passed else 1)
