"""Ranks of one gloo group as processes of this machine, with messages back to the process that started them.

The processes are forked from a server (``forkserver``) that has imported torch and run nothing, so a group of ranks
is ready in a fraction of a second, and it does not matter what the calling process did with threads before. Where
there is no such server the processes are spawned, and each imports for itself.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guarddcp.errors import GuardError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

__all__ = ["RankFailure", "Say", "run_ranks", "start_server"]

Say = Callable[[object], None]
"""What a job calls to send a picklable message to the starter while it works."""

PRELOAD = ("guarddcp.cli.job", "torch._dynamo", "guarddcp.kernels.numba_cpu")
"""What takes a second or more to import, once in the server instead of in every rank: torch and DCP; what FSDP2 imports
at its first use; and the kernels, which are compiled when they are imported for the first time on a machine."""

GROUP_TIMEOUT = datetime.timedelta(seconds=120)


class RankFailure(RuntimeError):
    """A rank ended without a result; the message holds the rank's traceback or its exit code."""


def run_ranks(
    ranks: int, job: Callable[..., Any], *args: object, on_message: Callable[[object], None] | None = None
) -> list[Any]:
    """Run ``job(say, *args)`` on every rank of a new gloo group of ``ranks`` >= 1 processes; results by rank.

    ``job`` is a function of an importable module; it, its arguments and its result are pickled. Messages of all ranks
    go to ``on_message`` in the order of arrival. When one rank fails the others are ended, and its GuardError is
    raised as it was; any other failure becomes RankFailure.
    """
    start_server()
    context = _context()
    with tempfile.TemporaryDirectory(prefix="guarddcp-ranks-") as folder:
        store = str(Path(folder) / "rendezvous")
        processes, ears = [], []
        try:
            for rank in range(ranks):
                ear, mouth = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, ranks, store, mouth, job, args), daemon=True)
                process.start()
                mouth.close()
                processes.append(process)
                ears.append(ear)
            results = _listen(ears, on_message)
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            # After a failure the other ranks wait for a peer that is gone: end them rather than wait for gloo.
            for process, ear in zip(processes, ears, strict=True):
                if process.is_alive():
                    process.kill()
                process.join()
                ear.close()


def start_server() -> None:
    """Start the server that ranks are forked from, if it does not run; returns while it still imports."""
    context = _context()
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(list(PRELOAD))
        with _same_package():
            forkserver.ensure_running()


@contextlib.contextmanager
def _same_package() -> Iterator[None]:
    """Let a new interpreter import the guarddcp that runs here, whatever lies in its current directory."""
    home = str(Path(__file__).parents[2])
    changed = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join([home, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _context() -> ForkServerContext | SpawnContext:
    if "forkserver" in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


def _listen(ears: list[Connection], on_message: Callable[[object], None] | None) -> list[Any]:
    """Serve the pipes until every rank has sent its result; raise the first failure."""
    results: list[Any] = [None] * len(ears)
    open_ears = dict(zip(ears, range(len(ears)), strict=True))
    while open_ears:
        for ear in wait(list(open_ears)):
            assert isinstance(ear, Connection)
            rank = open_ears[ear]
            try:
                kind, value = pickle.loads(ear.recv_bytes())
            except EOFError:
                raise RankFailure(f"rank {rank} of {len(ears)} died without a word") from None
            if kind == "failure":
                raise value if isinstance(value, GuardError) else RankFailure(f"rank {rank} of {len(ears)}:\n{value}")
            if kind == "result":
                results[rank] = value
                del open_ears[ear]
            elif on_message is not None:
                on_message(value)
    return results


def _rank(rank: int, ranks: int, store: str, mouth: Connection, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Body of one process: join the group, run the job, send what it returns or raises."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT
        )
        result = job(lambda message: _send(mouth, "message", message), *args)
        # A gloo thread that still holds a tensor of the last collective when Python ends aborts the process.
        dist.barrier()
        dist.destroy_process_group()
        _send(mouth, "result", result)
    except BaseException as error:  # DCP's CheckpointException is no Exception
        _send(mouth, "failure", _root(error) or traceback.format_exc())
        raise SystemExit(1) from None


def _send(mouth: Connection, kind: str, value: object) -> None:
    # Plain pickle: torch's own for pipes sends tensors as handles, which are void once the sender has ended.
    mouth.send_bytes(pickle.dumps((kind, value)))


def _loopback() -> str:
    """Name of the loopback interface: the ranks share a machine that may have no network and no host name."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def _root(error: BaseException) -> GuardError | None:
    """The GuardError behind ``error``: itself, or the first one among the failures that DCP collected from ranks."""
    if isinstance(error, GuardError):
        return error
    for failure in getattr(error, "failures", {}).values():
        if isinstance(failure[0], GuardError):
            return failure[0]
    return None
