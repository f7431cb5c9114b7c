"""How a post-norm model adds and feeds forward, found by running its proxy; and the
model with two neurons an FFN.

Nothing is known by name. That a norm reads ``writer(h) + x``, where x is what another
linear module reads, is told by equal values; what lies between two linear modules is
told by what it makes of numbers put there. The model is put together again with centred
writers and, where they serve, the neurons.
"""

import copy
import itertools
import math
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.conversion.proxy.discover import would_tie_a_head
from hf_rmsnorm.conversion.proxy.keys import keys_of
from hf_rmsnorm.conversion.proxy.layer_norms import Norms, find_layer_norms
from hf_rmsnorm.conversion.proxy.model import (
    ProxyModel,
    empty_model,
    make_proxy,
    new_model,
    plain,
    shapes_of,
    with_settings,
)
from hf_rmsnorm.conversion.proxy.run import MISFITS, run
from hf_rmsnorm.conversion.proxy.shift_invariance import (
    ZERO_MEAN,
    centre,
    input_means,
    shift_invariance_test,
)
from hf_rmsnorm.converted.record import centre_
from hf_rmsnorm.verification.context import leaves_of

NEURONS = 2
EQUAL = 1e-10  # of the largest element; float64 leaves 1e-15
RECENT = 64  # linear calls before a norm that are looked at


