"""What a step is going to do, parameter by parameter, as text (M27)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..orthogonalize.choose import choose, flop
from .chunks import Chunk
from .options import AdamWOptions, MuonOptions
from .shared import Shared, SharedChunk
from .unreduced import SliceChunk


def report(
    labelled: Sequence[Sequence[tuple[str, Tensor]]],  # (name for messages, parameter), per group
    chunks: Sequence[Sequence[Chunk]],  # per group
    options: Sequence[MuonOptions | AdamWOptions],  # per group
    shared: Shared,
) -> str:
    """One line per parameter, and the sums; see `MuonBase.report`."""
    lines, batches, total, counts = [], 0, 0, {"muon": 0, "adamw": 0}
    sharings = [of_all + own for of_all, own in zip(shared.chunks, shared.home, strict=True)]
    for parameters, batch, group, together in zip(labelled, chunks, options, sharings, strict=True):
        route = "muon" if isinstance(group, MuonOptions) else "adamw"
        counts[route] += len(parameters)
        parts: dict[Tensor, list[str]] = {param: [] for _, param in parameters}
        if isinstance(group, MuonOptions):
            for number, chunk in enumerate(batch, start=batches):
                total += _describe(chunk, number, group, parts)
            for number, chunk in enumerate(together, start=batches + len(batch)):
                total += _describe_shared(chunk, number, group, parts)
            batches += len(batch) + len(together)
        sliced = {
            chunk.chunk.members[0].param: chunk.chunk.team.size
            for chunk in together
            if isinstance(chunk, SliceChunk)
        }
        for where, param in parameters:
            work = "; ".join(parts[param])
            if route == "muon":
                work = f", {work or 'nothing to orthogonalize'}"
            elif param in sliced:
                work = f", rows shared out to {sliced[param]} ranks"
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
    first = chunk.members[0].param
    work, per_matrix = _work(chunk.matrix, first, options)
    matrices: dict[Tensor, int] = {}
    for member in chunk.members:
        matrices[member.param] = matrices.get(member.param, 0) + member.piece.matrices
    for param, count in matrices.items():
        parts[param].append(
            f"{count} x {chunk.matrix} in batch {number}, {work}, {count * per_matrix:.3g} FLOP"
        )
    return chunk.matrices * per_matrix


def _describe_shared(
    chunk: SharedChunk, number: int, options: MuonOptions, parts: Mapping[Tensor, list[str]]
) -> int:
    """The same for a chunk that several ranks work on."""
    work, per_matrix = _work(chunk.matrix, chunk.members[0].param, options)
    owners: dict[Tensor, list[int]] = {}
    for member, owner in zip(chunk.members, chunk.owners, strict=True):
        owners.setdefault(member.param, []).append(owner)
    wire = str(chunk.wire).removeprefix("torch.")
    for param, ranks in owners.items():
        plural = "s" if len(set(ranks)) > 1 else ""
        parts[param].append(
            f"{len(ranks)} x {chunk.matrix} on rank{plural} "
            f"{', '.join(map(str, sorted(set(ranks))))} of {chunk.team.size}, {wire} on the wire, "
            f"in batch {number}, {work}, {len(ranks) * per_matrix:.3g} FLOP"
        )
    return len(chunk.members) * per_matrix


def _work(matrix: tuple[int, int], first: Tensor, options: MuonOptions) -> tuple[str, int]:
    """How matrices of a shape are orthogonalized, and the operations for one."""
    buffer = options.momentum_dtype or torch.promote_types(first.dtype, torch.float32)
    choice = choose(
        *matrix,
        dtype=torch.promote_types(buffer, torch.float32),  # of the directions
        device=first.device,
        steps=options.ns_steps,
        method=options.method,
        iterate_dtype=options.dtype,
    )
    per_matrix = flop(
        choice.method, *matrix, steps=options.ns_steps, restarts=choice.restarts, symmetric=False
    )
    return f"{choice.method} in {str(choice.dtype).removeprefix('torch.')}", per_matrix
