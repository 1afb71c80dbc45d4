"""Registries of backends, partitioners, reconstructions, model families and methods, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from .errors import InputError


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T], Generic[T]):
    """Instances of registered classes by their `name`, in the order of registration.

    >>> PARTITIONERS: Registry[Partitioner] = Registry("partitioner")
    >>> @PARTITIONERS.register
    ... class Semantic(Partitioner):
    ...     name = "semantic"
    """

    def __init__(self, kind: str) -> None:
        """Args:
        kind: What is registered here, in the singular, for error messages.
        """
        self._kind = kind
        self._known: dict[str, T] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Class decorator: registers one instance of the class under its name.

        Args:
            cls: A class with a `name` that takes no arguments.

        Returns:
            The class, unchanged.
        """
        self.add(cls())
        return cls

    def add(self, one: T) -> None:
        """Registers an instance under its name.

        Args:
            one: An instance; a name that is taken raises ValueError (`remove` the old one first).
        """
        if one.name in self._known:
            raise ValueError(f"two of kind {self._kind} are called {one.name!r}")
        self._known[one.name] = one

    def remove(self, name: str) -> None:
        """Forgets a registered name.

        Args:
            name: One of the known names.
        """
        del self._known[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            known = ", ".join(map(repr, self._known))
            raise InputError(f"{self._kind} {name!r} is not known; there are: {known}")
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
