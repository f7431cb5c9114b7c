"""Which sums of a layer's forward its norms read, learned by running it on stand-ins for all that is not a norm.

The layer's own `+` are made to note what they return, its norms what they are given; a norm that is given the very
tensor that a `+` returned reads that sum. The forward with those sums fused then has to give the same bits.
"""

import ast
import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...fused.handover import hand_over, handed_over, holds_rows_of
from ...fused.layer import Fusion
from ...fused.norm import fusible_recipe, recipe_of
from ...fused.recipe import operands
from ...fused.source import CannotRewrite, changes_itself, forward_source, sums, with_sums
from ..formula.probe import is_plain
from ..swap import restore, unfused
from .values import hangs_hooks, is_seen, past_versions

SHAPE = (5, 3)  # rows of the stand-in's input: no dimension that a tuple of outputs could be mistaken for
FORMS = (1, 2, 3)  # a tensor, or a tuple of so many
NO_SUM, ADDS_NOTHING = "no norm reads a sum of its forward as it is", "its forward adds nothing"
# What a layer is, without its own settings -> what was learned of such layers.
_cache: dict[tuple, list["Learned"]] = {}
_NOT_PLAIN = object()


@dataclass(frozen=True)
class LayerFlow:
    """What the forward of a layer does with sums, and where its tensors go.

    Args:
        fusion: its own sums that a norm reads.
        entry: the child that is the first to be given the layer's input; "" where none is.
        passes: (child, who is the first to be given the very tensor that it returned) for each child that is no norm:
            another child, or "" for who called the layer.
        reason: why no sum is fused; "" where one is.
    """

    fusion: Fusion = Fusion(())
    entry: str = ""
    passes: tuple[tuple[str, str], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Learned:
    """What was learned of one layer. It holds for all layers alike whose settings, of those that were read, are equal.

    A forward that never reads its `layer_idx` is learned once for all layers; one that branches on it, once for each.
    """

    flow: LayerFlow | str
    settings: dict[str, object]

    def holds_for(self, settings: dict[str, object]) -> bool:
        return all(settings.get(name, _NOT_PLAIN) == value for name, value in self.settings.items())


def find_flow(layer: nn.Module, inside: bool = False) -> LayerFlow | str:
    """What a layer whose norms are patched does with sums; the reason where nothing can be told of it.

    inside: it is further in than a layer, where there are many such modules, of which few add: less is tried.
    """
    settings = _settings(layer)
    known = _cache.setdefault((inside, *structure(layer), _config(layer)), [])
    for learned in known:
        if learned.holds_for(settings):
            return learned.flow
    read: set[str] = set()
    try:
        flow = _learn(layer, inside, read)
    except CannotRewrite as error:
        flow = str(error)
    known.append(Learned(flow, {name: settings.get(name, _NOT_PLAIN) for name in read}))
    return flow


def norms_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The layer's children that are patched norms whose sums may be fused."""
    norms = ((name, child, fusible_recipe(child)) for name, child in layer.named_children())
    return {name: child for name, child, recipe in norms if recipe is not None and recipe.is_simple}


def structure(layer: nn.Module) -> tuple:
    """What layers alike have in common: their class and its forward, the classes of their children, norms' shapes."""
    cls = unfused(type(layer))
    children = tuple((name, type(child)) for name, child in layer.named_children())
    shapes = tuple(tuple(p.shape) for norm in norms_of(layer).values() for p in norm.parameters(recurse=False))
    return cls, inspect.unwrap(cls.forward), children, shapes


def _settings(layer: nn.Module) -> dict[str, object]:
    """The plain values that a layer holds; all layers are learned in evaluation mode."""
    return {name: value for name, value in vars(layer).items() if is_plain(value) and name != "training"}


def _config(layer: nn.Module) -> tuple:
    config = getattr(getattr(layer, "config", None), "__dict__", {})
    return tuple(sorted((name, value) for name, value in config.items() if is_plain(value)))


def _learn(layer: nn.Module, inside: bool, read: set[str]) -> LayerFlow | str:
    """`find_flow` of a layer of which nothing is known; `read` gets the names of the attributes that it depends on."""
    base = unfused(type(layer))
    function, definition = forward_source(base)
    positions = range(len(sums(definition, function)))
    if changes_itself(definition):
        return "its forward changes what the layer holds"
    if hangs_hooks(definition):
        return "its forward hangs hooks on tensors"
    if not positions and not any(True for _ in layer.children()):  # nn.Linear: no stand-in for its large weight
        return LayerFlow(reason=ADDS_NOTHING)
    norms = norms_of(layer)
    noting = _noting(base, read)
    size, dtype = _row(norms)
    x, other = torch.randn(2, *SHAPE, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    stubs = [name for name, child in layer.named_children() if name not in norms and not _is_plain_module(child)]
    totals: dict[int, torch.Tensor] = {}  # what each `+` returned
    returned: dict[str, torch.Tensor] = {}  # what each stub did
    given: list[tuple[str, torch.Tensor, int]] = []  # what each child was given, in which version

    def note(layer, left, right, at: int):
        total = left + right
        if isinstance(total, torch.Tensor):
            totals[at] = total
        return total

    forward = with_sums(base, {at: at for at in positions}, note)
    added = (getattr(node, "left", None) for node in sums(definition, function))
    kind = list if any(isinstance(side, ast.List) for side in added) else tuple  # ``[h] + outputs[1:]``
    # What the stubs may return, the most likely first: how the source uses their outputs says it.
    guess = tuple(_used_as(definition, name) for name in stubs)
    others = itertools.product(FORMS, repeat=len(stubs)) if len(stubs) <= 4 and not inside else ()
    for rest, forms in itertools.product((None, other), dict.fromkeys([guess, *others])):
        stand_in = _stand_in(layer, norms, size, dict(zip(stubs, forms, strict=True)), kind)
        stand_in.__class__ = noting
        try:
            expected = _run(base.forward, stand_in, x, rest)
            for name in (*norms, *stubs):
                stand_in._modules[name].register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: given.extend(
                        (name, t, t._version) for t in (_first(args, kwargs),) if t is not None
                    ),
                    with_kwargs=True,
                )
            for name in stubs:
                stand_in._modules[name].register_forward_hook(
                    lambda _, args, y, name=name: returned.update({name: y[0] if isinstance(y, tuple) else y})
                )
            output = _run(forward, stand_in, x, rest)
        except Exception:  # a stub returns what this forward does not expect, which any error can say
            output = None
        if output is not None and output.shape == x.shape and torch.equal(output, expected):
            nodes, itself = sums(definition, function), definition.args.args[0].arg
            past = past_versions(definition, itself)
            to_norms = [each for each in given if each[0] in norms]
            sites = tuple(site for site in _first_readers(totals, to_norms, output) if nodes[site[0]] not in past)
            entries = [*to_norms, *given]  # a norm before others
            entry = next((name for name, read, _ in entries if read is x), "")
            views = {
                at for at, _ in sites if not any(t is totals[at] for _, t, _ in to_norms)
            }  # whose graph is its own
            seen = [at for at, name in sites if name and (at in views or is_seen(definition, nodes[at], itself, norms))]
            reason = _refuted(base, stand_in, norms, sites, expected, x, rest) if sites else NO_SUM
            fusion = Fusion(() if reason else sites, tuple(seen))
            passes = tuple((name, to) for name, to in _first_readers(returned, given, output) if name != to)
            return LayerFlow(fusion, entry, passes, reason if positions else ADDS_NOTHING)
        totals.clear()
        returned.clear()
        given.clear()
    return "its forward does not run on stand-ins for what is not a norm" if positions else ADDS_NOTHING


def _first_readers(made: dict, given: list, output: torch.Tensor) -> tuple:
    """(key, name) of each tensor that was made and is given to somebody as it is; "" is who called the forward."""
    # A sum that is written to before it is read is another: what tells so at run time, the version of a tensor, there
    # is none of under `inference_mode`.
    given = [*given, ("", output, output._version)]
    readers = (
        (key, [name for name, x, version in given if (x is y or holds_rows_of(x, y)) and version == 0])
        for key, y in made.items()
    )
    return tuple(sorted((key, names[0]) for key, names in readers if names))


def _row(norms: dict[str, nn.Module]) -> tuple[int, torch.dtype]:
    """(length of the norms' rows, dtype of their weights); any length for norms without weight, or with empty ones."""
    parameters = [p for norm in norms.values() for p in norm.parameters(recurse=False)]
    whole = [p for p in parameters if p.numel()]
    sizes = [*(p.shape[-1] for p in whole), *(recipe_of(norm).hidden_size for norm in norms.values())]
    dtypes = [p.dtype for p in whole or parameters]
    return next(filter(None, sizes), 64), next(iter(dtypes), torch.bfloat16)


def _refuted(base: type, stand_in: nn.Module, norms, sites: tuple, expected: torch.Tensor, x, rest) -> str:
    """Why these sums cannot be fused, "" where the forward that fuses them gives what it is expected to."""
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
        output = _run(with_sums(base, dict(sites), add), stand_in, x, rest)
    except Exception as error:  # a sum where `self` is another object, or whatever else a forward does
        return f"with its sums fused its forward fails: {type(error).__name__}: {error}"
    return "" if torch.equal(output, expected) else "with its sums fused its forward gives other values"


class _Stub(nn.Module):
    """Something that mixes: one tensor of its input's shape, or a tuple or list that begins with it."""

    def __init__(self, original: nn.Module, number: int, form: int, kind: type = tuple):
        super().__init__()
        self.__dict__["original"], self.number, self.form, self.kind = original, number, form, kind

    def __getattr__(self, name):
        found = getattr(self.__dict__["original"], name)
        return _Stub(found, self.number, 1) if isinstance(found, nn.Module) else found

    def forward(self, *args, **kwargs):
        x = _first(args, kwargs)
        y = x.roll(1, -1) * 0.5 + 0.125 * self.number
        return y if self.form == 1 else self.kind([y, *[None] * (self.form - 1)])


def _first(args: tuple, kwargs: dict) -> torch.Tensor | None:
    tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
    return next((t for t in tensors if t.is_floating_point()), None)


def _is_plain_module(module: nn.Module) -> bool:
    """Whether this is dropout, an identity or an activation of torch's own."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules and not module._parameters


def _stand_in(layer: nn.Module, norms: dict[str, nn.Module], size: int, forms: dict[str, int], kind: type) -> nn.Module:
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
        modules[name] = _Stub(child, number, forms[name], kind) if name in forms else _bare(child)
    for name in norms:
        for held, key, t in _held(modules[name]):
            shape = t.shape if t.numel() else (size,)
            held[key] = (0.7 + 0.4 * torch.randn(shape, generator=generator)).to(t.dtype)
        restore(modules[name])  # the formula is proven: what runs here needs no backend
    twin.__dict__["_modules"] = modules
    return twin


def _noting(cls: type, read: set[str]) -> type:
    """A subclass of a class whose instances add to `read` the name of each attribute that is read of them."""

    def __getattribute__(self, name):
        read.add(name)
        return super(noting, self).__getattribute__(name)

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__")}
    try:
        noting = type(cls)(cls.__name__, (cls,), {**names, "__getattribute__": __getattribute__})
    except Exception as error:  # a metaclass or __init_subclass__ of the user's may refuse in any way
        raise CannotRewrite(f"its class cannot be subclassed: {type(error).__name__}: {error}") from error
    return noting


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
def _run(forward: Callable, stand_in: nn.Module, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """The first output of a forward for x, all else that it asks for, or may be given a tensor, being `other`."""
    rest = list(inspect.signature(forward).parameters.values())[2:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    asked = [p.name for p in rest if p.default in (p.empty, None) and p.kind in named]
    output = forward(stand_in, x, **dict.fromkeys(asked, other))
    return output[0] if isinstance(output, (tuple, list)) else output


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
