"""Damage anywhere is refused, by a verification and by a load, and named; certificates are proved before all else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, failure

from guarddcp import GuardedReader, GuardedWriter, verify
from guarddcp.container.datafile import Footer
from guarddcp.container.layout import HEADER_BYTES, MANIFEST_NAME, TRAILER
from guarddcp.dcp import saving
from guarddcp.dcp.opening import read_manifest
from guarddcp.dcp.verification import examine
from guarddcp.errors import CheckpointNotFoundError, FormatError, GuardError, IntegrityError
from guarddcp.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

REFUSALS = (IntegrityError, FormatError, CheckpointNotFoundError)


def state() -> dict[str, Any]:
    """Coded pairs, exact frames, a pack with small tensors and values, one of them a pickle."""
    big = torch.randint(-(2**31), 2**31, (8, 1024), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    values = {"epoch": 3, "note": ("a", 1.5), "set": {1, 2}}
    return {"big": big, "optim": adam(shapes=((40, 40), (150,))).state_dict(), "small": torch.arange(5), **values}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with several frames to a tensor."""
    path = tmp_path_factory.mktemp("good") / "ck"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "EXACT_FRAME_BYTES", 4096)
        dcp.save(state(), storage_writer=GuardedWriter(path))
    assert verify(path).ok
    return path


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.gdcp")
    return file


def check_refused(path: Path, name: str, *, verify_level: Any = "before") -> None:
    """Both ways to read must refuse and name a file or a tensor; ``before`` must leave targets as they were."""
    with pytest.raises(REFUSALS) as caught:
        verify(path)
    target = blank(state())
    error = failure(dcp.load, target, storage_reader=GuardedReader(path, verify=verify_level))
    assert isinstance(error, REFUSALS), error
    for text in (str(caught.value), str(error)):
        assert any(word in text for word in (name, MANIFEST_NAME, "big at", "optim.state.", "pack 0")), text
    if verify_level == "before":
        assert_same(target, blank(state()))


# ---- flipped bits


