import gc
import multiprocessing
import os
import pickle
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from guarddcp.errors import FormatError, IntegrityError
from guarddcp.storage import Store, ranges, writers
from guarddcp.storage.ranges import MAX_GAP, MAX_REQUEST, join
from guarddcp.storage.store import check_name

DATA = bytes(range(256)) * 20  # 5120 bytes: several blocks of the bucket


def put(store, name, data=DATA):
    with store.create(name) as writer:
        writer.write(data)


# -- every kind of URL ---------------------------------------------------------------------------------------------


def test_write_then_read(url):
    store = Store(url)
    with store.create("data.bin") as writer:
        writer.write(DATA[:100])
        writer.write(memoryview(DATA)[100:])
        writer.write(b"")
        assert writer.tell() == len(DATA)
    other = Store(url)
    assert other.size("data.bin") == len(DATA)
    assert other.read("data.bin", 250, 260) == DATA[250:260]
    assert other.read_all("data.bin", len(DATA)) == DATA
    assert other.is_local == ("memory" not in str(url) and "bucket" not in str(url))


def test_nothing_is_visible_before_close(url):
    store = Store(url)
    writer = store.create("x")
    writer.write(DATA)
    if not store.is_local:
        assert not store.exists("x")
    writer.close()
    writer.close()
    assert store.exists("x")


def test_abort_publishes_nothing(url):
    store = Store(url)
    writer = store.create("x")
    writer.write(DATA)
    writer.abort()
    writer.abort()
    assert not store.exists("x")
    with pytest.raises(ValueError, match="write to an object that is aborted"):
        writer.write(b"more")
    with pytest.raises(ValueError, match="aborted"):
        writer.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_block_publishes_nothing(url, error):
    store = Store(url)

    def save():
        with store.create("x") as writer:
            writer.write(DATA)
            raise error("boom")

    with pytest.raises(error, match="boom"):
        save()
    assert not store.exists("x")


def test_a_dropped_writer_publishes_nothing(url):
    store = Store(url)
    writer = store.create("x")
    writer.write(DATA)
    del writer
    gc.collect()
    assert not store.exists("x")


def test_abort_after_close_removes(url):
    store = Store(url)
    writer = store.create("x")
    writer.write(DATA)
    writer.close()
    writer.abort()
    assert not store.exists("x")


def test_missing_objects(url):
    store = Store(url)
    assert not store.exists("x")
    store.delete("x")
    for call in (lambda: store.size("x"), lambda: store.read("x", 0, 1), lambda: store.read_all("x", 10)):
        with pytest.raises(FileNotFoundError):
            call()


def test_delete_and_empty_object(url):
    store = Store(url)
    store.create("empty").close()
    assert store.exists("empty")
    assert store.size("empty") == 0
    assert store.read_all("empty", 10) == b""
    assert store.read("empty", 0, 0) == b""
    store.delete("empty")
    assert not store.exists("empty")


@pytest.mark.parametrize(("begin", "end"), [(5000, 5121), (5120, 5121), (10**12, 10**13)])
def test_a_truncated_object_is_named(url, begin, end):
    store = Store(url)
    put(store, "x")
    with pytest.raises(IntegrityError, match=r"/x.*(shorter|truncated).*expected .* bytes; got"):
        store.read("x", begin, end)


def test_read_all_has_a_limit(url):
    store = Store(url)
    put(store, "x")
    with pytest.raises(FormatError, match=r"/x: object is too large; expected at most 5119 bytes"):
        store.read_all("x", len(DATA) - 1)


def test_ranges_come_back_in_the_order_asked(url):
    store = Store(url)
    put(store, "a")
    put(store, "b", DATA[::-1])
    asked = [("b", 7, 9), ("a", 5000, 5120), ("a", 0, 0), ("a", 3, 700), ("b", 7, 9), ("a", 600, 800)]
    expected = [(DATA[::-1] if name == "b" else DATA)[begin:end] for name, begin, end in asked]
    assert store.read_ranges(asked) == expected
    assert store.stats.bytes_asked == sum(end - begin for _, begin, end in asked)
    assert store.stats.bytes_fetched == (9 - 7) + (5120 - 3)
    assert store.stats.requests == 2


def test_pickled_store_works(url):
    store = Store(url, {"skip_instance_cache": True})
    put(store, "x")
    assert store.read("x", 0, 3) == DATA[:3]
    copy = pickle.loads(pickle.dumps(store))
    assert copy.read("x", 1, 4) == DATA[1:4]
    assert (copy.url, copy.stats.requests, store.stats.requests) == (os.fspath(url), 1, 1)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "../a", "a\\b", "s3://b", "a:b", "a\0", "a b", "a\n", "x" * 201, b"a", None, 3]
)
def test_illegal_names_are_refused_everywhere(url, name):
    store = Store(url)
    calls = [store.create, store.size, store.exists, store.delete, lambda n: store.read(n, 0, 1)]
    for call in calls:
        with pytest.raises(FormatError, match="illegal object name; expected one path component"):
            call(name)
    with pytest.raises(FormatError, match="illegal object name"):
        store.read_all(name, 9)


