"""momentum on every path: bit for bit the reference, whatever the list."""

from __future__ import annotations

import pytest
import torch

from ..conftest import module_fixture
from ._tensors import DTYPES, LAYOUTS, SHAPES, assert_same, copies, draw

momentum = module_fixture("kernels", "momentum")


@pytest.fixture(scope="module")
def expect(submodule):
    """`expect(grads, buffers, out dtypes, ...)`: the reference, tensor by tensor, on the CPU."""
    reference = submodule("reference.update")

    def run(grads, buffers, dtypes, *, mu=0.95, nesterov=True, form="heavy_ball", scale=None):
        buffers, out, directions = copies(buffers), [], []
        for k, (grad, buffer) in enumerate(zip(copies(grads), buffers, strict=True)):
            ema = form == "ema"
            direction = reference.momentum(grad, buffer, mu, nesterov=nesterov, ema=ema)
            directions.append(direction)
            scaled = direction if scale is None else direction * scale[k].cpu()
            out.append(scaled.to(dtypes[k % len(dtypes)]))
        return buffers, out, directions

    return run


def outputs(tensors, dtypes, layout="plain"):
    return [
        LAYOUTS[layout](torch.empty(x.shape, dtype=dtypes[k % len(dtypes)], device=x.device))
        for k, x in enumerate(tensors)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_amax_and_sum_of_squares(momentum, expect, device, layout):
    """amax is exact. Squares: 16 per thread one by one, then trees of 32 and 8; 32 roundings."""
    shapes = (*SHAPES, (301, 997))
    grads = draw(shapes, torch.float32, seed=0, layout=layout, device=device)
    buffers = draw(shapes, torch.float32, seed=1, layout=layout, device=device)
    _, _, directions = expect(grads, buffers, [torch.float16])
    stats = momentum(
        grads, buffers, outputs(grads, [torch.float16]), mu=0.95, nesterov=True, form="heavy_ball"
    )
    assert stats.shape == (len(shapes), 2) and stats.dtype == torch.float32
    for (amax, squares), direction in zip(stats.tolist(), directions, strict=True):
        exact = direction.double()
        assert amax == (exact.abs().max().item() if exact.numel() else 0.0)
        total = exact.square().sum().item()
        assert abs(squares - total) <= 32 * 2.0**-24 * total


def test_stats_do_not_depend_on_the_other_entries(momentum, device):
    shapes = [(k + 1, 37 * k + 1) for k in range(60)]
    grads = draw(shapes, torch.float32, seed=0, device=device)
    buffers = draw(shapes, torch.float32, seed=1, device=device)
    options = {"mu": 0.95, "nesterov": True, "form": "heavy_ball"}

    def run(chosen):
        picked = [grads[k] for k in chosen]
        return momentum(
            picked,
            copies([buffers[k] for k in chosen], device),
            outputs(picked, [torch.float16]),
            **options,
        )

    together = run(range(60))
    assert_same([run(range(60))], [together])
    assert_same([torch.cat([run([k]) for k in range(60)])], [together])
    assert_same([run(range(59, -1, -1)).flip(0)], [together])


def test_four_hundred_tensors(momentum, expect, device):
    """More than one launch of any kernel holds, tiny ones among them."""
    shapes = [((k * 7919) % 3000 + 1,) for k in range(400)] + [(0,)] * 7
    grads = draw(shapes, DTYPES, seed=0, device=device)
    buffers = draw(shapes, torch.float32, seed=1, device=device)
    out = outputs(grads, [torch.float16])
    expected = expect(grads, buffers, [torch.float16])
    stats = momentum(grads, buffers, out, mu=0.95, nesterov=True, form="heavy_ball")
    assert_same(buffers, expected[0])
    assert_same(out, expected[1])
    largest = [d.abs().max() if d.numel() else torch.zeros(()) for d in expected[2]]
    assert_same([stats[:, 0].contiguous()], [torch.stack(largest)])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_nan_and_inf_stay_in_their_tensor(momentum, expect, device, bad):
    grads = draw([(300, 5), (7,), (4096,)], torch.float32, seed=0, device=device)
    buffers = draw([(300, 5), (7,), (4096,)], torch.float32, seed=1, device=device)
    grads[0][170, 3] = bad
    out = outputs(grads, [torch.float32])
    expected = expect(grads, buffers, [torch.float32])
    stats = momentum(grads, buffers, out, mu=0.95, nesterov=True, form="heavy_ball")
    assert_same(buffers, expected[0])
    assert_same(out, expected[1])
    assert not stats[0].isfinite().any() and stats[1:].isfinite().all()
    assert stats[0].isnan().all() == (bad != bad)


def test_float64_takes_the_reference(momentum, expect, device):
    grads = draw([(9, 4)], torch.float64, seed=0, device=device)
    buffers = draw([(9, 4)], torch.float64, seed=1, device=device)
    out = outputs(grads, [torch.float64])
    expected = copies(buffers)
    expected[0].mul_(0.5).add_(grads[0].cpu())
    stats = momentum(grads, buffers, out, mu=0.5, nesterov=False, form="heavy_ball")
    torch.testing.assert_close(buffers[0].cpu(), expected[0], rtol=1e-15, atol=0)
    assert torch.equal(out[0], buffers[0])
    assert stats[0, 0] == out[0].abs().max().float()


def three(device, shape=(6, 4)):
    return [[torch.ones(shape, device=device) for _ in range(2)] for _ in range(3)]


def test_more_errors(momentum, device):
    lists = three(device)
    with pytest.raises(ValueError, match=r"form must be one of .* got 'nesterov'"):
        momentum(*lists, mu=0.9, nesterov=True, form="nesterov")
    with pytest.raises(ValueError, match=r"scale must be \(2,\) float32, got \(3,\)"):
        momentum(*lists, mu=0.9, nesterov=True, form="ema", scale=torch.ones(3, device=device))
    wild = torch.zeros((3,) * 7, device=device)[(slice(None, None, 2),) * 7]
    with pytest.raises(ValueError, match="only contiguous tensors may have more than 6"):
        momentum([wild], [wild.clone()], [wild], mu=0.9, nesterov=True, form="ema")


def test_opcheck(ops, device):
    grads, buffers, out = three(device)
    arguments = (grads, buffers, out, 0.9, True, False, torch.ones(2, device=device))
    torch.library.opcheck(ops.momentum.default, arguments)


def test_meta_and_explain(opt, momentum):
    grads, buffers, out = three("meta")
    stats = momentum(grads, buffers, out, mu=0.5, nesterov=False, form="ema")
    assert stats.shape == (2, 2) and stats.is_meta
    assert opt.explain("momentum", device="xpu").startswith("reference: the loaded variant has no")
