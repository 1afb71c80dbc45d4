"""How backends, partitioners, reconstructions, model families and methods make themselves known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from .errors import InputError


class Named(Protocol):
    name: ClassVar[str]


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T], Generic[T]):
    """Instances of registered classes by their `name`, in the order in which they registered.

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
        """Class decorator: makes one instance of the class known under its name.

        Args:
            cls: A class with a `name` that takes no arguments.

        Returns:
            The class, unchanged. A name that is taken is replaced: a user may register a better one.
        """
        self._known[cls.name] = cls()
        return cls

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
