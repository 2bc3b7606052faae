"""Why a product is not fused: every reason, and what is said and raised; no device, no ranks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

GPU = torch.device("cuda", 0)
LARGE = 2**14
ASKED = {"group": "0", "fuse": "auto", "workspace": 2**20, "scaled": False, "layout": None}


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
    state = SimpleNamespace(capturing=False, prepared=None, preparations=0)
    group = Group("0")

    def prepare(*_):
        state.preparations += 1
        return state.prepared

    monkeypatch.setattr(fused, "resolved", lambda _: group)
    monkeypatch.setattr(fused, "_prepared", {})
    monkeypatch.setattr(fused, "_prepare", prepare)
    monkeypatch.setattr(fused, "has_float8_products", lambda _: True)
    monkeypatch.setattr(fused, "_workspace_bytes", lambda _: 2**19)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_large_products_are_fused(fused, machine) -> None:
    assert fused.why_not(matrix(), LARGE, **ASKED) is None
    assert fused.why_not(matrix(), LARGE, **ASKED) is None
    assert machine.preparations == 1  # ranks prepare a group once, together


@pytest.mark.parametrize(
    ("name", "arguments", "changes"),
    [
        ("ASKED", {}, {"fuse": "never"}),
        ("ON_CPU", {"is_cuda": False}, {}),
        ("SMALL", {"rows": 1024, "columns": 1024}, {}),
    ],
)
def test_reasons_that_need_no_group(fused, report, machine, name, arguments, changes) -> None:
    found = fused.why_not(matrix(**arguments), 1024, **ASKED | changes)
    assert found == getattr(report, name)
    assert machine.preparations == 0


def test_small_products_are_fused_when_asked(fused, machine) -> None:
    assert fused.why_not(matrix(8, 8), 8, **ASKED | {"fuse": "always"}) is None


def test_size_that_pays_doubles_for_float8(fused, report, machine) -> None:
    at = {"rows": 4096, "columns": 8192}  # 2.4e11 operations with 3584 columns
    assert fused.why_not(matrix(**at), 3584, **ASKED) is None
    eight = matrix(**at, dtype=torch.float8_e4m3fn)
    assert fused.why_not(eight, 3584, **ASKED | {"scaled": True}) == report.SMALL


def test_float8_without_its_products(fused, report, machine, monkeypatch) -> None:
    monkeypatch.setattr(fused, "has_float8_products", lambda _: False)
    assert fused.why_not(matrix(), LARGE, **ASKED | {"scaled": True}) == report.NO_FP8
    assert fused.why_not(matrix(), LARGE, **ASKED) is None


def test_reason_of_a_group(fused, machine) -> None:
    machine.prepared = "the ranks of the group are on 2 hosts"
    assert fused.why_not(matrix(), LARGE, **ASKED) == machine.prepared


def test_reasons_of_a_capture(fused, report, machine) -> None:
    machine.capturing = True
    assert fused.why_not(matrix(), LARGE, **ASKED) == report.FIRST_IN_CAPTURE
    assert machine.preparations == 0  # it would wait for other ranks
    machine.capturing = False
    assert fused.why_not(matrix(), LARGE, **ASKED) is None
    machine.capturing = True
    assert fused.why_not(matrix(), LARGE, **ASKED) == report.WORKSPACE
    assert fused.why_not(matrix(), LARGE, **ASKED | {"workspace": 2**19}) is None


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


def prepared(fused, monkeypatch, *, other=None, failure=None, join=None) -> str | None:
    """What `_prepare` says where the second rank has these facts, and fails for this reason."""
    mine = {"host": "here", "device": "gpu-0", "seen": ["gpu-0", "gpu-1"], "missing": ""}
    mine |= {"reached": mine["seen"], "overlap": False}
    told = [mine | {"device": "gpu-1"} | (other or {}), failure]

    def all_gather_object(found, value, group):
        found[:] = [value, told.pop(0)]

    monkeypatch.setattr(fused.distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(fused.SymmetricMemory, "facts", staticmethod(lambda _: mine))
    monkeypatch.setattr(fused, "_enable", lambda _: None)
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
    there = prepared(fused, monkeypatch, failure="OutOfMemoryError: all is used")
    assert there.endswith("on rank 1 of the group: OutOfMemoryError: all is used")


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
