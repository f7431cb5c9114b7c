"""`HfRmsNormCallback`: patches the model of a Trainer."""

import inspect
import sys
import warnings
import weakref

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..converted.finetuned import TRAINED, Recentre, mark_as_rms
from ..converted.follow import conversion_of
from ..ops.backend import runs_on, where_norms_run
from ..ops.first_use import summary
from ..patching import PatchReport, patch_model
from ..patching.api import check_options
from ..paths import did_you_mean

# whose level and handlers are Transformers'
logger = logging.get_logger("transformers.integrations.hf_rmsnorm")
# of the callback: those of `patch_model`, and two more
OPTIONS = [*inspect.signature(patch_model).parameters, "recentre", "train_as_rms"]
OPTIONS.remove("model")


class HfRmsNormCallback(TrainerCallback):
    """Patches the model of a `transformers.Trainer`, or of one derived from it as TRL's
    are.

    The model is patched when the Trainer has been made, before it is wrapped or
    compiled. A model of `model_init` is patched when its training begins. A converted
    model is checked again after a checkpoint was resumed. No model is patched twice,
    and the Trainer saves the bytes and names of the unpatched model. Norms that
    ``use_liger_kernel`` replaces stay Liger's, with a warning.

    For each Trainer the main process prints one line on stderr: how many norms were
    swapped, and where they run.

    The callback does not see a model that is assigned to ``trainer.model`` later, or a
    reference model of TRL: call `patch_model` on these.

    Args:
        recentre: for a converted model: centre its residual weights after each
            optimizer step, so that LayerNorm and RMSNorm stay equal (`Recentre`).
        train_as_rms: for a converted model: record in its config that it is trained as
            RMSNorm (`train_as_rms`). A warning at each save: a plain load computes
            LayerNorm.
        options: keyword arguments of `patch_model`. Options that are not named stay as
            an earlier patch has set them.

    Attributes:
        report: of the last patch; also logged, at level INFO, once for equal ones.

    Raises:
        TypeError: an option that `patch_model` does not know, or a flag that is not a
            bool.
        ValueError: recentre and train_as_rms together; a value that `patch_model` does
            not know; and, from the Trainer, what those two and `patch_model` raise.

    Example:
        >>> from hf_rmsnorm import HfRmsNormCallback
        >>> trainer = Trainer(model, args, callbacks=[HfRmsNormCallback()])  # doctest: +SKIP
    """

    def __init__(
        self, *, recentre: bool = False, train_as_rms: bool = False, **options
    ):
        if recentre and train_as_rms:
            raise ValueError(
                "recentre and train_as_rms contradict each other: choose one"
            )
        for name in options:
            if name not in OPTIONS:
                raise TypeError(
                    "HfRmsNormCallback takes the arguments of patch_model, and there is "
                    f"no {name!r}{did_you_mean(name, OPTIONS)}"
                )
        flags = dict(options, recentre=recentre, train_as_rms=train_as_rms)
        for name in ("include", "exclude"):
            flags.pop(name, None)
        check_options(**flags)
        self.report: PatchReport | None = None
        self._recentre_wanted = recentre
        self._trained_as_rms = train_as_rms
        self._options = options
        self._recentre: Recentre | None = None
        self._saves_trained = False
        self._patched: weakref.ref[torch.nn.Module] | None = None
        self._logged = self._said = ""
        self._compared = False

    def __getstate__(self):
        # A search by Ray pickles the Trainer with its callbacks; the model is another
        # one there.
        return {**self.__dict__, "_patched": None, "_recentre": None}

    def on_init_end(self, args, state, control, model=None, **kwargs):
        self._said = ""  # another Trainer says it again
        self._prepare(args, state, model)

    def on_train_begin(
        self, args, state, control, model=None, optimizer=None, **kwargs
    ):
        self._prepare(args, state, model, optimizer)
        if any("liger_kernel" in norm.reason for norm in self.report.skipped):
            logger.warning(
                "use_liger_kernel took norms: liger_kernel_config={'rms_norm': False, "
                "'rope': False} keeps its other kernels"
            )
        conversion = conversion_of(model)
        as_rms = any(norm.converted for norm in self.report.swapped)
        self._saves_trained = as_rms and conversion.trained
        if as_rms and not (self._recentre_wanted or conversion.trained):
            logger.warning(
                "this converted model trains as RMSNorm, and what is saved loads as "
                "LayerNorm: another function where its residual weights were trained; "
                "give HfRmsNormCallback recentre=True or train_as_rms=True"
            )

    def on_step_end(self, args, state, control, **kwargs):
        """Print the result of the first step's comparisons, once."""
        line = summary(args.device)
        if line and not self._compared and state.is_world_process_zero:
            print(f"hf_rmsnorm: {line}", file=sys.stderr)
        self._compared = True

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._recentre is not None:
            self._recentre()

    def on_save(self, args, state, control, **kwargs):
        if self._saves_trained:
            warnings.warn(TRAINED, stacklevel=2)

    def on_train_end(self, args, state, control, **kwargs):
        self._recentre = None
        self.on_save(args, state, control)  # it may be saved now, which is no event

    def _prepare(self, args, state, model: torch.nn.Module, optimizer=None) -> None:
        """Patch a model, unless it is the one that was patched last, and say so."""
        if self._trained_as_rms:
            mark_as_rms(model, trained=state.global_step > 0)
        elif self._recentre_wanted:
            self._recentre = Recentre(model)  # what has moved before is centred
            if optimizer is not None:
                self._recentre.check_optimizer(optimizer)
        before = self._patched and self._patched()
        if before not in model.modules():
            self._patch(model, args.use_liger_kernel)
        elif args.use_liger_kernel or conversion_of(before) is not None:
            self._patch(before, args.use_liger_kernel)
        line = swapped_line(self.report, args.device)
        if line != self._said and state.is_world_process_zero:
            self._say(line)
        self._said = line

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr)

    def _patch(self, model: torch.nn.Module, liger: bool) -> None:
        self.report = self._swap(model, liger)
        self._patched = weakref.ref(model)
        if str(self.report) == self._logged:
            return
        self._logged = str(self.report)
        logger.info(self._logged)
        conversion = conversion_of(model)
        if conversion is not None and conversion.why_not:
            logger.warning(
                f"each norm that the conversion recorded {conversion.why_not}"
            )

    def _swap(self, model: torch.nn.Module, liger: bool) -> PatchReport:
        with warnings.catch_warnings():
            if liger:  # it may have them all, which is said where training begins
                warnings.filterwarnings("ignore", "patch_model changed no norm")
            return patch_model(model, **self._options)


def swapped_line(report: PatchReport, device: torch.device) -> str:
    """One line: how many norms were swapped, and where they run; `device` is the
    Trainer's.
    """
    records = report.devices
    if {record["device"] for record in records} == {"cpu"}:
        # a sharded model is put on its GPU later
        records = [runs_on(device)]
    places = [f"runs on {place}" for place in where_norms_run(records)]
    return "; ".join([f"hf_rmsnorm: {report.counts}", *places])
