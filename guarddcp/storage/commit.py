"""Publishing the manifest: the one step that turns files into a checkpoint.

Local disk, in this order: write a sibling file, fsync it, fsync the folder (so that data files are there before
the manifest that names them), link or rename, fsync the folder, remove the sibling. A reader sees the old manifest
or the new one, whole, and a kill between any two steps leaves one of them. What a kill may leave over is a sibling
``.NAME.<random>.tmp``, which no reader looks at.

Other filesystems: one put, which object stores make atomic. No rename, no listing.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import secrets
import threading

from guarddcp.errors import CheckpointExistsError, FormatError
from guarddcp.storage.store import Store, check_name
from guarddcp.storage.writers import sync_folder

__all__ = ["commit"]

# What os.link says on filesystems without hard links (FAT, some FUSE and network mounts).
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
_MEMORY_LOCK = threading.Lock()  # memory:// looks and then puts; threads of one process may stand for ranks


def commit(store: Store, name: str, data: bytes, *, overwrite: bool) -> None:
    """Publish ``data`` as object ``name``, atomically.

    With ``overwrite`` the last writer wins. Without it CheckpointExistsError if the object exists or another writer
    comes first: exactly one of several gets through on local disks, ``memory://``, and stores with conditional
    puts; on a filesystem that has none, two writers at the same moment can both get through.

    An OSError means that the manifest may not be durable; on a local disk it was not published unless the error
    came from the last fsync of the folder. The same ``data`` may then be committed again with ``overwrite``.
    """
    check_name(name)
    if store.is_local:
        _commit_local(store, name, data, overwrite)
    else:
        _commit_remote(store, name, data, overwrite)


def _exists_error(store: Store, name: str, detail: str = "a checkpoint is already there") -> CheckpointExistsError:
    return CheckpointExistsError(
        detail,
        where=store.where(name),
        hint="Pass overwrite=True to replace it, or write to another path.",
    )


def _commit_local(store: Store, name: str, data: bytes, overwrite: bool) -> None:
    final = store.local_path(name)
    temp_name = f".{name.lstrip('.')[:100]}.{secrets.token_hex(8)}.tmp"
    temp = store.local_path(temp_name)
    try:
        with store.create(temp_name) as writer:
            writer.write(data)
        sync_folder(store.folder)
        if overwrite:
            os.replace(temp, final)
        else:
            _publish_new(store, name, temp, final)
        sync_folder(store.folder)
    finally:
        with contextlib.suppress(OSError):
            store.delete(temp_name)


def _publish_new(store: Store, name: str, temp: str, final: str) -> None:
    try:
        os.link(temp, final)
    except FileExistsError as error:
        # Over NFS a repeated request can be refused because of its own first try.
        if not os.path.samefile(temp, final):
            raise _exists_error(store, name) from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _claim_and_rename(store, name, temp, final)


def _claim_and_rename(store: Store, name: str, temp: str, final: str) -> None:
    """Exclusive publication without hard links: who creates the claim may rename.

    A writer killed in here leaves the claim, and later ones are refused until it is removed or they overwrite.
    """
    claim_name = f"{name}.claim"
    claim = store.local_path(claim_name)
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError as error:
        detail = f"another writer is committing, or was killed while it did and left {claim_name!r}"
        raise _exists_error(store, name, detail) from error
    try:
        if os.path.lexists(final):
            raise _exists_error(store, name)
        os.rename(temp, final)
    finally:
        os.unlink(claim)


def _commit_remote(store: Store, name: str, data: bytes, overwrite: bool) -> None:
    try:
        with store.calling(name):
            if overwrite:
                store.fs.pipe_file(store.remote_path(name), data)
            else:
                _put_new(store, name, data)
    except CheckpointExistsError:
        raise
    except OSError as error:
        # A lost response is retried inside the filesystem library, and a conditional retry is refused because of
        # its own first try; which error says so differs between stores. So look at what is there.
        there = _read_back(store, name, len(data))
        if there == data:
            return
        if overwrite or (there is None and not isinstance(error, FileExistsError)):
            raise
        raise _exists_error(store, name) from error


def _put_new(store: Store, name: str, data: bytes) -> None:
    fs, path = store.fs, store.remote_path(name)
    if "mode" in inspect.signature(fs.pipe_file).parameters:
        try:
            with _MEMORY_LOCK:
                fs.pipe_file(path, data, mode="create")
            return
        except (NotImplementedError, ValueError):  # knows the word, not the deed
            pass
    if store.exists(name):
        raise _exists_error(store, name)
    fs.pipe_file(path, data)


def _read_back(store: Store, name: str, limit: int) -> bytes | None:
    """The object, b"" for one larger than ``limit``, None if it is missing or cannot be read."""
    try:
        return store.read_all(name, limit)
    except FormatError:
        return b""
    except OSError:
        return None
