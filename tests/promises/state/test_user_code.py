"""Norms from a user's own file, loaded with trust_remote_code: served by what they
compute, or left alone and named.
"""

import json
import sys

import pytest
import safetensors.torch
import torch
import transformers.dynamic_module_utils
from transformers import AutoModelForCausalLM

from hf_rmsnorm import patch_model, unpatch_model, use_backend

CONFIGURATION = """
from transformers import PretrainedConfig


class HouseConfig(PretrainedConfig):
    model_type = "house"

    def __init__(self, hidden_size=32, vocab_size=64, **kwargs):
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        super().__init__(**kwargs)
"""
MODELING = '''
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_house import HouseConfig


def _root_mean_square(x, floor):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + floor)


class HouseRMSNorm(nn.Module):
    def __init__(self, size, floor=3e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.floor = floor

    def forward(self, signal):
        return self.gain * _root_mean_square(signal.float(), self.floor).to(signal.dtype)


class Evener(HouseRMSNorm):
    """The same by another name."""


class WithResidualRMSNorm(HouseRMSNorm):
    def forward(self, signal, residual=None):
        if residual is None:
            return super().forward(signal)
        residual = residual + signal
        return super().forward(residual), residual


class OptionalGateRMSNorm(HouseRMSNorm):
    def forward(self, signal, gate=None):
        y = super().forward(signal)
        return y if gate is None else y * nn.functional.silu(gate)


class GatedRMSNorm(HouseRMSNorm):
    def forward(self, signal, gate):
        return super().forward(signal) * nn.functional.silu(gate)


class NoisyRMSNorm(HouseRMSNorm):
    def forward(self, signal):
        if self.training:
            signal = signal + 0.1 * torch.randn_like(signal)
        return super().forward(signal)


class DroppedRMSNorm(HouseRMSNorm):
    def forward(self, signal):
        return nn.functional.dropout(super().forward(signal), 0.5, self.training)


class RunningRMSNorm(HouseRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, signal):
        self.seen += 1
        return super().forward(signal)


class CachedRMSNorm(HouseRMSNorm):
    def forward(self, signal):
        self.last = super().forward(signal)
        return self.last


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.plain, self.evener = HouseRMSNorm(size), Evener(size)
        self.residual, self.maybe_gated, self.gated = (
            WithResidualRMSNorm(size), OptionalGateRMSNorm(size), GatedRMSNorm(size))
        self.noisy, self.dropped = NoisyRMSNorm(size), DroppedRMSNorm(size)
        self.running, self.cached = RunningRMSNorm(size), CachedRMSNorm(size)
        self.mix = nn.Linear(size, size, bias=False)

    def forward(self, h):
        y, h = self.residual(self.mix(self.plain(h)), residual=h)
        h = h + self.maybe_gated(self.residual(y), gate=h) + self.maybe_gated(h) + self.gated(h, y)
        h = h + self.noisy(h) + self.dropped(h) + self.running(h) + self.cached(h)
        return self.evener(h)


class HouseForCausalLM(PreTrainedModel):
    config_class = HouseConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config.hidden_size) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        h = self.embed(input_ids)
        for block in self.blocks:
            h = block(h)
        return CausalLMOutput(logits=self.head(h))
'''
NORMS = ("plain", "evener", "residual", "maybe_gated", "gated")
ALONE = {
    "residual": "its second input, 'residual', is no gate",
    "maybe_gated": "its second input, 'gate', is no gate",
    "noisy": "reads self.training",
    "dropped": "calls nn.functional.dropout",
    "running": "writes self.seen",
    "cached": "writes self.last",
}
ids = torch.arange(24).view(2, 12)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint with code of its own; what Transformers copies of that code goes to
    a folder that passes away.
    """
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules)
    )
    monkeypatch.syspath_prepend(str(modules))
    for name in [
        name for name in sys.modules if name.startswith("transformers_modules")
    ]:
        monkeypatch.delitem(sys.modules, name)
    checkpoint = tmp_path / "house"
    checkpoint.mkdir()
    (checkpoint / "configuration_house.py").write_text(CONFIGURATION)
    (checkpoint / "modeling_house.py").write_text(MODELING)
    auto = {
        "AutoConfig": "configuration_house.HouseConfig",
        "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
    }
    (checkpoint / "config.json").write_text(
        json.dumps({"model_type": "house", "auto_map": auto})
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {"embed.weight": random(64, 32), "head.weight": random(64, 32)}
    for block in ("blocks.0", "blocks.1"):
        for name in (*NORMS, *ALONE):
            tensors[f"{block}.{name}.gain"] = random(32)
        tensors[f"{block}.mix.weight"] = random(32, 32)
        tensors[f"{block}.running.seen"] = torch.zeros(())
    safetensors.torch.save_file(
        tensors, checkpoint / "model.safetensors", {"format": "pt"}
    )
    return checkpoint


def load(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_a_norm_is_swapped_and_what_is_more_is_named(
    folder, dtype, fused_calls
):
    model = load(folder).to(dtype)
    assert type(model).__module__.startswith("transformers_modules.")
    expected = load(folder).to(dtype)(ids).logits
    report = patch_model(model)
    swapped = {record.path.rpartition(".")[2]: record for record in report.swapped}
    skipped = {record.path.rpartition(".")[2]: record for record in report.skipped}
    for name in ("plain", "evener"):
        assert swapped[name].formula.eps == 3e-6
    for name, reason in ALONE.items():
        assert reason in skipped[name].reason
    # One that cannot do without its gate is in the report either way.
    assert ("gated" in swapped) != ("gated" in skipped)
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    # of each block at least plain and evener
    assert len(fused_calls) >= 2 * 2
    assert [block.running.seen.item() for block in model.blocks] == [1, 1]
    unpatch_model(model)
    assert torch.equal(model(ids).logits, expected)
