"""Three-layer models for the tests of what is fused around the norms."""

import tiny_models
import torch
from torch import nn

IDS = tiny_models.token_ids()
INSIDE = "+ post_attention_layernorm"


def layers_of(model):
    if hasattr(model, "transformer"):
        return model.transformer.h
    return model.model.layers


def build(family, dtype=torch.float32, **config):
    return tiny_models.build(family, dtype, num_hidden_layers=3, **config).eval()


class Block(nn.Module):
    """What the layers of a row hold; subclasses say how they add."""

    def __init__(self, size=32):
        super().__init__()
        self.n1 = nn.RMSNorm(size, eps=1e-6)
        self.n2 = nn.RMSNorm(size, eps=1e-6)
        self.a = nn.Linear(size, size)
        self.b = nn.Linear(size, size)


def row(*layers, size=32):
    """The layers, and a norm behind the last."""
    model = nn.Sequential(*layers, nn.RMSNorm(size, eps=1e-6))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3, 0.4, generator)
    return model.eval()


def fused(report):
    """What the report says of each layer."""
    return [layer.fused or layer.reason for layer in report.layers]
