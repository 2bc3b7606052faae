"""The order in which chunks gather, compute and scatter."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="module")
def schedule(opt):
    return importlib.import_module(f"{opt.__name__}.distributed.schedule")


def chunk(number, log, later=0):
    log.append(f"open {number}")
    yield
    log.append(f"gather {number}")
    yield
    log.append(f"compute {number}")
    yield later
    log.append(f"scatter {number}")
    yield
    log.append(f"update {number}")


def run(schedule, count, ahead=1, later=lambda number: 0):
    log: list[str] = []
    schedule.run_pipeline(
        (chunk(n, log, later(n)) for n in range(count)),
        ahead=ahead,
        meanwhile=lambda: log.append("other"),
    )
    return log


@pytest.mark.sees_defect(
    "only the first gather runs under other work, and the pipeline drains between groups"
)
def test_every_transfer_has_a_computation_to_hide_under(schedule) -> None:
    """And what opens a chunk is sent before the scatter for which nobody waits yet."""
    assert run(schedule, 4) == [
        *("open 0", "gather 0", "open 1", "other", "gather 1"),
        *("compute 0", "open 2", "scatter 0", "gather 2"),
        *("compute 1", "update 0", "open 3", "scatter 1", "gather 3"),
        *("compute 2", "scatter 2", "update 1"),
        *("compute 3", "scatter 3", "update 2"),
        "update 3",
    ]


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_phases_are_in_order_and_few_chunks_are_alive(schedule, count, ahead) -> None:
    log = run(schedule, count, ahead)
    assert log.count("other") == 1
    before = log[: log.index("other")]
    assert [e for e in before if "gather" in e] == [f"gather {n}" for n in range(min(count, ahead))]
    alive: set[str] = set()
    for entry in log:
        phase, *number = entry.split()
        if phase == "open":
            alive.add(number[0])
        if phase == "update":
            alive.remove(number[0])
        assert len(alive) <= schedule.in_flight(ahead)
    assert len(log) == 5 * count + 1
    for phase in ("open", "gather", "compute", "scatter", "update"):
        order = [entry for entry in log if entry.startswith(phase)]
        assert order == [f"{phase} {n}" for n in range(count)]


def test_parts_of_a_whole_are_scattered_when_all_are_computed(schedule) -> None:
    """One in each round, between the gathers of what comes next."""
    log = run(schedule, 7, later=lambda number: 2 - number % 3)  # wholes 0-2, 3-5; 6 is one of two
    for number in range(6):
        last = 3 * (number // 3) + 2
        assert log.index(f"scatter {number}") > log.index(f"compute {last}")
    rounds = [entry for entry in log if entry.startswith(("gather", "scatter"))]
    assert rounds[4:10] == [
        *("scatter 0", "gather 4", "scatter 1", "gather 5", "scatter 2", "gather 6")
    ]
    assert rounds[-1] == "scatter 6"


def test_what_needs_no_later_computation_is_not_behind_what_does(schedule) -> None:
    """Its message is written already, and would take up memory for as long as it waits."""
    log = run(schedule, 5, later=lambda number: [2, 1, 0, None, None][number])
    scattered = [entry for entry in log if entry.startswith("scatter")]
    assert scattered == [f"scatter {number}" for number in (0, 3, 4, 1, 2)]


def test_chunks_without_communication_may_end_early(schedule) -> None:
    def short(number, log):
        log.append(f"all of {number}")
        return
        yield

    log: list[str] = []
    mixed = [short(1, log), short(3, log), chunk(0, log), short(4, log), chunk(2, log)]
    schedule.run_pipeline(mixed)
    phases = ("open", "gather", "compute", "scatter", "update")
    assert sorted(log) == sorted(
        [f"{phase} {n}" for n in (0, 2) for phase in phases] + ["all of 1", "all of 3", "all of 4"]
    )


def test_a_failing_chunk_closes_the_others(schedule) -> None:
    closed = []

    def watched():
        try:
            for _ in range(4):
                yield
        finally:
            closed.append(True)

    def failing():
        yield
        yield
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        schedule.run_pipeline([watched(), failing(), watched()])
    assert closed == [True, True]


def test_wrong_use(schedule) -> None:
    with pytest.raises(ValueError, match="ahead must be at least 1, got 0"):
        schedule.run_pipeline([], ahead=0)

    def often():
        for _ in range(5):
            yield

    with pytest.raises(RuntimeError, match="at most four times"):
        schedule.run_pipeline([often()])
