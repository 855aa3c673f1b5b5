"""Every rule of FORMAT.md 6 broken once, by editing a good manifest and sealing it again: each is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from samples import opened, raw_manifest, sealed, small_manifest

from guarddcp.container.layout import pack_columns
from guarddcp.container.manifest import from_bytes
from guarddcp.container.records import EXACT
from guarddcp.errors import FormatError

WHERE = "ckpt/.metadata"


@pytest.fixture(scope="module")
def sample():
    return small_manifest()


def parse(data):
    return from_bytes(data, where=WHERE)


def setting(*path, to):
    """An edit of the head: head[path[0]][path[1]]... = to."""

    def edit(head, _):
        target = head
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = to

    return edit


def column(name, index, to):
    """An edit of one entry of a column."""

    def edit(_, columns):
        columns[name][index] = to

    return edit


def columns(**edits):
    """Edits of whole columns; keys with __ for dots."""

    def edit(_, found):
        for name, change in edits.items():
            found[name.replace("__", ".")] = np.asarray(change(found[name.replace("__", ".")]), np.int64)

    return edit


def dropping(name):
    return lambda head, cols: (cols if name in cols else head).pop(name)


def adding(name, value):
    return lambda head, cols: (cols if isinstance(value, np.ndarray) else head).update({name: value})


# Order of shards in `small_manifest`: 0, 1 weight (exact, packed); 2-4 pairs; 5 step; 6 empty; 7, 8 odd.
HEAD_RULES = {
    "format": (setting("format", to=2), "unknown format; got 2"),
    "format true": (setting("format", to=True), "unknown format; got True"),
    "missing key": (dropping("views"), r"unknown or missing keys in the head; got \['views'\]"),
    "unknown key": (adding("more", 1), r"unknown or missing keys in the head; got \['more'\]"),
    "writer": (setting("writer", to=3), "writer is no text"),
    "created": (setting("created", to=None), "created is no text"),
    "planner data": (setting("planner_data", to={}), "planner_data is no text"),
    "storage meta": (setting("storage_meta", to=[]), "storage_meta is no text"),
    "guard": (setting("guard", to=[]), "guard is no object"),
    **{
        f"{key} no list": (setting(key, to={}), f"{key} is no list")
        for key in ("files", "entries", "groups", "views", "certificates", "privates", "reasons", "causes")
    },
    "causes": (setting("causes", 0, to="whim"), "unknown escape causes"),
    "reasons": (setting("reasons", 0, to=7), "reasons are no texts"),
    "file fields": (setting("files", 0, to=["a"]), "file entry"),
    "file path": (setting("files", 0, 0, to="../" + "a" * 29 + ".gdcp"), "illegal data file name"),
    "file case": (setting("files", 0, 0, to="A" * 32 + ".gdcp"), "illegal data file name"),
    "file newline": (setting("files", 0, 0, to="a" * 32 + ".gdcp\n"), "illegal data file name"),
    "file twice": (lambda h, _: h["files"][1].__setitem__(0, h["files"][0][0]), "a data file occurs twice"),
    "nonce length": (setting("files", 0, 1, to="00"), "not hexadecimal; got '00'"),
    "nonce digits": (setting("files", 0, 1, to="xy" * 16), "not hexadecimal"),
    "nonce type": (setting("files", 0, 1, to=7), "not hexadecimal; got 7"),
    "size negative": (setting("files", 0, 2, to=-1), "file entry"),
    "size true": (setting("files", 0, 2, to=True), "file entry"),
    "size float": (setting("files", 0, 2, to=1e3), "file entry"),
    "size huge": (setting("files", 0, 2, to=1 << 62), "file entry"),
    "footer": (setting("files", 0, 3, to=1 << 40), "file is smaller than its footer"),
    "checksum": (setting("files", 0, 4, to="0" * 15), "not hexadecimal"),
    "rank": (setting("files", 0, 5, to=-1), "file entry"),
    "entry": (setting("entries", 0, to="t"), "entry; got 't'"),
    "entry tag": (setting("entries", 0, 0, to="z"), "entry"),
    "entry key": (setting("entries", 0, 1, to=1), "entry"),
    "entry twice": (setting("entries", 6, 1, to="w"), "a key occurs twice"),
    "kind": (setting("entries", 4, 2, to="exec"), "kind of value"),
    "dtype": (setting("entries", 0, 2, to="float33"), "unknown dtype; got 'float33'"),
    "dtype type": (setting("entries", 0, 2, to=[]), "unknown dtype"),
    "shape negative": (setting("entries", 0, 3, to=[-6, 5]), "shape"),
    "shape float": (setting("entries", 0, 3, to=[6.0, 5]), "shape"),
    "shape huge": (setting("entries", 0, 3, to=[1 << 31, 1 << 31]), "shape"),
    "shape axes": (setting("entries", 0, 3, to=[1] * 65), "shape"),
    "dtype of parts": (setting("entries", 0, 2, to="qint8"), "elements of w alone do not make it; got .qint8"),
    "requires grad": (setting("entries", 0, 4, to=1), "shape"),
    "roles": (setting("groups", 1, 0, 0, to="vmax"), "roles of a group"),
    "roles swapped": (lambda h, _: h["groups"][1].reverse(), "roles of a group"),
    "role alone": (lambda h, _: h["groups"][1].pop(), "roles of a group"),
    "role type": (setting("groups", 0, 0, 0, to=[]), "roles of a group"),
    "group": (setting("groups", 0, to=3), "roles of a group"),
    "member": (setting("groups", 0, 0, 1, to=8), "member of a group"),
    "member type": (setting("groups", 0, 0, 1, to="w"), "member of a group"),
    "member value": (setting("groups", 0, 0, 1, to=4), "member of a group"),
    "member twice": (setting("groups", 1, 1, 1, to=1), "a tensor occurs twice in a group"),
    "member shape": (setting("groups", 1, 1, 1, to=6), "members of a group differ in shape"),
    "member dtype": (setting("entries", 1, 2, to="bfloat16"), "moments of a pair are not float32"),
    "view": (setting("views", 0, to=[[0, 1]]), "view"),
    "view axes": (setting("views", 0, 0, to=[0, 0]), "view"),
    "view axis float": (setting("views", 0, 0, to=[0, 1.0]), "view"),
    "view axis true": (setting("views", 0, 0, to=[0, True]), "view"),
    "view axis text": (setting("views", 0, 0, to=["0", "1"]), "view"),
    "view split": (setting("views", 0, 1, to=3), "view"),
    "view ndim": (setting("views", 0, 0, to=[0, 1, 2]), "view of another number of axes"),
    "certificate": (setting("certificates", 1, "delta", to="0x0p+0"), "certificate 1: .*delta"),
    "certificate type": (setting("certificates", 0, to=3), "certificate 0: .*a certificate must be a mapping"),
    "private": (setting("privates", 0, to="0"), "not hexadecimal"),
}  # fmt: skip

COLUMN_RULES = {
    "missing": (dropping("record"), r"unknown or missing columns; got \['record'\]"),
    "unknown": (adding("extra", np.zeros(1, np.int64)), r"unknown or missing columns; got \['extra'\]"),
    "negative": (column("bytes", 0, -1), "column bytes is out of range"),
    "huge": (column("bytes", 0, 1 << 62), "column bytes is out of range"),
    "length": (columns(record=lambda c: c[1:]), "column record has another length; got 8"),
    "escape length": (columns(escapes__zero_v=lambda c: c[1:]), "column escapes.zero_v has another length"),
    "pack length": (columns(pack__raw=lambda c: [*c, 1]), "column pack.raw has another length"),
    "value length": (columns(value__begin=lambda c: [*c, 1]), "column value.begin has another length"),
    "group length": (columns(group__shards=lambda c: [*c, 0]), "column group.shards has another length"),
    "group sum": (column("group.shards", 0, 3), "groups do not hold all shards"),
    "group sum wraps": (
        columns(group__shards=lambda _: [2**62 - 1] * 4 + [4 + 9]), "groups do not hold all shards"
    ),
    "boxes": (columns(offsets=lambda c: c[1:]), "boxes do not fit the shapes"),
    "sizes": (columns(sizes=lambda c: [*c, 1]), "boxes do not fit the shapes"),
    "view": (column("view", 2, 9), "column view points nowhere"),
    "certificate": (column("certificate", 2, 4), "column certificate points nowhere"),
    "private": (column("private", 2, 3), "column private points nowhere"),
    "reason": (column("reason", 2, 2), "column reason points nowhere"),
    "pack": (column("pack", 1, 9), "column pack points nowhere"),
    "pack file": (column("pack.file", 0, 3), "column pack.file points nowhere"),
    "value pack": (column("value.pack", 0, 3), "column value.pack points nowhere"),
    "file": (column("file", 2, 3), "column file points nowhere"),
    "codec": (column("codec", 2, 2), r"unknown codec"),
    "codec unpacked": (column("codec", 1, EXACT), "packed shards without a pack, or the reverse"),
    "codec packed": (column("codec", 0, 255), "packed shards without a pack, or the reverse"),
    "ratio alone": (column("certificate", 2, 0), "ratio shards without a certificate"),
    "certified exact": (column("certificate", 0, 1), "ratio shards without a certificate"),
    "no view": (column("view", 0, 0), "shards without view or private part"),
    "no private": (column("private", 2, 0), "shards without view or private part"),
    "roles": (columns(codec=lambda c: [1, *c[1:]], certificate=lambda c: [1, *c[1:]]), "roles do not fit the codec"),
    "outside": (column("offsets", 0, 3), "a chunk of w lies outside"),
    "uncovered": (column("sizes", 0, 3), "chunks of w do not cover it; got 25"),
    "covered twice": (column("sizes", 4, 6), "chunks of w.exp_avg do not cover it; got 45"),
    "record twice": (column("record", 2, 1), "records are not numbered from 0, once each"),
    "record gap": (column("record", 4, 7), "records are not numbered from 0, once each"),
    "record swap file": (column("file", 3, 0), "records are not numbered from 0, once each"),
    "bytes": (column("bytes", 2, 501), "records do not tile 0{32}.gdcp; got 691"),
    "pack bytes": (column("pack.bytes", 0, 99), "records do not tile"),
    "value outside": (column("value.length", 0, 2000), "a value lies outside its pack"),
    "shard outside": (column("pack.begin", 5, 101), "a shard lies outside its pack"),
    "packed place": (column("record", 1, 1), "packed shards with a record of their own"),
    "packed bytes": (column("bytes", 5, 3), "packed bytes of step are not those of its chunk"),
    "escapes": (column("escapes.zero_v", 2, 99), "more escapes than coordinates"),
    "exact escapes": (column("escapes.zero_v", 0, 1), "more escapes than coordinates"),
    "failed": (column("failed", 0, 1), "more failed frames than frames"),
}  # fmt: skip


@pytest.mark.parametrize("rule", [*HEAD_RULES, *(f"column {name}" for name in COLUMN_RULES)])
def test_a_broken_rule_is_refused_by_name(sample, rule):
    edit, message = HEAD_RULES[rule] if rule in HEAD_RULES else COLUMN_RULES[rule.removeprefix("column ")]
    head, cols = opened(sample)
    parse(sealed(raw_manifest(head, cols)))
    edit(head, cols)
    with pytest.raises(FormatError, match=message) as caught:
        parse(sealed(raw_manifest(head, cols)))
    assert str(caught.value).startswith(WHERE)


def test_columns_that_do_not_parse_are_refused(sample):
    head, cols = opened(sample)
    packed = pack_columns(cols)
    for spoilt, message in (
        (packed[:-1], "is cut off"),
        (packed + b"\0", "cut off"),
        (packed + packed, "repeated name"),
    ):
        with pytest.raises(FormatError, match=message):
            parse(sealed(raw_manifest(head, spoilt)))
