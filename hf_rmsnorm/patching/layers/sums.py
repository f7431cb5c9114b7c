"""Which sums of a layer's forward its norms read, learned by running it on stand-ins for all that is not a norm.

The layer's own `+` are made to note what they return, its norms what they are given; a norm that is given the very
tensor that a `+` returned reads that sum. The forward with those sums fused then has to give the same bits.
"""

import ast
import copy
import inspect
import itertools
import re
from collections.abc import Callable

import torch
from torch import nn

from ...fused.handover import hand_over, handed_over
from ...fused.layer import Fusion
from ...fused.norm import recipe_of
from ...fused.recipe import operands
from ...fused.source import CannotRewrite, changes_itself, forward_source, sums, with_sums
from ..formula.probe import is_plain
from ..swap import restore, unfused
from .values import is_seen, past_versions

SHAPE = (5, 3)  # rows of the stand-in's input: no dimension that a tuple of outputs could be mistaken for
FORMS = (1, 2, 3)  # a tensor, or a tuple of so many
NO_SUM = "no norm reads a sum of its forward as it is"
_cache: dict[tuple, Fusion | str] = {}
_NUMBER = re.compile("training|idx|index|layer_id")
_HOOKING = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


def find_fusion(layer: nn.Module) -> Fusion | str:
    """The fusion of a layer whose norms are patched; the reason where there is none to be had."""
    key = _key(layer)
    if key not in _cache:
        try:
            _cache[key] = _learn(layer)
        except CannotRewrite as error:
            _cache[key] = str(error)
    return _cache[key]


def norms_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The layer's children that are patched norms whose sums may be fused."""
    norms = ((name, child, recipe_of(child)) for name, child in layer.named_children())
    return {name: child for name, child, recipe in norms if recipe is not None and recipe.is_simple}


def _key(layer: nn.Module) -> tuple:
    function, config = inspect.unwrap(unfused(type(layer)).forward), getattr(layer, "config", None)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    # Settings that a forward may branch on; the layer's number only where it does, or each would be run anew.
    plain = {k: v for k, v in vars(layer).items() if is_plain(v) and (k in names or not _NUMBER.search(k))}
    plain.update((f"config.{k}", v) for k, v in getattr(config, "__dict__", {}).items() if is_plain(v))
    children = tuple((name, type(child)) for name, child in layer.named_children())
    shapes = tuple(tuple(p.shape) for norm in norms_of(layer).values() for p in norm.parameters(recurse=False))
    return unfused(type(layer)), function, children, shapes, tuple(sorted(plain.items()))


def _learn(layer: nn.Module) -> Fusion | str:
    base = unfused(type(layer))
    _, definition = forward_source(base)
    if not (positions := range(len(sums(definition)))):
        return "its forward adds nothing"
    if changes_itself(definition):
        return "its forward changes what the layer holds"
    if any(isinstance(node, ast.Attribute) and node.attr in _HOOKING for node in ast.walk(definition)):
        return "its forward hangs hooks on tensors"
    norms = norms_of(layer)
    size, dtype = _row(norms)
    x = torch.randn(*SHAPE, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    stubs = [name for name, child in layer.named_children() if name not in norms and not _is_plain_module(child)]
    totals: dict[int, torch.Tensor] = {}  # what each `+` returned
    given: list[tuple[str, torch.Tensor, int]] = []  # what each norm was given, in which version

    def note(layer, left, right, at: int):
        total = left + right
        if isinstance(total, torch.Tensor):
            totals[at] = total
        return total

    forward = with_sums(base, {at: at for at in positions}, note)
    # What the stubs may return, the most likely first: how the source uses their outputs says it.
    guess = tuple(_used_as(definition, name) for name in stubs)
    others = itertools.product(FORMS, repeat=len(stubs)) if len(stubs) <= 4 else ()
    for forms in dict.fromkeys([guess, *others]):
        stand_in = _stand_in(layer, norms, size, dict(zip(stubs, forms, strict=True)))
        try:
            expected = _run(base.forward, stand_in, x)
            for name in norms:
                stand_in._modules[name].register_forward_pre_hook(
                    lambda _, args, name=name: given.append((name, args[0], args[0]._version))
                )
            output = _run(forward, stand_in, x)
        except Exception:  # a stub returns what this forward does not expect, which any error can say
            output = None
        if output is not None and output.shape == x.shape and torch.equal(output, expected):
            nodes, itself = sums(definition), definition.args.args[0].arg
            past = past_versions(definition, itself)
            sites = tuple(site for site in _sites(totals, given, output) if nodes[site[0]] not in past)
            entry = next((name for name, read, _ in given if read is x), "")
            seen = [at for at, name in sites if name and is_seen(definition, nodes[at], itself, norms)]
            return _proven(base, stand_in, norms, Fusion(sites, entry, tuple(seen)), expected, x)
        totals.clear()
        given.clear()
    return "its forward does not run on stand-ins for what is not a norm"


def _sites(totals: dict, given: list, output: torch.Tensor) -> tuple[tuple[int, str], ...]:
    """As in `Fusion`, where the forward returned this."""
    # A sum that is written to before it is read is another: what tells so at run time, the version of a tensor, there
    # is none of under `inference_mode`.
    given = [*given, ("", output, output._version)]
    readers = ((at, [name for name, x, version in given if x is y and version == 0]) for at, y in totals.items())
    return tuple(sorted((at, names[0]) for at, names in readers if names))


def _row(norms: dict[str, nn.Module]) -> tuple[int, torch.dtype]:
    """(length of the norms' rows, dtype of their weights); any length for norms without weight, or with empty ones."""
    parameters = [p for norm in norms.values() for p in norm.parameters(recurse=False)]
    whole = [p for p in parameters if p.numel()]
    sizes = [*(p.shape[-1] for p in whole), *(recipe_of(norm).hidden_size for norm in norms.values())]
    dtypes = [p.dtype for p in whole or parameters]
    return next(filter(None, sizes), 64), next(iter(dtypes), torch.bfloat16)


def _proven(base: type, stand_in: nn.Module, norms, fusion: Fusion, expected: torch.Tensor, x) -> Fusion | str:
    if not fusion.sites and not fusion.entry:
        return NO_SUM
    recipes = {name: recipe_of(norm) for name, norm in norms.items()}

    def add(layer, left, right, reader):
        total = left + right
        if reader:
            norm = layer._modules[reader]
            given = operands(norm, recipes[reader])
            hand_over(norm, total, type(norm).forward(norm, total), *given, "reference")
        return total

    for name, recipe in recipes.items():
        stand_in._modules[name].register_forward_hook(
            lambda norm, args, _, recipe=recipe: handed_over(norm, args[0], *operands(norm, recipe), "reference")
        )
    try:
        output = _run(with_sums(base, dict(fusion.sites), add), stand_in, x)
    except Exception as error:  # a sum where `self` is another object, or whatever else a forward does
        return f"with its sums fused its forward fails: {type(error).__name__}: {error}"
    return fusion if torch.equal(output, expected) else "with its sums fused its forward gives other values"


class _Stub(nn.Module):
    """Something that mixes: one tensor of its input's shape, or a tuple that begins with it."""

    def __init__(self, original: nn.Module, number: int, form: int):
        super().__init__()
        self.__dict__["original"], self.number, self.form = original, number, form

    def __getattr__(self, name):
        found = getattr(self.__dict__["original"], name)
        return _Stub(found, self.number, 1) if isinstance(found, nn.Module) else found

    def forward(self, *args, **kwargs):
        x = next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_floating_point())
        y = x.roll(1, -1) * 0.5 + 0.125 * self.number
        return y if self.form == 1 else (y, *[None] * (self.form - 1))


