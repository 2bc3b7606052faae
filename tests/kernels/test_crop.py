"""crop: every element once, nothing beside it, for any alignment of out's rows."""

from __future__ import annotations

import pytest
import torch

from ..conftest import module_fixture

SHAPES = ((1, 1), (3, 7), (5, 8), (2, 9), (7, 63), (4, 257), (3, 1030), (2, 4099))


@pytest.fixture
def ops(submodule, device):
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("machine code from compute capability 8.0 on")
    return submodule("_ops").ops


reference = module_fixture("reference.normalize", "crop")


def framed(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """(3, R, C) of different values, more rows and columns than those."""
    shape = (3, rows + 2, -(-cols // 8) * 8)
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device) % 2039 + 1).half().reshape(shape)


def test_reference(reference) -> None:
    x = torch.arange(24).reshape(1, 4, 6)
    assert reference(x, 2, 3).tolist() == [[[0, 1, 2], [6, 7, 8]]]


def test_the_cpu_is_not_served(submodule) -> None:
    x = torch.empty(1, 8, 8, dtype=torch.float16)
    assert not submodule("kernels.products.normalize").crop_serves(x, torch.empty_like(x))


@pytest.mark.gpu
@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_alignment(ops, submodule, reference, device, shape, start) -> None:
    x, (r, c) = framed(*shape, device), shape
    memory = torch.zeros(3 * (r * c + 5) + 32, device=device, dtype=torch.float16)
    out = memory.as_strided((3, r, c), (r * c + 5, c, 1), start)
    expected = memory.clone()
    expected.as_strided(out.shape, out.stride(), start).copy_(reference(x, r, c))
    assert submodule("kernels.products.normalize").crop_serves(x, out)
    ops.crop(x, out)
    assert torch.equal(memory, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_that_lie_apart(ops, device, dtype) -> None:
    x = framed(20, 100, device).view(dtype)
    memory = torch.zeros(3, 21, 131, device=device, dtype=dtype)
    out = memory[:, :20, 3:102]
    ops.crop(x, out)
    assert torch.equal(out.view(torch.int16), x[:, :20, :99].view(torch.int16))
    memory[:, :20, 3:102] = 0
    assert (memory == 0).all()


@pytest.mark.gpu
def test_who_is_served(submodule, device) -> None:
    serves, x = submodule("kernels.products.normalize").crop_serves, framed(20, 100, device)
    out = torch.empty(3, 20, 99, device=device, dtype=torch.float16)
    assert serves(x, out)
    assert not serves(x.float(), out.float())
    assert not serves(x, out.float())
    assert not serves(x, out.mT)
    assert not serves(x[:, :, :96], out[:, :, :90])


@pytest.mark.gpu
def test_opcheck_and_wrong_arguments(ops, device) -> None:
    x = framed(20, 100, device)
    out = torch.empty(3, 20, 99, device=device, dtype=torch.float16)
    torch.library.opcheck(ops.crop.default, (x, out), test_utils=("test_schema", "test_faketensor"))
    for wrong, reason in (
        ((x, out[:2]), "must be"),
        ((x, x.new_empty(3, 23, 99)), "must be"),
        ((x, out.float()), "one dtype"),
        ((x, out.mT[:, :20, :20]), "contiguous"),
        ((x[:, :, :96], out[:, :, :90]), "x must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            ops.crop(*wrong)
