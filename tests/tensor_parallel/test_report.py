"""Why a product is not fused: every reason, what is said and raised; no device, no ranks.

And what is left of graphs that torch's own pass has been over: it runs on a CPU, on traces of fake
tensors, if torch is told that it has NCCL and that the group has symmetric memory.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed import _symmetric_memory as symmetric_memory

from .._compare import assert_error_at_most

GPU = torch.device("cuda", 0)
LARGE = 2**14
ASKED = {"group": "0", "fuse": "auto", "workspace": 2**20, "scaled": False, "layout": None}
ASKED["gathers"] = LARGE**2


@dataclass(frozen=True)
class Group:
    """As much of a process group of two ranks as is asked."""

    group_name: str

    def size(self) -> int:
        return 2


def matrix(rows: int = LARGE, columns: int = LARGE, **changes) -> SimpleNamespace:
    """What is asked of a left operand on a GPU, which need not be there."""
    known = {"is_cuda": True, "device": GPU, "dtype": torch.bfloat16, "shape": (rows, columns)}
    return SimpleNamespace(**known | changes)


@pytest.fixture
def machine(monkeypatch, fused):
    """One host whose GPUs all serve; `capturing` and `prepared` can be set."""
    state = SimpleNamespace(capturing=False, prepared=None, preparations=0, on=[], enlarged=[])
    state.bytes, state.enlargement = 2**20, None
    group = Group("0")

    def prepare(*_):
        assert state.on == [GPU]
        state.preparations += 1
        return state.prepared

    def enlarge(_, size, device):
        assert state.on == [device]
        state.enlarged.append(size)
        state.bytes = size
        return state.enlargement

    @contextlib.contextmanager
    def on_device_of(a):
        state.on.append(a.device)
        yield
        state.on.pop()

    def capturing():
        assert state.on == [GPU]  # asks about the current device's stream
        return state.capturing

    monkeypatch.setattr(fused, "resolved", lambda _: group)
    monkeypatch.setattr(fused, "_prepared", {})
    monkeypatch.setattr(fused, "_prepare", prepare)
    monkeypatch.setattr(fused, "has_float8_products", lambda _: True)
    monkeypatch.setattr(fused, "_captured", {})
    monkeypatch.setattr(fused, "_enlarged", enlarge)
    monkeypatch.setattr(fused, "on_device_of", on_device_of)
    monkeypatch.setattr(fused, "_workspace_bytes", lambda _: state.bytes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    return state


def test_large_products_are_fused(fused, report, machine, monkeypatch) -> None:
    for _ in range(2):
        assert fused.why_not(matrix(), **ASKED) is None
    assert machine.preparations == 1  # ranks prepare a group once, together
    monkeypatch.setattr(fused, "has_float8_products", lambda _: False)
    assert fused.why_not(matrix(), **ASKED | {"scaled": True}) == report.NO_FP8
    assert fused.why_not(matrix(), **ASKED) is None
    fused._prepared.clear()
    machine.prepared = "the ranks of the group are on 2 hosts"
    assert fused.why_not(matrix(), **ASKED) == machine.prepared


SMALL = 2048 * 8192 * 2  # bytes of all ranks; twice as many are gathered fused
SCATTERED = 2048 * 3584 * 2


@pytest.mark.parametrize(
    ("name", "arguments", "changes"),
    [
        ("ASKED", {}, {"fuse": "never"}),
        ("ON_CPU", {"is_cuda": False}, {}),
        ("SMALL", {}, {"gathers": SMALL}),
        ("SMALL", {}, {"gathers": 0, "scatters": SCATTERED}),
        (None, {}, {"gathers": 2 * SMALL}),
        (None, {}, {"gathers": 0, "scatters": 2 * SCATTERED}),
        (None, {"rows": 8, "columns": 8}, {"fuse": "always", "gathers": 64}),
    ],
)
def test_reasons_that_need_no_group(fused, report, machine, name, arguments, changes) -> None:
    found = fused.why_not(matrix(**arguments), **ASKED | changes)
    assert found == (name and getattr(report, name))
    assert machine.preparations == (name is None)


def test_reasons_of_a_capture(fused, report, machine) -> None:
    machine.capturing = True
    assert fused.why_not(matrix(), **ASKED) == report.FIRST_IN_CAPTURE
    assert machine.preparations == 0  # it would wait for other ranks
    machine.capturing = False
    assert fused.why_not(matrix(), **ASKED) is None
    machine.capturing = True
    assert fused.why_not(matrix(), **ASKED | {"workspace": 2**21}) == report.WORKSPACE
    assert machine.enlarged == []
    assert fused.why_not(matrix(), **ASKED) is None


def test_workspace_is_enlarged_together_and_a_failure_stays(fused, machine) -> None:
    assert fused.why_not(matrix(), **ASKED) is None and machine.enlarged == []
    larger = ASKED | {"workspace": 2**21}
    assert fused.why_not(matrix(), **larger) is None
    assert fused.why_not(matrix(), **larger) is None
    assert machine.enlarged == [2**21]
    machine.enlargement = "no memory on rank 1"
    assert fused.why_not(matrix(), **ASKED | {"workspace": 2**22}) == "no memory on rank 1"
    assert fused.why_not(matrix(), **ASKED) == "no memory on rank 1"  # small ones too, from now on
    assert machine.enlarged == [2**21, 2**22]


def test_fused_products_run_on_the_device_of_their_tensors(fused, machine, monkeypatch) -> None:
    """And what a CUDA graph has captured keeps its workspace when a larger call follows."""
    ran, workspaces = [], {"0": torch.empty(1)}

    def ran_on(*_, **__):
        ran.append([*machine.on])

    operations = SimpleNamespace(
        fused_all_gather_matmul=ran_on,
        fused_all_gather_scaled_matmul=ran_on,
        fused_matmul_reduce_scatter=ran_on,
        fused_scaled_matmul_reduce_scatter=ran_on,
    )
    torch_ops = SimpleNamespace(ops=SimpleNamespace(symm_mem=operations), cuda=torch.cuda)
    monkeypatch.setattr(fused, "torch", torch_ops)
    monkeypatch.setattr(
        fused.symmetric_memory, "_group_name_to_workspace_tensor", workspaces, raising=False
    )
    one, half = torch.tensor(1.0), torch.bfloat16
    a = matrix()
    a.contiguous = lambda: a

    def all_four() -> None:
        for scale in (None, one):
            mode = "" if scale is None else "tensorwise"
            fused.gathered_product(a, [], scale, [], mode, half, False, 0, "0", False)
            fused.scattered_product(a, a, scale, scale, half, False, "sum", 0, "0")

    all_four()
    assert ran == [[GPU]] * 4 and not fused._captured
    machine.capturing = True
    all_four()
    all_four()
    first = workspaces["0"]
    workspaces["0"] = torch.empty(2)
    all_four()
    (kept,) = fused._captured.values()
    assert [id(one) for one in kept] == [id(first), id(workspaces["0"])]


def test_reasons_of_a_layout(fused, report) -> None:
    gathered, scattered = fused.why_not_gathered, fused.why_not_scattered
    assert gathered(matrix(8, 1024), 1, "", "auto") is None
    assert gathered(matrix(8, 1023), 1, "", "always") == report.NARROW
    assert gathered(matrix(8, 1008), 1, "tensorwise", "always") == report.NARROW
    assert gathered(matrix(8, 4096), 1, "tensorwise", "auto") == report.SCALED_COLUMNS
    assert gathered(matrix(8, 4096), 1, "tensorwise", "always") is None
    assert gathered(matrix(8, 4090), 1, "tensorwise", "always") == report.SCALED_MULTIPLE
    assert gathered(matrix(8, 64), 0, "rowwise_sharded", "auto") is None
    assert gathered(matrix(6, 64), 0, "rowwise_sharded", "auto") == report.SCALE_ALIGNMENT
    assert gathered(matrix(6, 64), 0, "rowwise_replicated", "auto") == report.SCALE_ALIGNMENT
    assert gathered(matrix(6, 64), 0, "tensorwise", "auto") is None
    assert scattered(matrix(24, 64), 1, scaled=True) == report.SCALED_TRANSPOSE
    assert scattered(matrix(32, 64), 1, scaled=True) is None
    assert scattered(matrix(24, 64), 1, scaled=False) is None


@pytest.mark.parametrize("mode", ["tensorwise", "rowwise_replicated"])
def test_scaled_columns_are_added_as_they_arrive(fused, monkeypatch, mode: str) -> None:
    """Our own fused product, whose columns a stand-in of torch's gather brings."""
    made, eight, world = torch.Generator().manual_seed(0), torch.float8_e4m3fn, 4
    a = torch.randn(6, world * 32, generator=made).to(eight)
    bs = [torch.randn(n, world * 32, generator=made).to(eight).t() for n in (8, 16)]
    a_scale = torch.rand(6, 1, generator=made)
    b_scales = [torch.rand(1, b.shape[1], generator=made) for b in bs]
    if mode == "tensorwise":
        a_scale, b_scales = a_scale[0, 0], [scale[0, 0] for scale in b_scales]
    shards, order = [part.contiguous() for part in a.chunk(world, 1)], []

    def gather(shard, consume, gathered, group, keep):
        for rank in (1, 2, 3, 0):  # its own first
            gathered.chunk(world)[rank].copy_(shards[rank])
            consume(shards[rank], rank)

    event = SimpleNamespace(wait=lambda: order.append("wait"), record=lambda: order.append("add"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(fused, "resolved", lambda _: SimpleNamespace(size=lambda: world))
    monkeypatch.setattr(fused, "_running", lambda *_: contextlib.nullcontext())
    name = "_pipelined_all_gather_and_consume_last_dim"
    monkeypatch.setattr(fused.symmetric_memory, name, gather)
    options = (mode, torch.bfloat16, False, 1, "0")
    for keep in (True, False):
        gathered, outs = fused.gathered_product(shards[1], bs, a_scale, b_scales, *options, keep)
        assert torch.equal(gathered.float(), a.float()) if keep else gathered is None
        for out, b, b_scale in zip(outs, bs, b_scales, strict=True):
            exact = (a.double() * a_scale) @ (b.double() * b_scale)
            assert out.dtype == torch.bfloat16
            assert_error_at_most(out, exact, 2 * torch.finfo(torch.bfloat16).eps)
    assert order == ["wait", "add"] * 2 * world  # two streams never add at once


def prepared(
    fused, monkeypatch, *, other=None, failures=(None, None), allocate=None, join=None
) -> str | None:
    """What `_prepare` says where the second rank has these facts, and where this one or the second
    cannot allocate or join: `failures` has the second's reasons.
    """
    mine = {"host": "here", "device": "gpu-0", "seen": ["gpu-0", "gpu-1"], "missing": ""}
    mine |= {"reached": mine["seen"], "overlap": False}
    told = [mine | {"device": "gpu-1"} | (other or {}), *failures]

    def all_gather_object(found, value, group):
        found[:] = [value, told.pop(0)]

    monkeypatch.setattr(fused.distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(fused.SymmetricMemory, "facts", staticmethod(lambda _: mine))
    monkeypatch.setattr(fused, "_enable", lambda _: None)
    allocator = SimpleNamespace(empty_strided_p2p=allocate or (lambda *_: torch.empty(1)))
    monkeypatch.setattr(fused.symmetric_memory, "_SymmetricMemory", allocator)
    monkeypatch.setattr(fused.symmetric_memory, "_group_name_to_workspace_tensor", {})
    join = join or (lambda *_: None)
    monkeypatch.setattr(fused.symmetric_memory, "get_symm_mem_workspace", join)
    return fused._prepare(Group("0"), GPU)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, None),
        ({"host": "there"}, "on several hosts"),
        ({"device": "gpu-0"}, "two ranks use one GPU"),
        ({"missing": "torch too old"}, "rank 1: torch too old"),
    ],
)
def test_ranks_agree_on_what_symmetric_memory_joins(fused, monkeypatch, other, reason) -> None:
    found = prepared(fused, monkeypatch, other=other)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("step", ["allocate", "join"])