def weight_axis(module: torch.nn.Module) -> int | None:
    """The axis of a linear module's weight that its output runs along; None if it is no
    linear module.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if (
        not isinstance(weight, torch.nn.Parameter)
        or weight.ndim != 2
        or isinstance(module, torch.nn.Embedding)
    ):
        return None
    for axis in (0, 1):
        matrix = weight if axis else weight.T
        x = torch.ones(1, 1, matrix.shape[0], dtype=weight.dtype) / 3
        try:
            y = module(x)
        except (RuntimeError, TypeError, ValueError):
            # it takes other inputs, or rows of the other length
            continue
        expected = x @ matrix
        if bias is not None and bias.shape == expected.shape[-1:]:
            expected = expected + bias
        if (
            torch.is_tensor(y)
            and y.shape == expected.shape
            and torch.allclose(y, expected)
        ):
            return axis
    return None


def linear_paths(model: torch.nn.Module) -> list[str]:
    """Paths of the linear modules."""
    return [
        path
        for path in leaves_of(model)
        if weight_axis(model.get_submodule(path)) is not None
    ]


@dataclass(frozen=True)
class Sum:
    """The input of a norm is the output of a linear module plus a skip that linear
    modules, its readers, read too.
    """

    norm: str
    writer: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class FFN:
    """Linear, activation with ``act(z) - act(-z) = z`` neuron by neuron, linear; its
    input added, then a norm.

    Args:
        norm, first, second: module paths.
        first_axis, second_axis: of the linear modules' weights, which the neurons run
            along.
    """

    norm: str
    first: str
    second: str
    first_axis: int
    second_axis: int


@torch.no_grad()
def find_sums(model: torch.nn.Module, inputs: dict, norms: Norms) -> list[Sum]:
    """The sums that enter norms of a float64 model, in the order they run; one for each
    norm that reads one.
    """
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    found: dict[str, Sum] = {}

    def note(path, args, output):
        if path not in norms:
            calls.append((path, args[0], output))
        elif path not in found:
            recent = calls[-RECENT:]
            for writer, _, y in (
                call for call in reversed(recent) if _alike(args[0], call[2])
            ):
                # some models flatten rows on the way
                skip = args[0].flatten(0, -2) - y.flatten(0, -2)
                equal = (
                    r
                    for r, x, _ in recent
                    if _alike(x, skip) and _near(x.flatten(0, -2), skip)
                )
                if readers := tuple(dict.fromkeys(equal)):
                    found[path] = Sum(path, writer, readers)
                    break

    run(model, inputs, [*linear_paths(model), *norms], note)
    return list(found.values())


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """As many rows of one length."""
    return x.numel() == y.numel() and x.shape[-1] == y.shape[-1]


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x - y).abs().max() <= EQUAL * y.abs().max())


@torch.no_grad()
def find_ffns(
    model: torch.nn.Module, inputs: dict, sums: list[Sum]
) -> tuple[list[FFN], list[str]]:
    """(FFNs among the sums; sentences on those whose activation does not serve).

    Three runs: the first linear module of each candidate gives numbers of ours instead
    of its own, and the second module tells what became of them: of z, of -z, and of z
    with its neurons exchanged and half of it replaced.
    """
    pairs = [(s, reader) for s in sums for reader in s.readers if reader != s.writer]
    candidates = [
        (s, r)
        for s, r in pairs
        if _neurons(model, r)[0] == _neurons(model, s.writer, reads=True)[0]
    ]
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
                z, other = (
                    3
                    * torch.randn(
                        2, *output.shape, generator=generator, dtype=torch.float64
                    )
                ).unbind()
                numbers[path] = (
                    z,
                    other,
                    torch.rand(output.shape, generator=generator) < 0.5,
                )
            z, other, kept = numbers[path]
            return (z, -z, torch.where(kept, z.roll(1, -1), other))[which].to(
                output.dtype
            )

        run(model, inputs, firsts | {s.writer for s, _ in candidates}, swap)
        return arrived

    positive, negative, mixed = (
        (probe(which) for which in range(3)) if candidates else ({}, {}, {})
    )
    found, unfit = [], []
    for s, first in candidates:
        plus, minus, exchanged = positive[s.writer], negative[s.writer], mixed[s.writer]
        z, _, kept = numbers[first]
        if plus.numel() != z.numel():
            continue
        plus, minus, exchanged = (a.reshape(z.shape) for a in (plus, minus, exchanged))
        if not bool(
            ((exchanged - plus.roll(1, -1)).abs() <= EQUAL * plus.abs().max())[
                kept
            ].all()
        ):
            continue  # not neuron by neuron, as attention is not
        if not _near(plus - minus, z):
            unfit.append(f"between {first} and {s.writer} act(z) - act(-z) is not z")
            continue
        found.append(
            FFN(
                s.norm,
                first,
                s.writer,
                _neurons(model, first)[1],
                _neurons(model, s.writer, reads=True)[1],
            )
        )
    return found, unfit


def _neurons(model: torch.nn.Module, path: str, reads: bool = False) -> tuple[int, int]:
    """(how many a linear module gives, or reads; the axis of its weight that they run
    along)
    """
    module = model.get_submodule(path)
    axis = weight_axis(module) ^ reads
    return module.weight.shape[axis], axis


def grow_config(
    cls, config: PretrainedConfig, ffns: list[FFN], by: int
) -> dict[str, int] | None:
    """What to set in the config so that each of the FFNs has `by` neurons more, and all
    else its shape, if anything.

    A key is known by its value and by what the model made with another one looks like.
    """
    shapes = shapes_of(empty_model(cls, config))
    wanted = {name: list(shape) for name, shape in shapes.items()}
    widths = set()
    for first, axis, second, reads in {
        (f.first, f.first_axis, f.second, f.second_axis) for f in ffns
    }:
        widths.add(wanted[f"{first}.weight"][axis])
        wanted[f"{first}.weight"][axis] += by
        wanted[f"{second}.weight"][reads] += by
        if f"{first}.bias" in wanted:
            wanted[f"{first}.bias"][0] += by
    values = {k: getattr(config, k, None) for k in config.to_dict()}
    keys = [k for k, v in values.items() if type(v) is int and v in widths]
    for chosen in (
        some
        for count in range(1, len(keys) + 1)
        for some in itertools.combinations(keys, count)
    ):
        changes = {key: values[key] + by for key in chosen}
        try:
            got = shapes_of(empty_model(cls, with_settings(config, changes)))
        except MISFITS:  # a width that something else has to divide
            continue
        if {k: list(v) for k, v in got.items()} == wanted:
            return changes
    return None


@dataclass
class Structure:
    """What the proxy model shows. `zero`: the norms that centring all
    `residual_weights` serves.
    """

    proxy: ProxyModel
    norms: Norms
    silent: list[str]
    sums: list[Sum]
    ffns: list[FFN]
    unfit: list[str]
    grown: dict[str, int] | None
    residual_weights: dict[str, dict]
    undetermined: set[str]
    zero: set[str]


def look(model: PreTrainedModel) -> Structure:
    proxy = make_proxy(model.config, model_class=type(model))
    norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if not norms:
        raise ConversionRefused(f"{proxy.name} has no LayerNorm: nothing to convert")
    sums = find_sums(proxy.model, proxy.inputs, norms)
    ffns, unfit = find_ffns(proxy.model, proxy.inputs, sums)
    residual_weights, undetermined = residual_weights_of(proxy, norms)
    work = copy.deepcopy(proxy.model)
    centre(work, residual_weights)
    means = input_means(work, proxy.inputs, norms)
    zero = {path for path in norms if means[path] <= ZERO_MEAN}
    if len(zero) == len(norms):
        served = f"centring what writes to the stream serves every LayerNorm that was found ({len(norms)})"
        raise ConversionRefused(
            f"{proxy.name} is no post-norm model: {served}; convert it without post_norm"
        )
    ffns = [f for f in ffns if f.norm not in zero]
    grown = (
        grow_config(type(model), plain(model.config), ffns, NEURONS) if ffns else None
    )
    return Structure(
        proxy,
        norms,
        silent,
        sums,
        ffns,
        unfit,
        grown,
        residual_weights,
        undetermined,
        zero,
    )


def residual_weights_of(
    proxy: ProxyModel, norms: Norms
) -> tuple[dict[str, dict], set[str]]:
    ratio = shift_invariance_test(proxy.model, proxy.inputs, norms)
    keys = keys_of(proxy.model)
    saved = {n: how for n, how in ratio.residual_weights.items() if keys[n]}
    return saved, set(ratio.undetermined)


def as_double(model: PreTrainedModel) -> PreTrainedModel:
    result = new_model(type(model), plain(model.config))
    result.load_state_dict(model.state_dict())
    return result


def tie_changes(
    model: PreTrainedModel,
    residual_weights: dict[str, dict],
    undetermined: set[str],
) -> dict:
    """Untie where a writer is, or in a class with a head would be, tied to what is not
    centred in the same way.
    """
    groups: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), set()).add(name)
    ways = {n: (how["axis"], str(how["blocks"])) for n, how in residual_weights.items()}
    unlike = any(
        len({ways.get(name) for name in names - undetermined}) > 1
        for names in groups.values()
    )
    return (
        {"tie_word_embeddings": False}
        if unlike or would_tie_a_head(model, model.config, residual_weights)
        else {}
    )


@torch.no_grad()
def converted(
    model: PreTrainedModel,
    found: Structure,
    residual_weights: dict[str, dict],
    grown: dict,
) -> PreTrainedModel:
    """The model in float64, its residual weights centred, with the neurons where the
    config is to grow.
    """
    changes = {**grown, **tie_changes(model, residual_weights, found.undetermined)}
    result = new_model(type(model), with_settings(plain(model.config), changes))
    state, old = result.state_dict(), model.state_dict()
    for key, tensor in state.items():
        if key not in old:
            raise ConversionRefused(
                f"{type(model).__name__}: {key!r} of the converted model is not in the original"
            )
        tensor.zero_()[tuple(slice(n) for n in old[key].shape)] = old[key].to(
            tensor.dtype
        )
    result.load_state_dict(state)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    for name, how in residual_weights.items():
        centre_(parameters[name], **found.proxy.checkpoint_blocks(name, how))
    if grown:
        put_neurons(result, found.ffns)
    return result


def _pair(size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Weights (c, o) of a dtype with ``c o size`` next to 1, even once a checkpoint is
    loaded in bfloat16.

    One over a size is seldom exact in eight bits, but among the products of two numbers
    of eight bits one is near.
    """
    first = torch.arange(128, 256, dtype=torch.float64) * 2.0 ** -(
        math.ceil(math.log2(size)) + 7
    )
    second = 1 / (first * size)
    best = int((first * second.bfloat16().double() * size - 1).abs().argmin())
    return float(first[best]), float(second[best].to(dtype))


@torch.no_grad()
def put_neurons(model: torch.nn.Module, ffns: list[FFN]) -> None:
    """Set the last two neurons of each FFN."""
    for f in ffns:
        first, second = model.get_submodule(f.first), model.get_submodule(f.second)
        c, o = _pair(first.weight.shape[1 - f.first_axis], first.weight.dtype)
        _fill(first.weight, f.first_axis, (c, -c))
        _fill(second.weight, f.second_axis, (-o, o))
        if first.bias is not None:
            _fill(first.bias, 0, (0.0, 0.0))


def _fill(parameter: torch.Tensor, axis: int, values: tuple[float, ...]) -> None:
    """Set the last slices along an axis to a value each."""
    start = parameter.shape[axis] - len(values)
    for index, value in enumerate(values):
        parameter.select(axis, start + index).fill_(value)
