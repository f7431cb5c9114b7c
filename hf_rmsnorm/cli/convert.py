"""Convert the LayerNorm checkpoint SRC into one whose norms may run as RMSNorm, with
the same logits.

A small random model of the same classes shows which tensors write to the residual
stream, and proves the plan in float64. The plan is printed. The tensors are centred
while the checkpoint streams through, and DST appears whole once it is verified. After a
kill it is not there, and the same command starts again. Exits with 3 if the result
fails verification. A hub id is downloaded first.
"""

import logging
import os
import sys
from pathlib import Path

from ..paths import fitted
from .common import CliError, Result, progress_bar

# How the package's errors name an option of the functions, and the command's word.
OPTIONS = {
    "allow_pickle=True": "--allow-pickle",
    "inputs=...": "--inputs FILE",
    "max_shard_size=": "--max-shard-size ",
    'target="native"': "--target native",
    "trust_remote_code=True": "--trust-remote-code",
    "verify='full'": "--full-verify",
    "verify=False": "--no-verify",
}


def add_arguments(parser) -> None:
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        type=os.path.expanduser,
        help="a local folder with safetensors, a hub id, or demo:gpt2",
    )
    add(
        "dst",
        metavar="DST",
        nargs="?",
        type=os.path.expanduser,
        help="the folder to make; leave it out with --plan",
    )
    add(
        "--plan",
        action="store_true",
        help="print what would be done, and write nothing",
    )
    add(
        "--inputs",
        metavar="FILE",
        type=Path,
        help="a .safetensors file of the arguments of the model's forward, by "
        "name, for parts that text does not reach",
    )
    verify = parser.add_mutually_exclusive_group()
    verify.add_argument(
        "--no-verify",
        action="store_true",
        help="publish DST without running source and result",
    )
    verify.add_argument(
        "--full-verify",
        action="store_true",
        help="run all texts of a large checkpoint too, which takes minutes",
    )
    add(
        "--prompt",
        action="append",
        help="a text to verify on (default: two built-in ones)",
    )
    add(
        "--target",
        choices=["same", "native"],
        default="same",
        help="native: write a checkpoint of an architecture that uses RMSNorm, "
        "where one computes the same",
    )
    add(
        "--max-shard-size",
        default="2GB",
        metavar="SIZE",
        help="of a file of weights: a number of bytes, or as 500MB (default: 2GB)",
    )
    add(
        "--allow-pickle",
        action="store_true",
        help="read pytorch_model.bin if there is nothing else",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run the model code that SRC brings",
    )


def run(args) -> Result:
    if args.plan and args.dst is not None:
        raise CliError("--plan writes nothing: leave out --plan, or DST")
    if not args.plan and not args.dst:
        raise CliError("pass DST, or --plan to see what would be done without one")
    from . import models

    tensors = None if args.inputs is None else models.read_tensors(args.inputs)
    models.quieten()
    options = {
        "allow_pickle": args.allow_pickle,
        "trust_remote_code": args.trust_remote_code,
        "max_shard_size": args.max_shard_size,
        "inputs": None if tensors is None else lambda model: dict(tensors),
    }
    try:
        return _convert(args, options)
    except Exception as error:
        error.args = tuple(map(_as_options, error.args))
        raise


def _as_options(text):
    """A text of the package in the command's words."""
    if isinstance(text, str):
        for argument, option in OPTIONS.items():
            text = text.replace(argument, option)
    return text


def _convert(args, options: dict) -> Result:
    """The result; meanwhile the plan, the stages and the progress go to stderr."""
    from .. import conversion

    options["target"] = args.target
    if args.plan:
        with progress_bar(1, "planning on a small random model"):
            planned = conversion.plan_conversion(args.src, **options)
        return Result({"src": args.src, **planned.to_dict()}, fitted(str(planned)))
    log = logging.getLogger("hf_rmsnorm.conversion")
    log.setLevel(logging.INFO)
    stages = logging.StreamHandler(sys.stderr)
    log.addHandler(stages)
    bar = None

    def progress(tensors: int, done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = progress_bar(total, "writing", "B")
        bar.set_description(f"writing, {tensors} tensors", refresh=False)
        bar.update(done - bar.n)
        if done == total:  # the lines on its verification follow
            bar.close()

    try:
        done = conversion.convert_checkpoint(
            args.src,
            args.dst,
            prompts=args.prompt,
            verify="full" if args.full_verify else not args.no_verify,
            progress=progress,
            **options,
        )
    except conversion.VerificationFailed as error:
        verification = error.verification.to_dict()
        data = {"src": args.src, "published": False, "verification": verification}
        return Result(data, _as_options(str(error)), 3)
    finally:
        log.removeHandler(stages)
    return Result({"src": args.src, "published": True, **done.to_dict()}, str(done))
