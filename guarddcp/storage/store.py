"""One checkpoint directory (or object-store prefix) behind any fsspec URL.

Local disks are reached with plain system calls, because durability (fsync), exclusive create and positional reads
are not in fsspec's interface. All other URLs go through fsspec. On those no call here lists or renames, and no
call makes a folder unless opening a file says that one is missing: object stores have none, and asking s3fs for one
may create a bucket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from guarddcp.errors import FormatError, GuardError, IntegrityError
from guarddcp.storage.ranges import Request, join, local_read, run
from guarddcp.storage.writers import LocalWriter, MemoryWriter, ObjectWriter, RemoteWriter, make_folder

__all__ = ["ObjectWriter", "ReadStats", "Store", "check_name"]

LOCAL_THREADS = 4  # network mounts gain from a few reads in flight, page-cached files do not mind
REMOTE_THREADS = 16  # requests in flight on filesystems that are asynchronous inside (s3, gcs, abfs, http)

# The names that this package gives are of this form; a manifest that names anything else is not ours.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_COLLAPSED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")


def check_name(name: object) -> str:
    """Return ``name`` if it is a legal object name: one path component of letters, digits, ``.``, ``_``, ``-``.

    Raises FormatError otherwise, so that no name read from a manifest leads out of the checkpoint.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name in (".", ".."):
        raise FormatError(
            "illegal object name",
            where="storage",
            expected="one path component of 1-200 letters, digits, '.', '_' or '-'",
            got=repr(name)[:300],
        )
    return name


@dataclass
class ReadStats:
    """What reading has cost so far: bytes that callers asked for, bytes fetched (gaps included), requests made."""

    bytes_asked: int = 0
    bytes_fetched: int = 0
    requests: int = 0


@dataclass
class _PerProcess:
    """What must not cross a fork or a pickle: the fsspec instance (sockets, event loop) and a lock."""

    pid: int
    fs: Any
    path: str
    lock: threading.Lock = field(default_factory=threading.Lock)


