"""Fused products on GPUs against float64, each with the number of fused calls."""

from collections.abc import Callable

import pytest

from ..conftest import ROOT
from . import _cases
from ._gpu_ranks import results_of

pytestmark = [pytest.mark.gpu, pytest.mark.part("products")]

SETS = [(2, "shared"), (4, "shared")]
SETS += [pytest.param((n, "own"), marks=pytest.mark.part("several GPUs")) for n in (2, 4)]
# Distance from the owner's result; both are float16 iterates, in another order of sums.
NEWTON_SCHULZ = 2e-2


@pytest.fixture(scope="module", params=SETS, ids=lambda each: f"{each[0]}-{each[1]}")
def run(request, repo_id, opt) -> Callable[[str], list[dict]]:
    """`run(jobs)`: what every rank of a set left of them."""
    import torch

    world, placement = request.param
    if placement == "own" and torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs")
    torch.cuda.empty_cache()
    return lambda jobs: results_of(world, placement, repo_id, ROOT, jobs)


@pytest.fixture(scope="module")
def products(run) -> list[dict]:
    return run("products")


@pytest.fixture(scope="module")
def results(run) -> list[dict]:
    return run("others")


def of_job(results: list[dict], job: str) -> list:
    found = [of_rank[job] for of_rank in results]
    for rank, outcome in enumerate(found):
        failed = outcome.get("failed") if isinstance(outcome, dict) else None
        assert failed is None, f"rank {rank}: {failed}"
    return found


@pytest.mark.parametrize("case", _cases.cases(_cases.GPU), ids=lambda case: case.name)
def test_fused_product_equals_float64(case, products) -> None:
    for rank, of_rank in enumerate(of_job(products, "_products")):
        assert not _cases.verdict(case, of_rank[case.name], _cases.FUSED), f"on rank {rank}"


SCALED = pytest.mark.parametrize("scaling", ["None", "rowwise_sharded"])


def fused_calls(scaling: str, each: int) -> dict[str, int]:
    names = ("all_gather_matmul", "matmul_reduce_scatter")
    if scaling != "None":
        names = ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter")
    return {f"{name}/fused": each for name in names}


@SCALED
def test_compiled_block_fuses(results, scaling) -> None:
    for found in of_job(results, "_compiled"):
        assert max(found[scaling]["errors"]) <= 0.02  # a rounding of bfloat16 here and there
        assert found[scaling]["calls"] == fused_calls(scaling, each=2)


@SCALED
def test_captured_block_replays_fused_products(results, scaling) -> None:
    for found in of_job(results, "_captured"):
        # The last replay comes behind a call for which the workspace had to grow.
        assert found[scaling]["equal"] == [True, True, True]
        assert found[scaling]["calls"] == fused_calls(scaling, each=1)


def test_small_products_are_not_fused_by_themselves(results) -> None:
    for reason in of_job(results, "_small"):
        assert "too small to be hidden" in reason


def test_sharded_newton_schulz_is_as_good_as_the_owners(results) -> None:
    for found in of_job(results, "_newton_schulz"):
        assert len(found) == 32
        for case, (distance, error, owners_error) in found.items():
            # Both are as far from float64 as their iterates' rounding takes them, and apart by
            # both together; of spectra that reach below that rounding no bound of it is known.
            assert error <= 1.25 * owners_error + 1e-3, (case, error, owners_error)
            if case.startswith("gaussian"):
                assert distance <= NEWTON_SCHULZ, (case, distance)


def test_a_pipelined_product_is_exact_and_names_who_is_late(results) -> None:
    *came, last = of_job(results, "_pipelined")
    for found in came:
        assert found["wrong"] == [] and found["calls"] == 13
        assert f"rank {len(came)} of the group sent no rows within 3000 ms" in found["late"]
    assert last == {"wrong": [], "calls": 12, "late": "none"}
