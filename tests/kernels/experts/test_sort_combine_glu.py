"""Around the products on every path: expert_sort, combine and glu, each beside its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ..._compare import assert_all_same_bits, assert_error_at_most, assert_same_bits
from ...conftest import module_fixture
from ...moe._eager import LayerProblem, assert_first_order_alone, eager_activation

module = module_fixture("kernels.experts.expert_sort")
over_rows = module_fixture("kernels.experts.rows")

PATHS = ("reference", "triton")


def by_hand(ids: list[list[int]], experts: int, tile_rows: int):
    """(slots, offsets, tiles in use) by Python's stable sort."""
    flat = [i if 0 <= i < experts else experts for row in ids for i in row]
    slots = sorted(range(len(flat)), key=lambda slot: flat[slot])
    starts = [sum(group < e for group in flat) for e in range(experts + 2)]
    tiles = []
    for group in range(experts + 1):
        for first in range(starts[group], starts[group + 1], tile_rows):
            tiles.append([group, first, min(first + tile_rows, starts[group + 1])])
    return slots, starts[: experts + 1], tiles


def parts(order) -> tuple[torch.Tensor, ...]:
    return order.slots, order.rows, order.offsets, order.tiles


def assert_sorted(module, path, ids, experts, device, tile_rows=16, dtype=torch.int64) -> None:
    top_k = max(len(ids[0]) if ids else 2, 1)
    given_ids = torch.tensor(ids, dtype=dtype).view(len(ids), top_k).to(device)
    result = module.expert_sort(given_ids, experts, tile_rows=tile_rows, backend=path)
    slots, rows, offsets, tiles = (part.tolist() for part in parts(result))
    expected_slots, expected_offsets, expected_tiles = by_hand(ids, experts, tile_rows)
    assert slots == expected_slots
    assert [slots[row] for row in rows] == list(range(len(slots)))
    assert offsets == expected_offsets
    used = len(expected_tiles)
    assert tiles[:used] == expected_tiles
    assert tiles[used:] == [[-1, -1, -1]] * (len(tiles) - used)


@pytest.mark.sees_defect("ids of sentinels lengthen the offsets in silence")
@pytest.mark.sees_defect("tiles straddle experts, and experts without rows are visited")
@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        ([], 4),
        ([[2, 0]], 3),
        ([[1, 1]] * 40, 3),
        ([[0, 2]] * 20, 3),
        ([[-1, 4], [9, -7], [3, 0]], 4),
        ([[5, 6]] * 9, 4),
        ([[0]] * 33, 1),
    ],
    ids=["empty", "one-token", "one-expert", "gap", "sentinels", "only-sentinels", "E=1"],
)
def test_cases(module, device, path, ids, experts):
    assert_sorted(module, path, ids, experts, device)


@pytest.mark.parametrize("rows", [0, 5])
def test_what_is_recorded_is_launched_alone(module, device, watch, rows) -> None:
    """A recording refuses a copy by torch, and that launches from Python in every call."""
    plain = lambda _, name, function, operands, *__: [  # noqa: E731
        ids.is_contiguous() and ids.numel() > 0 for ids in operands
    ]
    seen = watch(module, "replayed", plain)
    ids = (torch.arange(4 * rows, device=device) % 3).view(rows, 4)[:, ::2]
    order = module.expert_sort(ids, 3, backend="triton")
    expected = module.expert_sort(ids, 3, backend="reference")
    assert_all_same_bits(parts(order), parts(expected))
    assert seen == [[True]] * (rows > 0)


@settings(max_examples=40, deadline=None)
@given(
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(st.integers(-2, 12), min_size=k, max_size=k), max_size=30)
    ),
    experts=st.integers(1, 10),
    tile_rows=st.sampled_from([16, 32, 64]),
)
def test_generated_reference(module, device, ids, experts, tile_rows):
    assert_sorted(module, "reference", ids, experts, device, tile_rows)


