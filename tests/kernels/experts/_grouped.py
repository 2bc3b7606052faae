"""Operands of the grouped LoRA ops on small problems, and their plain float64 results per slot."""

import torch

EXPERTS, TOP_K, RANK = 3, 2, 3
K, N, TOKENS = 16, 24, 9
PATHS = ("reference", "triton")


def operands(submodule, device, dtype=torch.float32, seed=0) -> dict:
    """Named tensors; expert 1 has no rows, and two slots are sentinels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    ids = torch.randint(0, 2, (TOKENS, TOP_K), generator=generator) * 2
    ids[3, 1], ids[7, 0] = -1, EXPERTS
    sort = submodule("kernels.experts.expert_sort").expert_sort
    order = sort(ids.to(device), EXPERTS, tile_rows=16)
    return {
        "ids": ids,
        "x": normal(TOKENS, K),
        "dy": normal(TOKENS * TOP_K, N),
        "weight": normal(EXPERTS, N, K).transpose(1, 2),
        "lora_a": normal(EXPERTS, RANK, K, dtype=torch.float32),
        "lora_b": normal(N, RANK * EXPERTS, dtype=torch.float32)
        .view(N, RANK, EXPERTS)
        .permute(2, 0, 1),
        "bias": normal(EXPERTS, N),
        "gates": normal(TOKENS, TOP_K, dtype=torch.float32),
        "order": order,
        "slots": order.slots,
        "rows": order.rows,
        "offsets": order.offsets,
        "tiles": order.tiles,
    }


def valid_slots(problem: dict) -> list[tuple[int, int, int]]:
    """(slot, token, expert) of every slot that names an expert."""
    flat = problem["ids"].reshape(-1).tolist()
    return [(slot, slot // TOP_K, e) for slot, e in enumerate(flat) if 0 <= e < EXPERTS]


def doubles(problem: dict) -> dict:
    """The floating tensors in float64 on the CPU."""
    tensors = {name: x for name, x in problem.items() if isinstance(x, torch.Tensor)}
    return {name: x.double().cpu() for name, x in tensors.items() if x.dtype.is_floating_point}
