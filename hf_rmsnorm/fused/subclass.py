"""Classes made at run time, each a subclass of a module's class that overrides one
method.
"""

import copyreg
from collections.abc import Callable

# What these run for a new class or around a function concerns that one alone. Code of
# others may keep account of it, as a registry of classes does.
_LIBRARIES = {
    "abc", "accelerate", "builtins", "diffusers", "torch", "transformers", "typing",
}  # fmt: skip


def derive(
    base: type, forward: Callable, marks: dict, make: Callable, *arguments
) -> type:
    """A subclass of base with base's name and module, that pickles.

    Args:
        forward: of the new class.
        marks: class attributes by which the class is known.
        make: ``make(base, *arguments)`` gives this class again; by name, for pickle.

    Raises:
        TypeError: base cannot be subclassed, or the user's code would run for that.
    """
    hearer = _hears_of_subclasses(base)
    if hearer:
        raise TypeError(f"{hearer} would run for the patched class too")
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


def _hears_of_subclasses(base: type) -> str:
    """The name of the user's code that runs for a new subclass; "" if there is none."""
    for cls in base.__mro__:
        if "__init_subclass__" in vars(cls) and not is_of_library(cls):
            return f"{cls.__qualname__}.__init_subclass__"
    for cls in type(base).__mro__:
        if not is_of_library(cls):
            return f"the metaclass {cls.__qualname__}"
    return ""


def is_of_library(defined) -> bool:
    """Whether a class or a function is torch's or Hugging Face's."""
    module = getattr(defined, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES


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