def test_a_rank_that_cannot_join_tells_the_others(fused, monkeypatch, step) -> None:
    """And nobody joins unless all could allocate."""
    joined = []

    def refused(*_):
        raise RuntimeError("no peer access\nand more")

    options = {"join": lambda *_: joined.append(1), step: refused}
    here = prepared(fused, monkeypatch, **options)
    assert here.endswith("on rank 0 of the group: RuntimeError: no peer access")
    options[step], failed = None, "RuntimeError: no fabric"
    options |= {"failures": (failed,) if step == "allocate" else (None, failed)}
    there = prepared(fused, monkeypatch, **options)
    assert there.endswith("on rank 1 of the group: RuntimeError: no fabric")
    assert not joined
    workspaces = fused.symmetric_memory._group_name_to_workspace_tensor
    assert not workspaces or step == "join"


def test_reasons_are_counted_and_said_once(report, dispatch, caplog) -> None:
    dispatch.say_once.cache_clear()
    report.reset_comm_report()
    for _ in range(3):
        report.count_plain("an_op", "a reason", strict=False)
    report.count("an_op", report.FUSED)
    records = {(r.path, r.reason): r.calls for r in report.comm_report()}
    assert records == {("plain", "a reason"): 3, ("fused", None): 1}
    assert [r.getMessage() for r in caplog.records] == ["an_op is not fused: a reason"]
    report.reset_comm_report()
    assert report.comm_report() == ()


