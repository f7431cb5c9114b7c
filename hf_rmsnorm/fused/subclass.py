"""Classes made at run time, each a subclass of a module's class that overrides one
method.
"""

import copyreg
from collections.abc import Callable


def derive(
    base: type, forward: Callable, marks: dict, make: Callable[..., type], argument
) -> type:
    """A subclass of base with base's name and module, that pickles.

    Args:
        forward: of the new class.
        marks: class attributes by which the class is known.
        make: ``make(base, argument)`` gives this class again; by name, for pickle.

    Raises:
        TypeError: base cannot be subclassed.
    """
    names = {
        name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    cls = type(base)(base.__name__, (base,), {**names, "forward": forward, **marks})

    def __reduce_ex__(self, protocol):
        # older ones ask for a class by name
        reduced = super(cls, self).__reduce_ex__(max(protocol, 2))
        # The class is made at run time, so pickle cannot find it by name: have it made
        # again instead.
        if (
            type(self) is cls
            and reduced[0] is copyreg.__newobj__
            and reduced[1] == (cls,)
        ):
            return (_new, (make, base, argument), *reduced[2:])
        return reduced

    cls.__reduce_ex__ = __reduce_ex__
    return cls


def _new(make: Callable[..., type], base: type, argument):
    cls = make(base, argument)
    return cls.__new__(cls)


def marked(cls: type, mark: str) -> type | None:
    """The class in cls's ancestry that bears a mark, or None; it differs from cls where
    others subclassed it.
    """
    for ancestor in cls.__mro__:
        if mark in ancestor.__dict__:
            return ancestor
    return None


def exchanged(cls: type, part: type, other: type) -> type:
    """cls with `part` replaced by `other` among its ancestors; a new class only if
    `part` has subclasses among them.
    """
    if cls is part:
        return other
    if part not in cls.__mro__:
        return cls
    namespace = {
        k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")
    }
    forward = namespace.get("forward")
    while forward is not None and forward is not part.forward:
        forward = getattr(forward, "__wrapped__", None)
    if forward is not None:
        # an `__init_subclass__` has wrapped it, and will do so with the other
        del namespace["forward"]
    return type(cls)(
        cls.__name__, tuple(exchanged(b, part, other) for b in cls.__bases__), namespace
    )
