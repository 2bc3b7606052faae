"""A layer over packed experts on Hopper: compiled products beside Triton's, played and captured."""

import dataclasses

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._eager import PackedLayer, PackedProblem, assert_graph_follows, compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.fixture
def compiled_calls(submodule, watch):
    """The launches of the compiled product, in a list; none of what an earlier test compiles."""
    submodule("kernels.launch.triton_compile").settle()
    module = submodule("kernels.quant.packed_product")
    return watch(module, "packed_product", lambda *_, along, **__: along)


def packed_layer(moe, device, **changes) -> PackedLayer:
    sizes = {"tokens": 300, "experts": 4, "hidden": 832, "intermediate": 896}
    dtypes = {"dtype": torch.bfloat16, "lora_dtype": torch.bfloat16}
    form = {"rank": 8, "rank_down": 8, "strategy": "auto", "blocksize": 64}
    return PackedLayer(moe, device, PackedProblem(**{**sizes, **dtypes, **form, **changes}))


@pytest.mark.parametrize("routing", ("random", "one", "sentinels", "all-sentinels"))
def test_a_layer_equals_tritons_within_rounding(moe, device, compiled_calls, routing):
    """Forward and backward; both take the same rounded weights and sum in float32."""
    case = packed_layer(moe, device, routing=routing)
    expected = case.step("triton")
    assert not compiled_calls  # asked for by name, Triton's stays
    actual = case.step("compiled")
    assert sorted(compiled_calls) == [False, False, True, True]
    for name, value in expected.items():
        if routing == "all-sentinels":
            assert_same_bits(actual[name], value)
        else:
            assert relative_error(actual[name], value) <= 5e-3, name


@pytest.mark.parametrize("form", ({"nested": True}, {"rank": 12, "rank_down": 3}), ids=str)
def test_what_is_made_plain_is_played(moe, device, compiled_calls, played, launched, form):
    """Nested scales and ranks that are no multiples of 8, by the compiled product."""
    case = packed_layer(moe, device, **form)
    expected = case.step("triton")
    assert not compiled_calls
    with launched():
        apart = case.step("auto")
    assert len(compiled_calls) == 4
    compare(case.step("auto"), apart)
    for name, value in expected.items():
        assert relative_error(apart[name], value) <= 5e-3, name


def test_auto_takes_it_where_it_pays(moe, submodule, device, compiled_calls, monkeypatch):
    """150 rows per expert: a sum of 832 or more pays, and one of 640 does not."""
    case = packed_layer(moe, device)
    by_name = case.step("compiled")
    taken = list(compiled_calls)
    compiled_calls.clear()
    by_auto = case.step("auto")
    module = submodule("kernels.quant.packed_product")
    assert all(module.pays(150, depth, module.LEAST_ROWS) for depth in (832, 896, 1792))
    assert not module.pays(150, 640, module.LEAST_ROWS)
    assert sorted(compiled_calls) == sorted(taken)
    for name, value in by_name.items():
        assert relative_error(by_auto[name], value) <= 5e-3, name
    compiled_calls.clear()
    packed_layer(moe, device, hidden=640, intermediate=640).step("auto")
    assert compiled_calls == [False]  # through gate_up backwards, a sum of 1280


def test_a_step_in_a_cuda_graph_follows_new_routings(moe, device, compiled_calls):
    case = packed_layer(moe, device, tokens=64)

    def redraw(seed: int, routing: str) -> None:
        other = dataclasses.replace(case.problem, routing=routing)
        case.ids.copy_(other.ids(device, seed))
        case.leaves["x"].copy_(other.inputs(device, seed)[0])

    assert_graph_follows(lambda: case.step("compiled"), redraw)
    assert len(compiled_calls) == (3 + 1 + 5) * 4
