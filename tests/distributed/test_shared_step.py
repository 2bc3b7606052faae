"""Several ranks equal one, bit for bit: parameters and state, on every mesh and placement."""

from __future__ import annotations

import random

import pytest

from ._cases import CASES, Case, bits, expected_on, run_alone, run_together

pytestmark = pytest.mark.dist


def compare(opt, cases: list[Case], offload: bool = False) -> int:
    """Run every case on one rank and on all; returns how many tensors were compared."""
    compared = 0
    for case in cases:
        single, names = run_alone(opt, case)
        many, mesh = run_together(opt, case, offload=offload)
        for name in names:
            for key, tensor in many[name].items():
                expected = expected_on(single[name][key], tensor, mesh)
                found = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                assert found.shape == expected.shape, f"{case}: {name} {key}"
                difference = (found - expected).abs().amax() if found.numel() else 0
                assert bits(found) == bits(expected), f"{case}: {name} {key} by {difference}"
                compared += 1
    return compared


@pytest.mark.sees_defect("other DTensors must be routed or refused, never taken for local tensors")
@pytest.mark.sees_defect("state depends on the number of ranks")
@pytest.mark.sees_defect("dion's NorMuon normalizes per shard")
@pytest.mark.sees_defect("the path to compare with runs on CUDA only")
@pytest.mark.sees_defect(
    "plans are cached by names, so that other shapes or meshes reuse wrong indices"
)
@pytest.mark.sees_defect("directions are rounded to bfloat16 on the way to their owner")
def test_many_ranks_equal_one(ranks, world, device) -> None:
    """Shards of any kind, replicas, experts, missing gradients."""
    generator = random.Random(world)
    cases = [Case.random(generator, world, device.type) for _ in range(CASES[world])]
    for compared in ranks(world).run(compare, cases):
        assert compared > 4 * len(cases)


def test_state_in_host_memory_changes_no_bit_and_equals_one(ranks, world, device) -> None:
    """Momentum of a chunk is here for its first stage alone."""
    generator = random.Random(50 + world)
    cases = [Case.random(generator, world, device.type) for _ in range(CASES[world] // 3)]
    for compared in ranks(world).run(compare, cases, True):
        assert compared > 4 * len(cases)
