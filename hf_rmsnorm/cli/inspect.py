"""How large the mean of every norm's input is in MODEL, and what replacing LayerNorm by RMSNorm outright would cost.

The mean beside the RMS, over real text: 0 where a LayerNorm is an RMSNorm. With --after, the same of a converted model.
"""

from pathlib import Path

from ..paths import fitted
from ..sources import find
from . import common, models
from .common import DTYPES, CliError, Result, Table, add_count, add_device, add_model, pick_device, steps


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument("--after", metavar="MODEL", help="a converted copy of MODEL to set beside it")
    parser.add_argument("--text", metavar="FILE", type=Path, help="text to run on (default: Python's own help texts)")
    add_count(parser, "--max-tokens", 512, "use the first N tokens of the text")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="run in this dtype (default fp32)")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="also draw it (needs matplotlib)")
    add_device(parser)


def run(args) -> Result:
    plt = common.load_matplotlib(args.plot) if args.plot else None
    text = read_text(args.text)
    with steps(args, 4 if args.after else 2) as step:
        before = _inspect(args.model, args, text, step)
        after = _inspect(args.after, args, text, step) if args.after else None
    if after and [norm.path for norm in after.norms] != [norm.path for norm in before.norms]:
        raise CliError(f"{args.after} has other norms than {args.model}: pass its conversion to --after")
    data = {"model": args.model, **before.to_dict(), "after": after and {"model": args.after, **after.to_dict()}}
    if plt is not None:
        _draw(plt, args.plot, args.model, before, after)
        data["plot"] = str(args.plot)
    return Result(data, _blocks(args, before, after))


def read_text(file: Path | None) -> str:
    """The text to run on; Python's help texts without a file."""
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read {file} as text: {error}; pass a UTF-8 file with --text") from error
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
    model = models.load_model(source, DTYPES[args.dtype], device, "call inspect_norms from Python")
    step(f"running {name}")
    most = min(args.max_tokens, max_positions(model.config))
    ids = models.tokens(model, models.load_tokenizer(source), text, most)
    decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return inspect_norms(model, {"input_ids": ids, **decoded})


def _blocks(args, before, after) -> list[str | Table]:
    blocks = [f"{args.model}: {before.tokens} tokens, |mean| / RMS of each norm's input", _table(before, after)]
    for name, inspection in (("the model", before), (args.after, after)):
        if inspection is not None and inspection.perplexity is not None:
            blocks.append(f"perplexity of {name}: {inspection.perplexity:.6g}")
    naive = before.naive
    if naive is not None:
        cost = f"KL {naive.kl:.3g} nats a token, likeliest word kept for {naive.top1:.2%}"
        blocks.append(fitted(f"every LayerNorm swapped naively: perplexity {naive.perplexity:.6g}, {cost}"))
    return blocks


def _table(before, after) -> Table:
    """A row for each norm: how large its input's mean is, before a conversion and after it."""
    rows = [["norm", "kind", "median", "largest"]]
    for norm in before.norms:
        kind = "LayerNorm" if norm.centered else "RMSNorm"
        rows.append([norm.path, kind, f"{norm.median:.2e}", f"{norm.largest:.1e}"])
    width = max(len(path) for path, *_ in rows)
    form = f"{{:<{width}}}  {{:<9}}  {{:>8}}  {{:>7}}"
    if after:
        form += "  {:>15}  {:>7}"
        columns = [["after:   median", "largest"]]
        columns += [[f"{norm.median:.2e}", f"{norm.largest:.1e}"] for norm in after.norms]
        rows = [row + more for row, more in zip(rows, columns, strict=True)]
    rows = [tuple(row) for row in rows]
    return Table(rows, "\n".join(form.format(*row) for row in rows))


def _draw(plt, file: Path, name: str, before, after) -> None:
    figure, axes = plt.subplots(figsize=(max(6.0, 0.22 * len(before.norms)), 4.5), layout="constrained")
    for inspection, label, marker in ((before, "before", "o"), (after, "after conversion", "s")):
        if inspection is not None:
            axes.semilogy([max(norm.median, 1e-18) for norm in inspection.norms], marker=marker, label=label)
    axes.set_xticks(range(len(before.norms)), [norm.path for norm in before.norms], rotation=90, fontsize=6)
    axes.set_ylabel("median of |mean| / RMS of the norm's input")
    axes.set_title(f"How much of a mean each norm of {name} sees")
    axes.legend()
    common.save_figure(plt, figure, file)
