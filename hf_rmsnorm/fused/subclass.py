"""Classes made at run time, each a subclass of a module's class that overrides one
method.
"""

import copyreg
from collections.abc import Callable


def derive(
    base: type, forward: Callable, marks: dict, make: Callable, *arguments
) -> type:
    """A subclass of base with base's name and module, that pickles.

    Args:
        forward: of the new class.
        marks: class attributes by which the class is known.
        make: ``make(base, *arguments)`` gives this class again; by name, for pickle.

    Raises:
        TypeError: base cannot be subclassed.
    """
    namespace = {"forward": forward, **marks}
    for name in ("__module__", "__qualname__", "__doc__"):
        namespace[name] = getattr(base, name)
    cls = type(base)(base.__name__, (base,), namespace)

    def __reduce_ex__(self, protocol):
        # older ones ask for a class by name
        reduced = super(cls, self).__reduce_ex__(max(protocol, 2))
        # The class is made at run time, so pickle cannot find it by name: have it made
        # again instead.
        made, of_class, *state = reduced
        if type(self) is cls and made is copyreg.__newobj__ and of_class == (cls,):
            return _new, (make, base, *arguments), *state
        return reduced

    cls.__reduce_ex__ = __reduce_ex__
    return cls


def _new(make: Callable, base: type, *arguments):
    cls = make(base, *arguments)
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
    namespace = dict(cls.__dict__)
    namespace.pop("__dict__", None)
    namespace.pop("__weakref__", None)
    bases = tuple(exchanged(base, part, other) for base in cls.__bases__)
    return type(cls)(cls.__name__, bases, namespace)
