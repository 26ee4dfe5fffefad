"""Recording calls of a function that still runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def spy(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Append `note(*arguments)`, of the positional ones, to the returned list at each call of `owner.name`."""
    own, noted = getattr(owner, name), list[Any]()

    def call(*arguments: Any, **named: Any) -> Any:
        noted.append(note(*arguments))
        return own(*arguments, **named)

    patch.setattr(owner, name, call)
    return noted


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises this error for any arguments."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call
