"""Jobs on threads whose results come back in order, never more than a window of them in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

__all__ = ["OrderedPool", "default_threads"]


def default_threads() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


class OrderedPool:
    """``submit(job, then)``: ``then(result)`` runs in the submitting thread, in the order of submission.

    At most threads + 2 jobs are in flight: memory stays bounded however large the save. The first error of
    a job is raised from ``submit`` or ``drain``; leaving the context cancels what has not begun.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="guarddcp")
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def submit(self, job: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._waiting.append((self._pool.submit(job), then))
        while len(self._waiting) > self.threads + 2:
            self._finish_one()

    def map(self, job: Callable[[int], Any], count: int) -> Iterator[Any]:
        """Results of job(0..count-1), in order, at most a window of them unconsumed."""
        waiting: deque[Future[Any]] = deque()
        for number in range(count):
            waiting.append(self._pool.submit(job, number))
            if len(waiting) > self.threads + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def drain(self) -> None:
        """Wait for everything submitted so far."""
        while self._waiting:
            self._finish_one()

    def _finish_one(self) -> None:
        future, then = self._waiting.popleft()
        then(future.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
