"""Several ranks equal one, bit for bit: parameters and state, on every mesh and placement.

And so with the options of nanochat, whose script runs with our class in the place of its own.
"""

import functools
import math
import random

import pytest
import torch
from torch import distributed, nn

from .._compare import relative_error
from ..optimizers.test_update_rules import JULY, NanochatMuonAdamW, script
from ._cases import (
    CASES,
    Case,
    assert_tensors_equal,
    bits,
    device,
    mesh_of,
    placed_like,
    run_alone,
    run_together,
    spread,
    tensors_of,
    whole,
)
from ._ranks import on_ranks
from .test_partition import give, gradients, message_of, on_all, outcome, placed

pytestmark = pytest.mark.dist


def compare(opt, cases: list[Case], offload: bool = False) -> None:
    """Every case has on all ranks the bits that it has on one."""
    compared = 0
    for case in cases:
        many = run_together(opt, case, offload=offload)
        compared += assert_tensors_equal(many, run_alone(opt, case), str(case))
    assert compared > 4 * len(cases)


@pytest.mark.sees_defect("other DTensors must be routed or refused, never taken for local tensors")
@pytest.mark.sees_defect("state depends on the number of ranks")
@pytest.mark.sees_defect("dion's NorMuon normalizes per shard")
@pytest.mark.sees_defect("the path to compare with runs on CUDA only")
@pytest.mark.sees_defect(
    "plans are cached by names, so that other shapes or meshes reuse wrong indices"
)
@pytest.mark.sees_defect("directions are rounded to bfloat16 on the way to their owner")
@on_ranks()
def test_many_ranks_equal_one(opt, world, device) -> None:
    """Shards of any kind, replicas, experts, missing gradients."""
    generator = random.Random(world)
    compare(opt, [Case.random(generator, world, device.type) for _ in range(CASES[world])])


NAMES = ("layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight")
SHAPES = ((12, 6), (4, 6))  # three query heads of four rows, one key head
CONFIG = {"q_indices": [0, 1, 2], "k_indices": [0, 0, 0], "head_dim": 4, "threshold": 10.0}


def clip_on_shards(opt, shape: tuple[int, ...], texts: tuple[str, ...], rounding: str) -> int:
    """Two clipped steps on shards and on one rank; returns how many tensors were compared."""
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    grads = [[torch.randn(s, generator=generator).bfloat16() for s in SHAPES] for _ in range(2)]
    results = []
    for place in (torch.clone, lambda tensor: spread(tensor, mesh_of(shape), *texts)):
        params = [nn.Parameter(place(start)) for start in starts]
        optimizer = opt.Muon(
            zip(NAMES, params, strict=True), rounding=rounding, clip_config=CONFIG, lr=0.02
        )
        for of_step in grads:
            give(params, of_step)
            optimizer.step(qk_logits={0: torch.tensor([40.0, 5.0, 20.0])})
        results.append(tensors_of(optimizer, dict(zip(NAMES, params, strict=True))))
    alone, together = results
    return assert_tensors_equal(together, alone, str(texts))


@pytest.mark.parametrize("rounding", ["nearest", "residual"])
@pytest.mark.parametrize(
    ("mesh", "texts"),
    [
        ((3,), ("S0",)),  # four, four and four rows of 12, and two, two and none of 4
        ((3,), ("S1",)),
        ((3,), ("R",)),
        ((2, 2), ("T2", "S0")),  # rows that do not lie side by side
    ],
    ids=str,
)
def test_qk_clip_scales_the_rows_that_are_here(ranks, mesh, texts, rounding) -> None:
    for compared in ranks(math.prod(mesh)).run(clip_on_shards, mesh, texts, rounding):
        assert compared == (4 if rounding == "nearest" else 6)


# Of rank 0, 1 and 2. Only the whole says what is to be clipped by how much.
LOGITS = [[40.0, 5.0, math.nan], [11.0, math.inf, 20.0], None]
LARGEST = [40.0, 5.0, 20.0]


