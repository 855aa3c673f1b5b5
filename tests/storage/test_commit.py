import errno
import os
import threading
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from guarddcp.errors import CheckpointExistsError, FormatError
from guarddcp.storage import Store
from guarddcp.storage import commit as commit_module
from guarddcp.storage.commit import commit

# `from guarddcp.storage import commit` is the module: the package does not hide it behind the function.
NAME = ".metadata"
OLD, NEW = b"old manifest " * 10, b"new manifest, of another length " * 10


def names(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir())


# -- every kind of URL ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_first_commit(url, overwrite):
    commit(Store(url), NAME, NEW, overwrite=overwrite)
    assert Store(url).read_all(NAME, 9999) == NEW


def test_overwrite_replaces(url):
    commit(Store(url), NAME, OLD, overwrite=False)
    commit(Store(url), NAME, NEW, overwrite=True)
    assert Store(url).read_all(NAME, 9999) == NEW


def test_an_existing_checkpoint_is_refused_and_the_option_named(url):
    commit(Store(url), NAME, OLD, overwrite=False)
    with pytest.raises(CheckpointExistsError, match=r"\.metadata: a checkpoint is already there.*overwrite=True"):
        commit(Store(url), NAME, NEW, overwrite=False)
    with pytest.raises(FileExistsError):
        commit(Store(url), NAME, NEW[:3], overwrite=False)
    assert Store(url).read_all(NAME, 9999) == OLD


@pytest.mark.parametrize("kind", ["local", "memory", "claim"])
def test_exactly_one_of_several_writers_gets_through(tmp_path, monkeypatch, kind):
    url = str(tmp_path) if kind != "memory" else f"memory://race{tmp_path.name}"
    if kind == "claim":
        monkeypatch.setattr(commit_module.os, "link", refuse(errno.EPERM))
    if kind == "memory":  # looks and then puts: give the others time in between
        exists = MemoryFileSystem.exists
        monkeypatch.setattr(MemoryFileSystem, "exists", lambda *args: (exists(*args), time.sleep(0.01))[0])
    outcomes, start = [], threading.Barrier(8)

    def writer(i):
        start.wait()
        try:
            commit(Store(url), NAME, b"%d" % i * 1000, overwrite=False)
            outcomes.append(i)
        except CheckpointExistsError:
            outcomes.append(None)

    threads = [threading.Thread(target=writer, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [i for i in outcomes if i is not None]
    assert len(outcomes) == 8
    assert Store(url).read_all(NAME, 9999) == b"%d" % winner * 1000


@pytest.mark.parametrize("bad", ["", "..", "a/b", "s3://b/c"])
def test_illegal_names_are_refused(url, bad):
    with pytest.raises(FormatError, match="illegal object name"):
        commit(Store(url), bad, NEW, overwrite=True)


# -- local disks ---------------------------------------------------------------------------------------------------


def refuse(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_sibling_remains(tmp_path, overwrite):
    commit(Store(tmp_path), NAME, NEW, overwrite=overwrite)
    assert names(tmp_path) == [NAME]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("fault", [refuse(errno.ENOSPC), interrupt])
def test_a_fault_keeps_the_old_manifest_and_cleans_up(tmp_path, monkeypatch, call, fault):
    commit(Store(tmp_path), NAME, OLD, overwrite=False)
    monkeypatch.setattr(commit_module.os, call, fault)
    with pytest.raises((OSError, KeyboardInterrupt)):
        commit(Store(tmp_path), NAME, NEW, overwrite=True)
    assert names(tmp_path) == [NAME]
    assert (tmp_path / NAME).read_bytes() == OLD


def test_files_are_durable_before_their_names(tmp_path, monkeypatch):
    log = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        log.append("folder" if path == str(tmp_path) else "file")
        fsync(fd)

    def logged_replace(source, target):
        log.append("replace")
        replace(source, target)

    monkeypatch.setattr(commit_module.os, "fsync", logged_fsync)
    monkeypatch.setattr(commit_module.os, "replace", logged_replace)
    commit(Store(tmp_path), NAME, NEW, overwrite=True)
    assert log == ["file", "folder", "replace", "folder"]


STEPS = ["open", "write", "fsync", "close", "link", "replace", "rename", "unlink"]


def commit_and_die_before(step, tmp_path, overwrite, links):
    """In a forked child: commit, but exit hard before system call number ``step``. True if the child got through."""
    pid = os.fork()
    if pid == 0:
        try:
            count = 0

            def armed(call):
                def wrapped(*args, **kwargs):
                    nonlocal count
                    if count == step:
                        os._exit(7)
                    count += 1
                    return call(*args, **kwargs)

                return wrapped

            if not links:
                os.link = refuse(errno.EPERM)
            for name in STEPS:
                setattr(os, name, armed(getattr(os, name)))
            commit(Store(tmp_path), NAME, NEW, overwrite=overwrite)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 7)
    return code == 0


@pytest.mark.parametrize(("overwrite", "links"), [(True, True), (False, True), (False, False)])
def test_a_kill_between_any_two_steps_leaves_old_or_new(tmp_path, overwrite, links):
    seen, finished, step = [], False, 0
    while not finished:
        folder = tmp_path / str(step)
        folder.mkdir()
        if overwrite:
            (folder / NAME).write_bytes(OLD)
        finished = commit_and_die_before(step, folder, overwrite, links)
        there = (folder / NAME).read_bytes() if (folder / NAME).exists() else None
        assert there in (OLD if overwrite else None, NEW)
        seen.append(there == NEW)
        step += 1
        assert step < 50
    assert seen == sorted(seen)  # old until some step, new from then on
    assert seen[-1]
    assert seen.index(True) >= 8  # open, write, fsync, close of the file; open, fsync, close of the folder; publish
    # Whatever was left over, the next writer gets through.
    for folder in tmp_path.iterdir():
        commit(Store(folder), NAME, NEW, overwrite=True)
        assert (folder / NAME).read_bytes() == NEW


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV])
def test_without_hard_links_a_claim_makes_it_exclusive(tmp_path, monkeypatch, code):
    monkeypatch.setattr(commit_module.os, "link", refuse(code))
    commit(Store(tmp_path), NAME, NEW, overwrite=False)
    assert names(tmp_path) == [NAME]
    with pytest.raises(CheckpointExistsError, match="already there"):
        commit(Store(tmp_path), NAME, OLD, overwrite=False)
    assert names(tmp_path) == [NAME]
    assert (tmp_path / NAME).read_bytes() == NEW


