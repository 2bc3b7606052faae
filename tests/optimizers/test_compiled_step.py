"""torch.compile around a step: the step runs as it is, without tracing and without recompiling."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from .._compare import assert_same_bits
from ._steps import both, new_gradients, parameters, values


@pytest.fixture
def counted():
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["step", "function"])
def test_a_compiled_step_under_a_schedule(opt, device, counted, name, wrapped) -> None:
    """Twelve rates, beyond the compiler's limit of 8 graphs: nothing of the step is traced."""
    results = []
    for compiled in (False, True):
        params = parameters([(6, 4), (3, 8), (5,)], device=device)
        optimizer = both(opt, params, weight_decay=0.1)[name]()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def train(optimizer=optimizer, params=params):
            torch._foreach_mul_([param.grad for param in params], 2.0)
            optimizer.step()

        step = train if wrapped else optimizer.step
        step = torch.compile(step, backend="aot_eager") if compiled else step
        for seed in range(12):
            new_gradients(params, seed=seed)
            step()
            scheduler.step()
            if seed == 1:
                counted["after two"] = dict(counted["frames"])
        results.append(values(params))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert_same_bits(found, wanted)
    assert counted["stats"]["unique_graphs"] <= 1  # what is around the step
    assert counted["frames"] == counted["after two"]