def _is_plain_module(module: nn.Module) -> bool:
    """Whether this is dropout, an identity or an activation of torch's own."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules and not module._parameters


def _stand_in(layer: nn.Module, norms: dict[str, nn.Module], size: int, forms: dict[str, int]) -> nn.Module:
    """The layer with its norms on the CPU, hooks off, and stubs for all else; nothing of the layer is changed."""
    twin = _bare(layer)
    twin.__class__ = unfused(type(layer))
    generator = torch.Generator().manual_seed(0)
    for held, key, t in _held(twin):
        # Its own values, but where these are elsewhere in parts or not at all.
        here = type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta
        held[key] = (t if here else torch.randn(t.shape, generator=generator).to(t.dtype)).detach().cpu()
    modules = {}
    for number, (name, child) in enumerate(layer.named_children()):
        modules[name] = _Stub(child, number, forms[name]) if name in forms else _bare(child)
    for name in norms:
        for held, key, t in _held(modules[name]):
            shape = t.shape if t.numel() else (size,)
            held[key] = (0.7 + 0.4 * torch.randn(shape, generator=generator)).to(t.dtype)
        restore(modules[name])  # the formula is proven: what runs here needs no backend
    twin.__dict__["_modules"] = modules
    return twin


def _held(module: nn.Module) -> list[tuple[dict, str, torch.Tensor]]:
    """The module's own tensors, each with the dict that holds it and its name there."""
    stores = (module._parameters, module._buffers)
    return [(store, name, t) for store in stores for name, t in store.items() if t is not None]


def _bare(module: nn.Module) -> nn.Module:
    state = {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in vars(module).items()}
    state.update((k, v) for k, v in vars(nn.Module()).items() if k.endswith("_hooks") or "_hooks_" in k)
    state["_buffers"] = {key: t if t is None else t.clone() for key, t in module._buffers.items()}
    for name in ("forward", "_old_forward", "_hf_hook", "_is_hf_initialized"):
        state.pop(name, None)
    new = object.__new__(type(module))  # FSDP2's classes have a __new__ of their own
    new.__dict__.update(state, training=False)
    return new


@torch.no_grad()
def _run(forward: Callable, stand_in: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The first output of a forward for x, whatever else it asks for being None."""
    rest = list(inspect.signature(forward).parameters.values())[2:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    output = forward(stand_in, x, **{p.name: None for p in rest if p.default is p.empty and p.kind in named})
    return output[0] if isinstance(output, tuple) else output


def _used_as(definition: ast.FunctionDef, child: str) -> int:
    subscripts = [node.value for node in ast.walk(definition) if isinstance(node, ast.Subscript)]
    indexed = {value.id for value in subscripts if isinstance(value, ast.Name)}
    for node in ast.walk(definition):
        match node:
            case ast.Subscript(ast.Call(ast.Attribute(ast.Name(), name))) if name == child:
                return 2
            case ast.Assign([target, *_], ast.Call(ast.Attribute(ast.Name(), name))) if name == child:
                if isinstance(target, (ast.Tuple, ast.List)):
                    return len(target.elts)
                return 2 if isinstance(target, ast.Name) and target.id in indexed else 1
    return 1
