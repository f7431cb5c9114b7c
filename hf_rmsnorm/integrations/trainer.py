"""`HfRmsNormCallback`: a patch for whatever model a Trainer trains, at the moment that suits it."""

import inspect
import sys
import warnings
import weakref

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..patching import PatchReport, patch_model
from ..patching.api import check_options, repatch_model
from ..patching.converted import conversion_of
from .finetuned import TRAINED, Recentre, mark_as_rms

logger = logging.get_logger("transformers.integrations.hf_rmsnorm")  # whose level and handlers are Transformers'


class HfRmsNormCallback(TrainerCallback):
    """Patches the model of a `transformers.Trainer`, or of one derived from it as TRL's are.

    The model is patched when the Trainer has been made, so before it is wrapped or compiled and also where it only
    evaluates or predicts; and one that `model_init` makes, for `train` or for a trial of `hyperparameter_search`, when
    its training begins. Of a converted model it is asked again after a checkpoint was resumed whether its writers are
    centred. A model is never patched twice, and what the Trainer saves has the bytes and names of the unpatched model.
    Norms that ``use_liger_kernel`` replaces when training begins are left to Liger, and a warning says so.

    Not seen: a model put into ``trainer.model`` by hand, and a reference model of TRL's: `patch_model` serves both.

    Args:
        recentre: of a converted model, centre after each optimizer step what writes to its residual stream, so that
            LayerNorm and RMSNorm stay equal (`Recentre`).
        train_as_rms: of a converted model, record in its config that it is trained as RMSNorm (`train_as_rms`). What
            a plain load of it computes is warned of when it is saved and at the end.
        options: keyword arguments of `patch_model`. Where you have patched the model before, what they do not name
            stays as it is.

    Attributes:
        report: of the last patch; also logged, at level INFO, once for equal ones.

    Raises:
        TypeError: an option that `patch_model` does not know.
        ValueError: recentre and train_as_rms together; an unknown numerics; and, from the Trainer, what
            those two and `patch_model` raise.

    Example:
        >>> from hf_rmsnorm import HfRmsNormCallback
        >>> trainer = Trainer(model, args, callbacks=[HfRmsNormCallback()])  # doctest: +SKIP
    """

    def __init__(self, *, recentre: bool = False, train_as_rms: bool = False, **options):
        if recentre and train_as_rms:
            raise ValueError("recentre and train_as_rms contradict each other: choose one")
        try:
            inspect.signature(patch_model).bind(None, **options)
        except TypeError as error:
            raise TypeError(f"HfRmsNormCallback takes the arguments of patch_model: {error}") from None
        check_options(**options)
        self.report: PatchReport | None = None
        self._recentre_wanted, self._trained_as_rms, self._options = recentre, train_as_rms, options
        self._recentre: Recentre | None = None
        self._saves_trained = False
        self._patched: weakref.ref[torch.nn.Module] | None = None
        self._logged = ""

    def __getstate__(self):
        # A search by Ray pickles the Trainer with its callbacks; the model is another one there.
        return {**self.__dict__, "_patched": None, "_recentre": None}

    def on_init_end(self, args, state, control, model=None, **kwargs):
        self._patch(model, resumed=False)

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._patch(model, resumed=state.global_step > 0, again=args.use_liger_kernel)
        if args.use_liger_kernel and any("liger_kernel" in norm.reason for norm in self.report.skipped):
            cure = "liger_kernel_config={'rms_norm': False} keeps its other kernels"
            logger.warning(f"use_liger_kernel took norms: {cure}")
        if self._recentre_wanted:
            self._recentre = Recentre(model)
            if optimizer is not None:
                self._recentre.check_optimizer(optimizer)
        conversion = conversion_of(model)
        as_rms = any(norm.converted for norm in self.report.swapped)
        self._saves_trained = as_rms and conversion.trained
        if as_rms and not (self._recentre_wanted or conversion.trained):
            what = "this converted model trains as RMSNorm, and what is saved loads as LayerNorm"
            cure = "give HfRmsNormCallback recentre=True or train_as_rms=True"
            logger.warning(f"{what}: another function where its writers were trained; {cure}")

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._recentre is not None:
            self._recentre()

    def on_save(self, args, state, control, **kwargs):
        if self._saves_trained:
            warnings.warn(TRAINED, stacklevel=2)

    def on_train_end(self, args, state, control, **kwargs):
        self._recentre = None
        self.on_save(args, state, control)  # it may be saved now, which is no event

    def _patch(self, model: torch.nn.Module, resumed: bool, again: bool = False) -> None:
        if self._trained_as_rms:
            mark_as_rms(model, trained=resumed)
        elif self._recentre_wanted:
            Recentre(model)  # what has moved before is centred
        before = self._patched and self._patched()
        if before is not None and any(module is before for module in model.modules()):
            if conversion_of(before) is None and not again:
                return
            model = before
        with warnings.catch_warnings():
            if again:  # Liger may have them all, which is said where training begins
                warnings.filterwarnings("ignore", "patch_model changed no norm")
            if before is model:  # other weights may have been loaded since
                repatch_model(model)
            self.report = patch_model(model, **self._options)
        self._patched = weakref.ref(model)
        if str(self.report) != self._logged:
            self._logged = str(self.report)
            logger.info(self._logged)
            conversion = conversion_of(model)
            if conversion is not None and conversion.doubt:
                logger.warning(f"each norm that the conversion recorded {conversion.doubt}")


class TellingCallback(HfRmsNormCallback):
    """`HfRmsNormCallback` for who edits a YAML: says on stderr, in one line of one process, what was swapped."""

    def on_init_end(self, args, state, control, **kwargs):
        super().on_init_end(args, state, control, **kwargs)
        if state.is_world_process_zero:
            print(f"hf_rmsnorm: {str(self.report).splitlines()[0]}", file=sys.stderr)
