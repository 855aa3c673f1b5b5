"""Writers of one object each. An object appears whole or, after `abort` or any error, not at all.

``close`` publishes, ``abort`` takes back. That is the other way round from Python files, whose ``__exit__`` closes,
and so publishes, after an error as well.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fsspec.spec import AbstractBufferedFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from guarddcp.storage.store import Store

__all__ = ["LocalWriter", "MemoryWriter", "ObjectWriter", "RemoteWriter", "make_folder", "sync_folder"]


class ObjectWriter:
    """A binary stream to one new object: ``write`` in order, then ``close`` or ``abort``.

    Used in a ``with`` block it closes, or aborts if the block raises. One that is dropped unfinished aborts.
    After an error in ``write`` or ``close`` the writer has aborted and takes no more.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._state = "open"
        self._pid = os.getpid()

    def write(self, buffer: Buffer) -> None:
        """Append all bytes of a C-contiguous buffer. ValueError once closed or aborted."""
        if self._state != "open":
            raise ValueError(f"write to an object that is {self._state}")
        view = memoryview(buffer)
        if view.nbytes == 0:  # cast refuses shapes with a zero
            return
        with self._aborting():
            self._write(view.cast("B"))
        self._offset += view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._offset

    def close(self) -> None:
        """Publish the object, on a local disk durably. A second call does nothing; after ``abort`` ValueError."""
        if self._state == "closed":
            return
        if self._state != "open":
            raise ValueError("close of an object that is aborted")
        with self._aborting():
            self._state = "closing"
            self._close()
            self._state = "closed"

    def abort(self) -> None:
        """Remove what has been written, published or not. Never raises an Exception."""
        state, self._state = self._state, "aborted"
        if state != "aborted":
            with contextlib.suppress(Exception):
                self._abort(state)

    def _write(self, view: memoryview) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _abort(self, state: str) -> None:
        """Take back; ``state`` is open, closing (``close`` failed on the way) or closed."""
        raise NotImplementedError

    def _forget(self) -> None:
        """In a forked child: let go without a trace, the object belongs to the parent."""

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if getattr(self, "_state", "aborted") in ("open", "closing"):
            if self._pid == os.getpid():
                self.abort()
            else:
                self._forget()


class LocalWriter(ObjectWriter):
    """A new file; FileExistsError if there is one. ``close`` returns once its bytes are on the disk."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            make_folder(os.path.dirname(path))
            self._fd = os.open(path, flags, 0o666)
        super().__init__()

    def _write(self, view: memoryview) -> None:
        while view:
            count = os.write(self._fd, view)  # may be short: a signal, a quota, 2 GiB at most per call
            if count <= 0:
                raise OSError(errno.EIO, "write made no progress", self.path)
            view = view[count:]

    def _close(self) -> None:
        os.fsync(self._fd)
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _abort(self, state: str) -> None:
        try:
            self._close_fd()
        finally:
            os.unlink(self.path)

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self._close_fd()


class MemoryWriter(ObjectWriter):
    """``memory://``: its own files are public from ``open`` on, so stage the bytes and put them in one step."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store, self._name = store, name
        self._staged = io.BytesIO()

    def _write(self, view: memoryview) -> None:
        self._staged.write(view)

    def _close(self) -> None:
        self._store.fs.pipe_file(self._store.remote_path(self._name), self._staged.getvalue())
        self._staged = io.BytesIO()

    def _abort(self, state: str) -> None:
        self._staged = io.BytesIO()
        if state == "closed":
            self._store.delete(self._name)


class RemoteWriter(ObjectWriter):
    """An fsspec file. On object stores nothing is visible before ``close`` completes the upload."""

    def __init__(self, store: Store, name: str, path: str) -> None:
        self._file: Any = None
        self._store, self._name = store, name
        try:
            self._file = store.fs.open(path, "wb")
        except FileNotFoundError:  # a filesystem with folders; object stores send nothing yet
            store.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._file = store.fs.open(path, "wb")
        super().__init__()

    def _write(self, view: memoryview) -> None:
        with self._store.calling(self._name):
            while view:
                count = self._file.write(view)
                # Files that buffer take all; some raw ones return None for that.
                view = view[len(view) if count is None else count :]

    def _close(self) -> None:
        with self._store.calling(self._name):
            self._file.close()

    def _abort(self, state: str) -> None:
        if state == "closed":
            self._store.delete(self._name)
            return
        file, partly_visible = self._file, True
        try:
            if hasattr(file, "discard"):
                # Before any block was sent there is nothing to delete either.
                partly_visible = getattr(file, "offset", 0) is not None
                file.discard()
        finally:
            self._forget()
            # A close that failed may have published all the same: its response can get lost.
            if partly_visible or state == "closing":
                self._store.delete(self._name)

    def _forget(self) -> None:
        # fsspec's buffered files publish in close(), which their __del__ calls too: mark them closed instead.
        if isinstance(self._file, AbstractBufferedFile):
            self._file.closed = True
            self._file.buffer = None
        elif self._pid == os.getpid():
            with contextlib.suppress(Exception):
                self._file.close()


def make_folder(folder: str) -> None:
    """Make a folder and its parents so that they survive a crash."""
    missing = []
    head = folder
    while head and not os.path.isdir(head):
        missing.append(head)
        if head == os.path.dirname(head):
            break
        head = os.path.dirname(head)
    os.makedirs(folder, exist_ok=True)
    for made in missing:
        sync_folder(os.path.dirname(made))


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable. Filesystems that cannot sync folders (EINVAL, ENOTSUP) need not."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a parent that may be entered but not read
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)
