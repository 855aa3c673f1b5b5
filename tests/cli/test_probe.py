"""The measure of the demo: updates read off a real optimizer, and their comparison over ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from guarddcp.cli.probe import UpdateProbe, compare_updates
from guarddcp.cli.ranks import run_ranks

LR = 1e-3


def optimizer_at_step_3(kind=torch.optim.AdamW, size=1000, **settings):
    """An optimizer over two parameters, one of them large, with three steps behind it."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.full((size,), 100.0), torch.randn(7, 3, generator=generator)]
    optimizer = kind([{"params": [weights[0]], "weight_decay": 0.1}, {"params": [weights[1]]}], lr=LR, **settings)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return optimizer, weights, [torch.randn(weight.shape, generator=generator) for weight in weights]


def exact_update(state, gradient):
    """Adam's next update in units of lr, in float64 from its definition (betas 0.9 and 0.999, eps 1e-8)."""
    step = float(state["step"]) + 1
    m = 0.9 * state["exp_avg"].double() + 0.1 * gradient.double()
    v = 0.999 * state["exp_avg_sq"].double() + 0.001 * gradient.double() ** 2
    return (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
def test_update_is_that_of_the_definition(settings):
    optimizer, weights, gradients = optimizer_at_step_3(**settings)
    expected = [exact_update(optimizer.state[weight], grad) for weight, grad in zip(weights, gradients, strict=True)]
    updates = UpdateProbe(optimizer).step(gradients)
    for update, right in zip(updates, expected, strict=True):
        # 1e-5 of the update: float32 coefficients. Read off a parameter of 100 the error would be 0.004 lr.
        torch.testing.assert_close(update, right, rtol=2e-5, atol=2e-6)


def test_optimizer_is_left_alone():
    optimizer, weights, gradients = optimizer_at_step_3()
    before = [(weight.clone(), optimizer.state[weight]["exp_avg"].clone()) for weight in weights]
    UpdateProbe(optimizer).step(gradients)
    for weight, (value, moment) in zip(weights, before, strict=True):
        assert torch.equal(weight, value)
        assert torch.equal(optimizer.state[weight]["exp_avg"], moment)
        assert float(optimizer.state[weight]["step"]) == 3


def test_probe_follows_the_optimizer_over_several_steps():
    optimizer, weights, gradients = optimizer_at_step_3()
    probe = UpdateProbe(optimizer)
    for scale in (1.0, 1e-3, 1e3):
        now = [gradient * scale for gradient in gradients]
        expected = exact_update(optimizer.state[weights[1]], now[1])
        for weight, gradient in zip(weights, now, strict=True):
            weight.grad = gradient
        optimizer.step()
        torch.testing.assert_close(probe.step(now)[1], expected, rtol=5e-5, atol=5e-6)


def test_a_changed_moment_shows_as_its_update_changes():
    optimizer, weights, gradients = optimizer_at_step_3()
    native = UpdateProbe(optimizer)
    optimizer.state[weights[0]]["exp_avg"][5] += 0.25
    restored = UpdateProbe(optimizer)
    apart = native.step(gradients)[0] - restored.step(gradients)[0]
    assert torch.count_nonzero(apart) == 1
    assert abs(float(apart[5])) > 0.05


def _compare(say):
    rank = dist.get_rank()
    one = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(0, dtype=torch.float64)]
    other = [torch.tensor([1.0, 2.0 + 0.5 * rank], dtype=torch.float64), torch.zeros(0, dtype=torch.float64)]
    apart = compare_updates(one, other)
    other[0][0] = math.nan if rank == 1 else 1.0
    return apart, compare_updates(one, other).largest


def test_comparison_is_over_all_ranks_and_keeps_nan():
    for apart, with_nan in run_ranks(2, _compare):
        assert apart.largest == 0.5
        assert apart.rms == pytest.approx(math.sqrt(0.25 / 4))
        assert apart.rms_update == pytest.approx(math.sqrt(10 / 4))
        assert with_nan == math.inf