def test_strict_counts_nothing_that_did_not_run(opt, report) -> None:
    report.reset_comm_report()
    with pytest.raises(opt.CommUnavailable, match="an_op is not fused: a reason"):
        report.count_plain("an_op", "a reason", strict=True)
    report.count_plain("an_op", report.ASKED, strict=True)
    assert [record.calls for record in report.comm_report()] == [1]


@pytest.fixture
def group():
    """A group of two ranks of which only this one is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def gathered(x, dim, group):
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    return gather(x, dim, group)


def scattered(x, dim, group):
    scatter = getattr(functional, "reduce_scatter_single", None)
    return (scatter or functional.reduce_scatter_tensor)(x, "sum", dim, group)


@pytest.fixture
def check(opt, group):
    """`check(function, *sizes)`: what `assert_async_tp_fused` returns of it behind the pass."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def on(function, *sizes, of=None, nccl=True, enabled=True):
        with (
            mock.patch("torch.distributed.is_nccl_available", lambda: nccl),
            symmetric_memory._test_mode(None if enabled else {"another"}),
        ):
            with FakeTensorMode():
                inputs = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
                gm = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
                remove_noop_ops(gm.graph)
                view_to_reshape(gm)
                micro_pipeline_tp_pass(gm.graph)
            return opt.tensor_parallel.assert_async_tp_fused(gm, of)

    return on


