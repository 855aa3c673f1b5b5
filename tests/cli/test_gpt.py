"""The demo's model, text and batches."""

from __future__ import annotations

import math

import pytest
import torch

from guarddcp.cli.gpt import GPT, SIZES, Batches, load_corpus, param_groups, train_state
from guarddcp.cli.ranks import run_ranks


@pytest.mark.parametrize("name", sorted(SIZES))
def test_size_counts_the_parameters(name):
    with torch.device("meta"):
        model = GPT(SIZES[name])
    assert sum(weight.numel() for weight in model.parameters()) == SIZES[name].parameters


def test_full_size_is_the_benchmark_size():
    assert 10.5e6 < SIZES["full"].parameters < 11.5e6


def test_every_size_can_be_shared_by_the_demo_ranks():
    for ranks in (1, 2, 3):
        assert SIZES["demo"].windows % ranks == 0
        assert SIZES["tiny"].windows % ranks == 0


def test_logits_do_not_depend_on_later_bytes():
    torch.manual_seed(0)
    model, text = GPT(SIZES["tiny"]), torch.randint(256, (1, 16))
    with torch.no_grad():
        first = model(text)
        text[0, 10:] = 0
        second = model(text)
    assert first.shape == (1, 16, 256)
    torch.testing.assert_close(first[:, :10], second[:, :10])
    assert not torch.equal(first[:, 10:], second[:, 10:])


def test_corpus_is_python_source_of_the_length_asked_for():
    text = load_corpus(200_000)
    assert text.dtype == torch.uint8
    assert len(text) == 200_000
    assert b"import " in bytes(text.tolist())


def test_a_library_without_source_is_refused(monkeypatch, tmp_path):
    (tmp_path / "tiny.py").write_bytes(b"x = 1\n")
    monkeypatch.setattr("guarddcp.cli.gpt.sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no training text: .* holds 6 bytes of Python source, 100000 are needed"):
        load_corpus(100_001)


def test_a_batch_is_a_function_of_seed_and_step():
    text = torch.arange(256, dtype=torch.uint8).repeat(8)
    batches = Batches(text, block=16, windows=6, seed=3)
    inputs, targets = batches(7)
    assert inputs.shape == targets.shape == (6, 16)
    assert torch.equal((inputs + 1) % 256, targets)
    assert torch.equal(inputs, Batches(text, block=16, windows=6, seed=3)(7)[0])
    assert not torch.equal(inputs, batches(8)[0])
    assert not torch.equal(inputs, Batches(text, block=16, windows=6, seed=4)(7)[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_a_batch(ranks):
    batches = Batches(load_corpus(200_000), block=8, windows=6)
    whole = {tuple(row.tolist()) for row in batches(0)[0]}
    shares = [{tuple(row.tolist()) for row in batches(0, rank, ranks)[0]} for rank in range(ranks)]
    assert set().union(*shares) == whole
    assert sum(map(len, shares)) == len(whole)


def test_uneven_shares_are_refused():
    with pytest.raises(ValueError, match="6 windows cannot be shared evenly by 4 ranks"):
        Batches(load_corpus(200_000), block=8, windows=6)(0, 0, 4)


def test_only_matrices_decay():
    model = GPT(SIZES["tiny"])
    matrices, vectors = param_groups(model, weight_decay=0.3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {weight.dim() for weight in matrices["params"]} == {2}
    assert {weight.dim() for weight in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def _train(say):
    return train_state(30, size=SIZES["tiny"], betas=(0.9, 0.95), progress=lambda *done: say(done))


def test_train_state_returns_a_trained_state():
    # In a process of its own: the test process forks ranks elsewhere and must not have run a backward pass.
    seen = []
    (state,) = run_ranks(1, _train, on_message=seen.append)
    assert [step for step, _ in seen] == list(range(1, 31))
    assert state["loss"] == seen[-1][1] < 4.9 < math.log(256) < seen[0][1]
    assert (state["step"], state["betas"], state["eps"]) == (30, (0.9, 0.95), 1e-8)
    assert (state["lr"], state["weight_decay"]) == (5e-4, 0.1)
    names = set(state["params"])
    assert names == set(state["exp_avg"]) == set(state["exp_avg_sq"])
    for name in names:
        assert state["exp_avg"][name].shape == state["exp_avg_sq"][name].shape == state["params"][name].shape
        assert state["exp_avg_sq"][name].dtype == torch.float32
        assert float(state["exp_avg_sq"][name].min()) >= 0.0
