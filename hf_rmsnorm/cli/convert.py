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
import re
from functools import partial
from pathlib import Path

from ..paths import fitted
from ..sources import Source, find, on_disk
from .common import CliError, Result, bar, say

ADAPTER = "adapter_config.json"
# Arguments in the package's errors, as target="native" or allow_pickle=True; not a part
# of a path.
_ARGUMENT = re.compile(
    r"""(?<![\w/.-])(?:(allow_pickle|trust_remote_code)(?![\w/-])|(target|restart)(?==))(?:=True|=["'](\w+)["'])?"""
)


def add_arguments(parser) -> None:
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help="a local folder with safetensors, a hub id, or demo:gpt2; or an adapter's",
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
    what = "for an adapter: the model that it was trained on, and what convert made of that"
    add("--base", nargs=2, metavar=("MODEL", "CONVERTED"), help=what)
    what = "a .safetensors file of the arguments of the model's forward, by name, for parts that text does not reach"
    add("--inputs", metavar="FILE", type=Path, help=what)
    add(
        "--no-verify",
        action="store_true",
        help="publish DST without running source and result",
    )
    what = "run all texts of a large checkpoint too, which takes minutes, and compare greedy tokens"
    add("--full-verify", action="store_true", help=what)
    add(
        "--prompt",
        action="append",
        help="a text to verify on (default: two built-in ones)",
    )
    what = (
        "native: write a checkpoint of an architecture that uses RMSNorm, where one "
        "computes the same (default same: the source's own architecture)"
    )
    add("--target", choices=["same", "native"], default="same", help=what)
    add(
        "--restart",
        action="store_true",
        help="drop an unfinished conversion of something else",
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
    try:
        return _run(args)
    except Exception as error:  # in the command's words
        error.args = tuple(
            _as_options(each) if isinstance(each, str) else each for each in error.args
        )
        raise


def _as_options(text: str) -> str:
    text = (
        text.replace("verify=False", "--no-verify")
        .replace("verify='full'", "--full-verify")
        .replace("inputs=...", "--inputs FILE")
    )
    return _ARGUMENT.sub(
        lambda m: " ".join(filter(None, (_option(m[1] or m[2]), m[3]))), text
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _given(args, *names: str) -> list[str]:
    """Those of the options that the command was given, as it calls them."""
    return [
        _option(name)
        for name in names
        if getattr(args, name) not in (None, False, "same")
    ]


def _run(args) -> Result:
    from . import models

    if args.base or (Path(args.src).expanduser() / ADAPTER).is_file():
        return _run_adapter(args, models)
    source = find(args.src, args.trust_remote_code)
    if args.plan == (args.dst is not None):
        raise CliError("pass DST, or --plan to see what would be done without one")
    if args.plan and (
        idle := _given(args, "no_verify", "full_verify", "prompt", "restart")
    ):
        raise CliError(f"--plan writes nothing: leave out {', '.join(idle)}")
    models.quieten()
    from .. import conversion
    from ..conversion.checkpoint.source import open_checkpoint

    (source,) = _on_disk(args, source)
    if args.dst is not None:
        open_checkpoint(source.where, allow_pickle=args.allow_pickle)
    code = _common(args, models)
    with bar(args, bar_format="{desc}", desc="planning on a small random model"):
        planned = conversion.plan_conversion(source.where, target=args.target, **code)
    if args.plan:
        return Result({"src": args.src, **planned.to_dict()}, fitted(str(planned)))
    if not args.json:
        say(fitted(str(planned)))
    how = {"planned": planned, **code}
    return _result(
        args, partial(conversion.convert_checkpoint, source.where, args.dst, **how)
    )


def _common(args, models) -> dict:
    """The arguments that every function of conversion takes."""
    tensors = None if args.inputs is None else models.read_tensors(args.inputs)
    return {
        "allow_pickle": args.allow_pickle,
        "trust_remote_code": args.trust_remote_code,
        "inputs": None if tensors is None else lambda model: dict(tensors),
    }


def _on_disk(args, source, *bases) -> list:
    """The same in folders, downloaded where DST is not refused."""
    from ..conversion.folders import destination, ignored

    if args.dst is not None:
        destination(source.where if source.is_local else None, args.dst)
    weights = not args.plan or args.target == "native"
    patterns = ignored(args.allow_pickle, weights)
    return [on_disk(each, patterns) for each in (source, *bases)]


def _run_adapter(args, models) -> Result:
    if args.base is None:
        what = "the model that it was trained on and what convert made of that"
        raise CliError(f"{args.src} is an adapter: pass --base MODEL CONVERTED, {what}")
    if args.dst is None:
        raise CliError("--base takes an adapter and DST: pass the folder to make")
    if idle := _given(args, "plan", "target"):
        raise CliError(
            f"--base goes without {', '.join(idle)}: an adapter is converted as its base was"
        )
    source = Source(
        args.src, os.path.expanduser(args.src), True, args.trust_remote_code
    )
    if not os.path.isdir(source.where):
        source = find(args.src, args.trust_remote_code)
    if source.is_local and not os.path.isfile(os.path.join(source.where, ADAPTER)):
        raise CliError(
            f"{args.src} has no {ADAPTER}: --base goes with the folder of a PEFT adapter"
        )
    bases = [find(where, args.trust_remote_code) for where in args.base]
    models.quieten()
    from .. import conversion

    source, base, converted = _on_disk(args, source, *bases)
    how = {"base": base.where, "converted": converted.where, **_common(args, models)}
    return _result(
        args, partial(conversion.convert_adapter, source.where, args.dst, **how)
    )


class _Stages(logging.Handler):
    """Shows the log of a conversion at its progress bar."""

    def __init__(self, shown):
        super().__init__()
        self.shown = shown

    def emit(self, record) -> None:
        self.shown.set_description_str(_as_options(record.getMessage()))


def _result(args, convert) -> Result:
    """The result of converting with the options that every conversion takes; on a
    terminal a bar shows the progress.
    """
    from ..conversion import VerificationFailed

    def progress(tensors: int, done: int, total: int) -> None:
        shown.total = total
        shown.set_postfix_str(f"{tensors} tensors", refresh=False)
        shown.update(done - shown.n)

    log = logging.getLogger("hf_rmsnorm.conversion")
    log.setLevel(logging.INFO)
    try:
        with bar(args, unit="B", unit_scale=True, desc="converting") as shown:
            log.addHandler(_Stages(shown))
            verify = "full" if args.full_verify else not args.no_verify
            done = convert(
                prompts=args.prompt,
                verify=verify,
                restart=args.restart,
                progress=progress,
            )
    except VerificationFailed as error:
        data = {
            "src": args.src,
            "published": False,
            "verification": error.verification.to_dict(),
        }
        return Result(data, _as_options(str(error)), 3)
    finally:
        log.handlers.clear()
    return Result({"src": args.src, "published": True, **done.to_dict()}, str(done))
