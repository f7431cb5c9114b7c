"""The proof of a plan: carried out on the twin's own checkpoint, loaded again, and run as LayerNorm and as RMSNorm."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace

import torch

from ..checkpoint.expressions import computed
from ..checkpoint.steps import planned_tensors
from ..checkpoint.values import Values
from ..plan import CentringPlan, ConversionRefused
from .gauge import noting_means
from .keys import named_as_stored, saved_tensors
from .layer_norms import find_layer_norms
from .run import hooked, quiet, run
from .twin import Twin, give_weights, new_model

BOUND = 1e-12


@dataclass(frozen=True)
class ProofReport:
    """How far a converted twin is from the original, everything in float64.

    Args:
        model_class: of the twin.
        stock: max |difference| of the outputs with the model's own LayerNorms, over the largest.
        rms: the same with RMSNorms wherever the plan says so.
        norms: how many norms became RMSNorms, and how many there are.
        means: path -> largest |mean| / RMS of a row that enters the norm there, after the conversion.
    """

    model_class: str
    stock: float
    rms: float
    norms: tuple[int, int]
    means: dict[str, float] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Both differences are within 1e-12 of the scale."""
        return self.stock <= BOUND and self.rms <= BOUND

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {"passed": self.passed, "stock": self.stock, "rms": self.rms, "norms": list(self.norms)}

    def __str__(self) -> str:
        verdict = "proven" if self.passed else "NOT equal"
        return (
            f"{self.model_class}: {verdict}, {self.norms[0]} of {self.norms[1]} norms as RMSNorm; "
            f"float64 outputs differ by {self.stock:.1e} (LayerNorm) and {self.rms:.1e} (RMSNorm) of their scale"
        )


def at_twin_size(plan: CentringPlan, twin: Twin) -> CentringPlan:
    """The plan with blocks as long as the twin's."""
    here = {there: n for n, there in twin.widths.items()}
    return replace(plan, centre=tuple(replace(c, block=here[c.block]) for c in plan.centre))


@torch.no_grad()
def prove(plan: CentringPlan, twin: Twin) -> ProofReport:
    """Carry the plan out on a checkpoint of the twin, load it with the stock class, and compare the outputs.

    Args:
        plan: what `discover` found on this twin.

    Returns:
        A report; its `passed` is the verdict.

    Raises:
        ConversionRefused: the plan does not fit the checkpoint, or the result does not load.
    """
    cls = type(twin.model)
    original = new_model(cls, twin.config)
    give_weights(original, seed=3)
    tensors = saved_tensors(original)
    original = load_tensors(cls, twin.config, tensors)
    own = named_as_stored(at_twin_size(plan, twin), set(tensors), cls.base_model_prefix)
    config = copy.deepcopy(twin.config)
    for name, value in plan.config.items():
        setattr(config, name, value)
    values = Values(tensors)
    made = computed(planned_tensors(own, values, twin.name), values)
    converted = load_tensors(cls, config, made)
    expected = run(original, twin.inputs)
    norms, _ = find_layer_norms(converted, twin.inputs)
    chosen = {n.path for n in plan.norms if n.becomes_rms}
    means: dict[str, float] = {}
    with hooked(converted, norms, noting_means(means)):
        stock = difference(expected, run(converted, twin.inputs))
    as_rms = {path: norm for path, norm in norms.items() if path in chosen}
    if as_rms.keys() != chosen:
        raise ConversionRefused(f"{cls.__name__}: {sorted(chosen - as_rms.keys())[0]} is no LayerNorm once converted")

    def instead(path, args, output):
        return norms[path].as_rms(args[0])

    with hooked(converted, as_rms, instead):
        rms = difference(expected, run(converted, twin.inputs))
    return ProofReport(cls.__name__, stock, rms, (len(as_rms), len(plan.norms)), means)


def load_tensors(cls, config, tensors: dict[str, torch.Tensor]):
    how = {"config": copy.deepcopy(config), "dtype": torch.float64, "output_loading_info": True}
    with quiet():
        model, info = cls.from_pretrained(None, state_dict=dict(tensors), **how)
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted([*info["missing_keys"], *map(str, info["mismatched_keys"])])
        raise ConversionRefused(f"{cls.__name__} does not load what it saved: {missing[0]!r} is missing or misshapen")
    return model.double().eval()


def difference(expected: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """Largest |difference| of outputs over the largest |output| that was expected."""
    if len(expected) != len(outputs):
        return math.inf
    pairs = [(x, y) for x, y in zip(expected, outputs, strict=True) if x.numel()]
    return max(float((x - y).abs().max()) for x, y in pairs) / max(float(x.abs().max()) for x, _ in pairs)