# The last dimension of three; that of two is not fused by the pass of torch 2.13.
@pytest.mark.parametrize(
    ("size", "dim", "inner"),
    [((8, 64), 0, 64), ((4, 8, 64), 0, 64), ((4, 8, 64), 1, 64), ((4, 8, 1024), 2, 2048)],
)
def test_fused_gathers_pass(check, group, size, dim, inner) -> None:
    assert check(lambda a, b: gathered(a, dim, group) @ b, size, (inner, 32)) == 1


@pytest.mark.parametrize(
    ("size", "dim"), [*(((8, 64), dim) for dim in (0, 1)), *(((4, 8, 64), dim) for dim in range(3))]
)
def test_fused_scatters_pass(check, group, size, dim) -> None:
    assert check(lambda a, b: scattered(a @ b, dim, group), size, (64, 32)) == 1

    def block(a, b, c):
        return scattered((gathered(a, 0, group) @ b).relu() @ c, 0, group)

    assert check(block, (8, 64), (64, 32), (32, 64)) == 2


def product_with_two_readers(group):
    def function(a, b):
        c = a @ b
        return scattered(c, 0, group), c.relu()

    return function


LEFT = {
    "below the 1024": lambda g: lambda a, b: gathered(a, 1, g) @ torch.cat([b, b]),
    "from the right": lambda g: lambda a, b: b.t() @ gathered(a, 0, g).t(),
    "has another reader, relu": product_with_two_readers,
    "is of addmm": lambda g: lambda a, b: torch.addmm(b[0], gathered(a, 0, g), b),
    "match no pattern": lambda g: lambda a, b: gathered(a, 0, g).float().bfloat16() @ b,
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_has_its_reason(check, group, reason) -> None:
    with pytest.raises(AssertionError, match=rf"1 collectives of products.*\n.*{reason}"):
        check(LEFT[reason](group), (8, 64), (64, 64))


@pytest.mark.parametrize(
    ("lacks", "said"),
    [("enabled", "not enabled for the group '0'"), ("nccl", "built without NCCL")],
)
def test_what_torch_lacks_is_named(check, group, lacks, said) -> None:
    with pytest.raises(AssertionError, match=said):
        check(lambda a, b: gathered(a, 0, group) @ b, (8, 64), (64, 32), **{lacks: False})


def test_collectives_of_other_groups_do_not_count(check, group) -> None:
    def narrow(a, b):
        return gathered(a, 1, group) @ b

    with pytest.raises(AssertionError, match="no all-gather before a product"):
        check(narrow, (8, 64), (128, 32), of="another")
    with pytest.raises(AssertionError, match="below the 1024"):
        check(narrow, (8, 64), (128, 32), of=group)
    # A graph without either is no success; gathered parameters, as FSDP's, multiply nothing here.
    for call, *sizes in (
        (lambda a, b: a @ b, (8, 64), (64, 32)),
        (lambda a: gathered(a, 0, group).relu(), (8, 64)),
    ):
        with pytest.raises(AssertionError, match="no all-gather before a product"):
            check(call, *sizes)


def test_paths_that_part_and_meet_are_walked_once(graph) -> None:
    """Each residual addition doubles the paths, not the nodes."""
    made = torch.fx.Graph()
    first = x = made.placeholder("x")
    for _ in range(60):
        x = made.call_function(torch.add, (x, made.call_function(torch.relu, (x,))))
    last = made.output(x)
    aside = made.placeholder("y")
    assert graph._leads_to(first, last) and not graph._leads_to(first, aside)