def places(path: Path) -> Iterator[int]:
    """Every byte of header and trailer, both ends of every block and of its checksum, and some in between."""
    (entry,) = read_manifest(Store(path)).files
    data = (path / entry.name).read_bytes()
    footer = Footer.parse(entry, data[:HEADER_BYTES], data[entry.footer_begin :])
    yield from range(HEADER_BYTES)
    yield from range(entry.footer_begin, entry.size, 3)
    yield from range(entry.size - TRAILER.size, entry.size)
    for begin, end in zip(footer.begins[:-1].tolist(), footer.begins[1:].tolist(), strict=True):
        yield from {begin, end - 1, end - 8, max(begin, end - 9), (begin + end) // 2}
    yield from np.random.default_rng(0).integers(HEADER_BYTES, entry.footer_begin, 60).tolist()


def test_flipped_bits_in_a_data_file(damaged: Path) -> None:
    file = data_file(damaged)
    good = file.read_bytes()
    at_all = sorted(set(places(damaged)))
    assert len(at_all) > 200
    for number, at in enumerate(at_all):
        file.write_bytes(good[:at] + bytes([good[at] ^ (1 << number % 8)]) + good[at + 1 :])
        check_refused(damaged, file.name, verify_level=("before", "full", "checksum")[number % 3])


def test_flipped_bits_in_the_manifest(damaged: Path) -> None:
    file = damaged / MANIFEST_NAME
    good = file.read_bytes()
    for number, at in enumerate([*range(44), *range(44, len(good), len(good) // 60), len(good) - 1]):
        file.write_bytes(good[:at] + bytes([good[at] ^ (1 << number % 8)]) + good[at + 1 :])
        check_refused(damaged, MANIFEST_NAME)


# ---- lengths


@pytest.mark.parametrize("which", ["data", "manifest"])
def test_truncated_and_extended_files(damaged: Path, which: str) -> None:
    file = data_file(damaged) if which == "data" else damaged / MANIFEST_NAME
    good = file.read_bytes()
    for length in (0, 1, 31, 32, 39, 40, len(good) // 2, len(good) - 25, len(good) - 1):
        file.write_bytes(good[:length])
        check_refused(damaged, file.name)
    for tail in (b"\0", b"x" * 100, good):
        file.write_bytes(good + tail)
        check_refused(damaged, file.name)


def test_deleted_files(damaged: Path) -> None:
    file = data_file(damaged)
    good = file.read_bytes()
    file.unlink()
    check_refused(damaged, file.name)
    file.write_bytes(good)
    (damaged / MANIFEST_NAME).unlink()
    check_refused(damaged, MANIFEST_NAME)


# ---- bytes in the wrong place


def test_swapped_frames(damaged: Path) -> None:
    file, (entry,) = data_file(damaged), read_manifest(Store(damaged)).files
    good = file.read_bytes()
    footer = Footer.parse(entry, good[:HEADER_BYTES], good[entry.footer_begin :])
    spans = list(zip(footer.begins[:-1].tolist(), footer.begins[1:].tolist(), strict=True))
    pairs = [(a, b) for i, a in enumerate(spans) for b in spans[i + 1 :] if a[1] - a[0] == b[1] - b[0]]
    assert len(pairs) >= 6  # frames of random bits are all of one size
    for (a, b), (c, d) in pairs[:8]:
        file.write_bytes(good[:a] + good[c:d] + good[b:c] + good[a:b] + good[d:])
        check_refused(damaged, file.name)


def test_files_of_two_checkpoints_swapped(damaged: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "EXACT_FRAME_BYTES", 4096)
        dcp.save(state(), storage_writer=GuardedWriter(other))
    mine, theirs = data_file(damaged), data_file(other)
    assert mine.stat().st_size == theirs.stat().st_size  # the same state, but for names and nonces
    keep = mine.read_bytes()
    mine.write_bytes(theirs.read_bytes())
    check_refused(damaged, mine.name)
    mine.write_bytes(keep)
    shutil.copy(other / MANIFEST_NAME, damaged / MANIFEST_NAME)
    check_refused(damaged, theirs.name)


def test_frames_of_another_checkpoint(damaged: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "EXACT_FRAME_BYTES", 4096)
        dcp.save(state(), storage_writer=GuardedWriter(other))
    mine, theirs = data_file(damaged).read_bytes(), data_file(other).read_bytes()
    half = len(mine) // 2
    data_file(damaged).write_bytes(mine[:half] + theirs[half : half + 4000] + mine[half + 4000 :])
    check_refused(damaged, data_file(damaged).name)


# ---- what is told


def test_every_problem_is_listed(damaged: Path) -> None:
    file = data_file(damaged)
    data = bytearray(file.read_bytes())
    manifest = read_manifest(Store(damaged))
    wanted = ("big", "optim.state.0.exp_avg")
    for key in wanted:
        record = manifest.shard(manifest.shard_indexes(key)[0])
        _, end = manifest.record_begins()[record.file, record.record]
        data[end - 1] ^= 1
    file.write_bytes(data)
    report = examine(damaged)
    assert not report.ok
    assert len(report.problems) == 2
    assert all(any(key in line for line in report.problems) for key in wanted)
    with pytest.raises(IntegrityError, match=r"2 problem\(s\): IntegrityError: .*frame .*expected [0-9a-f]{16}; got"):
        verify(damaged)


def test_damage_elsewhere_does_not_disturb_a_part(damaged: Path) -> None:
    manifest, file = read_manifest(Store(damaged)), data_file(damaged)
    record = manifest.shard(manifest.find("big", (0, 0)))
    _, end = manifest.record_begins()[record.file, record.record]
    data = bytearray(file.read_bytes())
    data[end - 1] ^= 1
    file.write_bytes(data)
    target = {"small": torch.zeros(5, dtype=torch.int64)}
    dcp.load(target, storage_reader=GuardedReader(damaged))
    assert_same(target["small"], torch.arange(5))
    error = failure(dcp.load, {"big": torch.zeros(8, 1024, dtype=torch.int32)}, storage_reader=GuardedReader(damaged))
    assert isinstance(error, GuardError)
    assert "restore from another checkpoint or copy" in str(error)