def test_a_claim_that_was_left_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(commit_module.os, "link", refuse(errno.EPERM))
    (tmp_path / ".metadata.claim").touch()
    with pytest.raises(CheckpointExistsError, match=r"left '\.metadata\.claim'.*overwrite=True"):
        commit(Store(tmp_path), NAME, NEW, overwrite=False)
    assert names(tmp_path) == [".metadata.claim"]
    commit(Store(tmp_path), NAME, NEW, overwrite=True)
    assert (tmp_path / NAME).read_bytes() == NEW


def test_another_error_of_link_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(commit_module.os, "link", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        commit(Store(tmp_path), NAME, NEW, overwrite=False)
    assert names(tmp_path) == []


def test_a_link_reported_as_refused_after_it_was_made(tmp_path, monkeypatch):
    link = os.link

    def linked_but_refused(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "retry of a lost request", target)

    monkeypatch.setattr(commit_module.os, "link", linked_but_refused)
    commit(Store(tmp_path), NAME, NEW, overwrite=False)
    assert names(tmp_path) == [NAME]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_filesystems_that_cannot_sync_folders(tmp_path, monkeypatch, code):
    fsync = os.fsync

    def files_only(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(commit_module.os, "fsync", files_only)
    commit(Store(tmp_path), NAME, NEW, overwrite=False)
    assert (tmp_path / NAME).read_bytes() == NEW


# -- object stores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overwrite", "mode"), [(True, "overwrite"), (False, "create")])
def test_one_put_and_nothing_else(bucket, overwrite, mode):
    commit(Store("bucket://b/run"), NAME, NEW, overwrite=overwrite)
    assert bucket.log == [("put", mode)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_lost_response_is_recognised_by_the_bytes(bucket, overwrite):
    bucket.fail = "response"
    commit(Store("bucket://b/run"), NAME, NEW, overwrite=overwrite)
    assert bucket.objects == {"b/run/.metadata": NEW}


def test_a_store_without_conditional_puts_is_asked_first(bucket):
    bucket.conditional = False
    commit(Store("bucket://b/run"), NAME, OLD, overwrite=False)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        commit(Store("bucket://b/run"), NAME, NEW, overwrite=False)
    assert bucket.objects == {"b/run/.metadata": OLD}


def test_a_filesystem_that_takes_no_mode(bucket, monkeypatch):
    monkeypatch.setattr(bucket, "pipe_file", lambda self, path, value: self.objects.update({path: value}))
    commit(Store("bucket://b/run"), NAME, OLD, overwrite=False)
    with pytest.raises(CheckpointExistsError, match="already there"):
        commit(Store("bucket://b/run"), NAME, NEW, overwrite=False)
    assert bucket.objects == {"b/run/.metadata": OLD}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_put_is_raised(bucket, monkeypatch, overwrite):
    monkeypatch.setattr(bucket, "pipe_file", refuse(errno.EACCES))
    with pytest.raises(PermissionError):
        commit(Store("bucket://b/run"), NAME, NEW, overwrite=overwrite)
    assert bucket.objects == {}


def test_a_refusal_counts_without_permission_to_read(bucket, monkeypatch):
    monkeypatch.setattr(bucket, "pipe_file", lambda self, path, value, mode: refuse_as(FileExistsError))
    monkeypatch.setattr(bucket, "cat_file", lambda *args, **kwargs: refuse_as(PermissionError))
    with pytest.raises(CheckpointExistsError, match="already there"):
        commit(Store("bucket://b/run"), NAME, NEW, overwrite=False)


def refuse_as(kind):
    raise kind("refused")


def test_a_failed_overwrite_keeps_the_old(bucket, monkeypatch):
    commit(Store("bucket://b/run"), NAME, OLD, overwrite=True)
    monkeypatch.setattr(bucket, "pipe_file", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        commit(Store("bucket://b/run"), NAME, NEW, overwrite=True)
    assert bucket.objects == {"b/run/.metadata": OLD}
