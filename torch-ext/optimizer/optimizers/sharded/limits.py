"""How much of the work that ranks share is on its way at once. The same on all of them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ...distributed import in_flight
from ..groups.options import plain_number

# Bytes that a rank sends and receives on the way to the owners, of all chunks that are alive. With
# batches, results, answers and what an iteration works in, two to three times as much by count.
IN_FLIGHT_BYTES = 256 * 2**20
WARMUP = 1  # gathers launched before the first computation
ANY_SIZE = -1


@dataclass(frozen=True)
class Flow:
    """Chunks of matrices: how many are alive, and how large they may be.

    Args:
        warmup_step: gathers that are launched before the first computation.
        chunk_size: matrices in a chunk at most; -1 for as many as bytes allow.
        in_flight_bytes: what any rank sends and receives for the owners of all chunks that are
            alive; a chunk has one matrix of every owner in any case.
        cuda_graphs: whether stages that repeat themselves are replayed.

    Raises:
        ValueError, TypeError: the message names the argument.
    """

    warmup_step: int = WARMUP
    chunk_size: int = ANY_SIZE
    in_flight_bytes: int = IN_FLIGHT_BYTES
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("warmup_step", "chunk_size", "in_flight_bytes"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        _check_count("warmup_step", self.warmup_step, "")
        _check_count("in_flight_bytes", self.in_flight_bytes, "")
        if not isinstance(self.cuda_graphs, bool):
            raise TypeError(f"cuda_graphs must be True or False, got {self.cuda_graphs!r}")
        if self.chunk_size != ANY_SIZE:
            _check_count("chunk_size", self.chunk_size, ", or -1 for as many as bytes allow")

    @property
    def most(self) -> int | None:
        """Matrices in a chunk; None for any number."""
        return None if self.chunk_size == ANY_SIZE else self.chunk_size

    @property
    def chunk_bytes(self) -> int:
        """What any rank sends and receives for the owners of one chunk."""
        return max(1, self.in_flight_bytes // in_flight(self.warmup_step))


def _check_count(name: str, value: Any, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, at least 1{otherwise}, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1{otherwise}, got {value!r}")
