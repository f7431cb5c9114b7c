"""Measure the mean of every norm's input in MODEL, and the cost of merely replacing
LayerNorm by RMSNorm.

The mean is divided by the RMS. If it is 0, LayerNorm and RMSNorm are the same. --after
adds a converted model.
"""

from pathlib import Path

from ..paths import fitted
from ..sources import find
from . import common, models
from .common import (
    DTYPES,
    CliError,
    Result,
    add_count,
    add_device,
    add_model,
    add_verbose,
    pick_device,
    steps,
)

MOST_NORMS = 10  # that are printed without --verbose


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--after", metavar="MODEL", help="a converted copy of MODEL to compare with it"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="text to run on (default: Python's own help texts)",
    )
    add_count(parser, "--max-tokens", 512, "use the first N tokens of the text")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="fp32",
        help="run in this dtype (default fp32)",
    )
    parser.add_argument(
        "--plot", metavar="PNG", type=Path, help="also draw it (needs matplotlib)"
    )
    add_device(parser)
    add_verbose(parser, "every norm")


def run(args) -> Result:
    plt = common.load_matplotlib(args.plot) if args.plot else None
    text = read_text(args.text)
    with steps(args, 4 if args.after else 2) as step:
        before = _inspect(args.model, args, text, step)
        after = _inspect(args.after, args, text, step) if args.after else None
    if after and [norm.path for norm in after.norms] != [
        norm.path for norm in before.norms
    ]:
        raise CliError(
            f"{args.after} has other norms than {args.model}: pass its conversion to --after"
        )
    data = {
        "model": args.model,
        **before.to_dict(),
        "after": after and {"model": args.after, **after.to_dict()},
    }
    if plt is not None:
        _draw(plt, args.plot, args.model, before, after)
        data["plot"] = str(args.plot)
    return Result(data, _text(args, before, after))


def read_text(file: Path | None) -> str:
    """The text to run on; Python's help texts without a file."""
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(
            f"cannot read {file} as text: {error}; pass a UTF-8 file with --text"
        ) from error
    if not text.strip():
        raise CliError(f"{file} is empty: pass a file with some text")
    return text


def _inspect(name: str, args, text: str, step):
    source = find(name, args.trust_remote_code)
    device = pick_device(args.device)
    models.quieten()
    from ..verification import inspect_norms
    from ..verification.context import max_positions

    step(f"loading {name}")
    model = models.load_model(
        source, DTYPES[args.dtype], device, "call inspect_norms from Python"
    )
    step(f"running {name}")
    most = min(args.max_tokens, max_positions(model.config))
    ids = models.tokens(model, models.load_tokenizer(source), text, most)
    decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return inspect_norms(model, {"input_ids": ids, **decoded})


def _text(args, before, after) -> str:
    lines = [
        fitted(f"{args.model}: {_verdict(before)}"),
        *_table(before, after, args.verbose),
    ]
    if after is not None and after.perplexity is not None:
        lines.append(
            f"perplexity: {before.perplexity:.6g}, of {args.after}: {after.perplexity:.6g}"
        )
    return "\n".join(lines)


def _verdict(inspection) -> str:
    """The result, in one sentence."""
    naive = inspection.naive
    if naive is not None:
        change = f"perplexity from {inspection.perplexity:.6g} to {naive.perplexity:.6g} on {inspection.tokens} tokens"
        cost = (
            f"KL {naive.kl:.3g} nats a token, same likeliest token for {naive.top1:.2%}"
        )
        return (
            f"its LayerNorms merely replaced by RMSNorm would change {change} ({cost})"
        )
    if any(norm.centered for norm in inspection.norms):
        return "the mean of each LayerNorm's input, which an RMSNorm would not subtract"
    return (
        "all its norms are RMSNorm, which subtract no mean: there is nothing to convert"
    )


def _table(before, after, verbose: bool) -> list[str]:
    """A line for each norm: how large its input's mean is, before a conversion and
    after it.
    """
    chosen = range(len(before.norms)) if verbose else _largest(before)
    rows = [["|mean| / RMS of the input", "kind", "median", "largest"]]
    rows[0] += ["converted: median", "largest"] if after else []
    for index in chosen:
        norm = before.norms[index]
        row = [
            norm.path,
            "LayerNorm" if norm.centered else "RMSNorm",
            f"{norm.median:.2e}",
            f"{norm.largest:.1e}",
        ]
        if after:
            row += [
                f"{after.norms[index].median:.2e}",
                f"{after.norms[index].largest:.1e}",
            ]
        rows.append(row)
    width = max(len(path) for path, *_ in rows)
    form = f"{{:<{width}}}  {{:<9}}  {{:>8}}  {{:>7}}" + (
        "  {:>17}  {:>7}" if after else ""
    )
    lines = [form.format(*row) for row in rows]
    more = len(before.norms) - len(chosen)
    return (
        [*lines, f"and {more} more with smaller means: --verbose lists them"]
        if more
        else lines
    )


def _largest(inspection) -> list[int]:
    """The places of the norms with the largest means, in the order of the model."""
    by_median = sorted(
        range(len(inspection.norms)), key=lambda index: -inspection.norms[index].median
    )
    return sorted(by_median[:MOST_NORMS])


def _draw(plt, file: Path, name: str, before, after) -> None:
    figure, axes = plt.subplots(
        figsize=(max(6.0, 0.22 * len(before.norms)), 4.5), layout="constrained"
    )
    for inspection, label, marker in (
        (before, "before", "o"),
        (after, "after conversion", "s"),
    ):
        if inspection is not None:
            axes.semilogy(
                [max(norm.median, 1e-18) for norm in inspection.norms],
                marker=marker,
                label=label,
            )
    axes.set_xticks(
        range(len(before.norms)),
        [norm.path for norm in before.norms],
        rotation=90,
        fontsize=6,
    )
    axes.set_ylabel("median of |mean| / RMS of the norm's input")
    axes.set_title(f"How much of a mean each norm of {name} sees")
    axes.legend()
    common.save_figure(plt, figure, file)
