"""gated_experts: the layer in one op gives what eager torch gives, and keeps only what it must."""

import contextlib
import functools
import types

import pytest
import torch

from ..._compare import assert_error_at_most, assert_same_bits
from ...moe._eager import LayerProblem, assert_first_order_alone, assert_layer_close_to_eager, step
from .test_grouped_lora import RANK, TOP_K, N, operands

# 72: two tiles of columns either way, the last one not full. 11 experts: a group of 8 and a rest.
PROBLEMS = (
    LayerProblem(0),
    LayerProblem(9, hidden=16, intermediate=72, rank=3, rank_down=3, routing="sentinels"),
    LayerProblem(5, 2, 11, 16, 8, 12, 3, bias=True, train_base=True, activation="gelu"),
    LayerProblem(9, hidden=16, intermediate=24, rank=None, rank_down=3, interleaved=True),
    LayerProblem(9, hidden=16, intermediate=24, rank=3, rank_down=None, dtype=torch.float16),
)


@pytest.fixture
def called(submodule, monkeypatch, begun):
    """Names of the layer's ops that were called, in order, as torch.compile calls them."""
    monkeypatch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
    return begun(submodule("moe.grouped_linear"), "gated_experts", "_op")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_error_against_float64(moe, device, called, problem):
    assert_layer_close_to_eager(moe, device, problem, backend="triton")
    assert called == ["gated_experts"]


def test_without_a_backward_gate_and_up_are_not_stored(moe, submodule, device, monkeypatch, watch):
    """The same bits, nothing of (R, 2I): in no_grad, and where no leaf asks for a gradient."""
    launches = submodule("kernels.experts.gated_launch_triton")
    problem = LayerProblem(4, experts=2, hidden=8, intermediate=8, rank=2, rank_down=2)
    kept = watch(launches, "gated_forward", lambda found, *_, **__: tuple(found[0].shape))
    layer, x, ids, gates, _ = problem.drawn(moe, device, "triton")
    expected = layer(x, ids, gates)
    with torch.no_grad():
        assert_same_bits(layer(x, ids, gates), expected)
    layer.requires_grad_(False)
    assert_same_bits(layer(x.detach(), ids, gates.detach()), expected)
    rows, wide = problem.tokens * problem.top_k, 2 * problem.intermediate
    assert kept == [(rows, wide), (0, wide), (0, wide)]


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("reference", LayerProblem(4)),
        ("triton", LayerProblem(4, transposed=True)),  # columns of both halves apart in memory
        ("triton", LayerProblem(4, gated=False, activation="relu2")),
    ],
    ids=str,
)
def test_what_runs_stage_by_stage(moe, device, called, backend, problem):
    layer, x, ids, gates, _ = problem.drawn(moe, device, backend)
    layer(x, ids, gates)
    assert called == ["_op", "_op"]


def test_second_order_raises_and_a_graph_serves_twice(moe, device):
    problem = LayerProblem(5, experts=2, hidden=8, intermediate=8, rank=2, rank_down=2)
    layer, x, ids, gates, _ = problem.drawn(moe, device, "triton")
    assert_first_order_alone(layer(x, ids, gates), x)


@pytest.fixture
def with_room(moe, submodule, device, monkeypatch):
    """`with_room(made, **sizes)`: what a step adds to `made`, without room for gradients and with.

    Both give the same gradients.
    """
    launches = submodule("kernels.experts.gated_launch_triton")

    def run(made: list, **sizes) -> list[list]:
        problem = LayerProblem(experts=3, hidden=16, intermediate=8, rank=2, rank_down=2, **sizes)
        layer, x, ids, gates, grad = problem.drawn(moe, device, "triton")
        found, seen = [], []
        for room in (0, 10**9):
            monkeypatch.setattr(launches, "room_for_gradients", lambda *_, room=room: room)
            found.append(step(layer, x, ids, gates, grad).values())
            seen.append(made.copy())
            made.clear()
        for one, other in zip(*found, strict=True):
            assert_error_at_most(one, other, 1e-6)
        return seen

    return run


def test_order_of_gradients(submodule, monkeypatch, watch, with_room):
    """Few rows: each operand is let go before the next gradient. Many: sums share launches."""
    launches = submodule("kernels.experts.gated_launch_triton")
    monkeypatch.setattr(launches, "sums_fit_beside", lambda *_: False)
    sums = watch(launches, "expert_products", lambda _, given, *rest, **options: len(given))
    assert with_room(sums, tokens=6) == [[1, 2, 1], [4]]


def test_what_runs_beside_what(submodule, monkeypatch, begun, with_room):
    """LoRA's own launches beside the products, each after what it reads; where memory allows."""
    launches = submodule("kernels.experts.gated_launch_triton")
    made: list[str] = []

    @contextlib.contextmanager
    def around(name: str):
        made.append(f"{name}(")
        yield streams
        made.append(")")

    streams = types.SimpleNamespace(
        there=lambda: around("there"),
        there_waits=lambda: made.append("there-waits"),
        here_waits=lambda: made.append("here-waits"),
    )
    monkeypatch.setattr(launches, "beside", lambda _: around("both"))
    names = ("low_rank", "grouped_product", "combine_triton", "expert_products")
    begun(launches, *names, "gated_backward", "reorder", seen=made)
    seen = (" ".join(one) for one in with_room(made, tokens=24))
    alone, together = (text.replace("_triton", "").replace("grouped_", "") for text in seen)
    assert alone == (
        "low_rank reorder low_rank product combine "
        "low_rank gated_backward low_rank product combine "
        "expert_products expert_products expert_products"
    )
    assert together == (
        "low_rank reorder reorder low_rank product combine both( there( reorder low_rank ) "
        "here-waits there( gated_backward ) reorder there-waits expert_products "
        "here-waits there( low_rank ) expert_products here-waits "
        "there( product combine ) expert_products )"
    )


