"""Convert the LayerNorm checkpoint SRC into one whose norms may run as RMSNorm, with the same logits.

Which tensors write to the residual stream is found on a small random model of the same classes and proven there in
float64; they are centred while the checkpoint streams through, and DST appears whole once it is verified. A run that
was killed is taken up by the same command. Exits with 3 where the result fails verification. SRC may also be a LoRA
adapter of PEFT, with --base.
"""

from __future__ import annotations

from pathlib import Path

from .common import CliError, Result


def add_arguments(parser) -> None:
    parser.add_argument("src", metavar="SRC", help="a local folder with safetensors, or demo:gpt2; or an adapter's")
    parser.add_argument("dst", metavar="DST", nargs="?", help="the folder to make; leave it out with --plan")
    parser.add_argument("--plan", action="store_true", help="print what would be done, and write nothing")
    parser.add_argument(
        "--base", nargs=2, metavar=("MODEL", "CONVERTED"),
        help="for an adapter: the model that it was trained on, and what convert made of that",
    )  # fmt: skip
    parser.add_argument("--no-verify", action="store_true", help="publish DST without running source and result")
    parser.add_argument("--prompt", action="append", help="a text to verify on (default: two built-in ones)")
    parser.add_argument(
        "--target", choices=["same", "native"], default="same",
        help="native: write a checkpoint of an architecture that is RMSNorm by birth, where one computes the same "
        "(default same: the source's own architecture)",
    )  # fmt: skip
    parser.add_argument(
        "--fold-affine", action="store_true",
        help="fold the norms' weights and biases into the linears that read them, where that is exact",
    )  # fmt: skip
    parser.add_argument(
        "--post-norm", choices=["exact", "fit", "refuse"], default="refuse",
        help="for models like BERT. exact: two neurons more in every FFN, so that its norm and the embeddings' become "
        "RMSNorm; fit: all norms, approximately, by least squares on text (default refuse)",
    )  # fmt: skip
    parser.add_argument("--restart", action="store_true", help="drop an unfinished conversion of something else")
    parser.add_argument("--allow-pickle", action="store_true", help="read pytorch_model.bin if there is nothing else")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model code that SRC brings")


def run(args) -> Result:
    from . import models

    adapter = Path(args.src).expanduser()
    if (adapter / "adapter_config.json").is_file():
        return _run_adapter(args, adapter, models)
    if args.base:
        raise CliError(f"{args.src} has no adapter_config.json: --base goes with the folder of a PEFT adapter")
    source = models.find(args.src, args.trust_remote_code)
    if not source.is_local:
        raise CliError(f"{args.src} is no folder: download it first, with hf download {args.src} --local-dir FOLDER")
    if args.plan == (args.dst is not None):
        raise CliError("pass DST, or --plan to see what would be done without one")
    models.quieten()
    from ..conversion import (
        VerificationFailed,
        convert_checkpoint,
        convert_post_norm,
        plan_conversion,
        plan_fold,
        plan_native,
        write_folded,
        write_native,
    )

    if args.target == "native" and args.post_norm != "refuse":
        raise CliError("--target native and --post-norm are two ways: choose one")
    if args.fold_affine and args.post_norm != "refuse":
        raise CliError("--fold-affine and --post-norm are two ways: choose one")
    if args.post_norm != "refuse":
        if args.plan:
            raise CliError("--post-norm has no --plan: it converts the model in memory, and says what it did")
        made = convert_post_norm(
            source.where, args.dst, args.post_norm, trust_remote_code=args.trust_remote_code, texts=args.prompt,
            allow_pickle=args.allow_pickle, restart=args.restart,
        )  # fmt: skip
        return Result({"src": args.src, "published": True, **made.to_dict()}, str(made))
    native = args.target == "native"
    if native:
        planned = plan_native(source.where, fold_affine=args.fold_affine)
    else:
        planned = plan_conversion(source.where, trust_remote_code=args.trust_remote_code)
    fold = None
    if args.fold_affine and not native:
        fold = plan_fold(source.where, trust_remote_code=args.trust_remote_code)
    if args.plan:
        data = {"src": args.src, **planned.to_dict(), **({"fold": fold.to_dict()} if fold else {})}
        return Result(data, f"{planned}\n{fold}" if fold else str(planned))
    with _progress(args.json) as progress:
        how = {
            "prompts": args.prompt, "verify": not args.no_verify, "allow_pickle": args.allow_pickle,
            "restart": args.restart, "progress": progress,
        }  # fmt: skip
        try:
            if native:
                done = write_native(source.where, args.dst, planned=planned, **how)
            else:
                how["trust_remote_code"] = args.trust_remote_code
                if fold:
                    done = write_folded(source.where, args.dst, planned=fold, conversion=planned, **how)
                else:
                    done = convert_checkpoint(source.where, args.dst, planned=planned, **how)
        except VerificationFailed as error:
            data = {"src": args.src, "published": False, "verification": error.verification.to_dict()}
            return Result(data, str(error), 3)
    return Result({"src": args.src, "published": True, **done.to_dict()}, str(done))


def _run_adapter(args, adapter: Path, models) -> Result:
    if args.base is None:
        raise CliError(
            f"{args.src} is an adapter: pass --base MODEL CONVERTED, the model that it was trained on and what convert "
            "made of that"
        )
    if args.dst is None or args.plan or args.target == "native" or args.fold_affine or args.post_norm != "refuse":
        raise CliError("--base takes an adapter and DST, and goes with --no-verify, --prompt and --restart alone")
    base, converted = (models.find(where, args.trust_remote_code) for where in args.base)
    if not (base.is_local and converted.is_local):
        raise CliError(f"{' '.join(args.base)}: both have to be local folders")
    models.quieten()
    from ..conversion import VerificationFailed, convert_adapter

    try:
        done = convert_adapter(
            adapter, args.dst, base=base.where, converted=converted.where, prompts=args.prompt,
            trust_remote_code=args.trust_remote_code, verify=not args.no_verify, allow_pickle=args.allow_pickle,
            restart=args.restart,
        )  # fmt: skip
    except VerificationFailed as error:
        data = {"src": args.src, "published": False, "verification": error.verification.to_dict()}
        return Result(data, str(error), 3)
    return Result({"src": args.src, "published": True, **done.to_dict()}, str(done))


class _progress:
    """A bar of tensors and bytes on stderr, where rich or tqdm would show one: a terminal."""

    def __init__(self, silent: bool):
        import sys

        from tqdm.auto import tqdm

        self._bar = tqdm(
            unit="B", unit_scale=True, desc="converting", disable=silent or not sys.stderr.isatty(), leave=False
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._bar.close()

    def __call__(self, tensors: int, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.set_postfix_str(f"{tensors} tensors", refresh=False)
        self._bar.update(done - self._bar.n)
