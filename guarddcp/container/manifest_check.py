"""Parsing the manifest's head and checking head against columns: every rule of FORMAT.md 6 that a reader relies on."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from guarddcp.codecs.ratio import CAUSES
from guarddcp.codecs.view import View
from guarddcp.config import Guard
from guarddcp.container.datafile import FileEntry
from guarddcp.container.layout import DATA_SUFFIX, HEADER_BYTES, NONCE_BYTES, TRAILER, VERSION
from guarddcp.container.manifest import (
    _INDEXES,
    _PACK_COLUMNS,
    _PLACES,
    _VALUE_COLUMNS,
    Manifest,
    _escape_column,
    head_certificates,
)  # fmt: skip
from guarddcp.container.records import EXACT, IN_PACK, PACKED, PICKLED, RATIO, TREE, TensorEntry, ValueEntry
from guarddcp.container.value_types import DTYPES, TENSOR_DTYPES
from guarddcp.errors import FormatError

__all__ = ["parse_head", "validate"]

_KEYS = (
    "format", "writer", "created", "guard", "files", "entries", "groups", "views", "certificates", "privates",
    "reasons", "causes", "planner_data", "storage_meta",
)  # fmt: skip
_FILE_NAME = re.compile(r"[0-9a-f]{32}" + re.escape(DATA_SUFFIX))
_SIZE_MAX = 1 << 62
_ROLES = ((("x",)), (("m", "v")))
_AXES_MAX = 64


class _Refuse:
    """Raises FormatError with the place in the head unless a condition holds."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, good: bool, what: str, got: object = None) -> None:
        if not good:
            raise FormatError(what, where=self.where, got=None if got is None else repr(got)[:200])


def parse_head(text: bytes, *, where: str) -> Manifest:
    """Manifest with empty columns from the JSON head; every field's type and range is checked."""
    require = _Refuse(where)
    head = _json(text, where)
    require(isinstance(head, dict), "head is no object")
    require(sorted(head) == sorted(_KEYS), "unknown or missing keys in the head", sorted(set(head) ^ set(_KEYS)))
    require(_whole(head["format"]) and head["format"] == VERSION, "unknown format", head["format"])
    for key in ("writer", "created", "planner_data", "storage_meta"):
        require(isinstance(head[key], str), f"{key} is no text", head[key])
    _check_guard(head["guard"], require)
    for key in ("files", "entries", "groups", "views", "certificates", "privates", "reasons", "causes"):
        require(isinstance(head[key], list), f"{key} is no list", head[key])
    require(head["causes"] == list(CAUSES), "unknown escape causes", head["causes"])
    require(all(isinstance(reason, str) for reason in head["reasons"]), "reasons are no texts")
    entries = [_entry(item, require) for item in head["entries"]]
    names = [entry.key for entry in entries]
    require(len(set(names)) == len(names), "a key occurs twice")
    return Manifest(
        writer=head["writer"],
        created=head["created"],
        guard=head["guard"],
        files=[_file(item, require) for item in head["files"]],
        entries=entries,
        groups=[_group(item, entries, require) for item in head["groups"]],
        views=[_view(item, require) for item in head["views"]],
        certificates=head_certificates(head["certificates"], where=where),
        privates=[_hex(item, None, require) for item in head["privates"]],
        reasons=head["reasons"],
        planner_data=head["planner_data"],
        storage_meta=head["storage_meta"],
        columns={},
    )


def _json(text: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number[:20]} is no number")
        return value

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"head is no JSON ({error})", where=where) from error


def _check_guard(guard: Any, require: _Refuse) -> None:
    require(isinstance(guard, dict), "guard is no object", guard)
    try:
        Guard.from_dict(guard)
    except (TypeError, ValueError) as error:
        raise FormatError(f"illegal guard: {error}", where=require.where) from error


def _whole(value: object, limit: int = _SIZE_MAX) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _hex(value: object, length: int | None, require: _Refuse) -> bytes:
    good = isinstance(value, str) and re.fullmatch(r"([0-9a-f]{2})*", value) is not None
    require(good and (length is None or len(str(value)) == 2 * length), "not hexadecimal", value)
    return bytes.fromhex(str(value))


def _file(item: Any, require: _Refuse) -> FileEntry:
    require(isinstance(item, list) and len(item) == 6, "file entry", item)
    name, nonce, size, footer_bytes, footer_checksum, rank = item
    require(isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None, "illegal data file name", name)
    require(_whole(size) and _whole(footer_bytes) and _whole(rank), "file entry", item)
    require(HEADER_BYTES + footer_bytes + TRAILER.size <= size, "file is smaller than its footer", item)
    number = int.from_bytes(_hex(footer_checksum, 8, require), "big")
    return FileEntry(name, _hex(nonce, NONCE_BYTES, require), size, footer_bytes, number, rank)


