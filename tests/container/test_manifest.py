"""The manifest: round trips, look-ups, headers, fuzz."""

from __future__ import annotations

import json
import math
import pickle
import resource
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import (
    HEAD_FIELDS,
    PAIR_PRIVATE,
    Rank,
    built,
    opened,
    pair,
    rank_parts,
    raw_manifest,
    same_manifest,
    sealed,
    small_manifest,
)  # fmt: skip

from guarddcp.codecs.ratio import CAUSES
from guarddcp.codecs.view import View
from guarddcp.container.layout import compress
from guarddcp.container.manifest import build, from_bytes, to_bytes
from guarddcp.container.records import EXACT, RATIO, ShardRecord, TensorEntry, ValueEntry
from guarddcp.container.summary import summarise
from guarddcp.errors import FormatError, IntegrityError

WHERE = "ckpt/.metadata"


@pytest.fixture(scope="module")
def sample():
    return small_manifest()


def parse(data):
    return from_bytes(data, where=WHERE)


# -- round trips -------------------------------------------------------------------------------------------------------


@given(rank_parts())
def test_round_trip(parts):
    manifest = built(parts)
    data = to_bytes(manifest)
    same_manifest(parse(data), manifest)
    assert to_bytes(parse(data)) == data


@given(rank_parts())
def test_every_shard_is_found_as_its_rank_reported_it(parts):
    """Files and packs are counted anew; all else is what the ranks said."""
    manifest = parse(to_bytes(built(parts)))
    files = packs = found = 0
    for part, shards, values in parts[1]:
        for shard in shards:
            _, key = shard.members[-1]
            seen = [manifest.shard(i) for i in manifest.shard_indexes(key)]
            moved = replace(shard, file=shard.file + files if shard.pack < 0 else 0)
            moved = replace(
                moved, pack=shard.pack + packs if shard.pack >= 0 else -1, escapes=shard.escapes or (0,) * 7
            )
            assert moved in seen
            assert (shard.offsets, shard.sizes) in manifest.chunks(key)
            index = manifest.find(key, shard.offsets)
            assert manifest.shard(index) == moved or 0 in shard.sizes
            found += 1
        for value in values:
            assert manifest.values[value.key] == replace(value, pack=value.pack + packs)
        files, packs = files + len(part.files), packs + len(part.packs)
    assert found == manifest.num_shards
    assert manifest.files == [entry for part, _, _ in parts[1] for entry in part.files]
    assert manifest.packs == [
        replace(p, file=p.file + sum(len(q.files) for q, _, _ in parts[1][:i]))
        for i, (part, _, _) in enumerate(parts[1])
        for p in part.packs
    ]


def test_records_lie_one_after_the_other(sample):
    begins = sample.record_begins()
    assert begins == {
        (0, 0): (32, 532), (0, 1): (532, 622), (0, 2): (622, 722),
        (1, 0): (32, 332),
        (2, 0): (32, 432), (2, 1): (432, 532), (2, 2): (532, 632),
    }  # fmt: skip
    for number, entry in enumerate(sample.files):
        assert max(end for (file, _), (_, end) in begins.items() if file == number) == entry.footer_begin


def test_what_is_not_there_is_refused_by_name(sample):
    assert sample.shard_indexes("nothing") == []
    with pytest.raises(FormatError, match=r"w: no such chunk in the manifest; got offset \(1, 0\)"):
        sample.find("w", (1, 0))
    with pytest.raises(FormatError, match="nothing: no such chunk"):
        sample.find("nothing", ())


def test_a_full_chunk_hides_an_empty_one_at_its_offset():
    rank = Rank(0)
    shard = ShardRecord((("x", "w"),), (2,), (3,), EXACT, View((0,), 0), None, b"1234")
    rank.add(shard, 50)
    rank.add(replace(shard, sizes=(0,)), 8)
    rank.add(replace(shard, offsets=(0,), sizes=(2,)), 60)
    manifest = parse(to_bytes(build([TensorEntry("w", "int8", (5,))], [rank.part()], **HEAD_FIELDS)))
    assert manifest.shard(manifest.find("w", (2,))).sizes == (3,)


