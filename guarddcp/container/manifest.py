"""The manifest: everything that ties data files to a save, as one checksummed object (FORMAT.md 6).

build    coordinator: the ranks' records -> Manifest
to_bytes / from_bytes
find     one shard by key and offset; shards of a key; values
Shards stay in integer columns and become `ShardRecord`s only when asked for.
"""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from guarddcp.certificate import Certificate, from_plain, to_plain
from guarddcp.codecs.ratio import CAUSES
from guarddcp.codecs.view import View
from guarddcp.container.datafile import FileEntry
from guarddcp.container.layout import (
    MANIFEST_MAGIC,
    VERSION,
    checksum,
    compress,
    decompress,
    pack_columns,
    unpack_columns,
)  # fmt: skip
from guarddcp.container.records import (
    IN_PACK,
    PackRecord,
    RankPart,
    ShardRecord,
    TensorEntry,
    ValueEntry,
    ValueRecord,
)  # fmt: skip
from guarddcp.errors import FormatError, IntegrityError

__all__ = ["Manifest", "build", "from_bytes", "to_bytes"]

_HEADER = struct.Struct("<8sIIQQQ")
_HEAD_LENGTH = struct.Struct("<Q")
_RAW, _ZSTD = 0, 1
_RATIO_ALLOWED, _RATIO_SLACK = 128, 1 << 20
_INDEXES = ("view", "certificate", "private", "reason")
_PLACES = ("codec", *_INDEXES, "file", "record", "bytes", "pack", "pack.begin", "failed")
_PACK_COLUMNS = ("pack.file", "pack.record", "pack.bytes", "pack.raw")
_VALUE_COLUMNS = ("value.pack", "value.begin", "value.length")


def _escape_column(cause: str) -> str:
    return f"escapes.{cause}"


@dataclass
class Manifest:
    """A whole checkpoint's index. ``columns``: int64 arrays as FORMAT.md 6 names them; lists: the head's."""

    writer: str
    created: str
    guard: dict[str, Any]
    files: list[FileEntry]
    entries: list[TensorEntry | ValueEntry]
    groups: list[tuple[tuple[str, str], ...]]
    views: list[View]
    certificates: list[Certificate]
    privates: list[bytes]
    reasons: list[str]
    planner_data: str
    storage_meta: str
    columns: dict[str, np.ndarray]
    causes: tuple[str, ...] = CAUSES
    _by_offset: dict[str, dict[tuple[int, ...], int]] = field(default_factory=dict, repr=False)

    @property
    def num_shards(self) -> int:
        return int(self.columns["codec"].size)

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        return {entry.key: entry for entry in self.entries if isinstance(entry, TensorEntry)}

    @cached_property
    def values(self) -> dict[str, ValueRecord]:
        """Value records by key."""
        entries = [entry for entry in self.entries if isinstance(entry, ValueEntry)]
        rows = zip(*(self.columns[name].tolist() for name in _VALUE_COLUMNS), strict=True)
        return {e.key: ValueRecord(e.key, e.kind, *row) for e, row in zip(entries, rows, strict=True)}

    @cached_property
    def packs(self) -> list[PackRecord]:
        return [PackRecord(*row) for row in zip(*(self.columns[name].tolist() for name in _PACK_COLUMNS), strict=True)]

    @cached_property
    def _group_begins(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.columns["group.shards"])])

    @cached_property
    def _axis_begins(self) -> np.ndarray:
        """Per shard: where its boxes begin in the columns offsets and sizes."""
        ndim = [len(self.tensors[members[0][1]].shape) for members in self.groups]
        per_shard = np.repeat(np.array(ndim, np.int64), self.columns["group.shards"])
        return np.concatenate([[0], np.cumsum(per_shard)])

    @cached_property
    def _groups_of_key(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, members in enumerate(self.groups):
            for _, key in members:
                found.setdefault(key, []).append(number)
        return found

    def shard(self, index: int) -> ShardRecord:
        """Shard number ``index`` in column order."""
        group = int(np.searchsorted(self._group_begins, index, side="right")) - 1
        begin, end = self._axis_begins[index], self._axis_begins[index + 1]
        at = {name: int(self.columns[name][index]) for name in _PLACES}
        return ShardRecord(
            members=self.groups[group],
            offsets=tuple(self.columns["offsets"][begin:end].tolist()),
            sizes=tuple(self.columns["sizes"][begin:end].tolist()),
            codec=at["codec"],
            view=self.views[at["view"] - 1] if at["view"] else None,
            certificate=self.certificates[at["certificate"] - 1] if at["certificate"] else None,
            private=self.privates[at["private"] - 1] if at["private"] else b"",
            reason=self.reasons[at["reason"] - 1] if at["reason"] else "",
            file=at["file"],
            record=at["record"],
            bytes=at["bytes"],
            pack=at["pack"] - 1,
            pack_begin=at["pack.begin"],
            failed=at["failed"],
            escapes=tuple(int(self.columns[_escape_column(cause)][index]) for cause in self.causes),
        )

    def shards(self) -> Iterator[ShardRecord]:
        return (self.shard(index) for index in range(self.num_shards))

    def shard_indexes(self, key: str) -> list[int]:
        """Numbers of the shards that hold chunks of tensor ``key``."""
        begins = self._group_begins
        return [i for g in self._groups_of_key.get(key, ()) for i in range(int(begins[g]), int(begins[g + 1]))]

    def chunks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, sizes) of every stored chunk of tensor ``key``."""
        found = []
        for index in self.shard_indexes(key):
            begin, end = self._axis_begins[index], self._axis_begins[index + 1]
            found.append(
                (tuple(self.columns["offsets"][begin:end].tolist()), tuple(self.columns["sizes"][begin:end].tolist()))
            )
        return found

    def find(self, key: str, offset: tuple[int, ...]) -> int:
        """Number of the shard that holds the chunk of ``key`` at ``offset``. Raises FormatError if there is none."""
        if key not in self._by_offset:
            indexes = self.shard_indexes(key)
            places = [place for place, _ in self.chunks(key)]
            # Empty chunks share offsets with full ones: the full one wins.
            order = sorted(range(len(indexes)), key=lambda i: self.shard(indexes[i]).coordinates)
            self._by_offset[key] = {places[i]: indexes[i] for i in order}
        try:
            return self._by_offset[key][offset]
        except KeyError:
            raise FormatError("no such chunk in the manifest", where=key, got=f"offset {offset}") from None

    def record_begins(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(file, record) -> byte range [begin, end) of every record."""
        from guarddcp.container.layout import HEADER_BYTES

        own = self.columns["pack"] == 0
        file = np.concatenate([self.columns["file"][own], self.columns["pack.file"]])
        record = np.concatenate([self.columns["record"][own], self.columns["pack.record"]])
        length = np.concatenate([self.columns["bytes"][own], self.columns["pack.bytes"]])
        order = np.lexsort((record, file))
        ranges, at, current = {}, HEADER_BYTES, -1
        for f, r, n in zip(file[order].tolist(), record[order].tolist(), length[order].tolist(), strict=True):
            if f != current:
                at, current = HEADER_BYTES, f
            ranges[f, r] = (at, at + n)
            at += n
        return ranges