def _entry(item: Any, require: _Refuse) -> TensorEntry | ValueEntry:
    require(isinstance(item, list) and len(item) >= 3 and isinstance(item[1], str), "entry", item)
    if item[0] == "b" and len(item) == 3:
        require(item[2] in ("plain", "pickle"), "kind of value", item)
        return ValueEntry(item[1], item[2])
    require(item[0] == "t" and len(item) == 5, "entry", item)
    _, key, dtype, shape, requires_grad = item
    require(isinstance(dtype, str) and dtype in DTYPES, "unknown dtype", dtype)
    require(isinstance(shape, list) and len(shape) <= _AXES_MAX and all(map(_whole, shape)), "shape", shape)
    require(math.prod(shape) < _SIZE_MAX and isinstance(requires_grad, bool), "shape", item)
    return TensorEntry(key, dtype, tuple(shape), requires_grad)


def _group(item: Any, entries: list[Any], require: _Refuse) -> tuple[tuple[str, str], ...]:
    good = isinstance(item, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in item)
    require(good and tuple(role for role, _ in item) in _ROLES, "roles of a group", item)
    members = []
    for role, number in item:
        require(_whole(number, len(entries)) and isinstance(entries[number], TensorEntry), "member of a group", item)
        members.append((role, entries[number].key))
    require(len({key for _, key in members}) == len(members), "a tensor occurs twice in a group", item)
    tensors = [entries[number] for _, number in item]
    require(len({tensor.shape for tensor in tensors}) == 1, "members of a group differ in shape", item)
    pair = len(members) == 2
    require(not pair or {tensor.dtype for tensor in tensors} == {"float32"}, "moments of a pair are not float32", item)
    return tuple(members)


def _view(item: Any, require: _Refuse) -> View:
    require(isinstance(item, list) and len(item) == 2 and isinstance(item[0], list), "view", item)
    axes, split = item
    require(all(map(_whole, axes)) and len(axes) <= _AXES_MAX and sorted(axes) == list(range(len(axes))), "view", item)
    require(_whole(split, len(axes) + 1), "view", item)
    return View(tuple(axes), split)


def validate(manifest: Manifest, *, where: str) -> None:
    """Hold columns against the head: names, lengths, indexes, boxes, volumes, records."""
    require = _Refuse(where)
    columns = manifest.columns
    escapes = [_escape_column(cause) for cause in manifest.causes]
    known = {"group.shards", "offsets", "sizes", *_PLACES, *_PACK_COLUMNS, *_VALUE_COLUMNS, *escapes}
    require(set(columns) == known, "unknown or missing columns", sorted(set(columns) ^ known))
    for name, column in columns.items():
        require(bool((column >= 0).all()) and bool((column < _SIZE_MAX).all()), f"column {name} is out of range")
    shards, packs = manifest.num_shards, int(columns["pack.file"].size)
    values = sum(isinstance(entry, ValueEntry) for entry in manifest.entries)
    lengths = dict.fromkeys((*_PLACES, *escapes), shards) | dict.fromkeys(_PACK_COLUMNS, packs)
    lengths |= dict.fromkeys(_VALUE_COLUMNS, values) | {"group.shards": len(manifest.groups)}
    for name, length in lengths.items():
        require(columns[name].size == length, f"column {name} has another length", columns[name].size)
    counts = columns["group.shards"]
    # Each by itself first: a sum of huge ones can wrap around to the right number.
    good = bool((counts <= shards).all()) and int(counts.sum()) == shards
    require(good, "groups do not hold all shards")
    axes = int(manifest._axis_begins[-1])
    require(columns["offsets"].size == axes and columns["sizes"].size == axes, "boxes do not fit the shapes")
    _check_indexes(manifest, require)
    _check_boxes(manifest, require)
    _check_records(manifest, require)


def _check_indexes(manifest: Manifest, require: _Refuse) -> None:
    columns = manifest.columns
    tables = (manifest.views, manifest.certificates, manifest.privates, manifest.reasons)
    limits = dict(zip(_INDEXES, (len(table) + 1 for table in tables), strict=True))
    limits |= {"pack": columns["pack.file"].size + 1, "pack.file": len(manifest.files)}
    limits["value.pack"] = columns["pack.file"].size
    for name, limit in limits.items():
        require(bool((columns[name] < limit).all()), f"column {name} points nowhere")
    codec, packed = columns["codec"], columns["pack"] > 0
    require(bool(np.isin(codec, (EXACT, RATIO, *IN_PACK)).all()), "unknown codec", sorted(set(codec.tolist())))
    require(bool((np.isin(codec, IN_PACK) == packed).all()), "packed shards without a pack, or the reverse")
    require(bool((columns["file"][~packed] < len(manifest.files)).all()), "column file points nowhere")
    require(bool(((codec == RATIO) == (columns["certificate"] > 0)).all()), "ratio shards without a certificate")
    require(
        bool((packed | ((columns["view"] > 0) & (columns["private"] > 0))).all()), "shards without view or private part"
    )
    pairs = np.array([len(members) == 2 for members in manifest.groups], bool)
    require(bool((np.repeat(pairs, columns["group.shards"]) == (codec == RATIO)).all()), "roles do not fit the codec")