# -- URLs ----------------------------------------------------------------------------------------------------------


def test_urls_are_verbatim(tmp_path):
    assert Store("bucket://b//c/").url == "bucket://b//c/"
    assert Store("bucket://b//c/").remote_path("x") == "b//c/x"
    assert Store(f"file://{tmp_path}/c%20d/").local_path("x") == f"{tmp_path}/c%20d/x"
    assert Store("memory://").remote_path("x") == "/x"
    with pytest.raises(ValueError, match="not on a local disk"):
        Store("memory://a").local_path("x")


def test_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("ckpt")
    monkeypatch.chdir("/")
    put(store, "x")
    assert (tmp_path / "ckpt" / "x").read_bytes() == DATA


@pytest.mark.parametrize("bad", ["s3:/bucket/run", Path("memory://a/b")])
def test_collapsed_urls_are_refused(bad):
    with pytest.raises(FormatError, match=r"a URL with one slash; expected (s3|memory)://.*Pass URLs as str"):
        Store(bad)


@pytest.mark.parametrize("bad", ["", b"/tmp/x"])
def test_what_is_no_path_is_refused(bad):
    with pytest.raises(FormatError, match="not a path; expected a path or URL as text"):
        Store(bad)


def test_unknown_protocols_say_so():
    with pytest.raises(ValueError, match="nosuch"):
        Store("nosuch://a").exists("x")


def test_chained_url_and_folders_are_made(tmp_path):
    store = Store("dir::file:///", {"dir": {"path": str(tmp_path / "deep" / "er")}})
    assert not store.is_local
    put(store, "x")
    assert (tmp_path / "deep" / "er" / "x").read_bytes() == DATA
    writer = store.create("y")
    writer.write(DATA)
    writer.abort()
    assert not (tmp_path / "deep" / "er" / "y").exists()


def test_memory_is_shared_between_stores_and_needs_no_folders():
    MemoryFileSystem.store.clear()
    put(Store("memory://deep/er"), "x")
    assert Store("memory:///deep/er/").read_all("x", 9999) == DATA
    assert list(MemoryFileSystem.store) == ["/deep/er/x"]


def test_a_closed_signature_gets_no_cache_option():
    class Plain(MemoryFileSystem):
        protocol = "plainmem"

        def __init__(self, token=None):
            super().__init__()
            self.token = token

    fsspec.register_implementation("plainmem", Plain, clobber=True)
    assert Store("plainmem://a", {"token": "t"}).fs.token == "t"


# -- local disks ---------------------------------------------------------------------------------------------------


def test_an_existing_file_is_not_overwritten(tmp_path):
    store = Store(tmp_path)
    put(store, "x")
    with pytest.raises(FileExistsError):
        store.create("x")
    assert store.read_all("x", 9999) == DATA


