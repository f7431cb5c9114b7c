"""Small modules that call norms as models do: alone, behind a sum, and of queries and
keys. In `eager` each says what plain torch computes in its place.
"""

import torch
import torch.nn.functional as F
from add_norm import fused_add_norm
from heads import fused_qk_norm
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_rmsnorm import NormSpec, layer_norm, rms_norm
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton", "reference"]
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-5, has_bias=True, functional=True)


def random(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.to(DEVICE)


def some_weight(size, seed=0):
    values = random(size, seed=seed).sigmoid()
    return nn.Parameter(values + 0.5)


class Norms(nn.Module):
    """Both norms around a linear, as a decoder layer has them."""

    calls = 2
    operands = 1

    def __init__(self, size=64):
        super().__init__()
        self.size = size
        self.weight = some_weight(size)
        self.bias = nn.Parameter(random(size, seed=1))
        mix = random(size, size, seed=2)
        mix = mix / size**0.5
        self.mix = nn.Parameter(mix)

    def inputs(self, batch=2, length=8):
        return (random(batch, length, self.size),)

    def forward(self, x):
        y = rms_norm(x, self.weight)
        y = y @ self.mix
        z = layer_norm(y, self.weight, self.bias)
        return (z,)

    def eager(self, x):
        spec = NormSpec(False, 1e-6)
        y = reference_norm(x, self.weight, None, spec)
        y = y @ self.mix
        z = F.layer_norm(y, (self.size,), self.weight, self.bias)
        return (z,)


class Sums(Norms):
    """What lies between attention and the next attention: add, norm, mix, add, norm."""

    operands = 2

    def inputs(self, batch=2, length=8):
        x = random(batch, length, self.size)
        residual = random(batch, length, self.size, seed=4)
        return x, residual

    def forward(self, x, residual):
        h, y = fused_add_norm(x, residual, self.weight, None, LLAMA)
        y = y @ self.mix
        return fused_add_norm(y, h, self.weight, self.bias, LAYER_NORM)

    def eager(self, x, residual):
        h = residual + x
        y = reference_norm(h, self.weight, None, LLAMA)
        h = h + y @ self.mix
        y = F.layer_norm(h, (self.size,), self.weight, self.bias, 1e-5)
        return h, y


class Heads(nn.Module):
    """What an attention layer does before its attention: four heads of q, two of k, and
    a rotary embedding.
    """

    calls = 2
    operands = 1

    def __init__(self, size=16):
        super().__init__()
        self.size = size
        self.q_weight = some_weight(size)
        self.k_weight = some_weight(size, seed=1)

    def inputs(self, batch=2, length=8):
        x = random(batch, length, 6 * self.size)
        angles = random(batch, length, self.size // 2, seed=5)
        angles = angles.repeat(1, 1, 2)
        return x, angles.cos(), angles.sin()

    def split(self, x):
        heads = x.unflatten(-1, (6, self.size))
        heads = heads.transpose(1, 2)
        return heads.split((4, 2), dim=1)

    def forward(self, x, cos, sin):
        q, k = self.split(x)
        return fused_qk_norm(q, k, self.q_weight, self.k_weight, LLAMA, cos, sin)

    def eager(self, x, cos, sin):
        q, k = self.split(x)
        q = reference_norm(q, self.q_weight, None, LLAMA)
        k = reference_norm(k, self.k_weight, None, LLAMA)
        return apply_rotary_pos_emb(q, k, cos, sin)


MODULES = {"norm": Norms, "add_norm": Sums, "qk_norm": Heads}


def loss(outputs):
    first, *others = outputs
    total = first.square().sum()
    for y in others:
        total = total + y.sin().sum()
    return total


def leaves_of(module, inputs):
    """(the operands of which a test takes gradients, the other inputs)."""
    operands = inputs[: module.operands]
    leaves = [t.detach().requires_grad_() for t in operands]
    return leaves, inputs[module.operands :]


def outcome(function, module, inputs):
    """Every output, and every gradient of a loss of them all."""
    leaves, rest = leaves_of(module, inputs)
    module.zero_grad()
    outputs = function(*leaves, *rest)
    loss(outputs).backward()
    results = [y.detach() for y in outputs]
    for leaf in leaves:
        results.append(leaf.grad)
    for parameter in module.parameters():
        results.append(parameter.grad.clone())
    return results


def assert_near(got, expected, tolerance=2e-6):
    for a, b in zip(got, expected, strict=True):
        largest = b.abs().max().item()
        atol = tolerance * largest
        torch.testing.assert_close(a, b, rtol=tolerance, atol=atol)


def assert_equal(got, expected):
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))