def test_a_checkpoint_without_anything():
    manifest = build([], [Rank(0).part()], **HEAD_FIELDS)
    same_manifest(parse(to_bytes(manifest)), manifest)
    assert (manifest.num_shards, manifest.packs, manifest.values) == (0, [], {})


def test_a_manifest_that_compresses_too_well_is_stored_raw(sample):
    entries = [ValueEntry(f"{number:03}" + "k" * 20_000, "plain") for number in range(200)]
    rank = Rank(0)
    for entry in entries:
        rank.add_value(entry.key, entry.kind, 3)
    manifest = build(entries, [rank.part()], **HEAD_FIELDS)
    data = to_bytes(manifest)
    assert struct.unpack_from("<I", data, 12) == (0,)
    assert struct.unpack_from("<I", to_bytes(sample), 12) == (1,)
    same_manifest(parse(data), manifest)


def test_pickle_stops_at_the_first_byte(sample):
    with pytest.raises(pickle.UnpicklingError, match="invalid load key"):
        pickle.loads(to_bytes(sample))


@pytest.mark.parametrize("key", ["", "\x00", "a\ud800b", "\U0001f600", 'quote " and \\', "x" * 5000])
def test_odd_keys(key):
    rank = Rank(0)
    rank.add_value(key, "plain", 9)
    manifest = build([ValueEntry(key, "plain")], [rank.part()], **HEAD_FIELDS)
    assert list(parse(to_bytes(manifest)).values) == [key]


def test_thirty_tensors_on_sixty_four_ranks():
    rng = np.random.default_rng(7)
    ranks = [Rank(number, 1 + number % 2) for number in range(64)]
    entries, certificate = [], small_manifest().certificates[0]
    for number in range(30):
        shape = tuple(rng.integers(64, 9000, rng.integers(1, 4)).tolist())
        key = f"model.layers.{number}.weight"
        entries += [
            TensorEntry(key, "bfloat16", shape, True),
            *(TensorEntry(k, "float32", shape) for _, k in pair(key)),
        ]
        edges = np.sort(rng.integers(0, shape[0], 63)).tolist()
        for rank, begin, end in zip(ranks, [0, *edges], [*edges, shape[0]], strict=True):
            box = (begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:])
            view = View(tuple(range(len(shape))), min(1, len(shape)))
            escapes = tuple(rng.integers(0, 2, 7).tolist()) if math.prod(box[1]) > 6 else ()
            moments = ShardRecord(pair(key), *box, RATIO, view, certificate, PAIR_PRIVATE, escapes=escapes)
            rank.add(moments, int(rng.integers(100, 1 << 22)), rank.rank % 2)
            exact = ShardRecord((("x", key),), *box, EXACT, view, None, b"\0\0\1\0")
            rank.add(exact, int(rng.integers(8, 1 << 22)))
    manifest = build(entries, [rank.part() for rank in ranks], **HEAD_FIELDS)
    data = to_bytes(manifest)
    assert len(data) < 16 * manifest.num_shards
    read = parse(data)
    assert read.num_shards == 30 * 64 * 2
    for index in rng.integers(0, read.num_shards, 300).tolist():
        shard = read.shard(index)
        assert shard == manifest.shard(index)
        for _, key in shard.members:
            assert index in read.shard_indexes(key)
            assert read.find(key, shard.offsets) == index or shard.coordinates == 0


def report_of(manifest):
    return summarise(
        manifest.shards(), manifest.values.values(), manifest.packs, manifest.files,
        tensors=manifest.tensors, guard=manifest.guard, parameter_of=str,
    )  # fmt: skip


