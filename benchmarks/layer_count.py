"""One decoder layer of a published shape, counted as Hugging Face runs it, with Liger,
and patched by this package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from triton.runtime import driver

from benchmarks.counting import saved_bytes
from benchmarks.models import random_model
from benchmarks.shapes import ModelShape
from benchmarks.traffic import Traffic
from benchmarks.variants import ALL_KERNELS, MLP_AND_LOSS, Variant
from hf_rmsnorm import use_backend

CACHE = "past_key_values"
EAGER, LIGER, OURS = "eager", "liger", "hf_rmsnorm"
LESS_MEMORY = {"memory_efficient": True}
VARIANTS = {  # the first is what others are compared with
    EAGER: Variant(),
    OURS: Variant(ours={}),
    f"{OURS}_memory_efficient": Variant(ours=LESS_MEMORY),
    LIGER: Variant(liger=ALL_KERNELS),
    f"{OURS}_liger": Variant(ours={}, liger=MLP_AND_LOSS),
    f"{OURS}_memory_efficient_liger": Variant(ours=LESS_MEMORY, liger=MLP_AND_LOSS),
}


@dataclass(frozen=True)
class Call:
    """The arguments that a model passes to its first layer, and its cache before the
    call.
    """

    args: tuple
    kwargs: dict

    @classmethod
    def seen(cls, args: tuple, kwargs: dict) -> Call:
        """A call that is about to run."""
        return cls(args, kwargs | {CACHE: copy.deepcopy(kwargs.get(CACHE))})

    def of(self, layer: nn.Module) -> Callable[[], torch.Tensor]:
        """A function that makes this call once and returns the layer's output."""
        arguments = self.kwargs | {CACHE: copy.deepcopy(self.kwargs[CACHE])}

        def run() -> torch.Tensor:
            output = layer(*self.args, **arguments)
            return output[0] if isinstance(output, tuple) else output

        return run

    def shared(self) -> list[torch.Tensor]:
        """Tensors that every layer of a model gets: the rotary embedding's tables, and
        a mask.
        """
        tensors = [
            *self.kwargs.get("position_embeddings", ()),
            self.kwargs.get("attention_mask"),
        ]
        return [tensor for tensor in tensors if tensor is not None]


class Subject:
    """A model of one layer in bfloat16, and two calls of that layer: a prompt, and one
    token behind it.
    """

    def __init__(self, shape: ModelShape, tokens: int):
        shape = replace(shape, vocabulary=128)  # the layer does not see it
        self.model = random_model(shape, 1, "cpu").eval()
        self.layer = self.model.model.layers[0]
        self.tokens = tokens
        inputs = torch.randn(1, tokens + 1, shape.hidden_size).to(torch.bfloat16)
        prompt, last = inputs.split([tokens, 1], dim=1)
        calls = []

        def see(layer, args, kwargs):
            calls.append(Call.seen(args, kwargs))

        hook = self.layer.register_forward_pre_hook(see, with_kwargs=True)
        with torch.no_grad():
            self.model.model(inputs_embeds=prompt, use_cache=False)
            seen = self.model.model(inputs_embeds=prompt, use_cache=True)
            cache = seen.past_key_values
            self.model.model(inputs_embeds=last, past_key_values=cache)
        hook.remove()
        self.prefill, _, self.decode = calls

    def count(self) -> tuple[dict, torch.Tensor]:
        """The counts of the layer in its present state, and its output for the prompt."""
        prefill, output = self._traffic(self.prefill)
        decode, _ = self._traffic(self.decode)
        kept = [*self.model.parameters(), *self.prefill.shared()]
        saved = saved_bytes(self.prefill.of(self.layer), kept)
        counted = {
            "decode": decode,
            "prefill": prefill,
            "saved_bytes_per_token": round(saved / self.tokens),
        }
        return counted, output

    @torch.no_grad()
    def _traffic(self, call: Call) -> tuple[dict, torch.Tensor]:
        tokens = call.args[0].shape[1]
        run = call.of(self.layer)
        with watched(Traffic(self.layer)) as traffic:
            output = run()
        return {
            "kernels": traffic.kernels,
            "fusible_kernels": traffic.fusible["kernels"],
            "fusible_bytes_per_token": round(traffic.fusible["bytes"] / tokens),
        }, output


@contextmanager
def watched(traffic: Traffic) -> Iterator[Traffic]:
    """Count operators and the launches of Triton kernels while the context is open."""
    machine = driver.active.machine
    machine.watch = traffic.launched
    try:
        with traffic:
            yield traffic
    finally:
        machine.watch = None


def count_layer(shape: ModelShape, tokens: int, liger: bool) -> dict[str, dict]:
    """By name of the variant, what one layer does; `liger`: Liger can be imported."""
    torch.manual_seed(0)
    subject = Subject(shape, tokens)
    outputs = {}
    counted = {}
    for name, variant in VARIANTS.items():
        if variant.liger is not None and not liger:
            continue
        with use_backend("triton"), variant.of(subject.model):
            counted[name], outputs[name] = subject.count()
        equal = (outputs[name] == outputs[EAGER]).double().mean().item()
        counted[name]["equal_to_eager"] = round(equal, 6)
    return counted
