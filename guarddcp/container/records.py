"""What the parts of a save are called on their way from the ranks into the manifest: plain, picklable records."""

from __future__ import annotations

import math
from dataclasses import dataclass

from guarddcp.certificate import Certificate
from guarddcp.codecs.view import View
from guarddcp.container.datafile import FileEntry

__all__ = [
    "EXACT", "IN_PACK", "M_SUFFIX", "PACKED", "PICKLED", "RATIO", "TREE", "V_SUFFIX",
    "PackRecord", "RankPart", "ShardRecord", "TensorEntry", "ValueEntry", "ValueRecord",
]  # fmt: skip

M_SUFFIX, V_SUFFIX = ".exp_avg", ".exp_avg_sq"
"""How the keys of Adam's moments end."""

EXACT, RATIO = 0, 1
PACKED, TREE, PICKLED = 255, 254, 253
IN_PACK = (PACKED, TREE, PICKLED)
"""Codec ids (FORMAT.md 2-4). Inside packs: raw bytes, the plain tree of a tensor subclass, torch.save's bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor key of the state dict. ``dtype``: torch's name without the prefix."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class ValueEntry:
    """A plain value of the state dict. ``kind``: "plain" (a tagged tree) or "pickle" (torch.save's bytes)."""

    key: str
    kind: str


@dataclass(frozen=True)
class ShardRecord:
    """One stored chunk. ``members``: (role, key); ``file``, ``record``, ``bytes``: where its record is, how long.

    A shard in a pack has ``pack`` >= 0 and takes ``bytes`` of the pack's raw bytes from ``pack_begin``; its ``file`` is
    0.
    ``file`` and ``pack`` count within the rank until the manifest renumbers them. ``reason``: "slug: why" a moment is
    exact, or "".
    """

    members: tuple[tuple[str, str], ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    codec: int
    view: View | None = None
    certificate: Certificate | None = None
    private: bytes = b""
    reason: str = ""
    file: int = 0
    record: int = 0
    bytes: int = 0
    pack: int = -1
    pack_begin: int = 0
    failed: int = 0
    escapes: tuple[int, ...] = ()

    @property
    def coordinates(self) -> int:
        """Entries of one member."""
        return math.prod(self.sizes)

    @property
    def evidence(self) -> str:
        return "proved" if self.certificate is not None else "exact"


@dataclass(frozen=True)
class ValueRecord:
    """One stored value: ``length`` bytes from ``begin`` of the raw bytes of pack ``pack``."""

    key: str
    kind: str
    pack: int
    begin: int
    length: int


@dataclass(frozen=True)
class PackRecord:
    """One pack: where its record lies, its stored and its raw bytes."""

    file: int
    record: int
    bytes: int
    raw: int


@dataclass(frozen=True)
class RankPart:
    """What a rank wrote beside its items: its data files and packs."""

    rank: int
    files: tuple[FileEntry, ...] = ()
    packs: tuple[PackRecord, ...] = ()