def _check_boxes(manifest: Manifest, require: _Refuse) -> None:
    columns, at, first = manifest.columns, 0, 0
    covered = dict.fromkeys(manifest.tensors, 0)
    coordinates = np.zeros(manifest.num_shards, np.int64)
    for members, count in zip(manifest.groups, columns["group.shards"].tolist(), strict=True):
        entry = manifest.tensors[members[0][1]]
        n = count * len(entry.shape)
        offsets, sizes = (columns[name][at : at + n].reshape(count, len(entry.shape)) for name in ("offsets", "sizes"))
        require(
            bool((offsets + sizes <= np.array(entry.shape, np.int64)).all()), f"a chunk of {entry.key} lies outside"
        )
        volumes = np.prod(sizes, axis=1, dtype=np.int64)  # below 2^62, since the shape's own volume is
        group = slice(first, first + count)
        coordinates[group] = volumes
        plain = columns["codec"][group] == PACKED
        good = columns["bytes"][group] == volumes * DTYPES[entry.dtype].itemsize
        by_elements = ~np.isin(columns["codec"][group], (TREE, PICKLED))
        require(
            entry.dtype in TENSOR_DTYPES or not by_elements.any(),
            f"elements of {entry.key} alone do not make it",
            entry.dtype,
        )
        require(bool((good | ~plain).all()), f"packed bytes of {entry.key} are not those of its chunk")
        for _, key in members:
            covered[key] += sum(volumes.tolist())
        at, first = at + n, first + count
    for key, volume in covered.items():
        require(volume == math.prod(manifest.tensors[key].shape), f"chunks of {key} do not cover it", volume)
    ndim = np.diff(manifest._axis_begins)
    for number, view in enumerate(manifest.views):
        require(bool((ndim[columns["view"] == number + 1] == len(view.axes)).all()), "view of another number of axes")
    _check_counts(manifest, coordinates, require)


def _check_counts(manifest: Manifest, coordinates: np.ndarray, require: _Refuse) -> None:
    """Escapes and failed frames belong to certified shards, and there are no more of them than coordinates."""
    ratio = manifest.columns["codec"] == RATIO
    escapes = sum(manifest.columns[_escape_column(cause)].astype(np.float64) for cause in manifest.causes)
    require(bool((escapes <= np.where(ratio, coordinates, 0)).all()), "more escapes than coordinates")
    require(
        bool((manifest.columns["failed"] <= np.where(ratio, coordinates, 0)).all()), "more failed frames than frames"
    )


def _check_records(manifest: Manifest, require: _Refuse) -> None:
    columns = manifest.columns
    own = columns["pack"] == 0
    alone = (columns["file"] == 0) & (columns["record"] == 0)
    require(bool((own | alone).all()), "packed shards with a record of their own")
    file = np.concatenate([columns["file"][own], columns["pack.file"]])
    record = np.concatenate([columns["record"][own], columns["pack.record"]])
    length = np.concatenate([columns["bytes"][own], columns["pack.bytes"]])
    names = [entry.name for entry in manifest.files]
    require(len(set(names)) == len(names), "a data file occurs twice")
    order = np.lexsort((record, file))
    counts = np.bincount(file, minlength=len(manifest.files))
    expected = np.concatenate([np.arange(n) for n in counts]) if counts.size else np.empty(0, np.int64)
    require(bool(np.array_equal(record[order], expected)), "records are not numbered from 0, once each")
    totals = np.bincount(file, weights=length.astype(np.float64), minlength=len(manifest.files))
    for entry, total in zip(manifest.files, totals.tolist(), strict=True):
        require(HEADER_BYTES + total == entry.footer_begin, f"records do not tile {entry.name}", total)
    raw = columns["pack.raw"]
    ends = columns["value.begin"] + columns["value.length"]
    require(not ends.size or bool((ends <= raw[columns["value.pack"]]).all()), "a value lies outside its pack")
    inside = columns["pack"] > 0
    ends = columns["pack.begin"][inside] + columns["bytes"][inside]
    require(not ends.size or bool((ends <= raw[columns["pack"][inside] - 1]).all()), "a shard lies outside its pack")
