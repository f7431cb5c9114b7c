"""The proof of a plan: carried out on the proxy's own checkpoint, loaded again, and run
as LayerNorm and as RMSNorm. `plan_centring` asks for it, after `discover`.
"""

import math
from dataclasses import dataclass

import torch

from ..checkpoint.source import Checkpoint
from ..errors import ConversionRefused
from ..plan import CentringPlan
from ..tensors import planned_tensors
from .keys import saved_tensors
from .layer_norms import ModelNorm, find_layer_norms
from .model import ProxyModel, give_weights, new_model, plain, with_settings
from .run import loaded, run

# of the outputs' scale. Roundings make 1e-15, and 1e-11 in 40 layers; a wrong plan 1e-6
# and more
BOUND = 1e-9


@dataclass(frozen=True)
class ProofReport:
    """How far a converted proxy is from the original, everything in float64."""

    model_class: str
    # max |difference| of the outputs with the model's own LayerNorms, over the largest
    stock: float
    rms: float  # the same with RMSNorms wherever the plan says so
    norms: tuple[int, int]  # how many became RMSNorms, and how many there are

    @property
    def passed(self) -> bool:
        """Both differences are within the bound."""
        return self.stock <= BOUND and self.rms <= BOUND

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "passed": self.passed,
            "stock": self.stock,
            "rms": self.rms,
            "norms": list(self.norms),
        }

    def __str__(self) -> str:
        verdict = "proven" if self.passed else "NOT equal"
        count, of = self.norms
        return (
            f"{self.model_class}: {verdict}, {count} of {of} norms as RMSNorm; float64 "
            f"outputs differ by {self.stock:.1e} (LayerNorm) and {self.rms:.1e} "
            "(RMSNorm) of their scale"
        )


@torch.no_grad()
def prove(plan: CentringPlan, proxy: ProxyModel) -> ProofReport:
    """Carry out what `discover` found on a checkpoint of the proxy, load it with the
    stock class, compare outputs.
    """
    cls = type(proxy.model)
    original = new_model(cls, proxy.config)
    # other ones: an activation that was saturated everywhere looked linear
    give_weights(original, seed=3)
    tensors = saved_tensors(original)
    original = load_tensors(cls, proxy.config, tensors)
    source = Checkpoint(tensors)
    planned = planned_tensors(plan, source)
    changed = {name: tensor.value(source) for name, tensor in planned.items()}
    converted = load_tensors(cls, with_settings(proxy.config, plan.config), changed)
    expected = run(original, proxy.inputs)
    stock = difference(expected, run(converted, proxy.inputs))
    norms, _ = find_layer_norms(converted, proxy.inputs)
    chosen = {norm.path for norm in plan.norms if norm.becomes_rms}
    rms = difference(expected, run_as_rms(converted, proxy.inputs, norms, chosen))
    return ProofReport(cls.__name__, stock, rms, (len(chosen), len(plan.norms)))


def run_as_rms(
    model: torch.nn.Module, inputs: dict, norms: dict[str, ModelNorm], chosen
) -> list[torch.Tensor]:
    """The outputs in float64 with the chosen norms as RMSNorms."""

    def as_rms(path, args, output):
        return norms[path].as_rms(args[0])

    with torch.no_grad():
        return run(model, inputs, chosen, as_rms)


def load_tensors(cls, config, tensors: dict[str, torch.Tensor]):
    """The model of these tensors in float64; refused if one is missing."""
    state = dict(tensors)
    model, info = loaded(
        cls, None, config=plain(config), dtype=torch.float64, state_dict=state
    )
    if wrong := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise ConversionRefused(
            f"{cls.__name__} does not load the tensors made for it: {wrong[0]!r} is "
            "missing or misshapen"
        )
    return model.double()


def difference(expected: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """Largest |difference| of outputs of `run` over the largest |output| that was
    expected; infinite if they have other shapes.
    """
    if [x.shape for x in expected] != [y.shape for y in outputs]:
        return math.inf
    x = torch.cat([tensor.flatten() for tensor in expected])
    y = torch.cat([tensor.flatten() for tensor in outputs])
    return float((x - y).abs().max() / x.abs().max())
