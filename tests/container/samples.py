"""Manifests to try things on: a small complete one, random ones, and a way to write broken ones.

Every number in them is consistent (records tile files, chunks tile tensors), but there are no data files behind them.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from guarddcp.certificate import Adam, certify
from guarddcp.codecs.ratio import CAUSES, Private
from guarddcp.codecs.view import View
from guarddcp.container import manifest as manifest_module
from guarddcp.container.datafile import FileEntry
from guarddcp.container.layout import HEADER_BYTES, MANIFEST_MAGIC, TRAILER, VERSION, checksum, compress, pack_columns
from guarddcp.container.manifest import build
from guarddcp.container.records import (
    EXACT,
    PACKED,
    PICKLED,
    RATIO,
    TREE,
    PackRecord,
    RankPart,
    ShardRecord,
    TensorEntry,
    ValueEntry,
    ValueRecord,
)  # fmt: skip

PAIR_PRIVATE = Private(1 << 20, ((1, 1, 77),)).to_bytes()
EXACT_PRIVATE = struct.pack("<I", 1 << 21)
HEAD_FIELDS = dict(
    guard={"tolerance": 0.01, "horizon": "all"}, writer="guarddcp test", planner_data="[]", storage_meta="{}"
)


def certificates():
    rule = Adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    return [
        certify(rule, step, tolerance=0.01, horizon="all", rounding_share=0.05, q_max=q_max)
        for step, q_max in ((141, 2.0), (141, 4.0), (1000, 2.0))
    ]


@dataclass
class Rank:
    """What one rank would report: records laid out one after the other in its files."""

    rank: int
    num_files: int = 1
    shards: list[ShardRecord] = field(default_factory=list)
    values: list[ValueRecord] = field(default_factory=list)
    packs: list[PackRecord] = field(default_factory=list)
    lengths: dict[int, list[int]] = field(default_factory=dict)
    open_raw: int = 0
    is_open: bool = False

    def record(self, file: int, length: int) -> tuple[int, int, int]:
        """(file, record, bytes) of a new record."""
        lengths = self.lengths.setdefault(file, [])
        lengths.append(length)
        return file, len(lengths) - 1, length

    def add(self, shard: ShardRecord, length: int, file: int = 0) -> None:
        """A shard with a record of its own, or in the open pack."""
        if shard.codec in (EXACT, RATIO):
            file, record, length = self.record(file, length)
            self.shards.append(replace(shard, file=file, record=record, bytes=length))
        else:
            self.shards.append(replace(shard, pack=len(self.packs), pack_begin=self.open_raw, bytes=length))
            self.open_raw, self.is_open = self.open_raw + length, True

    def add_value(self, key: str, kind: str, length: int) -> None:
        self.values.append(ValueRecord(key, kind, len(self.packs), self.open_raw, length))
        self.open_raw, self.is_open = self.open_raw + length, True

    def close_pack(self, length: int = 100, file: int = 0) -> None:
        self.packs.append(PackRecord(*self.record(file, length), self.open_raw))
        self.open_raw, self.is_open = 0, False

    def part(self) -> tuple[RankPart, list[ShardRecord], list[ValueRecord]]:
        if self.is_open:
            self.close_pack()
        files = []
        for number in range(self.num_files):
            name = f"{self.rank * 100 + number:032x}.gdcp"
            footer = 40 + number
            size = HEADER_BYTES + sum(self.lengths.get(number, [])) + footer + TRAILER.size
            files.append(
                FileEntry(name, bytes([self.rank % 256, number] * 8), size, footer, 2**64 - 1 - number, self.rank)
            )
        return RankPart(self.rank, tuple(files), tuple(self.packs)), self.shards, self.values


def pair(key: str) -> tuple[tuple[str, str], ...]:
    return (("m", f"{key}.exp_avg"), ("v", f"{key}.exp_avg_sq"))


def small_manifest():
    """Two ranks, three files; pairs, exact, packed, subclass and pickled shards, two packs, values, a 0-d tensor."""
    first, second, third = certificates()
    entries = [
        TensorEntry("w", "bfloat16", (6, 5), True),
        TensorEntry("w.exp_avg", "float32", (6, 5)),
        TensorEntry("w.exp_avg_sq", "float32", (6, 5)),
        TensorEntry("step", "float32", ()),
        ValueEntry("lr", "plain"),
        TensorEntry("empty", "int64", (0, 3)),
        TensorEntry("odd", "float32", (4,)),
        ValueEntry("odd value", "pickle"),
    ]
    zero, one = Rank(0, 2), Rank(1)
    plain, turned = View((0, 1), 1), View((1, 0), 1)
    moments = ShardRecord(pair("w"), (0, 0), (3, 5), RATIO, plain, first, PAIR_PRIVATE, escapes=(0, 1, 2, 3, 0, 0, 4))
    zero.add(moments, 500)
    zero.add(replace(moments, offsets=(3, 0), sizes=(1, 5), certificate=second, failed=1, escapes=(0,) * 7), 300, 1)
    one.add(replace(moments, offsets=(4, 0), sizes=(2, 5), certificate=third, view=turned), 400)
    weight = ShardRecord((("x", "w"),), (0, 0), (4, 5), EXACT, View((0, 1), 0), None, EXACT_PRIVATE)
    zero.add(weight, 90)
    one.add(replace(weight, offsets=(4, 0), sizes=(2, 5), codec=PACKED, view=None, private=b""), 20)
    one.add_value("odd value", "pickle", 11)
    one.close_pack()
    zero.add(ShardRecord((("x", "step"),), (), (), PACKED, reason="small: it is"), 4)
    zero.add_value("lr", "plain", 30)
    zero.add(ShardRecord((("x", "empty"),), (0, 0), (0, 3), PACKED), 0)
    zero.add(ShardRecord((("x", "odd"),), (0,), (3,), TREE), 70)
    one.add(ShardRecord((("x", "odd"),), (3,), (1,), PICKLED), 700)
    return build(entries, [zero.part(), one.part()], **HEAD_FIELDS)


def opened(manifest) -> tuple[dict, dict]:
    """Head and columns of a manifest, ready to be spoilt."""
    head = json.loads(json.dumps(manifest_module._head(manifest)))
    return head, {name: column.copy() for name, column in manifest.columns.items()}


def raw_manifest(head: object, columns: dict | bytes) -> bytes:
    """Head and columns as a manifest's raw bytes; ``head`` may be bytes already."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    packed = columns if isinstance(columns, bytes) else pack_columns(columns)
    return struct.pack("<Q", len(text)) + text + packed


