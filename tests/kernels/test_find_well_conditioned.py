"""find_well_conditioned: who is tried, with which scale, in any batch."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ._grams import WELL_CONDITIONED, grams


@pytest.fixture(scope="session")
def reference(submodule):
    return submodule("reference.subsets")


@pytest.fixture
def module(submodule, device):
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("machine code from compute capability 8.0 on")
    return submodule("kernels.find_well_conditioned")


@pytest.fixture
def find(module):
    """The op with zeros to begin with; what it leaves there is how often it counted."""

    def found(R: torch.Tensor, *arguments):
        zeros = torch.zeros(1 + len(R), dtype=torch.int32, device=R.device)
        tried = module.find_well_conditioned(R, *arguments, zeros)
        assert zeros[0] == len(R) and (zeros[1:] == zeros[1]).all()
        return tried

    return found


def test_reference_by_eigenvalues(reference) -> None:
    R = grams(torch.device("cpu"), 64)
    found, narrow = reference.find_well_conditioned(R, 0.65, 64)
    assert found.tolist() == WELL_CONDITIONED
    for matrix, scale in zip(R[found].double(), narrow[found], strict=True):
        values = torch.linalg.eigvalsh(matrix)
        mean, deviation = values.mean(), values.std(correction=0)
        assert scale == pytest.approx(1 / (mean * (1 + deviation / mean) ** 2).item(), rel=1e-9)
        assert (values * scale).max() < 1.1
    filled = torch.zeros(9, 70, 70, dtype=R.dtype)
    filled[:, :64, :64] = R
    torch.testing.assert_close(reference.find_well_conditioned(filled, 0.65, 64)[1], narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [136, 264, 520])
def test_equals_the_reference(find, submodule, reference, device, m) -> None:
    R = grams(device, m)
    block = torch.arange(m, device=device) // 128
    unread = block[:, None] > block
    tried = find(R.masked_fill(unread, torch.inf), 1.02, 0.65, m)
    factors, roots = submodule("kernels.norm_factors").norm_factors(R, 1.02, symmetric=True)
    torch.testing.assert_close(tried.factors, factors, rtol=3e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(tried.roots, roots, rtol=3e-7, atol=0, equal_nan=True)
    found, narrow = reference.find_well_conditioned(R, 0.65, m)
    assert found.tolist() == tried.found.bool().tolist() == WELL_CONDITIONED
    assert tried.subset[:5].tolist() == [4, 0, 1, 2, 8]
    torch.testing.assert_close(tried.narrow_factors.double(), narrow, rtol=3e-7, atol=0)
    torch.testing.assert_close(tried.narrow_roots.double(), narrow.sqrt(), rtol=3e-7, atol=0)
    for i in range(len(R)):
        alone = find(R[i : i + 1], 1.02, 0.65, m)
        for one, many in zip(alone[:5], tried[:5], strict=True):
            assert_same_bits(one, many[i : i + 1])


@pytest.mark.gpu
def test_zeros_that_fill_a_matrix_up_are_not_counted(find, reference, device) -> None:
    """133 rows and three of zeros: the moments of the 133."""
    R = torch.zeros(9, 136, 136, device=device, dtype=torch.float16)
    R[:, :133, :133] = grams(device, 133)
    tried = find(R, 1.02, 0.65, 133)
    assert tried.subset[:5].tolist() == [4, 0, 1, 2, 8]
    _, narrow = reference.find_well_conditioned(R, 0.65, 133)
    torch.testing.assert_close(tried.narrow_factors.double(), narrow, rtol=3e-7, atol=0)


@pytest.mark.gpu
def test_opcheck_and_wrong_arguments(submodule, module, device) -> None:
    op = submodule("_ops").ops.find_well_conditioned
    R = grams(device, 136).nan_to_num()
    found, subset, zeros = (torch.zeros(n, dtype=torch.int32, device=device) for n in (9, 10, 10))
    factors = torch.empty(4, 9, device=device)
    arguments = (R, 1.02, 0.65, 136, factors, found, subset, zeros)
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
    for wrong, reason in (
        ((R.float(), *arguments[1:]), "float16"),
        ((R[:, :128, :128], 1.02, 0.65, 128, *arguments[4:]), "m > 128"),
        ((*arguments[:4], factors[:3], found, subset, zeros), r"\(4, G\)"),
        ((*arguments[:5], found[1:], subset, zeros), "found must be"),
        ((*arguments[:7], zeros[1:]), "zeros"),
        ((R, 0.0, *arguments[2:]), "prefactor"),
        ((R, 1.02, 0.65, 137, *arguments[4:]), "side must be"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            op(*wrong)
