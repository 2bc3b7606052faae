"""Our own fused product, on a CPU: the workspace and the streams are stood in for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits

WORLD, ROWS, COLUMNS = 4, 6, 32


class Workspace:
    """The symmetric workspace as a rank sees it when the others have written theirs."""

    world_size = WORLD

    def __init__(self, rank: int, shards: list[torch.Tensor]) -> None:
        self.rank, self.steps = rank, []
        self.buffers = [torch.full_like(x.float(), torch.nan).to(x.dtype) for x in shards]
        self.shards = shards

    def barrier(self, channel: int) -> None:
        self.steps.append(channel)
        if channel == 1:
            own = self.buffers[self.rank]
            assert_same_bits(own, self.shards[self.rank])  # written before the others are let in
            self.buffers = self.shards

    def get_buffer(self, rank: int, shape, dtype) -> torch.Tensor:
        return self.buffers[rank].view(shape)


@pytest.fixture
def workspace(monkeypatch, fused):
    """`workspace(rank, shards)` is what the next call finds."""
    stream = SimpleNamespace(
        wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(fused, "_side_stream", lambda _: stream)

    def on(rank: int, shards: list[torch.Tensor]) -> Workspace:
        made = Workspace(rank, shards)
        monkeypatch.setattr(
            fused.symmetric_memory, "get_symm_mem_workspace", lambda group, size: made
        )
        return made

    return on


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_scaled_product_by_columns(fused, workspace, rank: int, rowwise: bool) -> None:
    made = torch.Generator().manual_seed(rank)
    eight = torch.float8_e4m3fn
    a = torch.randn(ROWS, WORLD * COLUMNS, generator=made).to(eight)
    bs = [torch.randn(n, WORLD * COLUMNS, generator=made).to(eight).t() for n in (8, 16)]
    a_scale = torch.rand(ROWS, 1, generator=made) if rowwise else torch.tensor(0.5)
    b_scales = [torch.rand(1, b.shape[1], generator=made) for b in bs]
    if not rowwise:
        b_scales = [scale[0, 0] for scale in b_scales]
    shards = [part.contiguous() for part in a.chunk(WORLD, 1)]
    memory = workspace(rank, shards)
    options = (torch.bfloat16, False, 1, "0", True)
    mode = "rowwise_replicated" if rowwise else "tensorwise"
    arguments = (shards[rank].clone(), bs, a_scale, b_scales, mode)
    gathered, outs = fused.gathered_product(*arguments, *options)
    assert memory.steps == [0, 1, 0]
    assert_same_bits(gathered, a)
    for out, b, b_scale in zip(outs, bs, b_scales, strict=True):
        exact = (a.double() * a_scale) @ (b.double() * b_scale)
        assert_error_at_most(out, exact, 2 * torch.finfo(torch.bfloat16).eps)
