"""A post-norm model taken apart on its twin, and put together again with centred writers and two neurons an FFN."""

import copy
import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ....record import centre_
from ...plan import ConversionRefused
from ...twin.discover import ZERO_MEAN, would_tie_a_head
from ...twin.gauge import centre, gauge_test, input_means
from ...twin.keys import Hit, KeyMap
from ...twin.layer_norms import TwinNorm, find_layer_norms
from ...twin.twin import Twin, make_twin, new_model, plain, with_settings
from .trace import FFN, Sum, find_ffns, find_sums, grow_config

NEURONS = 2


@dataclass
class Structure:
    """What was found on the twin. `hits` and `zero`: all writers, and the norms that centring those serves."""

    twin: Twin
    norms: dict[str, TwinNorm]
    silent: list[str]
    sums: list[Sum]
    ffns: list[FFN]
    unfit: list[str]
    grown: dict[str, int] | None
    hits: list[Hit]
    undetermined: set[str]
    zero: set[str]


def look(model: PreTrainedModel) -> Structure:
    twin = make_twin(model.config, model_class=type(model))
    norms, silent = find_layer_norms(twin.model, twin.inputs)
    if not norms:
        raise ConversionRefused(f"{twin.name} computes no LayerNorm: there is nothing to convert")
    sums = find_sums(twin.model, twin.inputs, norms)
    ffns, unfit = find_ffns(twin.model, twin.inputs, sums)
    hits, undetermined = hits_of(twin, norms)
    work = copy.deepcopy(twin.model)
    centre(work, hits)
    means = input_means(work, twin.inputs, norms)
    zero = {path for path in norms if means[path] <= ZERO_MEAN}
    if len(zero) == len(norms):
        served = f"centring what writes to the stream serves every LayerNorm that was found ({len(norms)})"
        raise ConversionRefused(f"{twin.name} is no post-norm model: {served}; convert it without post_norm")
    ffns = [f for f in ffns if f.norm not in zero]
    grown = grow_config(type(model), plain(model.config), ffns, NEURONS) if ffns else None
    return Structure(twin, norms, silent, sums, ffns, unfit, grown, hits, undetermined, zero)


def hits_of(twin: Twin, norms: dict[str, TwinNorm]) -> tuple[list[Hit], set[str]]:
    gauge = gauge_test(twin.model, twin.inputs, norms)
    unsaved = KeyMap(twin.model).unsaved()
    return [h for h in gauge.hits if h.parameter not in unsaved], set(gauge.undetermined)


def as_double(model: PreTrainedModel) -> PreTrainedModel:
    result = new_model(type(model), plain(model.config))
    result.load_state_dict(model.state_dict())
    return result


def tie_changes(model: PreTrainedModel, hits: list[Hit], undetermined: set[str]) -> dict:
    """Untie where a writer is, or in a class with a head would be, tied to what is not centred in the same way."""
    groups: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), set()).add(name)
    ways = {h.parameter: (h.axis, h.blocks) for h in hits}
    unlike = any(len({ways.get(name) for name in names - undetermined}) > 1 for names in groups.values())
    return {"tie_word_embeddings": False} if unlike or would_tie_a_head(model, model.config, hits) else {}


@torch.no_grad()
def converted(model: PreTrainedModel, found: Structure, hits: list[Hit], grown: dict) -> PreTrainedModel:
    """The model in float64, its writers centred, with the neurons where the config is to grow."""
    changes = {**grown, **tie_changes(model, hits, found.undetermined)}
    result = new_model(type(model), with_settings(plain(model.config), changes))
    state, old = result.state_dict(), model.state_dict()
    for key, tensor in state.items():
        if key not in old:
            raise ConversionRefused(f"{type(model).__name__}: {key!r} of the converted model is not in the original")
        tensor.zero_()[tuple(slice(n) for n in old[key].shape)] = old[key].to(tensor.dtype)
    result.load_state_dict(state)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    for name, how in found.twin.writers(hits).items():
        centre_(parameters[name], **how)
    if grown:
        put_neurons(result, found.ffns)
    return result


def _pair(size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Weights (c, o) of a dtype with ``c o size`` next to 1, even once a checkpoint is loaded in bfloat16.

    One over a size is seldom exact in eight bits, but among the products of two numbers of eight bits one is near.
    """
    first = torch.arange(128, 256, dtype=torch.float64) * 2.0 ** -(math.ceil(math.log2(size)) + 7)
    second = 1 / (first * size)
    best = int((first * second.bfloat16().double() * size - 1).abs().argmin())
    return float(first[best]), float(second[best].to(dtype))


@torch.no_grad()
def put_neurons(model: torch.nn.Module, ffns: list[FFN]) -> dict[str, dict]:
    """Set the last two neurons of each FFN; parameter -> ``{"axis", "first", "values"}`` as in the record."""
    put = {}
    for f in ffns:
        first = model.get_submodule(f.first)
        c, o = _pair(first.weight.shape[1 - f.first_axis], first.weight.dtype)
        values = {f"{f.first}.weight": (f.first_axis, [c, -c]), f"{f.second}.weight": (f.second_axis, [-o, o])}
        if first.bias is not None:
            values[f"{f.first}.bias"] = 0, [0.0, 0.0]
        for name, (axis, pair) in values.items():
            p = model.get_parameter(name)
            start = p.shape[axis] - NEURONS
            for i, value in enumerate(pair):
                p.select(axis, start + i).fill_(value)
            put[name] = {"axis": axis, "first": start, "values": pair}
    return put
