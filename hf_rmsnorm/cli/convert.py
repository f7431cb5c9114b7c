"""Convert the LayerNorm checkpoint SRC into one whose norms may run as RMSNorm, with
the same logits.

A small random model of the same classes shows which tensors write to the residual
stream, and proves the plan in float64. The plan is printed. The tensors are centred
while the checkpoint streams through, and DST appears whole once it is verified. The
same command goes on with a run that was killed. Exits with 3 if the result fails
verification. SRC may also be a LoRA adapter of PEFT, with --base. A hub id is
downloaded first.
"""

import logging
import os
import sys
from pathlib import Path

from ..paths import fitted
from .common import CliError, Result, announce, say

ADAPTER = "adapter_config.json"
# How the package's errors name an option of the functions, and the command's word.
OPTIONS = {
    "allow_pickle=True": "--allow-pickle",
    "inputs=...": "--inputs FILE",
    "restart=True": "--restart",
    'target="native"': "--target native",
    "trust_remote_code=True": "--trust-remote-code",
    "verify='full'": "--full-verify",
    "verify=False": "--no-verify",
}


def add_arguments(parser) -> None:
    add = parser.add_argument
    text = "a local folder with safetensors, a hub id, or demo:gpt2; or an adapter's"
    add("src", metavar="SRC", type=os.path.expanduser, help=text)
    text = "the folder to make; leave it out with --plan"
    add("dst", metavar="DST", nargs="?", type=os.path.expanduser, help=text)
    text = "print what would be done, and write nothing"
    add("--plan", action="store_true", help=text)
    text = "for an adapter: the model that it was trained on, and what convert made of that"
    add("--base", nargs=2, metavar=("MODEL", "CONVERTED"), help=text)
    text = "a .safetensors file of the arguments of the model's forward, by name, for parts that text does not reach"
    add("--inputs", metavar="FILE", type=Path, help=text)
    text = "publish DST without running source and result"
    add("--no-verify", action="store_true", help=text)
    text = "run all texts of a large checkpoint too, which takes minutes, and compare greedy tokens"
    add("--full-verify", action="store_true", help=text)
    text = "a text to verify on (default: two built-in ones)"
    add("--prompt", action="append", help=text)
    text = "native: write a checkpoint of an architecture that uses RMSNorm, where one computes the same"
    add("--target", choices=["same", "native"], default="same", help=text)
    text = "drop an unfinished conversion of something else"
    add("--restart", action="store_true", help=text)
    text = "read pytorch_model.bin if there is nothing else"
    add("--allow-pickle", action="store_true", help=text)
    text = "run the model code that SRC brings"
    add("--trust-remote-code", action="store_true", help=text)


def run(args) -> Result:
    _check_options(args)
    from . import models

    tensors = None if args.inputs is None else models.read_tensors(args.inputs)
    models.quieten()
    options = {
        "allow_pickle": args.allow_pickle,
        "trust_remote_code": args.trust_remote_code,
        "inputs": None if tensors is None else lambda model: dict(tensors),
    }
    try:
        return _convert_adapter(args, options) if args.base else _convert(args, options)
    except Exception as error:
        error.args = tuple(map(_as_options, error.args))
        raise


def _check_options(args) -> None:
    if args.plan == (args.dst is not None):
        raise CliError("pass DST, or --plan to see what would be done without one")
    is_adapter = os.path.isfile(os.path.join(args.src, ADAPTER))
    if is_adapter and not args.base:
        what = "the model that it was trained on and what convert made of that"
        raise CliError(f"{args.src} is an adapter: pass --base MODEL CONVERTED, {what}")
    if args.base and (args.plan or args.target != "same"):
        cure = "an adapter is converted as its base was"
        raise CliError(f"--base goes without --plan and --target: {cure}")


def _as_options(text):
    """A text of the package in the command's words."""
    if isinstance(text, str):
        for argument, option in OPTIONS.items():
            text = text.replace(argument, option)
    return text


def _convert(args, options: dict) -> Result:
    from .. import conversion
    from ..conversion.folders import destination, local

    if args.dst is not None:  # refused before anything is downloaded
        destination(local(args.src), args.dst)
    announce("planning on a small random model")
    planned = conversion.plan_conversion(args.src, target=args.target, **options)
    if args.plan:
        return Result({"src": args.src, **planned.to_dict()}, fitted(str(planned)))
    if not args.json:
        say(fitted(str(planned)))
    return _carry_out(args, conversion.convert_checkpoint, planned=planned, **options)


def _convert_adapter(args, options: dict) -> Result:
    from .. import conversion

    base, converted = args.base
    options |= {"base": base, "converted": converted}
    return _carry_out(args, conversion.convert_adapter, **options)


def _carry_out(args, convert, **options) -> Result:
    """The result of a conversion; on a terminal its stages and its progress are shown."""
    from ..conversion import VerificationFailed

    def progress(tensors: int, done: int, total: int) -> None:
        if shows:
            end = "\n" if done == total else ""
            text = f"\r{tensors} tensors, {done / total:.0%} written"
            print(text, end=end, file=sys.stderr, flush=True)

    shows = sys.stderr.isatty()
    log = logging.getLogger("hf_rmsnorm.conversion")
    stages = logging.StreamHandler(sys.stderr)
    if shows:
        log.setLevel(logging.INFO)
        log.addHandler(stages)
    try:
        done = convert(
            args.src,
            args.dst,
            prompts=args.prompt,
            verify="full" if args.full_verify else not args.no_verify,
            restart=args.restart,
            progress=progress,
            **options,
        )
    except VerificationFailed as error:
        verification = error.verification.to_dict()
        data = {"src": args.src, "published": False, "verification": verification}
        return Result(data, _as_options(str(error)), 3)
    finally:
        log.removeHandler(stages)
    return Result({"src": args.src, "published": True, **done.to_dict()}, str(done))
