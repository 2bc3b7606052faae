"""The order in which chunks gather, compute and scatter."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="module")
def schedule(opt):
    return importlib.import_module(f"{opt.__name__}.distributed.schedule")


def chunk(number, log):
    log.append(f"gather {number}")
    yield
    log.append(f"compute {number}")
    yield
    log.append(f"update {number}")


def run(schedule, count, ahead=1):
    log: list[str] = []
    schedule.run_pipeline(
        (chunk(n, log) for n in range(count)), ahead=ahead, meanwhile=lambda: log.append("other")
    )
    return log


def test_every_transfer_has_a_computation_to_hide_under(schedule) -> None:
    assert run(schedule, 3) == [
        "gather 0",
        "other",
        "gather 1",
        "compute 0",
        "gather 2",
        "compute 1",
        "update 0",
        "compute 2",
        "update 1",
        "update 2",
    ]


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_phases_are_in_order_and_few_chunks_are_alive(schedule, count, ahead) -> None:
    log = run(schedule, count, ahead)
    assert log.count("other") == 1
    assert log.index("other") == min(count, ahead)  # M14: under the first gathers
    alive: set[str] = set()
    for entry in log:
        phase, *number = entry.split()
        if phase == "gather":
            alive.add(number[0])
        if phase == "update":
            alive.remove(number[0])
        assert len(alive) <= schedule.in_flight(ahead)
    for phase in ("gather", "compute", "update"):
        order = [entry for entry in log if entry.startswith(phase)]
        assert order == [f"{phase} {n}" for n in range(count)]


def test_chunks_without_communication_may_end_early(schedule) -> None:
    def short(number, log):
        log.append(f"all of {number}")
        return
        yield

    log: list[str] = []
    mixed = [short(1, log), short(3, log), chunk(0, log), short(4, log), chunk(2, log)]
    schedule.run_pipeline(mixed)
    assert sorted(log) == sorted(
        [f"{phase} {n}" for n in (0, 2) for phase in ("gather", "compute", "update")]
        + ["all of 1", "all of 3", "all of 4"]
    )


def test_a_failing_chunk_closes_the_others(schedule) -> None:
    closed = []

    def watched():
        try:
            yield
            yield
        finally:
            closed.append(True)

    def failing():
        yield
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        schedule.run_pipeline([watched(), failing(), watched()])
    assert closed == [True, True]


def test_wrong_use(schedule) -> None:
    with pytest.raises(ValueError, match="ahead must be at least 1, got 0"):
        schedule.run_pipeline([], ahead=0)

    def thrice():
        yield
        yield
        yield

    with pytest.raises(RuntimeError, match="at most twice"):
        schedule.run_pipeline([thrice()])
