"""The way into conversion: `plan_conversion`, `convert_checkpoint` and, for adapters of
PEFT, `convert_adapter`.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..paths import fitted
from .checkpoint.layout import Layout
from .checkpoint.source import FLOATS, Checkpoint, open_checkpoint
from .checkpoint.write import write_checkpoint
from .folders import check_destination, check_source, destination, folder_of, local
from .plan import ConversionError, ConversionRefused
from .proxy.model import make_proxy
from .proxy.run import and_more
from .targets.adapter import plan_adapter
from .targets.centred import PlannedCentring, PlannedConversion, plan_centring
from .targets.native import plan_native
from .tensors import Stored, is_narrower, one_thread
from .verify.folder import Verification, VerificationFailed
from .verify.pair import Running, missing_parameters, tokenizer_of_source

TARGETS = ("same", "native")


@dataclass(frozen=True)
class Written:
    """The folder that a conversion wrote.

    Args:
        shards: for each file name, the bytes of its tensors.
        unused: tensors of the source that no tensor of the result is made from.
        not_copied: files and folders of the source that the result does not have, and
            why.
        resumed: how many shards an earlier run had written.
    """

    dst: Path
    shards: dict[str, int]
    tensors: int
    bytes: int
    changed: tuple[str, ...]
    added: tuple[str, ...]
    unused: tuple[str, ...]
    not_copied: dict[str, str]
    resumed: int

    @classmethod
    def of(cls, dst, source: Checkpoint, layout: Layout, resumed: int) -> "Written":
        """The summary of a layout that was made of a source."""
        made = {}
        for shard in layout.shards.values():
            made |= {name: entry.tensor for name, entry in shard.entries.items()}
        used = set().union(*(tensor.keys() for tensor in made.values()))
        changed, added = (), ()
        if set(source.metadata) == set(layout.shards):  # names are the source's
            changed = tuple(
                name
                for name, tensor in made.items()
                if name in source.tensors and not _is_copy(tensor)
            )
            added = tuple(sorted(made.keys() - source.tensors.keys()))
        shards = {name: shard.nbytes for name, shard in layout.shards.items()}
        return cls(
            dst=Path(os.path.abspath(dst)),
            shards=shards,
            tensors=len(made),
            bytes=sum(shards.values()),
            changed=changed,
            added=added,
            unused=tuple(sorted(source.tensors.keys() - used)),
            not_copied=source.not_copied,
            resumed=resumed,
        )

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "dst": str(self.dst),
            "tensors_written": self.tensors,
            "bytes": self.bytes,
            "shards_resumed": self.resumed,
            "changed": list(self.changed),
            "added": list(self.added),
            "unused": list(self.unused),
            "not_copied": self.not_copied,
        }

    def __str__(self) -> str:
        changes = ""
        if self.changed or self.added:
            changes = f", {len(self.changed)} changed, {len(self.added)} added"
        lines = [
            f"{self.dst}: {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB{changes}"
        ]
        if self.resumed:
            lines.append(
                f"{self.resumed} of {len(self.shards)} shards were there from an earlier run"
            )
        if self.unused:
            lines.append(
                f"tensors that the result does not need: {', '.join(self.unused)}"
            )
        for reason in dict.fromkeys(self.not_copied.values()):
            names = [name for name, why in self.not_copied.items() if why == reason]
            lines.append(f"not copied: {', '.join(names)} ({reason})")
        return "\n".join(lines)


def _is_copy(tensor) -> bool:
    return isinstance(tensor, Stored) and tensor.is_copy


@dataclass(frozen=True)
class Conversion:
    """The outcome of a conversion.

    Args:
        plan: the plan with its proof, as it was carried out.
        written: the folder and a summary of its content.
        verification: source and result compared, before the folder appeared.
    """

    plan: PlannedConversion
    written: Written
    verification: Verification

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            **self.plan.to_dict(),
            **self.written.to_dict(),
            "verification": self.verification.to_dict(),
        }

    def __str__(self) -> str:
        return fitted(f"{self.written}\n{self.verification}")


def plan_conversion(
    src: str | os.PathLike,
    *,
    target: str = "same",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_class: type | None = None,
    inputs: Callable | None = None,
) -> PlannedConversion:
    """Return the plan for converting `src` and its proof; nothing is written.

    Args:
        src: a model folder with safetensors, in one file or in shards, which is only
            read; or a hub id, whose files are downloaded into the hub's cache; or
            ``"demo:gpt2"``.
        target: ``"same"``: keep the checkpoint's architecture and centre all that
            writes to its residual stream. ``"native"``: write an architecture that uses
            RMSNorm and computes the same, if there is one.
        allow_pickle: read ``pytorch_model.bin`` if there is no safetensors file,
            without running code in it.
        trust_remote_code: run the model code that comes with the folder.
        model_class: the class to load it with, instead of the one its config names.
        inputs: makes keyword arguments of the forward for a model that takes other than
            token ids and pixels.

    Raises:
        ConversionRefused: it cannot be converted so; the message says why.
        ConversionError: this is no whole checkpoint folder.
    """
    check_source("src", src)
    _check(target, model_class, inputs)
    is_native = target == "native"
    folder = folder_of(src, allow_pickle=allow_pickle, weights=is_native)
    source = open_checkpoint(folder, allow_pickle=allow_pickle, weights=is_native)
    with one_thread():
        if is_native:
            return plan_native(source)
        how = Running(trust_remote_code, model_class)
        missing = missing_parameters(folder, how) if source.tensors else []
        proxy = make_proxy(
            folder,
            inputs=inputs,
            trust_remote_code=trust_remote_code,
            model_class=model_class,
        )
        planned = replace(plan_centring(folder, proxy), missing=tuple(missing))
    return _with_note_on_dtypes(planned, source)


def _with_note_on_dtypes(
    planned: PlannedCentring, source: Checkpoint
) -> PlannedCentring:
    """The plan with a note if tensors are stored in a narrower dtype than config.json
    names.
    """
    floats = {
        tensor.dtype
        for tensor in source.tensors.values()
        if tensor.dtype in FLOATS.values()
    }
    narrow = sorted(
        _name(dtype) for dtype in floats if is_narrower(dtype, source.dtype)
    )
    if not narrow:
        return planned
    stored, wide = " and ".join(narrow), _name(source.dtype)
    note = (
        f"config.json says {wide} and tensors are stored in {stored}: those that are changed are written in {wide}; "
        f"to keep {stored}, set dtype to it in the source's config.json first"
    )
    centring = replace(planned.centring, notes=(*planned.centring.notes, note))
    return replace(planned, centring=centring)


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(target, model_class, inputs) -> None:
    """Refuse options that do not go together."""
    if target not in TARGETS:
        raise ConversionRefused(
            f"target={target!r}: choose one of {', '.join(TARGETS)}"
        )
    if target == "native" and model_class:
        raise ConversionRefused(
            "model_class does not go with target='native', which converts causal language models"
        )
    if target == "native" and inputs:
        raise ConversionRefused("inputs goes with target='same' alone: pass prompts")


def _check_texts(texts) -> None:
    if texts is None:
        return
    if isinstance(texts, str) or not all(
        isinstance(text, str) and text.strip() for text in texts
    ):
        raise ConversionRefused(
            f"prompts={texts!r}: pass a list of texts, none of them empty"
        )


def _check_plan(planned, target: str) -> None:
    if planned is None:
        return
    if not isinstance(planned, PlannedConversion):
        raise ConversionRefused(
            f"planned is a {type(planned).__name__}: pass what plan_conversion returned"
        )
    if target == "native" and planned.keeps_shards:
        raise ConversionRefused("planned says how to convert: leave out target")


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    target: str = "same",
    prompts: list[str] | None = None,
    verify: bool | str = True,
    restart: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_class: type | None = None,
    inputs: Callable | None = None,
    planned: PlannedConversion | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Conversion:
    """Convert a LayerNorm checkpoint into one whose norms may be RMSNorms, with the
    same logits.

    LayerNorm of a vector of zero mean is RMSNorm of it (Jiang et al. 2023), so all that
    writes to the residual stream is centred. The result loads without this package and
    computes the same. `patch_model` runs its norms as RMSNorm, as its config.json
    records. The checkpoint streams through: a changed tensor is computed in float64, in
    slices, and rounded once to its own dtype. All other tensors keep their bytes.

    Args:
        src, target, allow_pickle, trust_remote_code, model_class, inputs: as in
        `plan_conversion`.
        dst: the folder to make. It appears whole, at the end. The same call goes on
            with a run that was killed.
        prompts: texts to verify on, if there is a tokenizer.
        verify: run source and result after writing, and publish only what passes. Of a
            large checkpoint a few tokens are run; ``"full"`` runs all texts and
            compares greedy tokens too.
        restart: drop the unfinished conversion of something else into the same DST.
        planned: what `plan_conversion` returned for this source, instead of target.
        progress: called as ``progress(tensors, bytes, total_bytes)`` with the tensors
            and bytes written so far.

    Raises:
        ConversionRefused: the model cannot be converted so.
        ConversionError: source or destination do not allow it; the message says what to
            do. DST does not exist then.
        VerificationFailed: the result does not pass; it stays unpublished, with a
            report.
    """
    check_source("src", src)
    check_destination(dst)
    _check(target, model_class, inputs)
    _check_texts(prompts)
    _check_plan(planned, target)
    destination(local(src), dst)  # refused before anything is downloaded or planned
    folder = folder_of(src, allow_pickle=allow_pickle)
    source = open_checkpoint(folder, allow_pickle=allow_pickle)
    how = Running(trust_remote_code, model_class, inputs, prompts, verify)
    planned = planned or plan_conversion(
        folder,
        target=target,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        model_class=model_class,
        inputs=inputs,
    )
    if verify:
        _check_before_writing(planned, folder, how)
    return _carry_out(planned, source, dst, how, restart, progress)


def _check_before_writing(
    planned: PlannedConversion, folder: Path, how: Running
) -> None:
    """Refuse a source that could not be verified after the writing."""
    if planned.missing:
        # a new random value for it would differ between source and result
        cure = "add what is missing, or pass verify=False"
        raise ConversionError(f"{folder}: has no {and_more(planned.missing)}: {cure}")
    if how.inputs is None:
        tokenizer_of_source(folder, how)


def convert_adapter(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    base: str | os.PathLike,
    converted: str | os.PathLike,
    prompts: list[str] | None = None,
    verify: bool | str = True,
    restart: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_class: type | None = None,
    inputs: Callable | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Conversion:
    """Convert a LoRA adapter of PEFT whose base `convert_checkpoint` has converted.

    LoRA adds ``B A x`` to the output of a linear. If that writes to the residual
    stream, B is centred along its output as the weight was. A trained copy of a whole
    module is centred like the module. `converted` with the result gives the logits of
    `base` with `src`, and `patch_model` runs both as RMSNorm.

    Args:
        src: a folder with adapter_config.json and adapter_model.safetensors, which is
            only read; or a hub id.
        dst: the folder to make, as in `convert_checkpoint`. Its adapter_config.json
            names `converted` as base.
        base: the model that the adapter was trained on: a folder, a hub id, or
            ``"demo:gpt2"``.
        converted: what `convert_checkpoint` made of `base`.
        model_class: the class that the adapter was trained on, if it is not the one
            that the base's config names.
        prompts, restart, allow_pickle, trust_remote_code, inputs, progress: as in
        `convert_checkpoint`.
        verify: run both pairs through PEFT, if it is installed, and publish only what
            passes.

    Raises:
        ConversionRefused: the adapter cannot be converted exactly; the message says
            which tensor and why.
        ConversionError, VerificationFailed: as in `convert_checkpoint`.
    """
    for name, source in (("src", src), ("base", base), ("converted", converted)):
        check_source(name, source)
    check_destination(dst)
    destination(local(src), dst)  # refused before anything is downloaded or planned
    folder = folder_of(src, allow_pickle=allow_pickle)
    adapter = open_checkpoint(folder, allow_pickle=allow_pickle, adapter=True)
    base, converted = folder_of(base, allow_pickle=allow_pickle), folder_of(converted)
    with one_thread():
        proxy = make_proxy(
            base,
            trust_remote_code=trust_remote_code,
            model_class=model_class,
            inputs=inputs,
        )
        planned = plan_adapter(
            adapter, open_checkpoint(base, allow_pickle=allow_pickle), converted, proxy
        )
    how = Running(trust_remote_code, model_class, inputs, prompts, verify)
    return _carry_out(planned, adapter, dst, how, restart, progress)


def _carry_out(
    planned: PlannedConversion,
    source: Checkpoint,
    dst,
    how: Running,
    restart: bool,
    progress: Callable | None,
) -> Conversion:
    # The verdict if DST appeared in an earlier run, which was killed while it cleaned
    # up.
    verdict = Verification(True, "verified by the run that wrote it")

    def check(folder: Path) -> None:
        nonlocal verdict
        verdict = planned.verify(source.folder, folder, how)
        if not verdict.passed:
            raise VerificationFailed(
                f"{dst}: not published, the result fails verification\n{verdict}",
                verdict,
            )
        planned.describe(folder, verdict)

    layout, config = planned.result(source)
    plan = json.dumps(planned.to_dict())
    resumed = write_checkpoint(
        source,
        dst,
        layout,
        config,
        plan=plan,
        check=check,
        restart=restart,
        progress=progress,
    )
    return Conversion(planned, Written.of(dst, source, layout, resumed), verdict)
