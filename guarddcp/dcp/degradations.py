"""What was saved, but not as it was asked for: gathered on every rank, said once for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Degradation", "Degradations", "lines_of"]

_KEYS_SHOWN = 3


@dataclass(frozen=True)
class Degradation:
    """``kind``: a slug; ``text``: why and what to do; ``keys``: of the state dict, those that it happened to."""

    kind: str
    text: str
    keys: tuple[str, ...]


class Degradations:
    """Those of one rank."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], list[str]] = {}

    def add(self, kind: str, text: str, key: str) -> None:
        self._keys.setdefault((kind, text), []).append(key)

    def all(self) -> list[Degradation]:
        return [Degradation(kind, text, tuple(keys)) for (kind, text), keys in self._keys.items()]


def lines_of(found: Iterable[Degradation]) -> list[str]:
    """One line for each kind: its first text, the first of its keys, and how many of both there are."""
    texts: dict[str, dict[str, None]] = {}
    keys: dict[str, dict[str, None]] = {}
    for one in found:
        texts.setdefault(one.kind, {})[one.text] = None
        keys.setdefault(one.kind, {}).update(dict.fromkeys(one.keys))
    return [f"{kind}: {_line(list(of_kind), list(keys[kind]))}" for kind, of_kind in texts.items()]


def _line(texts: list[str], keys: list[str]) -> str:
    more = f" and {len(keys) - _KEYS_SHOWN} more" if len(keys) > _KEYS_SHOWN else ""
    causes = f" (causes of this kind: {len(texts)}; `reason` in the report names each)" if len(texts) > 1 else ""
    return f"{texts[0]} [{', '.join(keys[:_KEYS_SHOWN])}{more}]{causes}"