def build(
    entries: Iterable[TensorEntry | ValueEntry],
    ranks: Iterable[tuple[RankPart, list[ShardRecord], list[ValueRecord]]],
    *,
    guard: dict[str, Any],
    writer: str,
    planner_data: str,
    storage_meta: str,
) -> Manifest:
    """Merge what the ranks wrote. ``entries`` in state-dict order; coverage is the caller's business."""
    ordered = list(entries)
    rank_of = {entry.key: number for number, entry in enumerate(ordered)}
    files: list[FileEntry] = []
    packs: list[tuple[int, ...]] = []
    by_group: dict[tuple[tuple[str, str], ...], list[tuple[ShardRecord, int, int]]] = {}
    values: dict[str, tuple[int, ...]] = {}
    for part, shards, stored in ranks:
        file_base, pack_base = len(files), len(packs)
        files += part.files
        packs += [(p.file + file_base, p.record, p.bytes, p.raw) for p in part.packs]
        for shard in shards:
            by_group.setdefault(shard.members, []).append((shard, file_base, pack_base))
        for value in stored:
            values[value.key] = (value.pack + pack_base, value.begin, value.length)
    groups = sorted(by_group, key=lambda members: (rank_of[members[0][1]], len(members)))
    tables: dict[str, dict[Any, int]] = {name: {} for name in _INDEXES}
    rows = [row for members in groups for row in by_group[members]]
    columns = _shard_columns(rows, tables)
    columns["group.shards"] = np.array([len(by_group[members]) for members in groups], np.int64)
    columns |= _stack(_PACK_COLUMNS, packs)
    columns |= _stack(_VALUE_COLUMNS, [values[e.key] for e in ordered if isinstance(e, ValueEntry)])
    return Manifest(
        writer=writer,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        guard=guard,
        files=files,
        entries=ordered,
        groups=groups,
        views=list(tables["view"]),
        certificates=list(tables["certificate"]),
        privates=list(tables["private"]),
        reasons=list(tables["reason"]),
        planner_data=planner_data,
        storage_meta=storage_meta,
        columns=columns,
    )