@pytest.mark.parametrize("rank", [3, 16, 17, 70])
def test_ranks_that_are_loaded_ahead_and_in_steps(moe, submodule, device, rank):
    assert submodule("kernels.experts.tile_tables").ahead(rank) == (rank <= 16)
    problem = LayerProblem(9, hidden=16, intermediate=24, rank=rank, rank_down=rank)
    assert_layer_close_to_eager(moe, device, problem, backend="triton")


def test_the_op_and_its_reference(moe, submodule, ops, device):
    problem = LayerProblem(6, experts=3, hidden=8, intermediate=8, rank=2, rank_down=2, bias=True)
    layer, x, ids, gates, _ = problem.drawn(moe, device)
    lora, order = layer.requires_grad_(False).expert_lora.factors(), moe.expert_sort(ids, 3)
    first = (layer.gate_up_proj.mT, lora.gate_up.a, lora.gate_up.b, layer.gate_up_proj_bias)
    second = (layer.down_proj.mT, lora.down.a, lora.down.b, layer.down_proj_bias)
    operands = (x.detach(), *first, *second, gates.detach())
    arguments = (x.detach(), *first, 2.0, *second, 2.0, *order.operands(), gates.detach())
    arguments += ("silu", False, True)
    expected = submodule("reference.moe").gated_experts(*operands, ids, (2.0, 2.0), "silu", False)
    assert_error_at_most(ops.gated_experts(*arguments)[0], expected, 1e-6)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.gated_experts.default, arguments, test_utils=checks)


def test_dynamo_leaves_the_bodies_of_ops_alone(moe, submodule, ops, device, watch):
    """Where a frame that it gave up calls them: sort, forward and backward."""
    launches = submodule("kernels.experts.gated_launch_triton")
    sort = submodule("kernels.experts.expert_sort")
    traced: list[tuple[str, bool]] = []
    names = ("expert_sort", "gated_experts_triton", "gated_experts_backward_triton")
    for place, name in zip((sort.reference, launches, launches), names, strict=True):
        watch(place, name, lambda *_, name=name: (name, torch.compiler.is_compiling()), traced)
    problem = LayerProblem(6, experts=3, hidden=8, intermediate=8, rank=2, rank_down=2)
    layer, *drawn = problem.drawn(moe, device)
    x, ids, gates, grad = (one.detach() for one in drawn)
    lora = layer.requires_grad_(False).expert_lora.factors()
    first = (layer.gate_up_proj.mT, lora.gate_up.a, lora.gate_up.b, None, 2.0)
    second = (layer.down_proj.mT, lora.down.a, lora.down.b, None, 2.0)

    @functools.partial(torch.compiler.disable, recursive=False)
    def given_up(x, gates, grad):
        slots, rows, offsets, tiles = ops.expert_sort(ids, 3, 16, "reference")
        layer = (*first, *second, slots, offsets, rows, tiles, 16, 2, gates, "silu", False)
        _, *kept = ops.gated_experts(x, *layer, True)
        return ops.gated_experts_backward(grad, *kept, x, *layer, [True] + [False] * 9)[0]

    torch.compile(lambda *given: given_up(*given), backend="eager")(x, gates, grad)
    assert traced == [(name, False) for name in names]


def test_a_factor_is_packed_in_pieces(submodule, device, monkeypatch, watch):
    """A copy much larger than the result is made for some columns at a time."""
    launch = submodule("kernels.experts.grouped_launch_triton")
    problem = operands(submodule, device)
    x, factor = problem["x"], problem["lora_b"].transpose(1, 2)
    rows = problem["order"].slots.shape[0]
    low = torch.randn(rows, RANK, device=device)
    monkeypatch.setattr(launch, "PIECE", 16)
    sizes = watch(launch, "reorder", lambda _, source, target, *rest: target.shape[2])
    results = []
    for limit in (1.5, 1 / 4, 1 / 9):
        monkeypatch.setattr(launch, "PACKED_PER_RESULT", limit)
        out = x.new_full((rows, N), torch.nan)
        options = {"direction": "forward", "fan": TOP_K, "scatter": False, "bias": problem["bias"]}
        weight, order = problem["weight"], problem["order"]
        launch.grouped_product(x, weight, low, factor, order, out, **options)
        results.append(out)
    assert sizes == [N, 16, N - 16], "with one more piece than MOST_PIECES nothing is copied"
    for found in results[1:]:
        assert_error_at_most(found, results[0], 1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_in_pieces(submodule, moe, device, monkeypatch, watch, interleaved):
    """The second tile of columns in a launch of its own, with its part of the packed factor."""
    launch = submodule("kernels.experts.grouped_launch_triton")
    problem = LayerProblem(
        4, experts=2, hidden=8, intermediate=40, rank=2, rank_down=None, interleaved=interleaved
    )
    layer, x, ids, gates, _ = problem.drawn(moe, device, "triton")
    gated = submodule("kernels.experts.gated_launch_triton")
    made = watch(gated, "column_pieces", lambda pieces, *_: pieces)
    found = []
    for limit in (1.5, 1 / 2, 1 / 8):
        monkeypatch.setattr(launch, "PACKED_PER_RESULT", limit)
        found.append(layer(x, ids, gates).detach())
    assert [(len(ranges), packs) for ranges, packs in made] == [(1, True), (2, True), (1, False)]
    for one in found[1:]:
        assert_error_at_most(one, found[0], 1e-6)
