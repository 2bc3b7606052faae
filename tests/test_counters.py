"""DRAM bytes from Nsight Compute's table, and the least that they are compared with."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

TABLE = """==PROF== Connected
some line of the child
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","first","dram__bytes_read.sum","{unit}","1,024"
"0","7","first","dram__bytes_write.sum","{unit}","512"
"1","7","second, with a comma","dram__bytes_read.sum","{unit}","2,000,000"
"1","7","second, with a comma","gpu__time_duration.sum","ns","9"
"""


@pytest.fixture(scope="module")
def counters():
    from benchmarks.harness import device

    return device


def test_bytes_of_kernels_in_order(counters) -> None:
    assert counters.parsed(TABLE.format(unit="byte")) == [1536.0, 2_000_000.0]


@pytest.mark.parametrize(
    ("text", "reason"), [(TABLE.format(unit="Mbyte"), "Mbyte"), ("no rights", "no table")]
)
def test_what_cannot_be_read_is_said(counters, text, reason) -> None:
    with pytest.raises(counters.NotCountedError, match=reason):
        counters.parsed(text)


def test_without_ncu_the_row_says_so(counters, monkeypatch) -> None:
    from benchmarks.harness import orthogonalize

    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    goal = orthogonalize.traffic_goal()["of_least_traffic"]
    assert goal == {"value": "no ncu on this machine", "goal": 1.5, "met": None}


def test_least_bytes_by_hand() -> None:
    from benchmarks.harness.orthogonalize import COUNTED, least_bytes

    assert COUNTED.case == "256x512x2048/heavy"
    assert least_bytes(COUNTED) == 256 * 512 * 2048 * (4 + 2 + 2 + 2 + 2 + 2 + 2 + 2)


def test_a_failing_ncu_says_so(counters, monkeypatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: "/bin/false")
    with pytest.raises(counters.NotCountedError, match="ncu failed: CalledProcess"):
        counters.counted("harness.orthogonalize")


def test_a_counter_that_hangs_is_killed_with_its_children(counters, tmp_path) -> None:
    """The grandchild would hold the pipe until it ends by itself."""
    pid, begin = tmp_path / "pid", time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        counters.output_of(["/bin/sh", "-c", f"sleep 200 & echo $! > {pid}; wait"], 4)
    assert time.monotonic() - begin < 100
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
