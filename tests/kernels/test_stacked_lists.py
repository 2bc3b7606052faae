"""Directions and updates in one tensor, one after another: the bits of a list of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from ._tensors import DTYPES, LAYOUTS, SHAPES, assert_same, draw


@pytest.fixture(scope="module")
def kernels(submodule):
    return submodule("kernels")


def stacked(tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_momentum_writes_to_its_place(kernels, device, dtypes, layout) -> None:
    """Also between shapes that leave the next one unaligned, and empty ones."""
    grads = draw(SHAPES, dtypes[0], seed=0, layout=layout, device=device)
    scale = torch.rand(len(SHAPES), device=device) + 0.5
    options = {"mu": 0.95, "nesterov": True, "form": "ema", "scale": scale}
    results, squares = [], []
    for together in (False, True):
        buffers = draw(SHAPES, torch.float32, seed=1, layout=layout, device=device)
        out = [torch.empty(g.shape, dtype=dtypes[1], device=device) for g in grads]
        batch = stacked(out)
        stats = kernels.momentum(grads, buffers, batch if together else out, **options)
        results.append([*buffers, batch if together else stacked(out), stats[:, 0]])
        squares.append(stats[:, 1])
    assert_same(*results)
    if device.type == "cpu":
        assert_same(*([x] for x in squares))
    else:  # an unaligned place is walked in another order
        torch.testing.assert_close(*squares, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["nearest", "stochastic", "residual", "second moments"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_apply_update_reads_from_its_place(kernels, device, dtypes, layout, mode) -> None:
    shapes = SHAPES if mode != "second moments" else [s for s in SHAPES if len(s) >= 2]
    updates = draw(shapes, dtypes[1], seed=1, device=device)
    results = []
    for together in (False, True):
        params = draw(shapes, dtypes[0], seed=0, layout=layout, device=device)
        narrow = dtypes[0] != torch.float32
        options = {}
        if mode == "stochastic":
            step, numbers = torch.tensor(3, device=device), list(range(len(shapes)))
            options["rounding"] = kernels.StochasticRounding(7, step, numbers, numbers)
        if mode == "residual":
            options["residuals"] = [
                torch.zeros_like(p, dtype=torch.int16) if narrow else None for p in params
            ]
        if mode == "second moments":
            moments = [torch.ones((*s[:-1], 1), device=device) for s in shapes]
            options |= {"second_moments": moments, "beta2": 0.9}
        given = stacked(updates) if together else updates
        factors = [0.1 * (k + 1) for k in range(len(shapes))]
        kernels.apply_update(params, given, lr=0.1, factors=factors, weight_decay=0.1, **options)
        results.append([*params, *options.get("residuals", []), *options.get("second_moments", [])])
    assert_same(*results)


def test_one_entry(kernels, device) -> None:
    (grad,) = draw([(3, 5)], torch.float32, seed=0, device=device)
    buffer, batch = torch.zeros_like(grad), torch.empty(1, 3, 5, device=device)
    kernels.momentum([grad], [buffer], batch, mu=0.9, nesterov=False, form="heavy_ball")
    assert_same([batch[0]], [grad])
    param = torch.zeros_like(grad)
    kernels.apply_update([param], batch, lr=1.0, factors=[-1.0], weight_decay=0.0)
    assert_same([param], [grad])


def test_float64_takes_the_reference(kernels, device) -> None:
    grads = [x.double() for x in draw([(3, 5), (2,)], torch.float32, seed=0, device=device)]
    buffers = [torch.zeros_like(g) for g in grads]
    batch = torch.empty(17, dtype=torch.float64, device=device)
    kernels.momentum(grads, buffers, batch, mu=0.9, nesterov=False, form="heavy_ball")
    assert torch.equal(batch, stacked(grads))
    params = [torch.zeros_like(g) for g in grads]
    kernels.apply_update(params, batch, lr=1.0, factors=[-1.0, -1.0], weight_decay=0.0)
    assert torch.equal(stacked(params), batch)


def test_float64_beside_others_writes_once(kernels, device) -> None:
    """The compiled op refuses the list, wherever the float64 stands, before it writes."""
    for dtypes in itertools.permutations((torch.float32, torch.float32, torch.float64)):
        grads = [torch.ones(3, dtype=dtype, device=device) for dtype in dtypes]
        buffers = [torch.ones_like(g) for g in grads]
        out = [torch.empty_like(g) for g in grads]
        kernels.momentum(grads, buffers, out, mu=0.5, nesterov=False, form="heavy_ball")
        assert all((buffer == 1.5).all() for buffer in buffers)
        params = [torch.ones_like(g) for g in grads]
        kernels.apply_update(params, out, lr=1.0, factors=[1.0] * 3, weight_decay=0.0)
        assert all((param == -0.5).all() for param in params)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda d: torch.ones(47, device=d), ValueError, r"must be contiguous with the 48 elem"),
        (lambda d: torch.ones(49, device=d), ValueError, r"must be contiguous with the 48 elem"),
        (lambda d: torch.ones(96, device=d)[::2], ValueError, r"got shape \(48,\) with strides"),
        (lambda d: torch.ones(2, 6, 4, device=d).int(), TypeError, "must be one of .* torch.int32"),
    ],
    ids=["short", "long", "gaps", "integers"],
)
def test_errors_say_what_and_write_nothing(kernels, device, make, error, message) -> None:
    lists = [[torch.ones(6, 4, device=device) for _ in range(2)] for _ in range(2)]
    with pytest.raises(error, match=message):
        kernels.momentum(*lists, make(device), mu=0.9, nesterov=True, form="ema")
    with pytest.raises(error, match=message):
        kernels.apply_update(lists[0], make(device), lr=1.0, factors=[1.0, 1.0], weight_decay=0.1)
    for tensors in lists:
        assert all((tensor == 1).all() for tensor in tensors)


def test_opcheck(ops, device) -> None:
    lists = [[torch.ones(6, 4, device=device) for _ in range(2)] for _ in range(2)]
    batch = torch.zeros(2, 6, 4, device=device)
    torch.library.opcheck(ops.momentum.default, (*lists, [], 0.9, True, False, None, batch))
    scalars = (0.1, None, [1.0, 1.0], 0.1, None, False, False, [], 0.0, [], 0, None, [], [])
    torch.library.opcheck(ops.apply_update.default, (lists[0], [], *scalars, batch))


def test_compiles_without_a_graph_break(kernels, device) -> None:
    def run(params, grads, buffers):
        batch = torch.empty(2, 6, 4, device=device)
        kernels.momentum(grads, buffers, batch, mu=0.5, nesterov=False, form="heavy_ball")
        kernels.apply_update(params, batch * 2, lr=1.0, factors=[1.0, 1.0], weight_decay=0.0)
        return params[0] + batch[1]

    lists = [[torch.ones(6, 4, device=device) for _ in range(2)] for _ in range(3)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert (compiled(*lists) == -2 + 1.5).all()
    assert all((buffer == 1.5).all() for buffer in lists[2])
