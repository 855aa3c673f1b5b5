"""The choice of Q: what is sampled, and that it is the cheapest of its candidates."""

from __future__ import annotations

import numpy as np
import pytest
from edge_values import EDGES
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guarddcp.certificate import Adam, Uncertifiable, certify, prove, q_limit
from guarddcp.codecs import choice
from guarddcp.codecs.choice import choose_certificate, sample_frames, sample_q
from guarddcp.codecs.view import Layout, View
from guarddcp.config import Guard

RULE = Adam(betas=(0.9, 0.999), eps=1e-8)


def choose(q, rule=RULE, step=1000, **guard):
    return choose_certificate(np.asarray(q, np.float32), rule, step, Guard(**guard))


@pytest.mark.parametrize(("rows", "numbers"), [
    (0, []), (1, [0]), (3, [0, 1, 2]), (8, list(range(8))), (9, [0, 1, 2, 3, 4, 5, 6, 7]), (80, list(range(0, 80, 10))),
])  # fmt: skip
def test_sampled_frames_are_few_and_spread(rows, numbers):
    layout = Layout((rows, 10), View((0, 1), 1), 10)
    assert [frame.number for frame in sample_frames(layout)] == numbers


@pytest.mark.parametrize("n", [1, 7, 4096, 100_000, 1 << 20])
def test_sampled_coordinates_are_few_and_spread(n):
    v = np.ones((1, n), np.float32)
    m = np.arange(n, dtype=np.float32)[None]
    q = sample_q(m, v)
    assert min(n, 3000) <= q.size <= min(n, 8192)
    assert q.max() >= 0.99 * (n - 1)
    # An odd stride meets every residue of a power of two, so that no column pattern hides.
    assert n < 4096 or len(set((q % 16).tolist())) == 16


def test_only_moments_are_sampled():
    v, m = (x.astype(np.float32) for x in np.meshgrid(EDGES, EDGES))
    with np.errstate(over="ignore"):
        q = sample_q(m, v)
    assert not np.isnan(q).any()
    assert (q >= 0).all()
    odd = np.array([[0, -0.0, 1e-40, -1, np.nan, np.inf, 1, 1]], np.float32)
    assert sample_q(np.array([[1, 1, 1, 1, 1, 1, np.nan, np.inf]], np.float32), odd).size == 0


def test_the_choice_is_the_cheapest_of_many():
    """Against a fine scan over Q with the same prices: within a twentieth of a bit."""
    rng = np.random.default_rng(0)
    for q in (np.abs(rng.normal(0, 0.1, 20_000)), rng.exponential(0.3, 20_000), rng.uniform(0, 2, 20_000)):
        q = np.minimum(q, q_limit(RULE)).astype(np.float32)
        chosen = choose(q)

        def price(cert, q=q):
            return choice.cell_bits(cert.cell) + choice._ESCAPE_BITS * np.mean(q > cert.cell.q_max)

        scan = [
            certify(RULE, 1000, tolerance=0.01, horizon="all", rounding_share=0.05, q_max=float(q_max))
            for q_max in np.geomspace(np.quantile(q, 0.98), 7.27, 40)
        ]
        assert price(chosen) <= min(map(price, scan)) + 0.1
        assert prove(chosen) <= 0.01


@pytest.mark.parametrize("q", [[], [0.0] * 50, [1e-30] * 50])
def test_samples_that_say_little(q):
    cert = choose(q)
    assert 0 < cert.cell.q_max <= 1.0


def test_a_few_outliers_do_not_widen_the_cell_but_a_common_q_does():
    base = np.full(10_000, 0.2)
    outliers = base.copy()
    outliers[::5000] = 7
    assert choose(outliers).cell == choose(base).cell
    assert choose(np.full(10_000, 6.0)).cell.q_max >= 6.0


def test_q_is_never_wider_than_adam_can_reach():
    assert choose(np.full(100, 1e6)).cell.q_max <= np.float32(q_limit(RULE)) * (1 + 1e-6)
    assert choose(np.full(100, 1e6), Adam(betas=(0.9, 0.8), eps=1e-8), horizon=1).cell.q_max <= 64.0


@given(
    hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(0, width=32, allow_infinity=True, allow_nan=False))
)
def test_any_sample_gives_a_certificate(q):
    """Also where a finite m over a small v has overflown to an infinite q."""
    cert = choose(q)
    assert 2.0**-6 <= cert.cell.q_max <= 7.3
    assert cert.bound <= 0.01


def test_candidates_lie_on_a_grid():
    """So that the shards of one save share few cells."""
    rng = np.random.default_rng(0)
    cells = {choose(np.abs(rng.normal(0, s, 3000))).cell.q_max for s in rng.uniform(0.1, 0.2, 60)}
    assert len(cells) <= 9
    assert all(abs(4 * np.log2(cell) - np.rint(4 * np.log2(cell))) < 1e-6 for cell in cells)


def test_a_smaller_q_is_tried_where_a_large_one_cannot_be_certified(monkeypatch):
    """One outlier in the sample must not make a whole shard exact."""
    honest, asked = choice.certify, []

    def only_small(rule, step, *, q_max, **options):
        asked.append(q_max)
        if q_max > 1:
            raise Uncertifiable("too wide", reason="tolerance")
        return honest(rule, step, q_max=q_max, **options)

    monkeypatch.setattr(choice, "certify", only_small)
    assert choose([*[0.1] * 5000, 7.0]).cell.q_max < 1
    assert max(asked) > 1
    with pytest.raises(Uncertifiable, match="too wide"):
        choose([6.0] * 50)


def test_a_guard_that_cannot_be_kept_is_refused_with_what_would_do():
    with pytest.raises(Uncertifiable, match="the smallest tolerance that would do is"):
        choose([0.1] * 50, tolerance=1e-7)
    with pytest.raises(Uncertifiable) as caught:
        choose([0.1] * 50, Adam(betas=(0.9, 0.8), eps=1e-8))
    assert caught.value.reason == "horizon"
