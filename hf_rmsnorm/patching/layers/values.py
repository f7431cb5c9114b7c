"""Where the values of a forward go, read from its source, for modulated norms and for those of q and k.

Who else gets hold of a sum that a modulated norm reads: such a sum may be hooked, differentiated by, or written to. And
what else is given q and k between their norms and their rotation.
"""

import ast
from collections.abc import Iterable

_FACTS = {"shape", "dtype", "device", "ndim", "size", "dim", "numel"}  # asked without getting hold of the tensor
_VIEWS = {"chunk", "flatten", "movedim", "permute", "reshape", "select", "split", "squeeze", "transpose", "unbind"}
PAST = {"data", "numpy", "__array__", "__dlpack__", "untyped_storage"}  # what writes go by without moving a version
JUMPS = ast.Break, ast.Continue, ast.Try, ast.While  # which `Flow` does not follow
_HOOKING = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
_Values = frozenset  # of what an expression may be: the nodes that made it, and parameters by name


def is_seen(definition: ast.FunctionDef, total: ast.BinOp, itself: str, norms: Iterable[str]) -> bool:
    """Whether anything but operators and these norms may be given what a ``+`` of a forward returns, or write to it.

    `total` is the ``+``, a node of `definition`; `itself` the forward's name for its module. If it jumps, they may.
    """
    if any(isinstance(node, JUMPS) for node in ast.walk(definition)):
        return True
    flow = Flow(definition, itself)
    read = (values for name, _, given in flow.calls if name not in norms or len(given) > 1 for _, values in given)
    return total in flow.shown or total in flow.written or any(total in values for values in read)


def hangs_hooks(definition: ast.FunctionDef) -> bool:
    """Whether a forward hangs hooks on tensors, or asks them to keep their gradients."""
    return any(isinstance(node, ast.Attribute) and node.attr in _HOOKING for node in ast.walk(definition))


def children_given(definition: ast.FunctionDef, body: list[ast.stmt], itself: str, norms: tuple[str, str]) -> tuple:
    """((name, what it is given) of each other child that is called from the first of two norms on; what these read)."""
    flow = Flow(ast.FunctionDef(definition.name, definition.args, body, []), itself)
    given = [(name, frozenset().union(*(values for _, values in given))) for name, _, given in flow.calls]
    first = [name for name, _ in given].index(norms[0])
    rows = frozenset().union(*(values for name, values in given if name in norms))
    return [each for each in given[first:] if each[0] not in norms], rows