def test_many_chunks_and_groups(module, device):
    """Several chunks, more experts than one block of the scan, long experts over many tiles."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 42, (150, 3), generator=generator)
    assert_sorted(module, "triton", ids.tolist(), 40, device)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_integer_dtypes(module, device, path, dtype):
    assert_sorted(module, path, [[3, 1], [0, 7]], 4, device, dtype=dtype)


STRIDES = {
    "columns skipped": lambda ids: ids.repeat_interleave(2, 1)[:, ::2].T.contiguous().T,
    "gaps": lambda ids: torch.stack((ids, ids + 1), -1)[..., 0],  # one flat view of stride 2
    "one id": lambda ids: ids[:1, :1].expand(2, 2),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("path", PATHS)
def test_strided_ids(module, device, path, strides):
    ids = STRIDES[strides](torch.tensor([[3, 1], [0, 3]], device=device))
    slots = module.expert_sort(ids, 4, backend=path).slots
    assert slots.tolist() == module.expert_sort(ids.clone(), 4, backend="reference").slots.tolist()
    assert slots.tolist() == ([0, 1, 2, 3] if strides == "one id" else [2, 1, 0, 3])


def test_the_most_experts(module, device):
    assert_sorted(module, "auto", [[2**12 - 1, 5], [2**12, 0], [5, -1]], 2**12, device)


@pytest.mark.sees_defect("padding each expert to whole blocks waits for the device once per expert")
def test_tile_rows_follow_the_mean_and_never_the_routing(module, device):
    most_rows = {16: (0, 128), 32: (129, 192), 64: (193, 384), 128: (385,)}
    for expected, rows in most_rows.items():
        assert {module.tile_rows_for(one, 8) for one in rows} == {expected}
    shapes = {
        tuple(part.shape for part in parts(module.expert_sort(torch.full((50, 2), e), 4)))
        for e in (-1, 0, 3)
    }
    assert len(shapes) == 1


@pytest.mark.sees_defect("compiled anew for each shape, with a wait for the device")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(module, device, dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def compiled(ids):
        return module.expert_sort(ids, 5)

    for tokens in (7, 9):
        ids = torch.randint(0, 5, (tokens, 2), device=device)
        assert_all_same_bits(parts(compiled(ids)), parts(module.expert_sort(ids, 5)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1, 2]], 4), TypeError, "expert_ids must be a dense tensor"),
        ((torch.ones(2, 2), 4), TypeError, "expert_ids must have dtype"),
        ((torch.ones(4, dtype=torch.int64), 4), ValueError, "expert_ids must have 2 dimensions"),
        ((torch.ones(2, 0, dtype=torch.int64), 4), ValueError, "expert_ids must name experts"),
        ((torch.ones(2, 2, dtype=torch.int64), 0), ValueError, "num_experts must be at least 1"),
        ((torch.ones(2, 2, dtype=torch.int64), 2**12 + 1), ValueError, "at most 4096, got 4097"),
        ((torch.ones(2, 2, dtype=torch.int64), 4.0), TypeError, "num_experts must be an integer"),
        ((torch.ones(2, 2, dtype=torch.int64), True), TypeError, "num_experts must be an integer"),
        ({"tile_rows": 24}, ValueError, "tile_rows must be a power of two"),
        ({"tile_rows": 32.0}, TypeError, "tile_rows must be an integer or None"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_wrong_arguments(module, arguments, error, message):
    options = arguments if isinstance(arguments, dict) else {}
    arguments = (torch.zeros(2, 2, dtype=torch.int64), 4) if options else arguments
    with pytest.raises(error, match=message):
        module.expert_sort(*arguments, **options)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(device, dtype, tokens=7, top_k=3, n=40, valid=17, seed=0):
    """y, gates, rows, offsets; rows from `valid` on are sentinels and hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = tokens * top_k
    rows = torch.randperm(total, generator=generator)
    y = torch.randn(total, n, generator=generator).to(dtype)
    y[valid:] = torch.nan
    gates = torch.randn(tokens, top_k, generator=generator)
    offsets = torch.tensor([0, 4, valid])
    return tuple(part.to(device) for part in (y, gates, rows, offsets))


