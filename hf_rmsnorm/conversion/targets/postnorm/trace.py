"""How a post-norm model adds and feeds forward, found by running it: sums that enter norms, and FFNs around them.

Nothing is known by name. That a norm reads ``writer(h) + x``, where x is what another linear module reads, is told by
equal values; what lies between two linear modules is told by what it makes of numbers put there.
"""

import itertools
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from ...twin.layer_norms import TwinNorm
from ...twin.run import MISFITS, hooked, linear_paths, run, weight_axis
from ...twin.twin import shapes_of

EQUAL = 1e-10  # of the largest element; float64 leaves 1e-15
RECENT = 64  # linear calls before a norm that are looked at


@dataclass(frozen=True)
class Sum:
    """The input of a norm is the output of a linear module plus a skip that linear modules, its readers, read too."""

    norm: str
    writer: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class FFN:
    """Linear, activation with ``act(z) - act(-z) = z`` neuron by neuron, linear; its input added, then a norm.

    Args:
        norm, first, second: module paths.
        first_axis, second_axis: of the linear modules' weights, which the neurons run along.
    """

    norm: str
    first: str
    second: str
    first_axis: int
    second_axis: int


@torch.no_grad()
def find_sums(model: torch.nn.Module, inputs: dict, norms: dict[str, TwinNorm]) -> list[Sum]:
    """The sums that enter norms of a float64 model, in the order they run; one for each norm that reads one."""
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    found: dict[str, Sum] = {}

    def note(path, args, output):
        if path not in norms:
            calls.append((path, args[0], output))
        elif path not in found:
            recent = calls[-RECENT:]
            for writer, _, y in (call for call in reversed(recent) if _alike(args[0], call[2])):
                skip = args[0].flatten(0, -2) - y.flatten(0, -2)  # some models flatten rows on the way
                equal = (r for r, x, _ in recent if _alike(x, skip) and _near(x.flatten(0, -2), skip))
                if readers := tuple(dict.fromkeys(equal)):
                    found[path] = Sum(path, writer, readers)
                    break

    with hooked(model, [*linear_paths(model), *norms], note):
        run(model, inputs)
    return list(found.values())


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """As many rows of one length."""
    return x.numel() == y.numel() and x.shape[-1] == y.shape[-1]


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x - y).abs().max() <= EQUAL * y.abs().max())


@torch.no_grad()
def find_ffns(model: torch.nn.Module, inputs: dict, sums: list[Sum]) -> tuple[list[FFN], list[str]]:
    """(FFNs among the sums; sentences on those whose activation does not serve).

    Three runs: the first linear module of each candidate gives numbers of ours instead of its own, and the second
    module tells what became of them: of z, of -z, and of z with its neurons exchanged and half of it replaced.
    """
    pairs = [(s, reader) for s in sums for reader in s.readers if reader != s.writer]
    candidates = [(s, r) for s, r in pairs if _neurons(model, r)[0] == _neurons(model, s.writer, reads=True)[0]]
    generator = torch.Generator().manual_seed(0)
    numbers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    firsts = {reader for _, reader in candidates}

    def probe(which: int) -> dict[str, torch.Tensor]:
        arrived = {}

        def swap(path, args, output):
            arrived[path] = args[0]
            if path not in firsts:
                return None
            if path not in numbers or numbers[path][0].shape != output.shape:
                z, other = (3 * torch.randn(2, *output.shape, generator=generator, dtype=torch.float64)).unbind()
                numbers[path] = z, other, torch.rand(output.shape, generator=generator) < 0.5
            z, other, kept = numbers[path]
            return (z, -z, torch.where(kept, z.roll(1, -1), other))[which].to(output.dtype)

        with hooked(model, firsts | {s.writer for s, _ in candidates}, swap):
            run(model, inputs)
        return arrived

    positive, negative, mixed = (probe(which) for which in range(3)) if candidates else ({}, {}, {})
    found, unfit = [], []
    for s, first in candidates:
        plus, minus, exchanged = positive[s.writer], negative[s.writer], mixed[s.writer]
        z, _, kept = numbers[first]
        if plus.numel() != z.numel():
            continue
        plus, minus, exchanged = (a.reshape(z.shape) for a in (plus, minus, exchanged))
        if not bool(((exchanged - plus.roll(1, -1)).abs() <= EQUAL * plus.abs().max())[kept].all()):
            continue  # not neuron by neuron, as attention is not
        if not _near(plus - minus, z):
            unfit.append(f"between {first} and {s.writer} act(z) - act(-z) is not z")
            continue
        found.append(FFN(s.norm, first, s.writer, _neurons(model, first)[1], _neurons(model, s.writer, reads=True)[1]))
    return found, unfit


def _neurons(model: torch.nn.Module, path: str, reads: bool = False) -> tuple[int, int]:
    """(how many a linear module gives, or reads; the axis of its weight that they run along)"""
    module = model.get_submodule(path)
    axis = weight_axis(module) ^ reads
    return module.weight.shape[axis], axis


def grow_config(cls, config: PretrainedConfig, ffns: list[FFN], by: int) -> dict[str, int] | None:
    """What to set in the config so that each of the FFNs has `by` neurons more, and all else its shape, if anything.

    A key is known by its value and by what the model made with another one looks like.
    """
    wanted, widths = {k: list(v) for k, v in shapes_of(cls, config).items()}, set()
    for first, axis, second, reads in {(f.first, f.first_axis, f.second, f.second_axis) for f in ffns}:
        widths.add(wanted[f"{first}.weight"][axis])
        wanted[f"{first}.weight"][axis] += by
        wanted[f"{second}.weight"][reads] += by
        if f"{first}.bias" in wanted:
            wanted[f"{first}.bias"][0] += by
    values = {k: getattr(config, k, None) for k in config.to_dict()}
    keys = [k for k, v in values.items() if type(v) is int and v in widths]
    for chosen in (some for count in range(1, len(keys) + 1) for some in itertools.combinations(keys, count)):
        changes = {key: values[key] + by for key in chosen}
        grown = type(config).from_dict(config.to_dict())
        for key, value in changes.items():
            setattr(grown, key, value)
        try:
            got = shapes_of(cls, grown)
        except MISFITS:  # a width that something else has to divide
            continue
        if {k: list(v) for k, v in got.items()} == wanted:
            return changes
    return None
