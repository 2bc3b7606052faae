"""The ops over lists: one stacked tensor gives the bits of a list; what they promise on a GPU."""

import itertools

import pytest
import torch

from .._compare import capture
from ._tensors import DTYPES, LAYOUTS, SHAPES, assert_same, copies, draw
from .test_step_ops import ADAMW as OPTIONS
from .test_step_ops import draw_lists


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
    apart, scale = list(torch.zeros_like(batch)), torch.ones(2, device=device)
    torch.library.opcheck(ops.momentum.default, (*lists, apart, 0.9, True, False, scale))
    scalars = (0.1, None, [1.0, 1.0], 0.1, None, False, False, [], 0.0, [], 0, None, [], [])
    torch.library.opcheck(ops.apply_update.default, (lists[0], [], *scalars, batch))


def whole_step(kernels, lists, out, lr, second, residuals, step):
    """All three ops, every option that may be captured."""
    params, grads, averages, squares, steps = lists
    options = {"mu": 0.95, "nesterov": True, "form": "ema"}
    stats = kernels.momentum(grads, averages, out, **options)
    count = len(params)
    update = {"lr": lr, "factors": [0.3] * count, "weight_decay": 0.1, "cautious": True}
    kernels.apply_update(params, out, second_moments=second, beta2=0.9, **update)
    key = kernels.StochasticRounding(3, step, list(range(count)), [0] * count)
    kernels.apply_update(params, out, rounding=key, **update)
    kernels.apply_update(params, out, residuals=residuals, **update)
    kernels.adamw(params, grads, averages, squares, steps, **{**OPTIONS, "lr": lr})
    return stats


def make(device):
    shapes = [(40, 30), (64, 96), (7, 5, 3)]
    lists = draw_lists(shapes, device, DTYPES)
    out = [torch.zeros(s, dtype=torch.float16, device=device) for s in shapes]
    second = [torch.ones(*s[:-1], 1, device=device) for s in shapes]
    residuals = [
        None if p.dtype == torch.float32 else torch.zeros(p.shape, dtype=torch.int16, device=device)
        for p in lists[0]
    ]
    return lists, out, second, residuals


@pytest.mark.gpu
def test_capture_replays_with_new_rate_and_step(kernels, device):
    """Five replays equal five eager steps bit for bit; lr and the rounding step change between."""
    eager, captured = make(device), make(device)
    rates = [torch.tensor(0.02 / (k + 1), device=device) for k in range(5)]
    lr, step = rates[0].clone(), torch.zeros((), device=device)
    warm = make(device)
    whole_step(kernels, warm[0], warm[1], lr, warm[2], warm[3], step)
    graph, stats = capture(
        lambda: whole_step(kernels, captured[0], captured[1], lr, captured[2], captured[3], step)
    )
    for k, rate in enumerate(rates):
        lr.copy_(rate)
        step.fill_(k)
        graph.replay()
        now = torch.tensor(k, device=device)
        lists, out, second, residuals = eager
        expected = whole_step(kernels, lists, out, rate.item(), second, residuals, now)
        assert_same([stats], [expected])
    for ours, theirs in zip(captured[0], eager[0], strict=True):
        assert_same(ours, theirs)
    assert_same(captured[2] + captured[3], eager[2] + eager[3])


def kernel_launches(call):
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events()]
    assert not any("Memcpy" in name for name in names)
    return sum("LaunchKernel" in name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "expected"), [(1, [2, 1, 3, 2]), (200, [2, 1, 5, 2])])
def test_launches_do_not_grow_with_the_list(kernels, device, monkeypatch, count, expected):
    """Two for momentum and adamw, one for apply_update, two more with up to 136 second moments."""
    # New memory is filled with NaN by the tests, which would count as launches.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    lists = draw_lists([(33, 5)] * count, device)
    out = [torch.zeros(33, 5, dtype=torch.float16, device=device) for _ in range(count)]
    second = [torch.ones(33, 1, device=device) for _ in range(count)]
    options = {"mu": 0.95, "nesterov": True, "form": "ema"}
    update = {"lr": 0.1, "factors": [1.0] * count, "weight_decay": 0.1}
    moments = {"second_moments": second, "beta2": 0.9}
    assert expected == [
        kernel_launches(lambda: kernels.momentum(lists[1], lists[2], out, **options)),
        kernel_launches(lambda: kernels.apply_update(lists[0], out, **update)),
        kernel_launches(lambda: kernels.apply_update(lists[0], out, **moments, **update)),
        kernel_launches(lambda: kernels.adamw(*lists, **OPTIONS)),
    ]