@given(rank_parts())
def test_a_report_accounts_for_every_byte_and_coordinate(parts):
    manifest = built(parts)
    report = report_of(manifest)
    assert report.moments.stored_bytes + report.exact.stored_bytes == sum(entry.size for entry in manifest.files)
    elements = sum(math.prod(entry.shape) for entry in manifest.tensors.values())
    assert 2 * report.moments.coordinates + report.exact.coordinates == elements
    assert report.moments.raw_bytes == 8 * report.moments.coordinates
    assert report.moments.escapes == sum(sum(shard.escapes) for shard in manifest.shards())
    assert report.moments.escapes == sum(report.moments.escapes_by_cause.values())
    ones = [*report.parameters.values(), *report.tensors.values()]
    for name in ("coordinates", "raw_bytes", "escapes"):
        assert sum(getattr(one, name) for one in ones) <= getattr(report.moments, name) + getattr(report.exact, name)
    bounds = [shard.certificate.bound for shard in manifest.shards() if shard.certificate]
    assert report.certified_bound == max(bounds, default=None)


# -- the header --------------------------------------------------------------------------------------------------------


def test_truncations_anywhere_are_refused(sample):
    data = to_bytes(sample)
    for end in range(len(data)):
        with pytest.raises((FormatError, IntegrityError), match=r"ckpt/\.metadata: manifest is cut off"):
            parse(data[:end])
    with pytest.raises(IntegrityError, match="cut off or too long; expected"):
        parse(data + b"\0")


def test_flipped_bits_anywhere_are_refused(sample):
    data = bytearray(to_bytes(sample))
    for bit in [*range(40 * 8), *range(40 * 8, len(data) * 8, 5)]:
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((FormatError, IntegrityError), match=r"^ckpt/\.metadata: "):
            parse(bytes(data))
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(("at", "new", "error", "message"), [
    (0, b"\x80\x02}q\x00X\x00\x00", FormatError, "not a guarddcp manifest; .*FileSystemReader"),
    (8, b"\x02\0\0\0", FormatError, "unknown manifest version or coder; .* got version 2, coder 1. A newer guarddcp"),
    (12, b"\x02\0\0\0", FormatError, "unknown manifest version or coder; .* got version 1, coder 2"),
    (12, b"\0\0\0\0", FormatError, "implausible manifest size"),
    (16, b"\xff" * 8, IntegrityError, "manifest is cut off or too long; expected 18446744073709551615"),
    (24, b"\xff" * 8, FormatError, "implausible manifest size; got 18446744073709551615 bytes from"),
    (24, b"\xff\xff\x0f\0\0\0\0\0", IntegrityError, "zstd frame of another size; expected 1048575"),
    (32, b"\0" * 8, IntegrityError, "manifest checksum; expected 0000000000000000; got"),
])  # fmt: skip
def test_headers(sample, at, new, error, message):
    data = to_bytes(sample)
    with pytest.raises(error, match=message):
        parse(data[:at] + new + data[at + len(new) :])


@pytest.mark.parametrize(("raw", "message"), [
    (b"", "manifest head is cut off"), (b"1234567", "manifest head is cut off"),
    (struct.pack("<Q", 1) + b"", "manifest head is cut off"), (b"\xff" * 8 + b"{}", "manifest head is cut off"),
    (struct.pack("<Q", 2) + b"{}", "unknown or missing keys in the head"),
    (struct.pack("<Q", 2) + b"[]", "head is no object"),
    (struct.pack("<Q", 2) + b"{]", "head is no JSON"),
    (struct.pack("<Q", 2) + b"\xff\xff", "head is no JSON"),
    (struct.pack("<Q", 12) + b'{"a":1,"a":2', "head is no JSON"),
    (struct.pack("<Q", 13) + b'{"a":1,"a":2}', r"head is no JSON \(a key occurs twice\)"),
    (struct.pack("<Q", 5000) + b"9" * 5000, "head is no JSON"),
    (struct.pack("<Q", 3) + b"NaN", r"head is no JSON \(NaN is no number\)"),
    (struct.pack("<Q", 9) + b"-Infinity", r"head is no JSON \(-Infinity is no number\)"),
    (struct.pack("<Q", 5) + b"1e999", r"head is no JSON \(1e999 is no number\)"),
    (struct.pack("<Q", 200_000) + b"[" * 200_000, "head is no JSON"),
])  # fmt: skip
@pytest.mark.parametrize("coder", [0, 1])
def test_heads_that_are_none(raw, message, coder):
    with pytest.raises(FormatError, match=message):
        parse(sealed(raw, coder=coder))


