"""Whether MODEL computes the same with its norms fused: PASS or FAIL, and how far apart.

Without a GPU the Triton kernels run in Triton's interpreter, which is exact and slow (see --max-tokens). Exits with 1
on FAIL, and where no kernel ran.
"""

from __future__ import annotations

from . import models
from .common import (
    DTYPES,
    CliError,
    Result,
    add_device,
    add_model,
    interpret_on_cpu,
    not_negative,
    pick_device,
    positive,
)

PROMPT = (
    "The following table lists the statements that may be used in a function. An expression is evaluated before the "
    "result is bound to a name; if it raises an exception, the name keeps the value that it had, and the search for a "
    "handler begins."
)

# What a converted checkpoint was found to be.
_SAID = {
    "centred": "converted and centred: {count} of its LayerNorms run as RMSNorm, which is the same",
    "trained": "converted, then trained as RMSNorm, as its config.json says: compared with {count} RMSNorms in plain "
    "torch; without patch_model it computes LayerNorm, which is another function",
    "doubted": "converted, but each norm that the conversion recorded {doubt}",
}


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", default=PROMPT, help="the text to compare on (default: a built-in one)")
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES, "all"],
        help="the weights' dtype, or all for fp32 and bf16 (default: as stored; all for a demo)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="use the first N tokens of the prompt (default 64)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=not_negative,
        default=32,
        metavar="N",
        help="compare N greedily generated tokens, 0 for none (default 32)",
    )
    parser.add_argument("--no-backward", action="store_true", help="leave out the gradients of the fused norms")
    add_device(parser)


def run(args) -> Result:
    source = models.find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    interpret_on_cpu(device)
    models.quieten()
    from .. import patch_model, verify_equivalence
    from ..ops.backend import describe_backend
    from ..patching.converted import conversion_of
    from ..verification.context import prompt_length
    from ..verification.recorded import as_recorded
    from ..verification.report import NOTHING_RAN

    backend, reason = describe_backend(device)
    if backend != "triton":  # its own forward against itself would prove nothing
        backend = "reference"
        reason += "; so this compares the plain-torch formula, not the kernels"

    dtype = args.dtype or ("all" if source.is_demo else "auto")
    config = models.load_config(source)
    tokenizer = models.load_tokenizer(source)
    runs, conversions = [], []
    for each in ("float32", "bfloat16") if dtype == "all" else (DTYPES.get(dtype, dtype),):
        model = models.load_model(source, config, each, device)
        if model.main_input_name != "input_ids":
            raise CliError(
                f"{source.name} is a {type(model).__name__}, which takes {model.main_input_name} and not a text: call "
                "verify_equivalence(model, inputs=...) from Python"
            )
        new = args.max_new_tokens
        inputs = models.tokens(model, tokenizer, args.prompt, prompt_length(model.config, args.max_tokens, new))
        if model.config.is_encoder_decoder:  # it would generate from the decoder's start token, not from a text
            inputs, new = {"input_ids": inputs, "decoder_input_ids": inputs}, 0
        conversion = conversion_of(model)
        conversions.append(conversion)
        pair, norms = (model, None), True
        if conversion and conversion.trained:  # its own forward is not what it computes
            pair, norms = (as_recorded(model), model), False
            patch_model(model)
        backward = not args.no_backward and norms
        how = {"backward": backward, "inputs": inputs, "backend": backend, "max_new_tokens": new, "norms": norms}
        runs.append(verify_equivalence(*pair, **how))
        del model, pair

    # A conversion is judged by its own formula, in whatever runs it; of the others the kernels are in question.
    idle = backend != "triton" and not any(conversions)
    passed = all(verdict.passed for verdict in runs) and not idle
    agreed = f"{NOTHING_RAN}; in plain torch the formulas agree"
    data = {
        "model": source.name,
        "passed": passed,
        "device": str(device),
        "backend": backend,
        "backend_reason": reason,
        "runs": [
            {**run.to_dict(), "conversion": _state(found), "conversion_doubt": found.doubt if found else ""}
            for run, found in zip(runs, conversions, strict=True)
        ],
    }
    blocks = [
        f"{source.name} in {run.dtype}: {agreed if run.passed and idle else run.verdict}\n{run}"
        + (f"\n  {_SAID[_state(found)].format(count=len(found.norms), doubt=found.doubt)}" if found else "")
        for run, found in zip(runs, conversions, strict=True)
    ]
    blocks.append(f"Backend {backend} on {device}: {reason}.")
    return Result(data, "\n\n".join(blocks), 0 if passed else 1)


def _state(conversion) -> str | None:
    if conversion is None:
        return None
    return "trained" if conversion.trained else "doubted" if conversion.doubt else "centred"