class Flow:
    """What becomes of each value of a forward; a binding on a branch or in a loop adds to an earlier one."""

    def __init__(self, definition: ast.FunctionDef, itself: str):
        self.itself, self.time = itself, 0  # which counts calls and writes in the order of the source
        self.calls: list[tuple[str, int, list]] = []  # of children: (name, time, [(position or keyword, values)])
        self.written: dict[object, int] = {}  # value -> time of the last write to it, in place or by a view
        self.shown: set = set()  # what somebody gets hold of otherwise: functions, the caller, closures
        self.past: set = set()  # what is written to, or may be, past its version
        self.read: dict[ast.Name, _Values] = {}  # what a variable may be where it is read
        self.rows: dict[str, str] = {}  # loop variable -> the child whose modules it takes
        nodes = ast.walk(definition)
        self.outer = {name for n in nodes if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
        arguments = definition.args
        names = (a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        bound = {name: frozenset([name]) for name in names if name != itself}
        for statement in definition.body:
            self.statement(statement, bound)

    def branch(self, statements: list[ast.stmt], bound: dict[str, _Values]) -> None:
        inside = dict(bound)
        for statement in statements:
            self.statement(statement, inside)
        for name, values in inside.items():
            bound[name] = bound.get(name, frozenset()) | values

    def statement(self, node: ast.stmt, bound: dict[str, _Values]) -> None:
        match node:
            case ast.Assign([ast.Tuple(names)], ast.Tuple(parts)) if len(names) == len(parts):
                for target, values in [(each, self.values(p, bound)) for each, p in zip(names, parts, strict=True)]:
                    self.bind(target, values, bound)
            case ast.Assign(targets, value):
                values = self.values(value, bound)
                for target in targets:
                    self.bind(target, values, bound)
            case ast.AnnAssign(target, _, value) if value is not None:
                self.bind(target, self.values(value, bound), bound)
            case ast.AugAssign(target, _, value):
                values = self.values(value, bound)
                if any(isinstance(each, (ast.Tuple, ast.List, ast.Dict, ast.Set)) for each in values):
                    self.shown |= values  # of the list that it adds to
                self.write(self.values(target, bound))
            case ast.For(target, iterable, body, orelse):
                for each in ast.walk(iterable):  # `layers` of ``enumerate(self.layers[1:])``
                    if isinstance(each, ast.Attribute) and getattr(each.value, "id", None) == self.itself:
                        self.rows.update((n.id, each.attr) for n in ast.walk(target) if isinstance(n, ast.Name))
                self.bind(target, self.values(iterable, bound), bound)
                for part in (body, body, orelse):  # twice: what the end of a loop leaves to its beginning
                    self.branch(part, bound)
            case ast.While(_, body, _):
                self.parts(node, bound)
                self.branch(body, bound)
            case ast.Return(value) if value is not None:
                self.shown |= self.values(value, bound)
            case ast.FunctionDef() | ast.ClassDef():
                self.shown |= self.mentioned(node, bound)
            case _:
                self.parts(node, bound)

    def parts(self, node: ast.AST, bound: dict[str, _Values]) -> None:
        for _, field in ast.iter_fields(node):
            parts = [part for part in (field if isinstance(field, list) else [field]) if isinstance(part, ast.AST)]
            if parts and isinstance(parts[0], ast.stmt):
                self.branch(parts, bound)
                continue
            for part in parts:
                self.values(part, bound) if isinstance(part, ast.expr) else self.parts(part, bound)

    def bind(self, target: ast.expr, values: _Values, bound: dict[str, _Values]) -> None:
        match target:
            case ast.Name(name):
                bound[name] = values
                self.shown |= values if name in self.outer else set()
            case ast.Tuple(targets) | ast.List(targets):
                for each in targets:
                    self.bind(each, values, bound)
            case ast.Starred(inner):
                self.bind(inner, values, bound)
            case _:
                self.shown |= values
                if isinstance(target, ast.Subscript):
                    self.write(self.values(target.value, bound))
                elif isinstance(target, ast.Attribute):
                    self.past |= self.values(target.value, bound)

    def write(self, values: _Values) -> None:
        self.time += 1
        self.written.update((value, self.time) for value in values)

    def values(self, node: ast.expr, bound: dict[str, _Values]) -> _Values:
        """What an expression may be: the tensor of a name, a view of one, or a new value, which is the node itself."""
        match node:
            case ast.Name(name):
                found = bound.get(name, frozenset())
                self.read[node] = self.read.get(node, frozenset()) | found
                return found
            case ast.IfExp(test, body, orelse):
                self.values(test, bound)
                return self.values(body, bound) | self.values(orelse, bound)
            case ast.NamedExpr(target, value):
                values = self.values(value, bound)
                self.bind(target, values, bound)
                return values
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.Starred():
                parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
                return frozenset([node]).union(*(self.values(part, bound) for part in parts))
            case ast.Subscript(value, index):
                self.values(index, bound)
                return self.values(value, bound)
            case ast.Attribute(value, name):
                values = self.values(value, bound)
                self.past |= values if name in PAST else set()
                return frozenset([node]) if name in _FACTS else values | {node}
            case ast.Call(function, arguments, keywords):
                return self.call(node, function, arguments, keywords, bound)
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                found = self.mentioned(node, bound)
                self.shown |= found
                return found | {node}
        self.parts(node, bound)
        return frozenset([node])

    def call(self, node: ast.Call, function, arguments, keywords, bound) -> _Values:
        given = [(at, self.values(argument, bound)) for at, argument in enumerate(arguments)]
        given += [(k.arg or "**", self.values(k.value, bound)) for k in keywords]
        for name, values in given[len(arguments) :]:
            if name == "out" or (name == "inplace" and arguments):
                self.write(values if name == "out" else given[0][1])
        match function:
            case ast.Attribute(ast.Name(owner), name) if owner == self.itself:
                child = name
            case ast.Name(name):
                child = self.rows.get(name)
            case _:
                child = None
        if child is not None:
            self.time += 1
            self.calls.append((child, self.time, given))
            return frozenset([node])
        self.shown = self.shown.union(*(values for _, values in given))
        receiver, method = self.values(function, bound), getattr(function, "attr", "")
        if method in _VIEWS and isinstance(function.value, ast.Name) and function.value.id == "torch":
            receiver = receiver.union(*(values for _, values in given))
        dunder = method.startswith(("__i", "__setitem__"))  # `h.__iadd__(y)` is ``h += y``
        if dunder if method.endswith("__") else method.endswith("_"):
            self.write(receiver)
        return frozenset([node]) if method in _FACTS else receiver | {node}  # a method's result may be a view

    @staticmethod
    def mentioned(node: ast.AST, bound: dict[str, _Values]) -> _Values:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        inside = frozenset(each for each in ast.walk(node) if isinstance(each, ast.expr))
        return inside.union(*(bound.get(name, frozenset()) for name in names))