@pytest.mark.gpu
def test_lists_of_two_devices_are_refused(kernels, device):
    grads, buffers, out = ([torch.ones(4, device=device) for _ in range(2)] for _ in range(3))
    buffers[1] = buffers[1].cpu()
    with pytest.raises(ValueError, match=r"buffers\[1\] is on cpu, grads\[0\] on cuda"):
        kernels.momentum(grads, buffers, out, mu=0.5, nesterov=False, form="ema")
    assert (buffers[0] == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("strided", (False, True))
def test_beyond_two_to_the_31_elements(kernels, device, strided):
    """Elements above 2**31 equal a small call on the same numbers, random bits included."""
    tail, columns = 4099, 2**16
    count = (2**15 + 1) * columns
    small = draw([(tail,)] * 3, torch.float32, seed=0, device=device)
    params = torch.zeros(count, dtype=torch.bfloat16, device=device)
    updates = torch.zeros(count, dtype=torch.bfloat16, device=device)
    params[-tail:], updates[-tail:] = small[0].bfloat16(), small[1].bfloat16()
    step = torch.ones((), device=device)
    expected = [small[0].bfloat16()]
    key = kernels.StochasticRounding(1, step, [0], [count - tail])
    options = {"lr": 0.01, "factors": [1.0], "weight_decay": 0.1}
    kernels.apply_update(expected, [small[1].bfloat16()], rounding=key, **options)
    if strided:  # another order in memory, the same numbers
        params, updates = params.view(-1, columns), updates.view(-1, columns).mT.contiguous().mT
    key = kernels.StochasticRounding(1, step, [0], [0])
    kernels.apply_update([params], [updates], rounding=key, **options)
    assert_same([params.reshape(-1)[-tail:]], expected)
    assert not params.reshape(-1)[:-tail].any()


@pytest.mark.gpu
def test_momentum_and_adamw_beyond_two_to_the_31_elements(kernels, device):
    tail, count = 4099, 2**31 + 5000
    lists = [torch.zeros(count, dtype=torch.bfloat16, device=device) for _ in range(2)]
    average, square = (torch.zeros(count, device=device) for _ in range(2))
    small = draw_lists([(tail,)], device, torch.bfloat16, torch.bfloat16)
    for whole, part in zip((*lists, average, square), small[:4], strict=True):
        whole[-tail:] = part[0]
    step = [torch.zeros((), device=device)]
    options = {"mu": 0.9, "nesterov": True, "form": "heavy_ball"}
    out = torch.empty(count, dtype=torch.bfloat16, device=device)
    few = [torch.empty(tail, dtype=torch.bfloat16, device=device)]
    stats = kernels.momentum([lists[1]], [average], [out], **options)
    fewer = kernels.momentum(small[1], small[2], few, **options)
    assert_same([out[-tail:], average[-tail:]], [few[0], small[2][0]])
    assert stats[0, 0] == fewer[0, 0]
    torch.testing.assert_close(stats, fewer, rtol=32 * 2.0**-24, atol=0)
    kernels.adamw([lists[0]], [lists[1]], [average], [square], step, **OPTIONS)
    kernels.adamw(*small, **OPTIONS)
    assert_same([lists[0][-tail:], square[-tail:]], [small[0][0], small[3][0]])
    assert not lists[0][:-tail].any()


@pytest.mark.gpu
def test_same_bits_after_a_busy_device(kernels, device):
    """Twenty runs under load give one result, sums included."""
    grads = draw(SHAPES * 3 + ((1000, 1000),), torch.float32, seed=0, device=device)
    buffers = draw(SHAPES * 3 + ((1000, 1000),), torch.float32, seed=1, device=device)
    options = {"mu": 0.9, "nesterov": True, "form": "heavy_ball"}
    noise = torch.randn(2048, 2048, device=device)
    results = []
    for _ in range(20):
        out = [torch.empty_like(x, dtype=torch.float16) for x in grads]
        noise @ noise
        results.append(kernels.momentum(grads, copies(buffers, device), out, **options))
    assert_same(results[1:], results[:1] * 19)
