"""Keeps the two moments of a chunk together on their way through DCP's planning.

Who calls, in the order of one save:

    every rank    prepare_local_plan   fold_pairs         m's and v's item become one PairItem
    coordinator   create_global_plan   (torch)            deduplicates, builds and validates Metadata
    every rank    write_data           PairItem.members   the two items that the planner can resolve
    coordinator   finish               unfold_metadata    each pair key becomes the keys of m and v
    coordinator   finish               check_coverage     what was written is what Metadata lists

A pair is planned under a key of its own, which no state dict holds. Deduplication is by key and offset, so
m and v cannot land on two ranks. Three more things follow, and each was a way to lose v without an error
as long as the pair went under m's key:

- A replica that has m but no v does not compete with another replica's pair. Both are written, and
  check_coverage refuses the chunk that came twice.
- Plan caching compares plans by key, offset and shape. A lone m that becomes a pair (or the reverse) is
  seen as a change, so no rank goes on with its stale plan.
- The plan cache is shared by all writers of a process. A writer that knows no pairs and is handed a cached
  plan with pairs fails at once (the planner cannot find the key) instead of saving m alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from guarddcp.container.records import M_SUFFIX, V_SUFFIX
from guarddcp.errors import FormatError, GuardError

__all__ = [
    "M_SUFFIX",
    "PAIR_SUFFIX",
    "V_SUFFIX",
    "PairItem",
    "check_coverage",
    "fold_pairs",
    "partner_fqn",
    "unfold_metadata",
]

PAIR_SUFFIX = " + exp_avg_sq [moment pair]"
"""m's key with this behind it is the pair's key. It is shown in the planner's own errors, so it is readable."""

MAX_KEYS_SHOWN = 5


def partner_fqn(m_fqn: str) -> str | None:
    """Key of v for the key of m, or None if the key is not that of a first moment."""
    return m_fqn.removesuffix(M_SUFFIX) + V_SUFFIX if m_fqn.endswith(M_SUFFIX) else None


@dataclass(frozen=True)
class PairItem(WriteItem):
    """Stands for both moments of one chunk: ``index`` is the pair's, ``tensor_data`` that of either moment."""

    @property
    def m(self) -> MetadataIndex:
        """Index of the first moment (exp_avg)."""
        return MetadataIndex(_m_fqn(self.index.fqn), self.index.offset)

    @property
    def v(self) -> MetadataIndex:
        """Index of the second moment (exp_avg_sq)."""
        return MetadataIndex(_v_fqn(self.index.fqn), self.index.offset)

    @property
    def members(self) -> tuple[WriteItem, WriteItem]:
        """Plain items of m and v, for ``planner.resolve_data``; the planner knows nothing of the pair's key."""
        m, v = (WriteItem(index, self.type, None, self.tensor_data) for index in (self.m, self.v))
        return m, v

    def tensor_storage_size(self) -> int | None:
        """Bytes of both moments of the whole tensor, as deduplication wants it to balance ranks."""
        size = super().tensor_storage_size()
        return None if size is None else 2 * size


def fold_pairs(plan: SavePlan) -> SavePlan:
    """Replace the items of m and v by one PairItem, in m's place, wherever both cover the same chunk.

    A pair is two items whose keys differ only in the suffix, with equal offset, chunk and tensor size, both
    float32 and strided. Every other item stays as it is, and so does a plan that is not usable: plan caching
    sends that empty stand-in for a plan that did not change. Folding twice changes nothing.

    Raises FormatError if a key of the state dict looks like the key of a pair.
    """
    if not plan.usable:
        return plan
    by_index = {item.index: item for item in plan.items}
    hidden = set()
    items = []
    for item in plan.items:
        if item.index.fqn.endswith(PAIR_SUFFIX) and not isinstance(item, PairItem):
            raise FormatError(
                "a key of the state dict ends like the keys that guarddcp gives to moment pairs",
                where=item.index.fqn,
                hint=f"Rename it: keys must not end in {PAIR_SUFFIX!r}.",
            )
        partner = _partner(item, by_index)
        if partner is not None:
            hidden.add(partner.index)
            item = PairItem(_pair_index(item.index), item.type, None, item.tensor_data)
        items.append(item)
    return dataclasses.replace(plan, items=[item for item in items if item.index not in hidden])


def unfold_metadata(metadata: Metadata) -> None:
    """Replace each pair key of ``metadata.state_dict_metadata`` by the keys of m and v, in that order, in place.

    Chunks of one moment that were planned alone are kept beside those that were planned in pairs. Doing it
    again changes nothing: under plan caching the planner hands in the same object at every save.

    Raises GuardError if ranks disagree whether a moment is a tensor.
    """
    entries = metadata.state_dict_metadata
    if not any(key.endswith(PAIR_SUFFIX) for key in entries):
        return
    unfolded: dict[str, Any] = {}
    for key, entry in entries.items():
        if key.endswith(PAIR_SUFFIX):
            for moment in (_m_fqn(key), _v_fqn(key)):
                _merge(unfolded, moment, entry)
        else:
            _merge(unfolded, key, entry)
    entries.clear()
    entries.update(unfolded)