def test_short_writes_are_completed(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(writers.os, "write", lambda fd, view: write(fd, view[: max(1, len(view) // 2)]))
    put(Store(tmp_path), "x")
    assert (tmp_path / "x").read_bytes() == DATA


def test_a_write_without_progress_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(writers.os, "write", lambda fd, view: 0)
    with pytest.raises(OSError, match="write made no progress"):
        put(Store(tmp_path), "x")
    assert list(tmp_path.iterdir()) == []


def test_close_syncs_and_a_failed_sync_removes(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(writers.os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    put(Store(tmp_path), "x")
    assert str(tmp_path / "x") in synced

    def fail(fd):
        raise OSError(5, "disk on fire")

    monkeypatch.setattr(writers.os, "fsync", fail)
    with pytest.raises(OSError, match="disk on fire"):
        put(Store(tmp_path), "y")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_new_folders_are_synced_into_their_parents(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(writers, "sync_folder", synced.append)
    put(Store(tmp_path / "a" / "b"), "x")
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a")]


def test_short_reads_are_completed(tmp_path, monkeypatch):
    store = Store(tmp_path)
    put(store, "x")
    pread = os.pread
    monkeypatch.setattr(ranges.os, "pread", lambda fd, count, at: pread(fd, min(count, 7), at))
    assert store.read("x", 1, 5000) == DATA[1:5000]


def test_a_file_that_shrinks_while_read_is_named(tmp_path, monkeypatch):
    store = Store(tmp_path)
    put(store, "x")
    monkeypatch.setattr(ranges.os, "pread", lambda fd, count, at: b"")
    with pytest.raises(IntegrityError, match=r"x bytes 0:10: object is shorter than its range; expected 10 bytes"):
        store.read("x", 0, 10)


def test_arrays_of_any_shape_are_written_as_bytes(tmp_path):
    store = Store(tmp_path)
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    with store.create("x") as writer:
        writer.write(array)
        writer.write(np.empty((0, 3), "<f4"))
        assert writer.tell() == 24
    assert store.read_all("x", 99) == array.tobytes()
    with pytest.raises(TypeError, match="contiguous"), store.create("y") as writer:
        writer.write(array.T)


def test_a_forked_child_leaves_the_parents_object_alone(tmp_path):
    writer = Store(tmp_path).create("x")
    pid = os.fork()
    if pid == 0:
        writer.__del__()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    writer.write(DATA)
    writer.close()
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("bad", [(-1, 4), (5, 4)])
def test_illegal_ranges(tmp_path, bad):
    with pytest.raises(ValueError, match=rf"x: illegal byte range {bad[0]}:{bad[1]}"):
        Store(tmp_path).read("x", *bad)


# -- object stores -------------------------------------------------------------------------------------------------


def test_a_failed_part_leaves_no_object_and_no_upload(bucket):
    bucket.fail = "part"
    with pytest.raises(ConnectionError, match="part refused"):
        put(Store("bucket://b/run"), "x")
    gc.collect()
    assert bucket.objects == {}
    assert bucket.uploads == set()
    assert bucket.log == ["initiate", "part", "discard", "delete"]


def test_a_small_aborted_object_costs_no_request(bucket):
    writer = Store("bucket://b/run").create("x")
    writer.write(b"few")
    writer.abort()
    assert bucket.log == ["discard"]


def test_a_close_whose_response_is_lost_takes_the_object_back(bucket):
    bucket.fail = "response"
    with pytest.raises(ConnectionError, match="response lost"):
        put(Store("bucket://b/run"), "x")
    assert bucket.objects == {}


def test_foreign_errors_become_os_errors(bucket):
    bucket.fail = "get"
    with pytest.raises(OSError, match=r"KeyError: 'NotAnOSError'.*bucket://b/run/x") as caught:
        Store("bucket://b/run").read("x", 0, 1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "NotAnOSError" in str(pickle.loads(pickle.dumps(caught.value)))


def test_exists_raises_what_is_no_answer(bucket):
    bucket.fail = "get"
    with pytest.raises(OSError, match="NotAnOSError"):
        Store("bucket://b/run").exists("x")


def test_requests_run_concurrently(async_barrier):
    store = Store("asyncbucket://b/run")
    put(store, "x")
    put(store, "y")
    assert store.read_ranges([("x", 0, 4), ("y", 4, 8)]) == [DATA[:4], DATA[4:8]]
    assert store.stats.requests == 2


def test_the_first_error_is_raised_from_threads(bucket):
    store = Store("asyncbucket://b/run")
    put(store, "x")
    with pytest.raises(FileNotFoundError, match="gone"):
        store.read_ranges([("x", 0, 4), ("gone", 4, 8)])


def test_each_process_connects_for_itself(bucket):
    store = Store("bucket://b/run")
    fs = store.fs
    assert store.fs is fs
    assert Store("bucket://b/run").fs is not fs
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(store.fs is fs))
    child.start()
    child.join()
    assert queue.get() is False


def test_the_listing_cache_is_off(bucket):
    assert Store("bucket://b/run").fs.dircache.use_listings_cache is False


# -- joining -------------------------------------------------------------------------------------------------------


def test_gaps_are_joined_up_to_the_limits():
    edge = 1000 + MAX_GAP
    assert [r.end for r in join([("x", 0, 1000), ("x", edge, edge + 5)])] == [edge + 5]
    assert [r.end for r in join([("x", 0, 1000), ("x", edge + 1, edge + 5)])] == [1000, edge + 5]
    assert [r.end for r in join([("x", 0, 9), ("x", 9, MAX_REQUEST)])] == [MAX_REQUEST]
    assert [r.end for r in join([("x", 0, 9), ("x", 9, MAX_REQUEST + 1)])] == [9, MAX_REQUEST + 1]
    assert len(join([("x", 0, 9), ("y", 9, 12)])) == 2
    assert [r.members for r in join([("x", 0, 4 * MAX_REQUEST), ("x", 5, 9)])] == [[0, 1]]


SPAN = st.tuples(st.sampled_from("ab"), st.integers(0, 2**25), st.integers(0, 2**22))


@settings(deadline=None, max_examples=100)
@given(st.lists(SPAN, max_size=30))
def test_requests_cover_all_ranges(spans):
    asked = [(name, begin, begin + length) for name, begin, length in spans]
    requests = join(asked)
    assert sorted(i for r in requests for i in r.members) == [i for i, (_, b, e) in enumerate(asked) if e > b]
    for request in requests:
        assert request.end - request.begin <= MAX_REQUEST
        for i in request.members:
            assert asked[i][0] == request.name
            assert request.begin <= asked[i][1] < asked[i][2] <= request.end
    # Never more than the ranges and the gaps that may be bridged.
    wanted = sum(asked[i][2] - asked[i][1] + MAX_GAP for r in requests for i in r.members)
    assert sum(r.end - r.begin for r in requests) <= wanted


@given(st.text(max_size=8))
def test_accepted_names_are_one_component(name):
    try:
        check_name(name)
    except FormatError:
        return
    assert os.path.basename(name) == name
    assert name not in ("", ".", "..")
    assert "://" not in name
