"""Why a product is not fused: every reason, and what is said and raised; no device, no ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

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


def test_large_products_are_fused(fused, machine) -> None:
    assert fused.why_not(matrix(), **ASKED) is None
    assert fused.why_not(matrix(), **ASKED) is None
    assert machine.preparations == 1  # ranks prepare a group once, together


@pytest.mark.parametrize(
    ("name", "arguments", "changes"),
    [
        ("ASKED", {}, {"fuse": "never"}),
        ("ON_CPU", {"is_cuda": False}, {}),
        ("SMALL", {}, {"gathers": 2**20}),
        ("SMALL", {}, {"gathers": 0, "scatters": 2**20}),
    ],
)
def test_reasons_that_need_no_group(fused, report, machine, name, arguments, changes) -> None:
    found = fused.why_not(matrix(**arguments), **ASKED | changes)
    assert found == getattr(report, name)
    assert machine.preparations == 0


def test_small_products_are_fused_when_asked(fused, machine) -> None:
    assert fused.why_not(matrix(8, 8), **ASKED | {"fuse": "always", "gathers": 64}) is None


def test_size_that_pays(fused, report, machine) -> None:
    """Of what all ranks know: 4096 x 8192 in 16 bits is gathered fused, 2048 rows are not."""
    for rows, reason in ((4096, None), (2048, report.SMALL)):
        assert fused.why_not(matrix(), **ASKED | {"gathers": rows * 8192 * 2}) == reason
        scattered = {"gathers": 0, "scatters": rows * 3584 * 2}
        assert fused.why_not(matrix(), **ASKED | scattered) == reason


def test_float8_without_its_products(fused, report, machine, monkeypatch) -> None:
    monkeypatch.setattr(fused, "has_float8_products", lambda _: False)
    assert fused.why_not(matrix(), **ASKED | {"scaled": True}) == report.NO_FP8
    assert fused.why_not(matrix(), **ASKED) is None


def test_reason_of_a_group(fused, machine) -> None:
    machine.prepared = "the ranks of the group are on 2 hosts"
    assert fused.why_not(matrix(), **ASKED) == machine.prepared


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
    assert gathered(matrix(8, 1024), 1, "") is None
    assert gathered(matrix(8, 1023), 1, "") == report.NARROW
    assert gathered(matrix(8, 4096), 1, "tensorwise") == report.SCALED_COLUMNS
    assert gathered(matrix(8, 64), 0, "rowwise_sharded") is None
    assert gathered(matrix(6, 64), 0, "rowwise_sharded") == report.SCALE_ALIGNMENT
    assert gathered(matrix(6, 64), 0, "rowwise_replicated") == report.SCALE_ALIGNMENT
    assert gathered(matrix(6, 64), 0, "tensorwise") is None
    assert scattered(matrix(24, 64), 1, scaled=True) == report.SCALED_TRANSPOSE
    assert scattered(matrix(32, 64), 1, scaled=True) is None
    assert scattered(matrix(24, 64), 1, scaled=False) is None


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
        ({"reached": ["gpu-1"]}, "no peer access"),
        ({"missing": "torch too old"}, "rank 1: torch too old"),
    ],
)
def test_ranks_agree_on_what_symmetric_memory_joins(fused, monkeypatch, other, reason) -> None:
    found = prepared(fused, monkeypatch, other=other)
    assert found is None if reason is None else reason in found


def test_a_rank_that_cannot_join_tells_the_others(fused, monkeypatch) -> None:
    def refused(*_):
        raise RuntimeError("no peer access\nand more")

    here = prepared(fused, monkeypatch, join=refused)
    assert here.endswith("on rank 0 of the group: RuntimeError: no peer access")
    there = prepared(fused, monkeypatch, failures=(None, "RuntimeError: no fabric"))
    assert there.endswith("on rank 1 of the group: RuntimeError: no fabric")


def test_nobody_joins_unless_all_could_allocate(fused, monkeypatch) -> None:
    def full(*_):
        raise torch.OutOfMemoryError("all is used")

    joined = []
    here = prepared(fused, monkeypatch, allocate=full, join=lambda *_: joined.append(1))
    assert here.endswith("on rank 0 of the group: OutOfMemoryError: all is used")
    failures = ("OutOfMemoryError: all is used",)
    there = prepared(fused, monkeypatch, failures=failures, join=lambda *_: joined.append(1))
    assert there.endswith("on rank 1 of the group: OutOfMemoryError: all is used")
    assert not joined and not fused.symmetric_memory._group_name_to_workspace_tensor


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