def check_coverage(metadata: Metadata, results: Iterable[Iterable[object]]) -> None:
    """Refuse a save that did not write every chunk and byte key of ``metadata`` exactly once.

    ``metadata`` is unfolded. ``results`` is a list over ranks of lists; whatever has no MetadataIndex as
    ``index`` is passed over. Volumes of the chunks of a tensor must add up to the tensor: the planner does
    not check that when it sees one plan only (``no_dist=True``). Ranks with an empty shard share one index
    that one of them writes. Linear in the number of chunks.

    Raises GuardError that names the first keys at fault and their number.
    """
    indexes = (getattr(result, "index", None) for of_rank in results for result in of_rank)
    # Plain tuples: hashing MetadataIndex takes most of the time when there are a million of them.
    written = Counter((index.fqn, index.offset) for index in indexes if isinstance(index, MetadataIndex))
    problems: dict[str, str] = {}
    for key, entry in metadata.state_dict_metadata.items():
        for problem in _key_problems(key, entry, written):
            problems.setdefault(key, problem)
    for key, offset in written:
        problems.setdefault(key, f"{_at(offset)}written, but not part of the plan")
    if problems:
        shown = "; ".join(f"{key}: {text}" for key, text in list(problems.items())[:MAX_KEYS_SHOWN])
        more = len(problems) - MAX_KEYS_SHOWN
        raise GuardError(
            "ranks did not write every part of the checkpoint exactly once; nothing was committed. "
            f"{len(problems)} key(s) at fault: {shown}" + (f"; and {more} more" if more > 0 else ""),
            hint="All replicas must save the same keys with the same dtypes and shapes (a moment alone on one rank and "
            "its pair on another count as two writes), and all ranks must take part in one save (no_dist=False).",
        )


def _m_fqn(pair_fqn: str) -> str:
    return pair_fqn.removesuffix(PAIR_SUFFIX)


def _v_fqn(pair_fqn: str) -> str:
    return _m_fqn(pair_fqn).removesuffix(M_SUFFIX) + V_SUFFIX


def _pair_index(m: MetadataIndex) -> MetadataIndex:
    return dataclasses.replace(m, fqn=m.fqn + PAIR_SUFFIX)


def _partner(m: WriteItem, by_index: dict[MetadataIndex, WriteItem]) -> WriteItem | None:
    v_fqn = partner_fqn(m.index.fqn)
    if v_fqn is None or m.tensor_data is None:
        return None
    v = by_index.get(MetadataIndex(v_fqn, m.index.offset))
    if v is None or v.tensor_data is None or v.type != m.type:
        return None
    return v if _codable(m.tensor_data) and _same_chunk(m.tensor_data, v.tensor_data) else None


def _codable(data: TensorWriteData) -> bool:
    return data.properties.dtype == torch.float32 and data.properties.layout == torch.strided


def _same_chunk(a: TensorWriteData, b: TensorWriteData) -> bool:
    # requires_grad, memory_format and pin_memory say nothing about values; loaders never read them.
    same_kind = (a.properties.dtype, a.properties.layout) == (b.properties.dtype, b.properties.layout)
    return same_kind and a.size == b.size and a.chunk == b.chunk


def _merge(unfolded: dict[str, Any], key: str, entry: Any) -> None:
    """Add an entry's chunks under ``key``. Never changes ``entry``: it may be shared by two keys or by a cache."""
    known = unfolded.get(key)
    if known is None:
        if isinstance(entry, TensorStorageMetadata):
            entry = dataclasses.replace(entry, chunks=list(entry.chunks))
        unfolded[key] = entry
    elif isinstance(known, TensorStorageMetadata) and isinstance(entry, TensorStorageMetadata):
        known.chunks.extend(entry.chunks)
    else:
        raise GuardError(
            "ranks disagree about the kind of one key",
            where=key,
            expected="a tensor on every rank that holds it",
            got=f"{type(known).__name__} and {type(entry).__name__}",
            hint="All replicas must save the same keys with the same types.",
        )


def _key_problems(key: str, entry: object, written: Counter[tuple[str, torch.Size | None]]) -> Iterator[str]:
    """Yield what is wrong with one key; takes what it accounts for out of ``written``."""
    if isinstance(entry, BytesStorageMetadata):
        count = written.pop((key, None), 0)
        if count != 1:
            yield _times(count)
    elif isinstance(entry, TensorStorageMetadata):
        sizes_at: dict[torch.Size, torch.Size] = {}
        volume = 0
        for chunk in entry.chunks:
            sizes_at[chunk.offsets] = chunk.sizes
            volume += math.prod(chunk.sizes)
        for offset, sizes in sizes_at.items():
            count = written.pop((key, offset), 0)
            if count != 1 and not (count > 1 and 0 in sizes):
                yield _at(offset) + _times(count)
        total = math.prod(entry.size)
        if volume != total:
            yield f"chunks hold {volume} elements, the tensor has {total}"


def _times(count: int) -> str:
    return "not written" if count == 0 else f"written {count} times"


def _at(offset: torch.Size | None) -> str:
    return f"chunk at {tuple(offset)} " if offset else ""