def test_a_zstd_bomb_is_refused_before_it_is_unpacked():
    bomb = compress(bytes(64 << 20))
    tracemalloc.start()
    for raw_length in (64 << 20, 1 << 20, 1 << 62):
        with pytest.raises((FormatError, IntegrityError), match=r"implausible manifest size|another size"):
            parse(sealed(b"", coder=1, stored=bomb, raw_length=raw_length))
    # The header's word for the content size is a lie: zstd itself must stop.
    lying = bytearray(bomb)
    assert lying[4] & 0xE0 == 0x80, "expected a window byte, then a content size of 4 bytes"
    lying[6:10] = (1 << 19).to_bytes(4, "little")
    with pytest.raises(IntegrityError, match="damaged zstd frame"):
        parse(sealed(b"", coder=1, stored=bytes(lying), raw_length=1 << 19))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


# -- fuzz --------------------------------------------------------------------------------------------------------------

SMALL = small_manifest()
RAW = raw_manifest(*opened(SMALL))
edits = st.lists(st.tuples(st.integers(0, len(RAW) - 1), st.integers(0, 255)), min_size=1, max_size=4)
interesting = st.sampled_from([0, 1, 2, 3, 5, 9, 255, 2**31, 2**53, 2**61, 2**62 - 1])


def use(manifest):
    """All that a reader does with a manifest that was let through."""
    for shard in manifest.shards():
        assert shard.coordinates >= 0
        manifest.find(shard.members[0][1], shard.offsets)
    manifest.record_begins()
    report_of(manifest).to_json()


@pytest.fixture
def little_memory():
    """Half a GiB more than now: a hostile count fails at once instead of filling the machine."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def refused_or_used(data):
    refusal = None
    try:
        use(parse(data))
    except (FormatError, IntegrityError) as error:
        refusal = str(error)
    assert refusal is None or refusal.startswith(WHERE)


@settings(max_examples=300)
@given(edits, st.integers(0, len(RAW)))
def test_fuzzed_bytes(edits, cut):
    data = bytearray(RAW)
    for at, value in edits:
        data[at] = value
    refused_or_used(sealed(bytes(data)))
    refused_or_used(sealed(bytes(data[:cut])))


def test_fuzzed_numbers(little_memory):
    @settings(max_examples=300)
    @given(st.data())
    def run(data):
        head, cols = opened(SMALL)
        for _ in range(data.draw(st.integers(1, 3))):
            name = data.draw(st.sampled_from(sorted(cols)))
            if cols[name].size:
                cols[name][data.draw(st.integers(0, cols[name].size - 1))] = data.draw(interesting)
        refused_or_used(sealed(raw_manifest(head, cols)))

    run()


junk = st.recursive(
    st.none() | st.booleans() | interesting | st.floats() | st.text(max_size=3) | st.just(-1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def test_fuzzed_heads(little_memory):
    @settings(max_examples=300)
    @given(st.data())
    def run(data):
        head, cols = opened(SMALL)
        target, key = head, data.draw(st.sampled_from(sorted(head)))
        while isinstance(target[key], (dict, list)) and target[key] and data.draw(st.integers(0, 3)):
            target = target[key]
            key = data.draw(
                st.sampled_from(sorted(target)) if isinstance(target, dict) else st.integers(0, len(target) - 1)
            )
        target[key] = data.draw(junk)
        refused_or_used(sealed(raw_manifest(json.dumps(head).encode(), cols)))

    run()


def test_causes_have_a_column_each(sample):
    assert sample.causes == CAUSES
    assert sample.shard(2).escapes == (0, 1, 2, 3, 0, 0, 4)