def sealed(raw: bytes, *, coder: int = 0, stored: bytes | None = None, raw_length: int | None = None) -> bytes:
    """A manifest of any raw bytes, under a checksum that fits."""
    if stored is None:
        stored = compress(raw) if coder == 1 else raw
    length = len(raw) if raw_length is None else raw_length
    return struct.pack("<8sIIQQQ", MANIFEST_MAGIC, VERSION, coder, len(stored), length, checksum(stored)) + stored


# -- random manifests --------------------------------------------------------------------------------------------------

_names = st.text(min_size=1, max_size=12)


@st.composite
def _cuts(draw, length: int) -> list[tuple[int, int]]:
    """Half-open pieces that tile range(length), some of them empty."""
    edges = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    return list(zip([0, *edges], [*edges, length], strict=True))


@st.composite
def rank_parts(draw):
    """(entries, what every rank reports) with tensors cut along their first axis and spread over ranks."""
    ranks = [Rank(number, draw(st.integers(1, 2))) for number in range(draw(st.integers(1, 4)))]
    entries: list[TensorEntry | ValueEntry] = []
    certificate = st.sampled_from(certificates())
    for key in draw(st.lists(_names, unique=True, max_size=6)):
        kind = draw(st.sampled_from(["pair", "exact", "pack", "value"]))
        if kind == "value":
            entries.append(ValueEntry(key, draw(st.sampled_from(["plain", "pickle"]))))
            draw(st.sampled_from(ranks)).add_value(key, entries[-1].kind, draw(st.integers(0, 400)))
            continue
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        members = pair(key) if kind == "pair" else (("x", key),)
        dtype = "float32" if kind == "pair" else draw(st.sampled_from(["float32", "bool", "complex64", "int16"]))
        entries += [TensorEntry(name, dtype, shape, draw(st.booleans())) for _, name in members]
        view = View(tuple(draw(st.permutations(range(len(shape))))), draw(st.integers(0, len(shape))))
        for begin, end in draw(_cuts(shape[0])) if shape else [(0, 0)]:
            sizes = (end - begin, *shape[1:]) if shape else ()
            shard = ShardRecord(members, (begin, *(0 for _ in shape[1:])) if shape else (), sizes, EXACT)
            escapes = tuple(draw(st.lists(st.integers(0, 3), min_size=len(CAUSES), max_size=len(CAUSES))))
            itemsize = {"float32": 4, "bool": 1, "complex64": 8, "int16": 2}[dtype]
            length = draw(st.integers(8, 5000))
            if kind == "pair":
                shard = replace(shard, codec=RATIO, view=view, certificate=draw(certificate), private=PAIR_PRIVATE)
                shard = replace(shard, escapes=escapes if shard.coordinates > 21 else (0,) * len(CAUSES))
            elif kind == "exact":
                shard = replace(shard, view=view, private=EXACT_PRIVATE, reason=draw(st.sampled_from(["", "a: b"])))
            else:
                shard, length = replace(shard, codec=PACKED), shard.coordinates * itemsize
            rank = draw(st.sampled_from(ranks))
            rank.add(shard, length, draw(st.integers(0, rank.num_files - 1)))
            if draw(st.booleans()) and rank.is_open:
                rank.close_pack(draw(st.integers(8, 200)))
    return entries, [rank.part() for rank in ranks]


def built(parts):
    """A manifest of what `rank_parts` drew."""
    entries, ranks = parts
    return build(entries, ranks, **HEAD_FIELDS)


def same_manifest(a, b) -> None:
    """Asserts that two manifests hold the same, field by field and shard by shard."""
    lists = ("files", "entries", "groups", "views", "certificates", "privates", "reasons", "causes")
    for name in ("writer", "created", "guard", "planner_data", "storage_meta", *lists):
        assert getattr(a, name) == getattr(b, name), name
    assert set(a.columns) == set(b.columns)
    for name, column in a.columns.items():
        np.testing.assert_array_equal(b.columns[name], column, err_msg=name)
        assert b.columns[name].dtype == np.int64
    assert list(a.shards()) == list(b.shards())
    assert (a.packs, a.values, a.record_begins()) == (b.packs, b.values, b.record_begins())
