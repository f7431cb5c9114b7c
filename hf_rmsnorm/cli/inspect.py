"""Measure the mean of every norm's input in MODEL, and the cost of merely replacing
LayerNorm by RMSNorm.

The mean is divided by the RMS. If it is 0, LayerNorm and RMSNorm are the same. --after
adds a converted model.
"""

from pathlib import Path

from ..paths import fitted
from ..sources import find
from . import models
from .common import (
    DTYPES,
    CliError,
    Result,
    add_count,
    add_device,
    add_model,
    announce,
    pick_device,
)


def add_arguments(parser) -> None:
    add_model(parser)
    text = "a converted copy of MODEL to compare with it"
    parser.add_argument("--after", metavar="MODEL", help=text)
    text = "text to run on (default: Python's own help texts)"
    parser.add_argument("--text", metavar="FILE", type=Path, help=text)
    add_count(parser, "--max-tokens", 512, "use the first N tokens of the text")
    text = "run in this dtype (default fp32)"
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help=text)
    add_device(parser)


def run(args) -> Result:
    text = read_text(args.text)
    before = _inspect(args.model, args, text)
    data = {"model": args.model, **before.to_dict(), "after": None}
    if args.after is None:
        return Result(data, _text(args, before, None))
    after = _inspect(args.after, args, text)
    if [norm.path for norm in after.norms] != [norm.path for norm in before.norms]:
        what = f"{args.after} has other norms than {args.model}"
        raise CliError(f"{what}: pass its conversion to --after")
    data["after"] = {"model": args.after, **after.to_dict()}
    return Result(data, _text(args, before, after))


def read_text(file: Path | None) -> str:
    """The text to run on; Python's help texts without a file."""
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cure = "pass a UTF-8 file with --text"
        raise CliError(f"cannot read {file} as text: {error}; {cure}") from error
    if not text.strip():
        raise CliError(f"{file} is empty: pass a file with some text")
    return text


def _inspect(name: str, args, text: str):
    source = find(name, args.trust_remote_code)
    device = pick_device(args.device)
    models.quieten()
    from ..verification import inspect_norms
    from ..verification.context import max_positions

    announce(f"loading {name}")
    dtype = DTYPES[args.dtype]
    model = models.load_model(source, dtype, device, "call inspect_norms from Python")
    announce(f"running {name}")
    most = min(args.max_tokens, max_positions(model.config))
    ids = models.tokens(model, models.load_tokenizer(source), text, most)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return inspect_norms(model, inputs)


def _text(args, before, after) -> str:
    lines = [fitted(f"{args.model}: {_verdict(before)}"), *_table(before)]
    if after is not None:
        lines += ["", fitted(f"{args.after}: {_verdict(after)}"), *_table(after)]
        if after.perplexity is not None:
            change = f"from {before.perplexity:.6g} to {after.perplexity:.6g}"
            lines.append(f"perplexity {change}")
    return "\n".join(lines)


def _table(inspection) -> list[str]:
    """A line for each norm: how large its input's mean is."""
    row = "{:<48}  {:<9}  {:>8}  {:>7}".format
    lines = [row("|mean| / RMS of the input", "kind", "median", "largest")]
    for norm in inspection.norms:
        kind = "LayerNorm" if norm.centered else "RMSNorm"
        lines.append(row(norm.path, kind, f"{norm.median:.2e}", f"{norm.largest:.1e}"))
    return lines


def _verdict(inspection) -> str:
    """The result, in one sentence."""
    naive = inspection.naive
    if naive is not None:
        perplexity = f"from {inspection.perplexity:.6g} to {naive.perplexity:.6g}"
        tokens = f"same likeliest token for {naive.top1:.2%}"
        return (
            "its LayerNorms merely replaced by RMSNorm would change perplexity "
            f"{perplexity} on {inspection.tokens} tokens "
            f"(KL {naive.kl:.3g} nats a token, {tokens})"
        )
    if any(norm.centered for norm in inspection.norms):
        return "the mean of each LayerNorm's input, which an RMSNorm would not subtract"
    return (
        "all its norms are RMSNorm, which subtract no mean: there is nothing to convert"
    )