def _stack(names: tuple[str, ...], rows: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
    table = np.array(rows, np.int64).reshape(len(rows), len(names))
    return {name: table[:, i] for i, name in enumerate(names)}


def _shard_columns(
    rows: list[tuple[ShardRecord, int, int]], tables: dict[str, dict[Any, int]]
) -> dict[str, np.ndarray]:
    def number(name: str, item: Any) -> int:
        if not item:
            return 0
        return tables[name].setdefault(item, len(tables[name])) + 1

    places = [
        (
            shard.codec,
            number("view", shard.view),
            number("certificate", shard.certificate),
            number("private", shard.private),
            number("reason", shard.reason),
            0 if shard.codec in IN_PACK else shard.file + file_base,
            shard.record,
            shard.bytes,
            shard.pack + pack_base + 1 if shard.codec in IN_PACK else 0,
            shard.pack_begin,
            shard.failed,
        )
        for shard, file_base, pack_base in rows
    ]
    columns = _stack(_PLACES, places)
    for axis, name in (("offsets", "offsets"), ("sizes", "sizes")):
        columns[name] = np.array([n for shard, _, _ in rows for n in getattr(shard, axis)], np.int64)
    escapes = np.array([shard.escapes or (0,) * len(CAUSES) for shard, _, _ in rows], np.int64).reshape(-1, len(CAUSES))
    return columns | {_escape_column(cause): escapes[:, i] for i, cause in enumerate(CAUSES)}


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as the bytes of `.metadata`."""
    head = json.dumps(_head(manifest), separators=(",", ":"), ensure_ascii=True).encode("ascii")
    raw = _HEAD_LENGTH.pack(len(head)) + head + pack_columns(manifest.columns)
    stored, coder = compress(raw, level=3), _ZSTD
    if len(raw) > _RATIO_SLACK + _RATIO_ALLOWED * len(stored):
        stored, coder = raw, _RAW
    return _HEADER.pack(MANIFEST_MAGIC, VERSION, coder, len(stored), len(raw), checksum(stored)) + stored


def _head(manifest: Manifest) -> dict[str, Any]:
    number = {entry.key: i for i, entry in enumerate(manifest.entries)}
    return {
        "format": VERSION,
        "writer": manifest.writer,
        "created": manifest.created,
        "guard": manifest.guard,
        "files": [
            [f.name, f.nonce.hex(), f.size, f.footer_bytes, f"{f.footer_checksum:016x}", f.rank] for f in manifest.files
        ],
        "entries": [
            ["t", e.key, e.dtype, list(e.shape), e.requires_grad]
            if isinstance(e, TensorEntry)
            else ["b", e.key, e.kind]
            for e in manifest.entries
        ],
        "groups": [[[role, number[key]] for role, key in members] for members in manifest.groups],
        "views": [[list(view.axes), view.split] for view in manifest.views],
        "certificates": [to_plain(certificate) for certificate in manifest.certificates],
        "privates": [private.hex() for private in manifest.privates],
        "reasons": manifest.reasons,
        "causes": list(manifest.causes),
        "planner_data": manifest.planner_data,
        "storage_meta": manifest.storage_meta,
    }


def from_bytes(data: bytes, *, where: str) -> Manifest:
    """Parse and validate `.metadata`. Raises FormatError or IntegrityError that says what is wrong."""
    from guarddcp.container.manifest_check import parse_head, validate

    if len(data) < _HEADER.size:
        raise FormatError("manifest is cut off", where=where, expected=f">= {_HEADER.size} bytes", got=len(data))
    magic, version, coder, stored_length, raw_length, stored_checksum = _HEADER.unpack_from(data)
    if magic != MANIFEST_MAGIC:
        raise FormatError(
            "not a guarddcp manifest",
            where=where,
            expected=MANIFEST_MAGIC.hex(),
            got=bytes(magic).hex(),
            hint="A checkpoint of torch's own writers is read by torch.distributed.checkpoint.FileSystemReader",
        )
    if version != VERSION or coder not in (_RAW, _ZSTD):
        raise FormatError(
            "unknown manifest version or coder",
            where=where,
            expected=f"version {VERSION}, coder 0 or 1",
            got=f"version {version}, coder {coder}",
            hint="A newer guarddcp wrote this checkpoint: upgrade",
        )
    stored = data[_HEADER.size :]
    if len(stored) != stored_length:
        raise IntegrityError("manifest is cut off or too long", where=where, expected=stored_length, got=len(stored))
    if (found := checksum(stored)) != stored_checksum:
        raise IntegrityError("manifest checksum", where=where, expected=f"{stored_checksum:016x}", got=f"{found:016x}")
    if raw_length > _RATIO_SLACK + _RATIO_ALLOWED * stored_length or (coder == _RAW and raw_length != stored_length):
        raise FormatError("implausible manifest size", where=where, got=f"{raw_length} bytes from {stored_length}")
    raw = stored if coder == _RAW else decompress(stored, raw_length, where=where)
    (head_length,) = _HEAD_LENGTH.unpack_from(raw) if len(raw) >= _HEAD_LENGTH.size else (len(raw),)
    if head_length > len(raw) - _HEAD_LENGTH.size:
        raise FormatError("manifest head is cut off", where=where, got=head_length)
    end = _HEAD_LENGTH.size + head_length
    manifest = parse_head(raw[_HEAD_LENGTH.size : end], where=where)
    manifest.columns = unpack_columns(memoryview(raw)[end:], where=where)
    validate(manifest, where=where)
    return manifest


def head_certificates(plain: list[Any], *, where: str) -> list[Certificate]:
    """Certificates of the head; their constants are checked, their bounds proved only later."""
    found = []
    for number, record in enumerate(plain):
        try:
            found.append(from_plain(record))
        except FormatError as error:
            raise FormatError(str(error), where=f"{where}, certificate {number}") from error
    return found
