"""Groups of ranks as processes: results, messages, failures."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from guarddcp.cli.ranks import RankFailure, run_ranks
from guarddcp.errors import IntegrityError


def _sum_of_ranks(say, offset):
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        say("first")
        say({"total": total.item()})
    return dist.get_rank(), dist.get_world_size(), total.item()


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_come_by_rank_and_messages_in_order(ranks):
    heard = []
    total = float(sum(range(10, 10 + ranks)))
    assert run_ranks(ranks, _sum_of_ranks, 10, on_message=heard.append) == [(r, ranks, total) for r in range(ranks)]
    assert heard == ["first", {"total": total}]


def _refuse(say):
    if dist.get_rank() == 1:
        raise IntegrityError("checksum is wrong", where="frame 7", expected=1, got=2)
    dist.barrier()


def test_our_own_error_arrives_as_it_was():
    with pytest.raises(IntegrityError, match="frame 7: checksum is wrong; expected 1; got 2") as caught:
        run_ranks(2, _refuse)
    assert caught.value.where == "frame 7"


def _refuse_in_dcp(say):
    from torch.distributed.checkpoint.api import CheckpointException

    raise CheckpointException("read", {1: (IntegrityError("torn", where="x"), None)})


def test_our_own_error_is_found_inside_dcp_s():
    with pytest.raises(IntegrityError, match=r"^x: torn$"):
        run_ranks(1, _refuse_in_dcp)


def _divide(say):
    return 1 // dist.get_rank()


def test_a_foreign_error_carries_rank_and_traceback():
    with pytest.raises(RankFailure, match=r"(?s)rank 0 of 1:.*_divide.*ZeroDivisionError"):
        run_ranks(1, _divide)


def _die(say):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_killed_rank_ends_the_others_at_once():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 2 died without a word"):
        run_ranks(2, _die)
    assert time.monotonic() - start < 30
