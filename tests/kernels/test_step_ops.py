"""momentum, apply_update and adamw on every path: bit for bit the reference, whatever the list.

One stacked tensor gives the bits of a list. On a GPU also: launches, sizes, a busy device.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ._tensors import DTYPES, LAYOUTS, NARROW, SHAPES, assert_same, copies, draw

MODES = ("nearest", "stochastic", "residual")
ADAMW = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def rounding_options(kernels, mode, params, *, layout="plain", step=7):
    """Keyword arguments of a mode; offsets odd, even and beyond 2^33."""
    if mode == "stochastic":
        step = torch.tensor(step, device=params[0].device)
        offsets = [(2**33 + 13 if k % 3 == 2 else 5 * k) for k in range(len(params))]
        numbers = list(range(len(params)))
        key = kernels.StochasticRounding(0x1234_5678_9ABC_DEF0, step, numbers, offsets)
        return {"rounding": key}
    if mode == "residual":
        generator = torch.Generator().manual_seed(9)
        found = []
        for p in params:
            drawn = torch.randint(-4000, 4000, p.shape, generator=generator, dtype=torch.int16)
            found.append(LAYOUTS[layout](drawn.to(p.device)) if p.dtype in NARROW else None)
        return {"residuals": found}
    return {}


def draw_lists(shapes, device, dtypes=torch.float32, grad_dtypes=torch.float32, layout="plain"):
    """params, grads, exp_avgs, exp_avg_sqs, steps; entry k has made k steps."""
    options = {"layout": layout, "device": device}
    return [
        draw(shapes, dtypes, seed=0, **options),
        draw(shapes, grad_dtypes, seed=1, **options),
        draw(shapes, torch.float32, seed=2, **options),
        draw(shapes, torch.float32, seed=3, positive=True, **options),
        [torch.tensor(float(k % 1000), device=device) for k in range(len(shapes))],
    ]


def stacked(tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class Op:
    """One op: its lists, a call of it, and what the reference makes of copies on the CPU."""

    modes: tuple[str, ...] = MODES
    variants: tuple[dict, ...] = ({},)  # of options, each with its own bits
    options = {}  # noqa: RUF012
    read = 0  # the first so many lists, which may not change
    stacked: int | None = None  # the list that may be one tensor

    def __init__(self, submodule) -> None:
        self.submodule, self.kernels = submodule, submodule("kernels")

    def mixed(self, shapes, device):
        return self.lists(shapes, device, DTYPES, (*DTYPES, torch.float16))

    def on_cpu(self, options: dict) -> dict:
        key = options.get("rounding")
        if key is not None:
            key = self.kernels.StochasticRounding(
                key.seed, key.step.cpu(), key.parameter, key.offset
            )
        residuals = options.get("residuals")
        residuals = None if residuals is None else copies(residuals)
        return {**self.options, **options, "rounding": key, "residuals": residuals}

    def check(self, lists, mode="nearest", layout="plain", together=False, **options) -> None:
        if mode != "nearest":
            options |= rounding_options(self.kernels, mode, lists[0], layout=layout)
        kept, on_cpu = [copies(tensors) for tensors in lists], self.on_cpu(options)
        expected = [copies(tensors) for tensors in lists]
        self.expect(expected, **on_cpu)
        given = list(lists)
        if together:
            given[self.stacked] = stacked(lists[self.stacked])
        self.call(*given, **{**self.options, **options})
        if together:
            pieces = given[self.stacked].split([x.numel() for x in expected[self.stacked]])
            lists[self.stacked] = [
                piece.view(x.shape) for piece, x in zip(pieces, expected[self.stacked], strict=True)
            ]
        for number, (ours, theirs) in enumerate(zip(lists, expected, strict=True)):
            assert_same(ours, kept[number] if number < self.read else theirs)
        if mode == "residual":
            assert_same(options["residuals"], on_cpu["residuals"])


class Momentum(Op):
    modes = ("nearest",)
    read = 1
    stacked = 2
    options = {"mu": 0.95, "nesterov": True, "form": "heavy_ball"}  # noqa: RUF012
    variants = tuple(
        {"form": form, "nesterov": nesterov}
        for form, nesterov in itertools.product(("heavy_ball", "ema"), (False, True))
    )

    def lists(self, shapes, device, dtypes=torch.float32, others=torch.float32, layout="plain"):
        grads = draw(shapes, dtypes, seed=0, layout=layout, device=device)
        buffers = draw(shapes, torch.float32, seed=1, layout=layout, device=device)
        return [grads, buffers, draw(shapes, others, seed=2, layout=layout, device=device)]

    def mixed(self, shapes, device):
        grads, _, out = self.lists(shapes, device, DTYPES, (torch.float16, *DTYPES, torch.float16))
        return [grads, draw(shapes, (*DTYPES, torch.float32), seed=1, device=device), out]

    def call(self, *lists, **options):
        return self.kernels.momentum(*lists, **options)

    def expect(self, lists, *, mu, nesterov, form, scale=None, **_) -> None:
        reference = self.submodule("reference.update")
        for k, (grad, buffer, out) in enumerate(zip(*lists, strict=True)):
            found = reference.momentum(grad, buffer, mu, nesterov=nesterov, ema=form == "ema")
            out.copy_(found if scale is None else found * scale[k].cpu())


class ApplyUpdate(Op):
    variants = tuple(
        {"cautious": cautious, "shaped_decay": shaped}
        for cautious, shaped in itertools.product((False, True), (False, True))
    )
    options = {"lr": 0.02, "weight_decay": 0.1}  # noqa: RUF012
    stacked = 1

    def lists(self, shapes, device, dtypes=torch.float32, others=torch.float32, layout="plain"):
        return [
            draw(shapes, dtypes, seed=0, layout=layout, device=device),
            draw(shapes, others, seed=1, layout=layout, device=device),
        ]

    def call(self, params, updates, **options):
        factors = [0.1 * (k + 1) for k in range(len(params))]
        self.kernels.apply_update(params, updates, **{"factors": factors, **options})

    def expect(self, lists, **options) -> None:
        factors = [0.1 * (k + 1) for k in range(len(lists[0]))]
        defaults = {"factors": factors, "shaped_decay": False, "cautious": False, "beta2": None}
        module = self.submodule("kernels.step.apply_update")
        module._reference(*lists, **{"second_moments": None, **defaults, **options})


class AdamW(Op):
    options = ADAMW

    def lists(self, shapes, device, dtypes=torch.float32, others=torch.float32, layout="plain"):
        return draw_lists(shapes, device, dtypes, others, layout)

    def call(self, *lists, **options):
        self.kernels.adamw(*lists, **options)

    def expect(self, lists, **options) -> None:
        self.submodule("kernels.step.adamw")._reference(*lists, **options)


OPS = {"momentum": Momentum, "apply_update": ApplyUpdate, "adamw": AdamW}
IN_MODES = [(name, mode) for name, kind in OPS.items() for mode in kind.modes]
in_modes = pytest.mark.parametrize(("name", "mode"), IN_MODES)


@pytest.fixture(scope="module")
def op_of(submodule):
    made = {name: kind(submodule) for name, kind in OPS.items()}
    return made.__getitem__


@pytest.mark.kernels_ci
@in_modes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_same_bits_as_the_reference(op_of, device, dtypes, layout, name, mode):
    """Also from and to one tensor, whose entries start unaligned behind odd shapes."""
    op = op_of(name)
    for options, together in itertools.product(op.variants, (False, True)):
        if together and op.stacked is None:
            continue
        if name == "momentum":
            options = {**options, "scale": torch.rand(len(SHAPES), device=device) + 0.5}
        op.check(op.lists(SHAPES, device, *dtypes, layout), mode, layout, together, **options)


@in_modes
def test_one_list_of_every_dtype_and_layout(op_of, device, name, mode):
    """More tensors than one launch of any kernel holds, tiny ones among them."""
    op, layouts = op_of(name), itertools.cycle(LAYOUTS)
    lists = op.mixed((*SHAPES * 5, *(((k * 7919) % 3000 + 1,) for k in range(400))), device)
    for number in range(min(len(lists), 4)):
        next(layouts)
        lists[number] = [LAYOUTS[next(layouts)](x) for x in lists[number]]
    op.check(lists, mode)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@in_modes
def test_nan_and_inf_propagate(op_of, device, name, mode, bad):
    op = op_of(name)
    lists = op.lists([(300, 5), (7,), (64,)], device, DTYPES)
    for tensor in lists[0 if name == "momentum" else 1]:
        tensor.view(-1)[3] = bad
    op.check(lists, mode, **({"cautious": True} if name == "apply_update" else {}))
    written = lists[1] if name == "momentum" else lists[0]
    assert all((~x.isfinite()).sum() == 1 for x in written)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", OPS)
def test_any_list(op_of, device, name, data):
    op, count = op_of(name), data.draw(st.integers(1, 12))
    shapes = [tuple(data.draw(st.lists(st.integers(0, 40), max_size=3))) for _ in range(count)]
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    lists = op.lists(shapes, device, DTYPES, DTYPES[::-1], layout)
    other = data.draw(st.sampled_from(sorted(LAYOUTS)))
    lists[1] = [LAYOUTS[other](x) for x in lists[1]]
    if name == "momentum":
        options = {"mu": data.draw(st.floats(0, 0.999)), "nesterov": data.draw(st.booleans())}
    else:
        options = {"lr": data.draw(st.floats(0, 1))}
    op.check(lists, data.draw(st.sampled_from(op.modes)), **options)


EMPTY = {
    "momentum": "grads is empty, but buffers has 1",
    "apply_update": "params is empty, but updates has 1",
    "adamw": "params is empty, but another list is not",
}


@pytest.mark.parametrize("name", OPS)
def test_empty_list(op_of, name):
    op = op_of(name)
    lists = [[] for _ in op.lists([(1,)], "cpu")]
    op.call(*lists, **op.options)
    lists[1] = [torch.zeros(1)]
    with pytest.raises(ValueError, match=EMPTY[name]):
        op.call(*lists, **op.options)


@pytest.mark.parametrize("name", OPS)
def test_meta_and_explain(opt, op_of, name):
    op = op_of(name)
    op.call(*op.lists([(6, 4), (6, 4)], "meta"), **op.options)
    said = opt.explain(name, device="xpu")
    assert said.startswith("reference: the loaded variant has no")


def put(number: int, entry):
    """A change of the second tensor of a list, by a function of what is there, or to it."""

    def edit(lists) -> None:
        old = lists[number][1]
        lists[number][1] = entry(old) if callable(entry) else entry

    return edit


def pop(number: int):
    return lambda lists: lists[number].pop()


def int16(*shape):
    return torch.zeros(shape, dtype=torch.int16)


def wild(lists) -> None:
    strided = torch.zeros((3,) * 7, device=lists[0][0].device)[(slice(None, None, 2),) * 7]
    lists[:] = [[strided], [strided.clone()], [strided]]


# (op, change of its lists, options, error, message); the second parameter is bfloat16 where both
# are (6, 4) in apply_update.
MOMENTS = {"second_moments": [(6, 2)] * 2, "beta2": 0.9}
BREAKS = [
    ("momentum", pop(1), {}, ValueError, "buffers has 1 entries and grads has 2"),
    ("momentum", put(2, lambda x: x.mT), {}, ValueError, r"out\[1\] has shape \(4, 6\), grads\[1"),
    ("momentum", put(0, torch.Tensor.int), {}, TypeError, r"grads\[1\] must be one of .* got .*32"),
    ("momentum", put(0, None), {}, TypeError, r"grads\[1\] must be a tensor"),
    ("momentum", put(1, lambda x: x[:1].expand(6, 4)), {}, ValueError, r"buffers\[1\] is expanded"),
    ("momentum", wild, {}, ValueError, "only contiguous tensors may have more than 6"),
    ("momentum", None, {"form": "nesterov"}, ValueError, r"form must be one of .* got 'nesterov'"),
    ("momentum", None, {"scale": (3,)}, ValueError, r"scale must be \(2,\) float32, got \(3,\)"),
    ("apply_update", pop(1), {}, ValueError, "updates has 1 entries and params has 2"),
    ("apply_update", None, {"factors": [1.0]}, ValueError, "factors has 1 entries for 2"),
    ("apply_update", put(1, lambda x: x.mT), {}, ValueError, r"updates\[1\] has shape \(4, 6\)"),
    ("apply_update", put(1, torch.Tensor.long), {}, TypeError, r"updates\[1\] must be one of"),
    ("apply_update", None, {"lr": (2,)}, ValueError, r"lr must be a number or .*shape \(2,\)"),
    ("apply_update", None, {"second_moments": [(6, 1)] * 2}, ValueError, "moments needs beta2"),
    ("apply_update", None, MOMENTS, ValueError, r"second_moments\[0\] must be \(..., m, 1\) or"),
    ("apply_update", None, {"residuals": [None, (6, 4)]}, TypeError, r"\[1\] must be int16, got"),
    ("apply_update", None, {"residuals": [None, None]}, ValueError, r"residuals\[1\] is None"),
    ("apply_update", None, {"residuals": [int16(6, 4)] * 2}, ValueError, r"s\[0\] must be None"),
    ("adamw", pop(2), {}, ValueError, "exp_avgs has 1 entries and params has 2"),
    ("adamw", put(3, lambda x: x.mT), {}, ValueError, r"exp_avg_sqs\[1\] has shape \(4, 6\), para"),
    ("adamw", put(2, torch.Tensor.bfloat16), {}, TypeError, r"exp_avgs\[1\] must be .*bfloat16"),
    ("adamw", put(4, torch.Tensor.long), {}, TypeError, r"steps\[1\] must be a float32 tensor"),
    ("adamw", put(4, torch.ones(2)), {}, ValueError, r"steps\[1\] must have one element"),
    ("adamw", put(0, lambda x: x[:1].expand(6, 4)), {}, ValueError, r"params\[1\] is expanded"),
    ("adamw", None, {"betas": (0.9,)}, ValueError, "betas must be two"),
]


def made(value, device):
    """Tensors of ones for shapes, in lists too."""
    if isinstance(value, list):
        return [made(entry, device) for entry in value]
    if isinstance(value, tuple) and all(isinstance(size, int) for size in value):
        return torch.ones(value, device=device)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("name", "edit", "options", "error", "message"),
    BREAKS,
    ids=[f"{row[0]}-{row[-1]}" for row in BREAKS],
)
def test_errors_say_what_and_write_nothing(op_of, device, name, edit, options, error, message):
    op = op_of(name)
    dtypes = (torch.float32, torch.bfloat16) if name == "apply_update" else torch.float32
    lists = op.lists([(6, 4), (6, 4)], device, dtypes)
    first = [tensors[0] for tensors in lists]
    kept = copies(first)
    if edit is not None:
        edit(lists)
    options = {key: made(value, device) for key, value in options.items()}
    with pytest.raises(error, match=message):
        op.call(*lists, **{**op.options, **options})
    assert_same(first, kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["apply_update", "adamw"])
def test_opcheck(ops, device, name, mode):
    params = [torch.ones(6, 4, device=device), torch.ones(3, 2, device=device).bfloat16()]
    one = torch.ones((), device=device)
    residuals = [int16(0).to(device), int16(3, 2).to(device)] if mode == "residual" else []
    ids = [0, 1] if mode == "stochastic" else []
    tail = (residuals, 3, one if mode == "stochastic" else None, ids, ids)
    if name == "adamw":
        lists = draw_lists([(6, 4), (3, 2)], device, (torch.float32, torch.bfloat16))
        scalars = (0.0, one * 0.1, 0.9, None, 0.95, None, 1e-8, None, 0.1, None)
    else:
        lists = (params, [torch.ones_like(p, dtype=torch.float16) for p in params])
        second = [torch.ones(6, 1, device=device), torch.ones(1, 2, device=device)]
        scalars = (0.0, one, [1.0, 1.0], 0.1, None, False, True, second, 0.9)
    torch.library.opcheck(getattr(ops, name).default, (*lists, *scalars, *tail))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_amax_and_sum_of_squares(op_of, device, layout):
    """amax is exact. Squares: 16 per thread one by one, then trees of 32 and 8; 32 roundings."""
    op, shapes = op_of("momentum"), (*SHAPES, (301, 997))
    wide = op.lists(shapes, device, layout=layout)
    op.call(*wide, **op.options)
    for place in (list, stacked):
        grads, buffers, out = op.lists(shapes, device, others=torch.float16, layout=layout)
        stats = op.call(grads, buffers, place(out), **op.options)
        assert stats.shape == (len(shapes), 2) and stats.dtype == torch.float32
        for (amax, squares), direction in zip(stats.tolist(), wide[2], strict=True):
            exact = direction.double()
            assert amax == (exact.abs().max().item() if exact.numel() else 0.0)
            total = exact.square().sum().item()
            assert abs(squares - total) <= 32 * 2.0**-24 * total


def test_stats_do_not_depend_on_the_other_entries(op_of, device):
    """Nor on how many launches there are."""
    op, count = op_of("momentum"), 400
    shapes = [(k % 60 + 1, 37 * (k % 60) + 1) for k in range(count)]
    lists = op.lists(shapes, device, others=torch.float16)

    def run(chosen):
        return op.call(*(copies([x[k] for k in chosen], device) for x in lists), **op.options)

    together = run(range(count))
    assert_same([run(range(count))], [together])
    assert_same([torch.cat([run([k]) for k in range(count)])], [together])
    assert_same([run(range(count - 1, -1, -1)).flip(0)], [together])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_nan_and_inf_stay_in_the_stats_of_their_tensor(op_of, device, bad):
    op = op_of("momentum")
    lists = op.lists([(300, 5), (7,), (4096,)], device)
    lists[0][0][170, 3] = bad
    stats = op.call(*lists, **op.options)
    assert not stats[0].isfinite().any() and stats[1:].isfinite().all()
    assert stats[0].isnan().all() == (bad != bad)


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
def test_a_stacked_tensor_that_does_not_fit_is_said(kernels, device, make, error, message) -> None:
    lists = [[torch.ones(6, 4, device=device) for _ in range(2)] for _ in range(2)]
    with pytest.raises(error, match=message):
        kernels.momentum(*lists, make(device), mu=0.9, nesterov=True, form="ema")
    with pytest.raises(error, match=message):
        kernels.apply_update(lists[0], make(device), lr=1.0, factors=[1.0, 1.0], weight_decay=0.1)
    for tensors in lists:
        assert all((tensor == 1).all() for tensor in tensors)


def test_opcheck_of_a_stacked_tensor(ops, device) -> None:
    lists = [[torch.ones(6, 4, device=device) for _ in range(2)] for _ in range(2)]
    batch = torch.zeros(2, 6, 4, device=device)
    torch.library.opcheck(ops.momentum.default, (*lists, [], 0.9, True, False, None, batch))
    apart, scale = list(torch.zeros_like(batch)), torch.ones(2, device=device)
    torch.library.opcheck(ops.momentum.default, (*lists, apart, 0.9, True, False, scale))
    scalars = (0.1, None, [1.0, 1.0], 0.1, None, False, False, [], 0.0, [], 0, None, [], [])
    torch.library.opcheck(ops.apply_update.default, (lists[0], [], *scalars, batch))


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
        kernel_launches(lambda: kernels.adamw(*lists, **ADAMW)),
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
    kernels.adamw([lists[0]], [lists[1]], [average], [square], step, **ADAMW)
    kernels.adamw(*small, **ADAMW)
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
