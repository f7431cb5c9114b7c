"""`plan_conversion` and `convert_checkpoint`: the way into conversion, for Python and for
``hf-rmsnorm convert``.

A conversion in order: `folders.py` and `checkpoint/source.py` open the source;
`targets/centred.py` (or `native.py`) plans it on the small random model of `proxy/`;
`checkpoint/write.py` writes the result into the folder of `destination.py`; `verify/`
compares it with the source; `publish` makes that folder DST.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..converted.record import RECORD_KEY, TRAINED_AS_RMS
from ..paths import fitted
from ..sources import Location
from .checkpoint.source import FLOATS, Checkpoint, open_checkpoint
from .checkpoint.write import write_checkpoint
from .destination import publish, working_folder
from .errors import ConversionError, ConversionRefused, clear_errors
from .folders import CONFIG, downloaded, locate
from .loading import class_of, missing_parameters, tokenizer_of
from .options import ConversionOptions
from .proxy.model import make_proxy
from .proxy.run import and_more
from .targets.centred import plan_centring
from .targets.native import plan_native
from .targets.planned import PlannedConversion
from .tensors import one_thread, widened
from .verify.compare import NOT_RUN, Verification, VerificationFailed, verify_draft

logger = logging.getLogger(__name__)


@clear_errors()
def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    planned: PlannedConversion | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    **options,
) -> Conversion:
    """Convert a LayerNorm checkpoint into one whose norms may be RMSNorms, with the
    same logits.

    LayerNorm of a vector of zero mean is RMSNorm of it (Jiang et al. 2023), so all that
    writes to the residual stream is centred. The result loads without this package and
    computes the same. `patch_model` runs its norms as RMSNorm, as its config.json
    records. The checkpoint streams through: a changed tensor is computed in float64, in
    slices, and rounded once to its own dtype. All other tensors keep their bytes.

    Args:
        src: as in `plan_conversion`.
        dst: the folder to make. It appears whole, at the end. After a kill it is not
            there, and the same call starts again.
        planned: what `plan_conversion` returned for this source, instead of target. One
            that was made before a hub's weights were there is made again.
        progress: called as ``progress(tensors, bytes, total_bytes)`` with the tensors
            and bytes written so far.
        options: those of `ConversionOptions`.

    Raises:
        ConversionRefused: the model cannot be converted so.
        ConversionError: source or destination do not allow it; the message says what to
            do. DST does not exist then.
        VerificationFailed: the result does not pass; it stays unpublished.
    """
    chosen = ConversionOptions(**options)
    if not isinstance(planned, PlannedConversion | None):
        what = f"planned is of type {type(planned).__name__}"
        raise ConversionRefused(f"{what}: pass what plan_conversion returned")
    if planned is not None and chosen.is_native:
        raise ConversionRefused("planned says how to convert: leave out target")
    location = locate(src)
    dst = Path(os.path.abspath(dst))
    with working_folder(location, dst) as draft:
        source = _opened(location, chosen)
        if planned is None or planned.missing is None:
            planned = _planned(source, chosen)
        if chosen.verify:
            _check_can_run(source, planned, chosen)
        logger.info("%s", fitted(str(planned)))
        with one_thread():
            tensors = planned.tensors(source)
            (draft / CONFIG).write_text(planned.config(source), encoding="utf-8")
            shards = write_checkpoint(
                source, tensors, planned.metadata, draft, chosen.parsed_max_shard_size, progress
            )  # fmt: skip
        verification = verify_draft(source, draft, chosen) if chosen.verify else NOT_RUN
        if not verification.passed:
            raise VerificationFailed(
                f"{dst}: not published, the result fails verification\n{verification}",
                verification,
            )
        source.check_unchanged()
        planned.describe(draft, verification)
        publish(draft, dst)
    used = {key for tensor in tensors.values() for key in tensor.keys}
    written = Written(
        dst=dst,
        shards=shards,
        tensors=len(tensors),
        bytes=sum(shards.values()),
        unused=tuple(sorted(source.tensors.keys() - used)),
        not_copied=source.not_copied,
    )
    return Conversion(planned, written, verification)


@clear_errors()
def plan_conversion(src: str | os.PathLike, **options) -> PlannedConversion:
    """Return the plan for converting `src` and its proof; nothing is written.

    Args:
        src: a model folder with safetensors, in one file or in shards, which is only
            read; or a hub id, whose files are downloaded into the hub's cache; or
            ``"demo:gpt2"``.
        options: those of `ConversionOptions`.

    Raises:
        ConversionRefused: it cannot be converted so; the message says why.
        ConversionError: this is no whole checkpoint folder.
    """
    chosen = ConversionOptions(**options)
    # the plan of a hub's model needs no weights
    source = _opened(locate(src), chosen, needs_weights=chosen.is_native)
    return _planned(source, chosen)


def _opened(
    location: Location, options: ConversionOptions, needs_weights: bool = True
) -> Checkpoint:
    """The source in its own folder; or in the hub's cache, without weights unless these
    are needed.
    """
    folder = downloaded(location, options.allow_pickle, needs_weights)
    return open_checkpoint(folder, options.allow_pickle, needs_weights)


def _planned(source: Checkpoint, options: ConversionOptions) -> PlannedConversion:
    with one_thread():
        if options.is_native:
            return plan_native(source)
        record = source.config.get(RECORD_KEY) or {}
        if record.get("computes") == TRAINED_AS_RMS:
            raise ConversionRefused(
                f"{source.folder}: by the record in its config.json this is an RMSNorm "
                'model already, trained as one: patch_model runs it; target="native" '
                "may change its architecture"
            )
        missing = None
        if source.tensors:
            missing = missing_parameters(source.folder, options)
        proxy = make_proxy(
            source.folder,
            inputs=options.inputs,
            trust_remote_code=options.trust_remote_code,
            model_class=options.model_class,
            to_convert=True,
        )
        return plan_centring(source, proxy, missing, _notes_on_dtypes(source))


def _notes_on_dtypes(source: Checkpoint) -> Iterator[str]:
    """A note if tensors are stored in a narrower dtype than config.json names."""
    dtypes = {tensor.dtype for tensor in source.tensors.values()}.intersection(FLOATS)
    narrow = [str(dtype) for dtype in dtypes if widened(dtype, source) != dtype]
    if narrow:
        stored = " and ".join(sorted(narrow)).replace("torch.", "")
        wide = str(source.dtype).removeprefix("torch.")
        yield (
            f"config.json says {wide} and tensors are stored in {stored}: those that "
            f"are changed are written in {wide}; to keep {stored}, set dtype to it in "
            "the source's config.json first"
        )


def _check_can_run(
    source: Checkpoint, planned: PlannedConversion, options: ConversionOptions
) -> None:
    """Refuse a source that could not be compared with its result."""
    folder = source.folder
    if planned.missing:
        # a new random value for it would differ between source and result
        raise ConversionError(
            f"{folder}: has no {and_more(planned.missing)}: add what is missing, or "
            "pass verify=False"
        )
    if options.inputs is None:  # refused if it does not load
        tokenizer_of(folder, class_of(folder, options), options)


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


@dataclass(frozen=True)
class Written:
    """The folder that a conversion wrote.

    Args:
        shards: for each file name, the bytes of its tensors.
        unused: tensors of the source that no tensor of the result is made from.
        not_copied: files and folders of the source that the result does not have, and
            why.
    """

    dst: Path
    shards: dict[str, int]
    tensors: int
    bytes: int
    unused: tuple[str, ...]
    not_copied: dict[str, str]

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {**asdict(self), "dst": str(self.dst)}

    def __str__(self) -> str:
        lines = [f"{self.dst}: {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB"]
        if self.unused:
            lines.append(
                f"tensors that the result does not need: {', '.join(self.unused)}"
            )
        for reason in dict.fromkeys(self.not_copied.values()):
            names = [name for name, why in self.not_copied.items() if why == reason]
            lines.append(f"not copied: {', '.join(names)} ({reason})")
        return "\n".join(lines)
