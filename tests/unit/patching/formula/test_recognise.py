"""Norms are recognised by what they compute: every formula of the family, in every
state a module can be in.
"""

import pytest
import torch
import torch.nn.functional as F
from reports import formula_of, report_on
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_rmsnorm import NormSpec


class Float32LayerNorm(nn.LayerNorm):
    """As diffusers has it."""

    def forward(self, x):
        weight = self.weight.float()
        bias = self.bias.float()
        y = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


FAMILY = [
    (
        lambda d: LlamaRMSNorm(d, eps=1e-5),
        NormSpec(False, 1e-5, rounding="before_weight"),
    ),
    (lambda d: Olmo2RMSNorm(d, eps=1e-6), NormSpec(False, 1e-6)),
    (lambda d: GemmaRMSNorm(d, eps=1e-6), NormSpec(False, 1e-6, weight_offset=1.0)),
    (lambda d: Gemma3nRMSNorm(d, eps=1e-6), NormSpec(False, 1e-6)),
    (
        lambda d: Gemma3nRMSNorm(d, eps=1e-6, with_scale=False),
        NormSpec(False, 1e-6, has_weight=False),
    ),
    (
        lambda d: T5LayerNorm(d, eps=1e-6),
        NormSpec(False, 1e-6, rounding="weight_dtype"),
    ),
    (lambda d: NanoChatRMSNorm(eps=1e-6), NormSpec(False, 1e-6, has_weight=False)),
    (lambda d: CohereLayerNorm(d, eps=1e-5), NormSpec(True, 1e-5)),
    (lambda d: OlmoLayerNorm(d), NormSpec(True, 1e-5, has_weight=False)),
    (
        lambda d: DebertaLayerNorm(d, eps=1e-7),
        NormSpec(True, 1e-7, has_bias=True, rounding="before_weight"),
    ),
    (
        lambda d: nn.LayerNorm(d, eps=1e-5),
        NormSpec(True, 1e-5, has_bias=True, functional=True),
    ),
    (lambda d: Float32LayerNorm(d, eps=1e-6), NormSpec(True, 1e-6, has_bias=True)),
    (lambda d: nn.LayerNorm(d, bias=False), NormSpec(True, 1e-5, functional=True)),
    (
        lambda d: nn.LayerNorm(d, elementwise_affine=False),
        NormSpec(True, 1e-5, has_weight=False, functional=True),
    ),
    (lambda d: nn.RMSNorm(d, eps=1e-6), NormSpec(False, 1e-6, functional=True)),
    (
        lambda d: nn.RMSNorm(d),
        NormSpec(False, torch.finfo(torch.float32).eps, functional=True),
    ),
]


@pytest.mark.parametrize("hidden_size", [2, 100, 4096])
@pytest.mark.parametrize(("build", "spec"), FAMILY)
def test_formula(build, spec, hidden_size):
    assert formula_of(build(hidden_size)) == spec


@pytest.mark.parametrize(("build", "spec"), FAMILY)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64, "meta"])
def test_formula_does_not_depend_on_dtype_or_device(build, spec, kind):
    assert formula_of(build(32).to(kind)) == spec


@pytest.mark.parametrize("eps", [0.0, 1e-12, 3.7e-4, 0.1])
@pytest.mark.parametrize(
    "build", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm, nn.RMSNorm, CohereLayerNorm]
)
def test_eps_is_exact(build, eps):
    assert formula_of(build(48, eps=eps)).eps == eps


def test_modules_of_other_kinds_are_neither_swapped_nor_mentioned():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    others = nn.ModuleList(
        [
            nn.Linear(8, 8),
            nn.Softmax(-1),
            nn.BatchNorm1d(8),
            nn.GroupNorm(2, 8),
            nn.MultiheadAttention(8, 2),
            LlamaRotaryEmbedding(config),
            ACT2FN["gelu_new"],
        ]
    )
    report = report_on(others)
    assert not report.swapped and not report.skipped, report


def test_other_attributes_are_examined_apart():
    class Flagged(LlamaRMSNorm):
        def __init__(self, size, centre):
            super().__init__(size)
            self.centre = centre

        def forward(self, hidden_states):
            if self.centre:
                hidden_states = hidden_states - hidden_states.mean(-1, keepdim=True)
            return super().forward(hidden_states)

    report = report_on(nn.Sequential(Flagged(16, False), Flagged(16, True)))
    assert [record.formula.centered for record in report.swapped] == [False, True]
    # it rounds after the mean too
    assert [bool(record.notes) for record in report.swapped] == [False, True]