@pytest.mark.parametrize("held", ["S0", "R", "process_group", "unreduced"])
@on_ranks(3)
def test_ranks_clip_by_the_largest_logits_of_all(opt, held) -> None:
    """Each measures on its own part of the data; replicas would drift apart."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    arguments = {}
    if held == "process_group":
        arguments = {"process_group": distributed.group.WORLD}
    elif held == "unreduced":
        arguments = {"gradients": "unreduced", "reduce_op": "sum"}
    results = []
    for alone in (False, True):
        generator = torch.Generator().manual_seed(3)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        if not alone and held in ("S0", "R"):
            params = placed(params, mesh_of((world,)), held)
        group = {"kind": "muon", "params": params, "names": NAMES, "lr": 0.02}
        optimizer = opt.MuonAdamW([group], clip_config=CONFIG, **({} if alone else arguments))
        for step in range(3):
            for param, shape in zip(params, SHAPES, strict=True):
                grad = torch.randn(shape, generator=generator)
                if not alone and held == "unreduced" and rank != step:
                    grad = torch.zeros(shape)  # all of it comes from one rank
                param.grad = placed_like(param, grad)
            given = LARGEST if alone else LOGITS[(rank + step) % 3]
            if step == 1:
                given = None  # of nobody
            optimizer.step(qk_logits=given and {0: torch.tensor(given)})
        results.append([bits(whole(param)) for param in params])
    assert results[0] == results[1]


@pytest.mark.parametrize("held", ["muon", "adamw", "replicas"])
@on_ranks(2)
def test_noise_that_would_depend_on_the_ranks_is_refused(opt, held) -> None:
    """Of shards; and of replicas that share the work, which a plan finds out."""
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    if held == "replicas":
        param.grad = torch.ones_like(param)
        optimizer = opt.Muon([param], rounding="stochastic", process_group=distributed.group.WORLD)
        message, written = outcome(optimizer, [param])
        assert not written
    else:
        sharded = placed([param], mesh_of((2,)), "S0")
        group = {"kind": held, "params": sharded, "lr": 1e-3, "rounding": "stochastic"}
        message = message_of(lambda: opt.MuonAdamW([group]))
        assert "use rounding='residual'" in message
    assert message.startswith("ValueError: ")
    assert "rounding='stochastic' is not supported" in message


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-30, 1e30])
@on_ranks(3)
def test_the_wire_keeps_eleven_bits_of_tiny_gradients(opt, scale) -> object:
    """Bfloat16 would keep 8, float16 without a scale nothing of the tiny ones."""
    results = []
    for dtype in (torch.float32, torch.float16):
        params, config = on_all("S1", [(24, 96)]), opt.DistributedConfig(dtype)
        options = {"lr": 1.0, "adjust_lr_fn": "none", "weight_decay": 0.0}
        optimizer = opt.Muon(params, **options, distributed=config)
        give(params, [grad * scale for grad in gradients(params, 0)])
        optimizer.step()
        results.append(params[0].detach().full_tensor())
    (grad,) = gradients(params, 0)
    coarse = opt.orthogonalize(grad.bfloat16().float()) - opt.orthogonalize(grad)
    error = (results[0] - results[1]).norm().item()
    coarse = coarse.norm().item()
    # Three bits more are an eighth of the error; the update is rounded to eleven bits as well.
    assert 0 < error < coarse / 4
    return error, coarse


@pytest.mark.parametrize("wire", [torch.float32, torch.float16])
@on_ranks(3)
def test_nan_and_inf_on_one_rank_stay_in_their_matrix_on_all(opt, wire) -> list[bytes]:
    params = on_all("S0")
    optimizer = opt.Muon(params, distributed=opt.DistributedConfig(wire))
    give(params, gradients(params, 0))
    if distributed.get_rank() == 1:
        params[0].grad.to_local()[0, 0] = float("nan")
        params[3].grad.to_local()[0, 0] = float("inf")
    optimizer.step()
    full = [param.detach().full_tensor() for param in params]
    assert full[0].isnan().all() and full[3].isnan().all()
    assert not any(full[i].isnan().any() for i in (1, 2, 4, 5))
    return [bits(tensor.nan_to_num()) for tensor in full]


def losses(opt) -> list[float]:
    place = {"rank": distributed.get_rank(), "world": distributed.get_world_size()}
    theirs = script(NanochatMuonAdamW, 50, **place)
    ours = script(functools.partial(opt.DistMuonAdamW, **JULY), 50, **place)
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0.0)
    return theirs


def test_the_script_runs_with_our_class(ranks) -> None:
    """Nothing in it but the class is another; every rank sees other data."""
    first, second = ranks(2).run(losses)
    assert first != second


JULY_SHAPES = {"a": (12, 8), "b": (8, 12), "c": (12, 8), "d": (30, 7), "e": (8, 8)}
JULY_OPTIONS = {
    "july": JULY,
    "july without variance reduction": {**JULY, "beta2": None},
    "transposed": {**JULY, "transposed": True, "split_sizes": {"b": (3, 9), "e": (4, 4)}},
    "heads in columns": {"transposed": True, "num_heads": {"a": 2, "b": 4}},
}


@pytest.mark.parametrize("options", JULY_OPTIONS.values(), ids=JULY_OPTIONS)
@pytest.mark.parametrize("sharing", ["unreduced", "replicas", "sharded"])
@on_ranks(2)
def test_ranks_give_the_bits_of_one_process(opt, sharing, options) -> None:
    """Norms are of whole rows and matrices, which their owner has: also with columns sharded."""
    mesh = mesh_of((distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in JULY_SHAPES.values()]
    alone = [nn.Parameter(value.to(device())) for value in drawn]
    shared = [nn.Parameter(param.detach().clone()) for param in alone]
    if sharing == "sharded":
        shared = [nn.Parameter(spread(p.data, mesh, f"S{k % 2}")) for k, p in enumerate(shared)]
    options = {"kind": "muon", "lr": 0.1, "names": [*JULY_SHAPES], **options}
    make = {
        "unreduced": opt.DistMuonAdamW,
        "replicas": functools.partial(opt.MuonAdamW, process_group=distributed.group.WORLD),
        "sharded": opt.MuonAdamW,
    }[sharing]
    one, many = opt.MuonAdamW([{**options, "params": alone}]), make([{**options, "params": shared}])
    for _ in range(3):
        for param, piece in zip(alone, shared, strict=True):
            # Of eight bits, so that the contributions of both ranks have exactly this mean.
            grad = torch.randn(param.shape, generator=generator).bfloat16().float().to(device())
            param.grad = grad
            of_rank = 0.5 + distributed.get_rank() if sharing == "unreduced" else 1
            piece.grad = placed_like(piece, grad * of_rank)
        one.step()
        many.step()
    for param, piece in zip(alone, shared, strict=True):
        assert bits(param) == bits(whole(piece))


@pytest.mark.parametrize("sharding", ["replicas", "sharded"])
@on_ranks(2)
def test_the_size_of_gradients_changes_nothing_on_a_float16_wire(opt, sharding) -> None:
    """The wire multiplies every matrix by a power of two; rows get the norm 1 behind it.

    Float16 rounds the directions: 6e-4 to 8e-4 of an update.
    """
    mesh = mesh_of((distributed.get_world_size(),))

    def stepped(factor: float, sharding: str = "", **options) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = []
        for number, shape in enumerate(JULY_SHAPES.values()):
            grad = torch.randn(shape, generator=generator) * factor
            grad = (grad * torch.logspace(0, -3, shape[0])[:, None]).to(device())
            value = torch.zeros_like(grad)
            if sharding == "sharded":
                value, grad = (spread(x, mesh, f"S{number % 2}") for x in (value, grad))
            params.append(nn.Parameter(value))
            params[-1].grad = grad
        rule = {"lr": 1.0, "weight_decay": 0.0, "dtype": torch.float32, **JULY}
        opt.Muon(params, **rule, **options).step()
        return [whole(param.detach()) for param in params]

    alone = torch.cat([param.flatten() for param in stepped(2.0**-20)])
    options = {"distributed": opt.DistributedConfig(torch.float16)}
    if sharding == "replicas":
        options["process_group"] = distributed.group.WORLD
    found, errors = [], []
    for factor in (1.0, 2.0**-20, 1e-5):
        params = stepped(factor, sharding, **options)
        found.append([bits(param) for param in params])
        errors.append(relative_error(torch.cat([p.flatten() for p in params]), alone))
    plain, small, other = found
    assert small == plain != other
    assert max(errors) < 2e-3, errors
