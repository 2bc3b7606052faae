"""Lists of tensors in every layout the list ops must take, drawn on the CPU so devices agree."""

from collections.abc import Callable, Sequence

import torch

from .._compare import assert_same_numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)

# Odd, empty, 0-D, below and above one vector, one chunk and one block of either backend.
SHAPES = ((5, 7), (0,), (33,), (64, 96), (3, 20, 17), (), (1, 1), (4099,), (2, 3, 4, 5), (131, 129))


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    buffer = x.new_zeros(x.numel() + 1)
    return buffer[1:].view(x.shape).copy_(x)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.ndim >= 2 else x


def _gaps(x: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dimension of a larger tensor."""
    return x if x.ndim == 0 else torch.stack((x, torch.zeros_like(x)), -1).flatten(-2)[..., ::2]


def _permuted(x: torch.Tensor) -> torch.Tensor:
    """The last dimension outermost in memory: two dimensions that cannot be merged."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.ndim >= 3 else _gaps(x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "unaligned": _unaligned,
    "transposed": _transposed,
    "gaps": _gaps,
    "permuted": _permuted,
}


def draw(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] | torch.dtype,
    *,
    seed: int,
    layout: str = "plain",
    device: torch.device | str = "cpu",
    positive: bool = False,
) -> list[torch.Tensor]:
    """Normal numbers (their squares if `positive`); dtypes take turns."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
    drawn = []
    for k, shape in enumerate(shapes):
        x = torch.randn(shape, generator=generator)
        x = x.square() if positive else x
        drawn.append(LAYOUTS[layout](x.to(dtypes[k % len(dtypes)]).to(device)))
    return drawn


def copies(
    tensors: Sequence[torch.Tensor | None], device: torch.device | str = "cpu"
) -> list[torch.Tensor | None]:
    return [None if x is None else x.detach().to(device, copy=True).contiguous() for x in tensors]


def assert_same(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> None:
    """Bit for bit on the CPU, but a NaN is a NaN."""
    for ours, theirs in zip(actual, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            assert_same_numbers(ours.detach().cpu(), theirs.detach().cpu())
