"""parallel_linear_lora: the predecessor's call, layouts and shapes."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most, relative_error

# The predecessor's kernel shapes (E, K, N, T, k, r); the last four are for a GPU.
SMALL = [(32, 128, 64, 64, 2, 4), (64, 256, 128, 128, 4, 8)]
LARGE = [
    (256, 2048, 1024, 2048, 8, 16),
    (256, 512, 2048, 2048, 8, 16),
    (64, 2048, 2048, 2048, 8, 16),
    (128, 2048, 1536, 2048, 8, 16),
]


def unstable_sort(ids, experts):
    """(sorted expert ids, slots, inclusive offsets) with equal slots in reverse order."""
    flat = ids.reshape(-1)
    slots = torch.flip(torch.argsort(torch.flip(flat, (0,)), stable=True), (0,))
    slots = flat.numel() - 1 - slots
    slots = torch.flip(slots, (0,))
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    return flat[slots], slots, ends


def draw(shape, device, dtype=torch.float32):
    """The predecessor's benchmark data: W * 0.02, A and B * 0.01, s = 2."""
    experts, k, n, tokens, top_k, rank = shape
    generator = torch.Generator(device).manual_seed(42)

    def normal(*size: int, std: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator, device=device) * std
        return drawn.to(dtype).requires_grad_()

    ids = torch.randint(0, experts - 1, (tokens, top_k), generator=generator, device=device)
    leaves = {
        "x": normal(tokens, k),
        "weight": normal(experts, n, k, std=0.02),
        "lora_A": normal(rank * experts, k, std=0.01),
        "lora_B": normal(n, rank * experts, std=0.01),
    }
    return ids, leaves


def by_expert(ids, leaves, experts, top_k, scaling, dtype):
    """Slot order result by one expert after the other in `dtype`, on autograd."""
    x, weight, a, b = (leaves[name].to(dtype) for name in ("x", "weight", "lora_A", "lora_B"))
    a = a.view(experts, -1, x.shape[1])
    b = b.view(weight.shape[1], experts, -1).transpose(0, 1)
    flat = ids.reshape(-1)
    pieces, order = [], []
    for e in flat.unique().tolist():
        mine = (flat == e).nonzero()[:, 0]
        source = x[mine // top_k]
        pieces.append(source @ weight[e].mT + scaling * (source @ a[e].mT) @ b[e].mT)
        order.append(mine)
    return torch.cat(pieces)[torch.argsort(torch.cat(order))]


def check(moe, shape, device, dtype, factor) -> None:
    experts, _, n, tokens, top_k, _ = shape
    ids, leaves = draw(shape, device, dtype)
    sei, ssi, offsets = unstable_sort(ids, experts)
    y = moe.parallel_linear_lora(
        leaves["x"],
        leaves["weight"].transpose(2, 1),
        top_k,
        sei,
        ssi,
        offsets,
        leaves["lora_A"],
        leaves["lora_B"],
        2.0,
    )
    grad = torch.randn(tokens * top_k, n, device=device).to(dtype)
    actual = [y, *torch.autograd.grad(y, list(leaves.values()), grad)]
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    exact = by_expert(ids, wide, experts, top_k, 2.0, torch.float64)
    exact = [exact, *torch.autograd.grad(exact, list(wide.values()), grad.double())]
    plain = by_expert(ids, leaves, experts, top_k, 2.0, dtype)
    plain = [plain, *torch.autograd.grad(plain, list(leaves.values()), grad)]
    for one, eager, right in zip(actual, plain, exact, strict=True):
        assert_error_at_most(one, right, max(factor * relative_error(eager, right), 3e-7))
        assert_error_at_most(one, right, 5e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_shapes(moe, device, shape, dtype):
    check(moe, shape, device, dtype, 1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_kernel_shapes(moe, device, shape, dtype):
    check(moe, shape, device, dtype, 1.5)


# (grouped_in, grouped_out, gated, lora): the predecessor's autograd tests.
@pytest.mark.parametrize(
    ("gated", "with_lora"), [(False, True), (True, True), (True, False), (False, False)]
)
def test_two_projections_as_the_predecessor_chains_them(moe, device, gated, with_lora):
    """gate_up to expert order, down with k = 1 from it, gates or slot order at the end."""
    experts, h, inner, tokens, top_k, rank = 6, 16, 12, 19, 3, 4
    ids, up = draw((experts, h, inner, tokens, top_k, rank), device)
    _, down = draw((experts, inner, h, tokens, top_k, rank), device)
    sei, ssi, offsets = unstable_sort(ids, experts)
    gates = torch.rand(tokens, top_k, device=device, requires_grad=True)

    def lora(leaves):
        return {name: leaves[name] if with_lora else None for name in ("lora_A", "lora_B")}

    route = {"sorted_expert_idxs": sei, "sorted_scattered_idxs": ssi, "expert_offsets": offsets}
    hidden = moe.parallel_linear_lora(
        up["x"], up["weight"].mT, top_k, **route, **lora(up), grouped_out=True, use_fused_dX=True
    )
    y = moe.parallel_linear_lora(
        hidden.relu(),
        down["weight"].mT,
        1,
        **route,
        **lora(down),
        gates=gates if gated else None,
        grouped_in=True,
    )
    leaves = [up["x"], up["weight"], down["weight"]]
    leaves += [gates] if gated else []
    leaves += [f[name] for f in (up, down) for name in ("lora_A", "lora_B")] if with_lora else []
    order = torch.argsort(ids.reshape(-1), stable=True)

    def expected():
        off = {name: x if with_lora or name[:4] != "lora" else x * 0 for name, x in up.items()}
        mid = by_expert(ids, off, experts, top_k, 1.0, torch.float64).relu()
        off = {name: x if with_lora or name[:4] != "lora" else x * 0 for name, x in down.items()}
        slots = by_expert(ids.reshape(-1, 1), {**off, "x": mid}, experts, 1, 1.0, torch.float64)
        if not gated:
            return slots
        return (slots.view(tokens, top_k, h) * gates.double()[..., None]).sum(1)

    assert order.numel() == tokens * top_k
    right = expected()
    grad = torch.randn_like(right)
    found = [y, *torch.autograd.grad(y, leaves, grad.float())]
    wanted = [right, *torch.autograd.grad(right, leaves, grad)]
    for one, other in zip(found, wanted, strict=True):
        assert_error_at_most(one, other, 1e-5)


def test_wrong_arguments(moe, device):
    ids, leaves = draw((4, 8, 8, 5, 2, 2), device)
    sei, ssi, offsets = unstable_sort(ids, 4)
    weight = leaves["weight"].mT
    with pytest.raises(ValueError, match="expert_offsets must be"):
        moe.parallel_linear_lora(leaves["x"], weight, 2, sei, ssi, offsets[:-1])
    with pytest.raises(ValueError, match="sorted_expert_idxs must be"):
        moe.parallel_linear_lora(leaves["x"], weight, 2, sei[:-1], ssi, offsets)
    with pytest.raises(ValueError, match="k must divide"):
        moe.parallel_linear_lora(leaves["x"], weight, 3, sei, ssi, offsets)
    with pytest.raises(ValueError, match="must share r E"):
        a, b = leaves["lora_A"], leaves["lora_B"]
        moe.parallel_linear_lora(leaves["x"], weight, 2, sei, ssi, offsets, a, b[:, :-1])
