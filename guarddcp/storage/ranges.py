"""Byte ranges: joining many into few requests, and reading them from local files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

__all__ = ["MAX_GAP", "MAX_REQUEST", "Request", "join", "local_read", "run"]

MAX_GAP = 64 * 2**10  # bytes; below this, reading the gap costs less than one more request
MAX_REQUEST = 16 * 2**20  # bytes; ranges are joined up to here, so that a request stays retryable and memory bounded


@dataclass
class Request:
    """Bytes ``begin`` to ``end`` (exclusive) of ``name``; ``members`` are indices of the ranges inside."""

    name: str
    begin: int
    end: int
    members: list[int]


def join(ranges: Sequence[tuple[str, int, int]]) -> list[Request]:
    """Requests that cover all ``(name, begin, end)``, sorted by name and begin; empty ranges need none.

    Neighbours are joined over gaps of up to `MAX_GAP` while the request stays within `MAX_REQUEST`; ranges may
    overlap and repeat. A single range above `MAX_REQUEST` is one request.
    """
    requests: list[Request] = []
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        name, begin, end = ranges[i]
        if begin == end:
            continue
        last = requests[-1] if requests else None
        if last is not None and last.name == name and begin - last.end <= MAX_GAP:
            joined = max(last.end, end)
            if joined == last.end or joined - last.begin <= MAX_REQUEST:
                last.end = joined
                last.members.append(i)
                continue
        requests.append(Request(name, begin, end, [i]))
    return requests


def local_read(path: str, begin: int, end: int) -> bytes:
    """Up to ``end - begin`` bytes of a file; fewer only where the file ends."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The size caps what one read allocates: a hostile or damaged range may claim terabytes.
        end = min(end, os.fstat(fd).st_size)
        parts = []
        while begin < end:
            part = os.pread(fd, min(end - begin, 2**30), begin)
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)


def run(task: Callable[[Request], None], requests: list[Request], threads: int) -> None:
    """``task`` on every request, on up to ``threads`` threads; an error cancels those not begun and is raised."""
    threads = min(threads, len(requests))
    if threads <= 1:
        for request in requests:
            task(request)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="guarddcp-read")
    try:
        for future in [pool.submit(task, request) for request in requests]:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
