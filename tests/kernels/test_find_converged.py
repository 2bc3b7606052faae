"""find_converged: whose residual is small, and who is left."""

from __future__ import annotations

import pytest
import torch

from ._grams import listed


@pytest.fixture(scope="session")
def reference(submodule):
    return submodule("reference.subsets")


@pytest.fixture
def module(submodule, device):
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("machine code from compute capability 8.0 on")
    return submodule("kernels.find_converged")


@pytest.fixture
def state(submodule, device):
    """What find_well_conditioned would have left for tried (G,) bool."""
    make = submodule("kernels.find_well_conditioned").WellConditioned

    def of(tried: torch.Tensor):
        numbers = tried.nonzero().flatten().tolist()
        unused = torch.empty(4, len(tried), device=device).unbind()
        return make(*unused, tried.int().to(device), listed(numbers, device, len(tried)))

    return of


def zeros_for(E: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1 + len(E), dtype=torch.int32, device=E.device)


def numbers_of(subset: torch.Tensor) -> list[int]:
    return subset[1 : 1 + subset[0].item()].tolist()


def residuals(batch: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, m, m) of sizes around the bound, one of them NaN, and which of them were tried."""
    generator = torch.Generator().manual_seed(batch)
    size = 10 ** torch.empty(batch).uniform_(-3, 0, generator=generator)
    E = torch.randn(batch, m, m, generator=generator).triu()
    E = (E + E.triu(1).mT) / m**0.5 * size[:, None, None]
    tried = torch.rand(batch, generator=generator) < 0.7
    E[~tried], E[tried.nonzero()[0]] = 0, torch.nan
    return E.half(), tried


def test_reference_by_norms(reference) -> None:
    E, tried = residuals(30, 40)
    norms = torch.linalg.matrix_norm(E.double())
    expected = tried & (norms <= (0.004 * 40) ** 0.5)
    assert 0 < expected.sum() < tried.sum()
    assert torch.equal(reference.find_converged(E, 0.004, 40, tried), expected)
    filled = torch.zeros(30, 43, 43)
    filled[:, :40, :40] = E
    filled.diagonal(dim1=-2, dim2=-1)[:, 40:] = -1
    assert torch.equal(reference.find_converged(filled, 0.004, 40, tried), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [9, 300, 700])
def test_equals_the_reference(module, state, reference, device, batch) -> None:
    """The bound is of the mean square per row; what was not tried is not looked at."""
    E, tried = residuals(batch, 136)
    expected = reference.find_converged(E, 0.004, 136, tried)
    assert 0 < expected.sum() < tried.sum()
    given = state(tried)
    E = E.to(device)
    rest = module.find_converged(E, 0.004, 136, given, zeros_for(E))
    assert given.found.bool().tolist() == expected.tolist()
    assert numbers_of(given.subset) == expected.nonzero().flatten().tolist()
    assert numbers_of(rest) == (~expected).nonzero().flatten().tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 40])
def test_where_none_was_tried_all_are_left(module, state, device, batch) -> None:
    E = torch.full((batch, 136, 136), torch.nan, device=device, dtype=torch.float16)
    given = state(torch.zeros(batch, dtype=torch.bool))
    rest = module.find_converged(E, 0.004, 136, given, zeros_for(E))
    assert (numbers_of(given.subset), numbers_of(rest)) == ([], list(range(batch)))


@pytest.mark.gpu
def test_zeros_that_fill_a_matrix_up_are_not_counted(module, state, device) -> None:
    side, m = 133, 136
    E = torch.zeros(3, m, m, device=device, dtype=torch.float16)
    E.diagonal(dim1=-2, dim2=-1)[:, side:] = -1
    E[1, 0, 0], E[2, 0, 0] = (0.003 * side) ** 0.5, (0.005 * side) ** 0.5
    given = state(torch.tensor([True, True, True]))
    rest = module.find_converged(E, 0.004, side, given, zeros_for(E))
    assert (numbers_of(given.subset), numbers_of(rest)) == ([0, 1], [2])


@pytest.mark.gpu
def test_opcheck_and_wrong_arguments(submodule, module, device) -> None:
    op = submodule("_ops").ops.find_converged
    E = torch.zeros(4, 136, 136, device=device, dtype=torch.float16)
    found = torch.ones(4, dtype=torch.int32, device=device)
    subset, rest = listed([0, 1, 2, 3], device, 4), listed([], device, 4)
    arguments = (E, 0.004, 136, found, subset, rest, zeros_for(E))
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
    for wrong, reason in (
        ((E.float(), *arguments[1:]), "float16"),
        ((E, 0.004, 0, *arguments[3:]), "side must be"),
        ((*arguments[:5], rest[1:], arguments[6]), "subsets"),
        ((*arguments[:6], rest[1:]), "zeros"),
        ((*arguments[:4], subset.long(), *arguments[5:]), "int32"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            op(*wrong)
