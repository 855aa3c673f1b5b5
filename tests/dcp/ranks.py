"""Several gloo ranks by fork, for tests: a tenth of a second where a launcher takes ten.

Fork is safe here because the parent has run no autograd backward, no OpenMP-parallel operation (conftest.py
sets one thread) and no init_process_group. Ranks inherit what the parent has imported and the objects of the
test; only results travel, by pickle.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch._dynamo  # fully_shard imports it at first use: once here instead of 2 s in every rank
import torch.distributed as dist

__all__ = ["RanksFailed", "run_ranks"]

GRACE_S = 2.0
"""How long the other ranks may go on after one failed, so that all tracebacks of one cause are seen."""


class RanksFailed(AssertionError):
    """One or more ranks raised, died or ran out of time; the message holds every traceback."""


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run ``fn(rank, num_ranks, *args)`` on every rank of a fresh gloo group; return the values by rank.

    Raises RanksFailed if a rank raises, ends without a value (then with its exit code), or is not done in
    ``timeout_s`` seconds. No process is left behind.
    """
    context = multiprocessing.get_context("fork")
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                rendezvous = (rank, num_ranks, f"file://{folder}/store", timeout_s)
                process = context.Process(target=_run_rank, args=(sender, rendezvous, fn, args))
                process.start()
                sender.close()
                ranks.append((process, receiver))
            answers = _collect([receiver for _, receiver in ranks], time.monotonic() + timeout_s)
        finally:
            for process, receiver in ranks:
                if process.is_alive():
                    process.join(GRACE_S / 10)
                    process.kill()
                process.join()
                receiver.close()
    failures = [
        f"rank {rank}: {text or f'no answer (exit code {ranks[rank][0].exitcode})'}"
        for rank, (fine, text) in enumerate(answers)
        if not fine
    ]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [value for _, value in answers]


def _collect(receivers: list[Connection], end: float) -> list[tuple[bool, Any]]:
    """(fine, value or traceback) by rank; soon after the first failure the missing ones are given up."""
    answers: list[tuple[bool, Any]] = [(False, None)] * len(receivers)
    waiting = set(receivers)
    while waiting and time.monotonic() < end:
        for ready in wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
            assert isinstance(ready, Connection)
            waiting.discard(ready)
            try:
                answer = ready.recv()
            except EOFError:
                answer = (False, None)
            answers[receivers.index(ready)] = answer
            if not answer[0]:
                end = min(end, time.monotonic() + GRACE_S)
    return answers


def _run_rank(sender: Connection, rendezvous: tuple[int, int, str, float], fn: Callable[..., Any], args: Any) -> None:
    rank, num_ranks, store, timeout_s = rendezvous
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout)
        value = fn(rank, num_ranks, *args)
        dist.barrier()  # a rank that leaves early breaks connections that others still read from
        sender.send((True, value))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    sender.close()
    os._exit(0)  # nothing that the parent's test runner registered for its exit
