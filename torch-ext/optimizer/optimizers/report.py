"""What a step is going to do, parameter by parameter, as text (M27)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..orthogonalize.choose import choose, flop
from .chunks import Chunk
from .options import AdamWOptions, MuonOptions


def report(
    labelled: Sequence[Sequence[tuple[str, Tensor]]],  # (name for messages, parameter), per group
    chunks: Sequence[Sequence[Chunk]],  # per group
    options: Sequence[MuonOptions | AdamWOptions],  # per group
) -> str:
    """One line per parameter, and the sums; see `MuonBase.report`."""
    lines, batches, total, counts = [], 0, 0, {"muon": 0, "adamw": 0}
    for parameters, batch, group in zip(labelled, chunks, options, strict=True):
        route = "muon" if isinstance(group, MuonOptions) else "adamw"
        counts[route] += len(parameters)
        parts: dict[Tensor, list[str]] = {param: [] for _, param in parameters}
        if isinstance(group, MuonOptions):
            for number, chunk in enumerate(batch, start=batches):
                total += _describe(chunk, number, group, parts)
        batches += len(batch)
        for where, param in parameters:
            work = "; ".join(parts[param])
            if route == "muon":
                work = f", {work or 'nothing to orthogonalize'}"
            lines.append(f"{where} {tuple(param.shape)}: {route}{work}")
    return "\n".join(
        [
            *lines,
            f"{counts['muon']} parameters by muon in {batches} batches, {total:.3g} FLOP per step "
            f"with dense products; {counts['adamw']} by adamw",
        ]
    )


def _describe(
    chunk: Chunk, number: int, options: MuonOptions, parts: Mapping[Tensor, list[str]]
) -> int:
    """Append the chunk's share of each of its parameters; returns the operations of the chunk."""
    m, n = chunk.matrix
    first = chunk.members[0].param
    buffer = options.momentum_dtype or torch.promote_types(first.dtype, torch.float32)
    choice = choose(
        m,
        n,
        dtype=torch.promote_types(buffer, torch.float32),  # of the directions
        device=first.device,
        steps=options.ns_steps,
        method=options.method,
        iterate_dtype=options.dtype,
    )
    per_matrix = flop(
        choice.method, m, n, steps=options.ns_steps, restarts=choice.restarts, symmetric=False
    )
    matrices: dict[Tensor, int] = {}
    for member in chunk.members:
        matrices[member.param] = matrices.get(member.param, 0) + member.piece.matrices
    for param, count in matrices.items():
        parts[param].append(
            f"{count} x ({m}, {n}) in batch {number}, {choice.method} in "
            f"{str(choice.dtype).removeprefix('torch.')}, {count * per_matrix:.3g} FLOP"
        )
    return chunk.matrices * per_matrix
