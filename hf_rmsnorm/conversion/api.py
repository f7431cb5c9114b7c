"""The way into conversion: `plan_conversion`, `convert_checkpoint` and, for adapters of PEFT, `convert_adapter`."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory

from ..paths import fitted
from .checkpoint.layout import Layout
from .checkpoint.source import FLOATS, Checkpoint, open_checkpoint
from .checkpoint.write import write_checkpoint
from .folders import check_destination, check_source, destination, folder_of, local
from .plan import ConversionRefused
from .proxy.model import make_proxy
from .targets.adapter import plan_adapter
from .targets.centred import PlannedCentring, PlannedConversion, plan_centring
from .targets.fold import with_folds
from .targets.native import plan_native
from .tensors import Stored, is_narrower
from .verify.folder import Verification, VerificationFailed
from .verify.pair import Running, look_first

TARGETS = ("same", "native")


@dataclass(frozen=True)
class Written:
    """What was written.

    Args:
        shards: for each file name, the bytes of its tensors.
        unused: tensors of the source that nothing is made from.
        not_copied: files and folders of the source that are no part of the result, and why.
        resumed: how many shards a run before this one had written.
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
        """What a layout of a source came to."""
        entries = {name: entry for shard in layout.shards.values() for name, entry in shard.entries.items()}
        there = source.tensors.keys()
        made = {name: entry.tensor for name, entry in entries.items()}
        copies = {name for name, tensor in made.items() if isinstance(tensor, Stored) and tensor.is_copy}
        used = set().union(*(tensor.keys() for tensor in made.values()))
        keeps = set(source.metadata) == set(layout.shards)
        changed = tuple(name for name in made if name in there and name not in copies) if keeps else ()
        added = tuple(sorted(made.keys() - there)) if keeps else ()
        size = sum(entry.nbytes for entry in entries.values())
        unused = tuple(sorted(there - used))
        home, shards = Path(os.path.abspath(dst)), {name: shard.nbytes for name, shard in layout.shards.items()}
        return cls(home, shards, len(made), size, changed, added, unused, source.not_copied, resumed)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("changed", "added", "unused")}
        sizes = {"tensors_written": self.tensors, "bytes": self.bytes, "shards_resumed": self.resumed}
        return {"dst": str(self.dst), **sizes, **lists, "not_copied": self.not_copied}

    def __str__(self) -> str:
        changes = f", {len(self.changed)} changed, {len(self.added)} added" if self.changed or self.added else ""
        lines = [f"{self.dst}: {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB{changes}"]
        if self.resumed:
            lines.append(f"{self.resumed} of {len(self.shards)} shards were there from a run before this one")
        if self.unused:
            lines.append(f"tensors of no use to the result: {', '.join(self.unused)}")
        for reason in dict.fromkeys(self.not_copied.values()):
            names = [name for name, why in self.not_copied.items() if why == reason]
            lines.append(f"not copied: {', '.join(names)} ({reason})")
        return "\n".join(lines)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Args:
        plan: what was planned and proven, as it was carried out.
        written: the folder, and what is in it.
        verification: source and result compared, before the folder appeared.
    """

    plan: PlannedConversion
    written: Written
    verification: Verification

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {**self.plan.to_dict(), **self.written.to_dict(), "verification": self.verification.to_dict()}

    def __str__(self) -> str:
        return fitted(f"{self.written}\n{self.verification}")


def plan_conversion(
    src: str | os.PathLike,
    *,
    target: str = "same",
    fold_affine: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_class: type | None = None,
    inputs: Callable | None = None,
) -> PlannedConversion:
    """What converting `src` would do, and the proof that it is exact; nothing is written.

    Args:
        src: a model folder with safetensors, in one file or in shards, which is only read; or a hub id, whose files are
            downloaded into the hub's cache; or ``"demo:gpt2"``.
        target: ``"same"``: the checkpoint's own architecture; all that writes to its residual stream is centred.
            ``"native"``: an architecture that uses RMSNorm and computes the same, where there is one.
        fold_affine: fold the norms' weights and biases into the linears that read them, where that is exact.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file, without running code in it.
        trust_remote_code: run the model code that comes with the folder.
        model_class: the class to load it with, instead of the one its config names.
        inputs: makes keyword arguments of the forward for a model, where it takes other than token ids and pixels.

    Raises:
        ConversionRefused: it cannot be converted so; the message says why.
        ConversionError: this is no whole checkpoint folder.
    """
    check_source("src", src)
    _check(target, model_class, inputs)
    is_native = target == "native"
    src = folder_of(src, allow_pickle=allow_pickle, weights=is_native)
    source = open_checkpoint(src, allow_pickle=allow_pickle, weights=is_native)
    if is_native:
        return plan_native(src, fold_affine=fold_affine, allow_pickle=allow_pickle)
    if source.tensors:
        look_first(src, Running(trust_remote_code, model_class, verify=False))
    proxy = make_proxy(src, inputs=inputs, trust_remote_code=trust_remote_code, model_class=model_class)
    planned = _with_note_on_dtypes(plan_centring(src, proxy), source)
    return with_folds(planned, proxy) if fold_affine else planned


def _with_note_on_dtypes(planned: PlannedCentring, source: Checkpoint) -> PlannedCentring:
    """The plan with a note where tensors are stored in a narrower dtype than config.json names."""
    floats = {tensor.dtype for tensor in source.tensors.values() if tensor.dtype in FLOATS.values()}
    narrow = sorted(_name(dtype) for dtype in floats if is_narrower(dtype, source.dtype))
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
        raise ConversionRefused(f"target={target!r}: choose one of {', '.join(TARGETS)}")
    if target == "native" and model_class:
        raise ConversionRefused("model_class does not go with target='native', which converts causal language models")
    if target == "native" and inputs:
        raise ConversionRefused("inputs goes with target='same' alone: pass prompts")


def _check_texts(name: str, texts) -> None:
    if texts is not None and (isinstance(texts, str) or not all(isinstance(t, str) and t.strip() for t in texts)):
        raise ConversionRefused(f"{name}={texts!r}: pass a list of texts, none of them empty")


def _check_shard_size(size: int | str | None, keeps_shards: bool) -> None:
    if size is None:
        return
    if keeps_shards:
        raise ConversionRefused("max_shard_size goes with target='native': here shards stay the source's")
    try:
        split_state_dict_into_shards_factory({"w": 1}, get_storage_size=int, filename_pattern="{suffix}",
                                             max_shard_size=size)  # fmt: skip
        fits = not isinstance(size, int) or size > 0
    except (ValueError, TypeError):
        fits = False
    if not fits:
        raise ConversionRefused(f"max_shard_size={size!r}: pass a number of bytes, or a size like '5GB'")


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    target: str = "same",
    fold_affine: bool = False,
    prompts: list[str] | None = None,
    verify: bool | str = True,
    max_shard_size: int | str | None = None,
    restart: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_class: type | None = None,
    inputs: Callable | None = None,
    planned: PlannedConversion | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Conversion:
    """Convert a LayerNorm checkpoint into one whose norms may be RMSNorms, with the same logits.

    LayerNorm of a vector of zero mean is RMSNorm of it (Jiang et al. 2023), so everything that writes to the residual
    stream is centred. The result loads without this package and computes the same; `patch_model` runs its norms as
    RMSNorm, as its config.json records. The checkpoint streams through: tensors are computed in float64, in pieces, and
    rounded once to their own dtype; what is not touched keeps its bytes.

    Args:
        src, target, fold_affine, allow_pickle, trust_remote_code, model_class, inputs: as in
            `plan_conversion`.
        dst: the folder to make. It appears whole, at the end; a run that was killed is taken up by the same call.
        prompts: texts to verify on, where there is a tokenizer.
        verify: run source and result after writing, and publish only what passes. Of a large checkpoint a few tokens
            are run; ``"full"`` runs all texts and greedy tokens.
        max_shard_size: bytes, or "5GB" and the like; with ``target="native"`` alone, as shards stay the source's
            otherwise.
        restart: drop the unfinished conversion of something else into the same DST.
        planned: what `plan_conversion` returned for this source, instead of target and fold_affine.
        progress: called as ``progress(tensors, bytes, total_bytes)`` with what is done so far.

    Raises:
        ConversionRefused: the model cannot be converted so.
        ConversionError: source or destination do not allow it; the message says what to do. DST does not exist then.
        VerificationFailed: what was written does not pass; it stays unpublished, beside a report.
    """
    check_source("src", src)
    check_destination(dst)
    _check(target, model_class, inputs)
    _check_texts("prompts", prompts)
    if planned is not None and not isinstance(planned, PlannedConversion):
        raise ConversionRefused(f"planned is a {type(planned).__name__}: pass what plan_conversion returned")
    other = planned is not None and target == "native" and planned.keeps_shards
    if planned is not None and (other or fold_affine):
        raise ConversionRefused("planned says how to convert: leave out target and fold_affine")
    keeps_shards = planned.keeps_shards if planned is not None else target == "same"
    _check_shard_size(max_shard_size, keeps_shards)
    destination(local(src), dst)  # refused before anything is downloaded or planned
    src = folder_of(src, allow_pickle=allow_pickle)
    source = open_checkpoint(src, allow_pickle=allow_pickle)
    planned = planned or plan_conversion(
        src, target=target, fold_affine=fold_affine, allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code, model_class=model_class, inputs=inputs,
    )  # fmt: skip
    how = Running(trust_remote_code, model_class, inputs, prompts, verify)
    if verify:
        look_first(src, how)
    return _carry_out(planned, source, dst, how, max_shard_size, restart, progress)


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
    """Convert a LoRA adapter of PEFT that was trained on a checkpoint which `convert_checkpoint` has converted.

    LoRA adds ``B A x`` to what a linear computes. Where that writes to the residual stream, B is centred along its
    output as the weight was; full tensors that the adapter brings are centred like those they stand in for. `converted`
    with the result gives the logits of `base` with `src`, and `patch_model` runs both as RMSNorm.

    Args:
        src: a folder with adapter_config.json and adapter_model.safetensors, which is only read; or a hub id.
        dst: the folder to make, as in `convert_checkpoint`. Its adapter_config.json names `converted` as base.
        base: the model that the adapter was trained on: a folder, a hub id, or ``"demo:gpt2"``.
        converted: what `convert_checkpoint` made of `base`.
        model_class: the class that the adapter was trained on, where it is not the one that the base's config names.
        prompts, restart, allow_pickle, trust_remote_code, inputs, progress: as in `convert_checkpoint`.
        verify: run both pairs through PEFT, where it is installed, and publish only what passes.

    Raises:
        ConversionRefused: the adapter cannot be converted exactly; the message says which tensor and why.
        ConversionError, VerificationFailed: as in `convert_checkpoint`.
    """
    for name, source in (("src", src), ("base", base), ("converted", converted)):
        check_source(name, source)
    check_destination(dst)
    destination(local(src), dst)  # refused before anything is downloaded or planned
    src = folder_of(src, allow_pickle=allow_pickle)
    source = open_checkpoint(src, allow_pickle=allow_pickle, adapter=True)
    base, converted = folder_of(base, allow_pickle=allow_pickle), folder_of(converted)
    proxy = make_proxy(base, trust_remote_code=trust_remote_code, model_class=model_class, inputs=inputs)
    planned = plan_adapter(src, base, converted, proxy, allow_pickle=allow_pickle)
    how = Running(trust_remote_code, model_class, inputs, prompts, verify)
    return _carry_out(planned, source, dst, how, None, restart, progress)


def _carry_out(
    planned: PlannedConversion, source: Checkpoint, dst, how: Running, max_shard_size, restart, progress
) -> Conversion:
    # What stands where DST appeared in a run before this one, which was killed while it cleaned up.
    verdict = Verification(True, "verified by the run that wrote it")

    def check(folder: Path) -> None:
        nonlocal planned, verdict
        verdict, planned = planned.verify(source.folder, folder, how)
        if not verdict.passed:
            raise VerificationFailed(f"{dst}: not published, the result fails verification\n{verdict}", verdict)
        planned.describe(folder, verdict)

    layout, config = planned.result(source, max_shard_size)
    plan = json.dumps(planned.to_dict())
    resumed = write_checkpoint(source, dst, layout, config, plan=plan, check=check, restart=restart, progress=progress)
    return Conversion(planned, Written.of(dst, source, layout, resumed), verdict)
