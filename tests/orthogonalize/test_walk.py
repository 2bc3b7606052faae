"""The walk over slices copies no whole tensor, however its leading dimensions are laid out."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._compare import assert_same_bits


@pytest.fixture(scope="session")
def batch(submodule):
    return submodule("orthogonalize.batch")


class LargestAllocation(TorchDispatchMode):
    """Remembers the most elements of a result in memory that none of its arguments has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            given = {memory(a) for a in args if isinstance(a, torch.Tensor)}
            if memory(result) not in given:
                self.elements = max(self.elements, result.numel())
        return result


def memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "last_first": lambda x: x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
    "every_second": lambda x: torch.stack([x, -x], 1).flatten(0, 1)[::2],
    "columns": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_whole_copy_of_input_or_output(batch, monkeypatch, layout, kind) -> None:
    """Slices of four matrices stand for CUDA's, so that pieces meet in one buffer."""
    if kind == "cuda":
        monkeypatch.setattr(batch, "slice_for", lambda *_: batch.Slice(4, 16, 24))
    x = torch.randn(5, 3, 10, 24, generator=torch.Generator().manual_seed(0))
    wanted = x / torch.linalg.matrix_norm(x, keepdim=True)
    view = LAYOUTS[layout](x)
    assert torch.equal(view, x)
    out = LAYOUTS[layout](torch.empty_like(x))
    with LargestAllocation() as largest:
        batch.walk(view, out, torch.float32, 1.0, lambda x, last: x)
    torch.testing.assert_close(out, wanted)
    assert 0 < largest.elements <= 4 * 16 * 24


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_give_the_bits_of_a_contiguous_batch(opt, device, layout) -> None:
    x = torch.randn(3, 2, 10, 24, generator=torch.Generator().manual_seed(0)).to(device)
    assert_same_bits(opt.orthogonalize(LAYOUTS[layout](x)), opt.orthogonalize(x))


def test_taken_cuts_where_a_slice_is_full(batch) -> None:
    x = torch.arange(7.0).view(7, 1, 1).expand(7, 2, 3)
    pieces = [[len(view) for view in taken] for taken in batch._taken(x, 3)]
    assert pieces == [[3], [3], [1]]
    y = torch.zeros(3, 2, 2, 3).transpose(0, 1)  # (2, 3, 2, 3), no single stride
    pieces = [[len(view) for view in taken] for taken in batch._taken(y, 4)]
    assert pieces == [[3, 1], [2]]


def test_the_start_ends_when_the_iteration_lets_it_go(batch, device) -> None:
    """A reference more would keep the start of every slice beside its successors."""
    seen = []

    def iterate(x: torch.Tensor, last: torch.Tensor | None):
        start = weakref.ref(x)
        x = x + 0
        seen.append(start())
        return x

    x = torch.randn(2, 3, 4, device=device)
    batch.walk(x, torch.empty_like(x), torch.float32, 1.0, iterate)
    assert seen
    assert all(start is None for start in seen)