class Store:
    """Named objects under one URL.

    Parameters: ``url`` is a local path (str or os.PathLike), ``file://...``, or any URL that fsspec knows, taken
    verbatim; URLs must be str, since pathlib turns ``s3://a`` into ``s3:/a`` (refused with FormatError).
    ``storage_options`` go to the fsspec filesystem and have no meaning on local disks.

    Every method that takes a name raises FormatError for an illegal one (`check_name`). OSError and its subclasses
    pass through; an error of another kind from a filesystem library becomes OSError with the library's error as
    its cause, so that callers and other ranks see one picklable family. Stores can be pickled and survive a fork:
    connections are made on first use in each process. Methods may be called from several threads.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> None:
        text = os.fspath(url)
        if not isinstance(text, str) or not text:
            raise FormatError("not a path", where="storage", expected="a path or URL as text", got=repr(url))
        collapsed = _COLLAPSED_URL.match(text)
        if collapsed and collapsed[1] in known_implementations and collapsed[1] not in ("file", "local"):
            raise FormatError(
                "a URL with one slash", where=text, expected=f"{collapsed[1]}://...", hint="Pass URLs as str."
            )
        self.url = text
        self.storage_options = dict(storage_options or {})
        self.is_local = _is_local(text)
        # Absolute now: a worker process may have another current directory.
        self._folder: str = LocalFileSystem._strip_protocol(text) if self.is_local else ""
        self.stats = ReadStats()
        self._process: _PerProcess | None = None

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "stats": ReadStats()}

    # -- names ---------------------------------------------------------------------------------------------------

    def where(self, name: str) -> str:
        """``url/name``, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    @property
    def folder(self) -> str:
        """Absolute path of the folder on a local disk; ValueError elsewhere."""
        if not self.is_local:
            raise ValueError(f"{self.url} is not on a local disk")
        return self._folder

    def local_path(self, name: str) -> str:
        """Absolute path of an object on a local disk; ValueError elsewhere."""
        return os.path.join(self.folder, check_name(name))

    def remote_path(self, name: str) -> str:
        """Path of an object as the fsspec filesystem `fs` wants it."""
        return f"{self._here().path.rstrip('/')}/{check_name(name)}"

    @property
    def fs(self) -> Any:
        """This process's own fsspec filesystem: never shared, no listing cache. Not for local disks."""
        return self._here().fs

    def _here(self) -> _PerProcess:
        process = self._process
        if process is None or process.pid != os.getpid():
            fs, path = (None, self._folder) if self.is_local else _connect(self.url, self.storage_options)
            process = self._process = _PerProcess(os.getpid(), fs, path)
        return process

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Turn errors of a filesystem library that are not OSError into OSError naming the object."""
        self._here()  # a missing library or unknown protocol keeps its own error, which says what to install
        try:
            yield
        except (OSError, GuardError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.where(name)) from error

    # -- writing -------------------------------------------------------------------------------------------------

    def create(self, name: str) -> ObjectWriter:
        """Open a new object for writing; the folder is made if it is missing.

        A local file that exists raises FileExistsError. Elsewhere names are trusted to be new (they are random):
        a conditional upload whose first response got lost would be refused because of its own first try.
        """
        if self.is_local:
            return LocalWriter(self.local_path(name))
        with self.calling(name):
            path, fs = self.remote_path(name), self.fs
            if isinstance(fs, MemoryFileSystem):
                return MemoryWriter(self, name)
            return RemoteWriter(self, name, path)

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError), self.calling(name):
            if self.is_local:
                os.unlink(self.local_path(name))
            else:
                self.fs.rm_file(self.remote_path(name))

    # -- looking -------------------------------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """Whether the object is there. Unlike fsspec's ``exists`` an error (no permission, no network) is raised."""
        try:
            if self.is_local:
                os.stat(self.local_path(name))
            else:
                self._probe(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _probe(self, name: str) -> None:
        # A ranged read first: s3fs' info of a missing key goes on to list. An empty object has no byte 0, which
        # some stores call an error; only then ask for its size.
        path = self.remote_path(name)
        with self.calling(name):
            try:
                self.fs.cat_file(path, start=0, end=1)
            except (FileNotFoundError, PermissionError):
                raise
            except OSError:
                self.size(name)

    def size(self, name: str) -> int:
        """Size in bytes. FileNotFoundError if there is no such object."""
        if self.is_local:
            return os.stat(self.local_path(name)).st_size
        with self.calling(name):
            info = self.fs.info(self.remote_path(name))
        if info.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(name))
        if info.get("size") is None:
            raise OSError(errno.EIO, "the filesystem does not tell the size", self.where(name))
        return int(info["size"])

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end`` (exclusive) of an object, all of them.

        Raises FileNotFoundError for a missing object, IntegrityError if it ends before ``end``.
        """
        return self.read_ranges([(name, begin, end)])[0]

    def read_all(self, name: str, limit: int) -> bytes:
        """A whole object of at most ``limit`` bytes in one request; a larger one is a FormatError."""
        if self.is_local:
            data = local_read(self.local_path(name), 0, limit + 1)
        else:
            with self.calling(name):
                data = self._remote_head(name, limit + 1)
        self._count(len(data), len(data), 1)
        if len(data) > limit:
            raise FormatError("object is too large", where=self.where(name), expected=f"at most {limit} bytes")
        return data

    def _remote_head(self, name: str, end: int) -> bytes:
        try:
            return bytes(self.fs.cat_file(self.remote_path(name), start=0, end=end))
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            if self.size(name) == 0:  # "range not satisfiable"
                return b""
            raise

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Many byte ranges ``(name, begin, end)``, returned in the order asked.

        Ranges are sorted and joined over gaps of up to 64 KiB into requests of up to 16 MiB (a
        longer single range stays one request); requests run concurrently. The first error cancels the rest.
        Raises as `read` does, and ValueError for a range that is negative or ends before it begins.
        """
        for name, begin, end in ranges:
            check_name(name)
            if not 0 <= begin <= end:
                raise ValueError(f"{self.where(name)}: illegal byte range {begin}:{end}")
        out: list[bytes] = [b""] * len(ranges)
        requests = join(ranges)

        def fetch(request: Request) -> None:
            data = self._fetch(request.name, request.begin, request.end)
            for i in request.members:
                out[i] = data[ranges[i][1] - request.begin : ranges[i][2] - request.begin]
            self._count(sum(len(out[i]) for i in request.members), len(data), 1)

        run(fetch, requests, self._threads())
        return out

    def _threads(self) -> int:
        if self.is_local:
            return LOCAL_THREADS
        # A filesystem that is not asynchronous inside is seldom safe to use from several threads (ftp, sftp).
        return REMOTE_THREADS if getattr(self.fs, "async_impl", False) else 1

    def _fetch(self, name: str, begin: int, end: int) -> bytes:
        if self.is_local:
            data = local_read(self.local_path(name), begin, end)
        else:
            with self.calling(name):
                try:
                    data = bytes(self.fs.cat_file(self.remote_path(name), start=begin, end=end))
                except (FileNotFoundError, PermissionError):
                    raise
                except OSError as error:
                    self._refuse_if_short(name, end, error)
                    raise
        if len(data) != end - begin:
            raise IntegrityError(
                "object is shorter than its range" if len(data) < end - begin else "store returned more than asked",
                where=f"{self.where(name)} bytes {begin}:{end}",
                expected=f"{end - begin} bytes",
                got=f"{len(data)} bytes",
            )
        return data

    def _refuse_if_short(self, name: str, end: int, error: OSError) -> None:
        # Stores answer a range that begins past the end with an error; which one differs, so look at the size.
        try:
            size = self.size(name)
        except OSError:
            return
        if size < end:
            where = self.where(name)
            raise IntegrityError("object is truncated", where=where, expected=f">= {end} bytes", got=size) from error

    def _count(self, asked: int, fetched: int, requests: int) -> None:
        with self._here().lock:
            self.stats.bytes_asked += asked
            self.stats.bytes_fetched += fetched
            self.stats.requests += requests

    def make_folder(self) -> None:
        """Make the local folder, durably. On other filesystems folders appear with their first object."""
        if self.is_local:
            make_folder(self._folder)


def _is_local(url: str) -> bool:
    if "::" in url and url.split("::", 1)[0].split("://")[0] in known_implementations:
        return False  # chained, such as simplecache::file:///x
    return "://" not in url or url.startswith(("file://", "local://"))


def _connect(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    # A listing cache answers "not there" long after another rank wrote; a shared instance may carry one.
    options = {"skip_instance_cache": True, "use_listings_cache": False, **storage_options}
    try:
        return url_to_fs(url, **options)
    except TypeError:  # a third-party filesystem with a closed signature
        del options["use_listings_cache"]
        return url_to_fs(url, **options)
