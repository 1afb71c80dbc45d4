"""Registries of backends, partitioners, reconstructions, model families and methods, by name."""

from collections import UserDict
from typing import Protocol, TypeVar

from .errors import InputError


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(UserDict[str, T]):
    """Instances of registered classes by their `name`, in the order of registration.

    >>> PARTITIONERS: Registry[Partitioner] = Registry("partitioner")
    >>> @PARTITIONERS.register
    ... class Semantic(Partitioner):
    ...     name = "semantic"
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind  # what is registered here, in the singular, for error messages

    def register(self, cls: type[T]) -> type[T]:
        """Class decorator: registers one instance of a class, which takes no arguments, under its name."""
        self.add(cls())
        return cls

    def add(self, one: T) -> None:
        """Registers an instance under its name; a name that is taken raises ValueError (`remove` the old one first)."""
        if one.name in self:
            raise ValueError(f"two of kind {self._kind} are called {one.name!r}")
        self[one.name] = one

    def remove(self, name: str) -> None:
        """Forgets a registered name."""
        del self[name]

    def __missing__(self, name: str) -> T:
        raise InputError(f"{self._kind} {name!r} is not known; there are: {', '.join(map(repr, self))}")
