"""Norm classes as a user's own file holds them; importable, so that pickled models find
them in a new process.
"""

import torch
from torch import nn


class Evenly(nn.Module):
    """An RMSNorm that neither its name nor its attributes give away."""

    def __init__(self, size, floor=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size))
        self.floor = floor

    def forward(self, signal):
        wide = signal.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.floor)
        return self.gain * wide.to(signal.dtype)