def combined_by_hand(y, gates, rows, offsets, top_k):
    out = torch.zeros(rows.numel() // top_k, y.shape[1], dtype=torch.float64)
    for slot, row in enumerate(rows.tolist()):
        if row < int(offsets[-1]):
            weight = 1.0 if gates is None else gates.reshape(-1)[slot].double().cpu()
            out[slot // top_k] += weight * y[row].double().cpu()
    return out


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_sums(over_rows, device, path, gated, dtype):
    y, gates, rows, offsets = problem(device, dtype)
    gates = gates if gated else None
    actual = over_rows.combine(y, gates, rows, offsets, 3, backend=path)
    assert actual.dtype == dtype
    eps = 2 * torch.finfo(dtype).eps  # one rounding, or the interpreter's truncation
    assert_error_at_most(actual.cpu(), combined_by_hand(y, gates, rows, offsets, 3), eps)


@pytest.mark.parametrize("path", PATHS)
def test_strides_and_repeats(over_rows, device, path):
    y, gates, rows, offsets = problem(device, torch.float32)
    expected = over_rows.combine(y, gates, rows, offsets, 3, backend=path)
    strided = torch.stack((y, y), 2)[..., 0]
    again = over_rows.combine(strided, gates.T.contiguous().T, rows, offsets, 3, backend=path)
    assert_same_bits(again, expected)


@pytest.mark.parametrize(("tokens", "columns"), [(0, 40), (7, 0)])
@pytest.mark.parametrize("path", PATHS)
def test_no_tokens_or_columns(over_rows, device, path, tokens, columns):
    y, gates, rows, offsets = problem(device, torch.float32, tokens, n=columns, valid=2 * tokens)
    out = over_rows.combine(y, gates, rows, offsets, 3, backend=path)
    assert out.shape == (tokens, columns)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("path", PATHS)
def test_value_and_gradient(over_rows, device, path, activation, interleaved, dtype):
    """Clamps are met (values to 12); float32 may lose digits where exp or erf are approximate."""
    generator = torch.Generator().manual_seed(0)
    drawn = (4 * torch.randn(5, 26, generator=generator)).to(device, dtype)
    leaf, exact = drawn.clone().requires_grad_(), drawn.double().requires_grad_()
    grad = torch.randn(5, 13, generator=generator).to(device, dtype)
    actual = over_rows.glu(leaf, activation, interleaved=interleaved, backend=path)
    form = LayerProblem(activation=activation, interleaved=interleaved)
    expected = eager_activation(form, exact)
    assert actual.dtype == dtype
    budget = 2 * torch.finfo(dtype).eps
    assert_error_at_most(actual, expected, budget)
    (found,) = torch.autograd.grad(actual, leaf, grad)
    (right,) = torch.autograd.grad(expected, exact, grad.double())
    assert found.dtype == dtype
    assert_error_at_most(found, right, budget)


@pytest.mark.parametrize("path", PATHS)
def test_strided_and_empty(over_rows, device, path):
    drawn = torch.randn(6, 8, device=device)
    expected = over_rows.glu(drawn, backend=path)
    strided = torch.stack((drawn, drawn), 2)[..., 0]
    assert_same_bits(over_rows.glu(strided, backend=path), expected)
    assert over_rows.glu(drawn[:0], backend=path).shape == (0, 4)


def test_backward_twice_is_right_and_second_order_raises(over_rows, device):
    leaf = torch.randn(3, 8, device=device, requires_grad=True)
    assert_first_order_alone(over_rows.glu(leaf), leaf)


@pytest.mark.parametrize("path", PATHS)
def test_opcheck(ops, device, path):
    ids = torch.tensor([[1, 5], [0, 1], [-1, 2]], device=device)
    gate_up = torch.randn(3, 8, device=device)
    for op, arguments in (
        (ops.expert_sort, (ids, 4, 16)),
        (ops.combine, (*problem(device, torch.float32, valid=21), 3)),
        (ops.glu, (gate_up, "silu", False)),
        (ops.glu_backward, (gate_up[:, :4], gate_up, "gpt_oss", True)),
    ):
        torch.library.opcheck(op.default, (*arguments, path))
    leaf = gate_up.requires_grad_()
    torch.library.opcheck(ops.glu.default, (leaf, "silu", False, "reference"))


def test_wrong_arguments_glu(over_rows):
    with pytest.raises(ValueError, match=r"gate_up must be \(M, 2I\)"):
        over_rows.glu(torch.ones(2, 5))
    with pytest.raises(ValueError, match="activation must be one of"):
        over_rows.glu(torch.ones(2, 4), "swish")
    with pytest.raises(TypeError, match="gate_up must have dtype"):
        over_rows.glu(torch.ones(2, 4, dtype=torch.int64))
