"""The public names, for type checkers. `hf_rmsnorm/__init__.py` has the same list."""

from .conversion import convert_checkpoint as convert_checkpoint
from .conversion import plan_conversion as plan_conversion
from .converted.finetuned import Recentre as Recentre
from .converted.finetuned import train_as_rms as train_as_rms
from .formula import NormSpec as NormSpec
from .integrations.trainer import HfRmsNormCallback as HfRmsNormCallback
from .ops import layer_norm as layer_norm
from .ops import rms_norm as rms_norm
from .ops import use_backend as use_backend
from .ops.settings import settings as settings
from .patching import PatchReport as PatchReport
from .patching import count_launches as count_launches
from .patching import is_patched as is_patched
from .patching import patch_model as patch_model
from .patching import patched as patched
from .patching import unpatch_model as unpatch_model
from .verification import EquivalenceReport as EquivalenceReport
from .verification import verify_equivalence as verify_equivalence

__version__: str
