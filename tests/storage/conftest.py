"""A bucket: an fsspec filesystem with the manners of an object store (multipart upload, no folders, no rename)."""

import errno
import threading

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile


class BucketFile(AbstractBufferedFile):
    """Blocks of 1 KiB; visible only when the last block completes the upload."""

    def _initiate_upload(self):
        self.parts = []
        self.fs.log.append("initiate")
        self.fs.uploads.add(self.path)

    def _upload_chunk(self, final=False):
        self.fs.log.append("part")
        if self.fs.fail == "part":
            raise ConnectionError("part refused")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.log.append("complete")
            self.fs.uploads.discard(self.path)
            self.fs.objects[self.path] = b"".join(self.parts)
            if self.fs.fail == "response":
                raise ConnectionError("response lost")
        return True

    def discard(self):
        self.fs.log.append("discard")
        self.fs.uploads.discard(self.path)


class BucketFS(AbstractFileSystem):
    protocol = "bucket"
    objects: dict = {}  # noqa: RUF012  (shared on purpose: the server)
    uploads: set = set()  # noqa: RUF012
    log: list = []  # noqa: RUF012
    fail = None
    barrier = None
    conditional = True

    def _open(self, path, mode="rb", **kwargs):
        return BucketFile(self, path, mode=mode, block_size=1024)

    def info(self, path, **kwargs):
        self.log.append("head")
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.log.append(("get", start, end))
        if self.barrier is not None:
            self.barrier.wait(timeout=10)
        if self.fail == "get":
            raise KeyError("NotAnOSError")
        if path not in self.objects:
            raise FileNotFoundError(path)
        if start >= len(self.objects[path]):
            raise OSError(errno.EINVAL, "range not satisfiable")
        return self.objects[path][start:end]

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self.log.append(("put", mode))
        if mode == "create":
            if not self.conditional:
                raise NotImplementedError("no conditional puts")
            if path in self.objects:
                raise OSError(errno.EINVAL, "pre-condition failed")  # what some S3 servers' clients say
        self.objects[path] = bytes(value)
        if self.fail == "response":
            raise ConnectionError("response lost")

    def rm_file(self, path):
        self.log.append("delete")
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def ls(self, path, **kwargs):
        raise AssertionError("object stores are never listed")

    def mv(self, *args, **kwargs):
        raise AssertionError("object stores are never renamed in")

    def makedirs(self, path, exist_ok=False):
        raise AssertionError("object stores have no folders")


class AsyncBucketFS(BucketFS):
    protocol = "asyncbucket"
    async_impl = True


fsspec.register_implementation("bucket", BucketFS, clobber=True)
fsspec.register_implementation("asyncbucket", AsyncBucketFS, clobber=True)


@pytest.fixture
def bucket():
    """The server side of bucket://, empty and without faults; a fault set on the class holds for all clients."""
    for cls in (BucketFS, AsyncBucketFS):
        cls.fail, cls.barrier, cls.conditional = None, None, True
    for shared in (BucketFS.objects, BucketFS.uploads, BucketFS.log):
        shared.clear()
    yield BucketFS
    BucketFS.fail = None


@pytest.fixture
def async_barrier(bucket):
    """Reads of asyncbucket:// return only when two are in flight at once."""
    AsyncBucketFS.barrier = threading.Barrier(2)
    yield
    AsyncBucketFS.barrier = None


@pytest.fixture(params=["plain", "pathlike", "file", "memory", "bucket"])
def url(request, tmp_path, bucket):
    """One empty place per kind of URL; the local ones do not exist yet."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return {
        "plain": str(tmp_path / "a" / "b"),
        "pathlike": tmp_path / "a" / "b",
        "file": f"file://{tmp_path}/a/b",
        "memory": "memory://run/step-1",
        "bucket": "bucket://b/run/step-1",
    }[request.param]
