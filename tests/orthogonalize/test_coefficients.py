"""Coefficients and restarts: published tables follow from their criteria; tools print them."""

import math
import subprocess
import sys

import pytest
import torch

from ..conftest import ROOT

SAFETY_2 = {"steps": 5, "lower": 1e-3, "safety": 2e-2, "cushion": 0.02}
PAPER_CUSHION = 0.02407327424182761

# nanochat, nanochat/optim.py; the same in modded-nanogpt and dion.
NANOCHAT = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def assert_rows(actual, expected, *, rel: float = 0.0, decimals: int | None = None) -> None:
    assert len(actual) == len(expected)
    tolerance = {"rel": rel, "abs": 10**-decimals if decimals else 0.0}  # printed or cut
    for row, wanted in zip(actual, expected, strict=True):
        assert row == pytest.approx(wanted, **tolerance)


@pytest.mark.kernels_ci
def test_defaults_are_the_nanochat_table(opt) -> None:
    # The sixteenth digit of a float64 solve depends on the order of its eliminations.
    assert_rows(opt.polar_express_coefficients(), NANOCHAT, rel=5e-15)
    assert opt.polar_express_coefficients(**SAFETY_2) == opt.polar_express_coefficients()


def test_paper_table_and_the_sets_made_of_it(opt, coefficients) -> None:
    paper = opt.COEFFICIENT_SETS["polar_express_paper"].rows
    derived = opt.polar_express_coefficients(8, safety=0, cushion=PAPER_CUSHION)
    assert_rows(derived[:5], paper[:5], rel=5e-15)
    # The paper ran the last steps in another precision: 1.875 for what is 1.87499999805.
    assert_rows(derived[5:], paper[5:], rel=1e-8)
    gram = opt.COEFFICIENT_SETS["gram_newton_schulz"]
    assert_rows(gram.rows, coefficients.rescaled(derived[:5], 1.05), rel=5e-15)
    eo = opt.COEFFICIENT_SETS["emerging_optimizers"].rows
    # Their last row is the paper's 1.875, not divided: the final step needs no safety.
    assert_rows(eo, (*coefficients.rescaled(derived[:7], 1.01), derived[7]), decimals=4)


def test_any_step_count_converges(opt, reference) -> None:
    sigma = torch.logspace(-3, 0, 2001, dtype=torch.float64)
    previous = math.inf
    for steps in range(1, 11):
        rows = opt.polar_express_coefficients(steps)
        assert len(rows) == steps
        values = reference.schedule_on_values(sigma, rows)
        error = (values - 1).abs().max().item()
        assert error < previous, f"{steps} steps are not better than {steps - 1}"
        # Minimax: the errors at both ends of [lower, 1] are equal and opposite.
        assert values.max().item() - 1 == pytest.approx(1 - values.min().item(), rel=1e-3)
        previous = error
    assert previous < 1e-14 * 10


@pytest.mark.parametrize("lower", [1e-9, 1e-4, 0.3, 1 - 1e-7, 1.0])
@pytest.mark.parametrize("cushion", [0.0, 0.1, 0.9])
def test_unusual_arguments_are_solved(opt, lower: float, cushion: float) -> None:
    for safety in (0.0, 0.05):
        rows = opt.polar_express_coefficients(12, lower, safety, cushion)
        assert all(math.isfinite(v) for row in rows for v in row)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"steps": 0}, ValueError, "steps"),
        ({"steps": 5.0}, TypeError, "5.0"),
        ({"lower": 0.0}, ValueError, "lower"),
        ({"lower": 1.5}, ValueError, "1.5"),
        ({"lower": math.nan}, ValueError, "lower"),
        ({"lower": "small"}, TypeError, "lower"),
        ({"safety": -0.1}, ValueError, "safety"),
        ({"safety": math.inf}, ValueError, "safety"),
        ({"cushion": 1.0}, ValueError, "cushion"),
        ({"cushion": -0.1}, ValueError, "cushion"),
    ],
)
def test_bad_arguments(opt, arguments, error, word) -> None:
    with pytest.raises(error, match=word):
        opt.polar_express_coefficients(**arguments)


def test_exchange_that_fails_raises(coefficients, monkeypatch) -> None:
    with pytest.raises(ValueError, match="no minimax quintic"):
        coefficients.optimal_quintic(1e-3, math.nan)
    monkeypatch.setattr(coefficients, "MAX_REMEZ_ITERATIONS", 2)
    with pytest.raises(RuntimeError, match="did not converge in 2 iterations"):
        coefficients.optimal_quintic(1e-3, 1.0)


# What a schedule does to [lower, 1] in exact arithmetic: smallest and largest value, slope at 0.
# The Polar Express bands are symmetric about 1, as a minimax schedule's must be.
BANDS = {
    ("keller_jordan", 1e-2): (0.682, 1.134, 485),
    ("keller_jordan", 1e-3): (0.471, 1.202, 485),
    ("you", 3e-3): (0.978, 1.145, 493),
    ("you", 1e-3): (0.475, 1.145, 493),
    ("polar_express", 1e-3): (0.859, 1.141, 989),
    ("gram_newton_schulz", 1e-3): (0.729, 1.124, 804),
    ("gram_newton_schulz", 3e-3): (0.846, 1.124, 804),
    ("cans", 1e-3): (0.884, 1.120, 1049),
    ("cubic5", 1e-2): (0.774, 1.300, 119),
    ("deepseek_v4", 1e-3): (1.000, 1.000, 79263),
}


@pytest.mark.parametrize(("name", "lower"), BANDS, ids=lambda v: str(v))
def test_bands(coefficients, reference, name: str, lower: float) -> None:
    steps = 10 if name == "deepseek_v4" else 5
    rows, _ = coefficients.resolve_coefficients(name, steps)
    sigma = torch.logspace(math.log10(lower), 0, 20001, dtype=torch.float64)
    values = reference.schedule_on_values(sigma, rows)
    low, high, slope = BANDS[name, lower]
    assert values.min().item() == pytest.approx(low, abs=6e-4)
    assert values.max().item() == pytest.approx(high, abs=6e-4)
    assert math.prod(a for a, _, _ in rows) == pytest.approx(slope, abs=0.6)


def test_sets_are_never_cut_or_stretched(opt) -> None:
    sets = opt.COEFFICIENT_SETS
    repeating = {"keller_jordan", "polar_express_paper", "emerging_optimizers"}
    for name, table in sets.items():
        assert table.name == name
        assert table.source
        assert table.rows_for(len(table.rows)) == table.rows
        longer = len(table.rows) + 2
        if name in repeating:
            assert table.rows_for(longer) == table.rows + (table.rows[-1],) * 2
        else:
            with pytest.raises(ValueError, match=f"steps={longer}.*{name}"):
                table.rows_for(longer)
        if len(table.rows) > 1:
            with pytest.raises(ValueError, match=name):
                table.rows_for(len(table.rows) - 1)
    with pytest.raises(TypeError):
        sets["mine"] = sets["you"]
    with pytest.raises(AttributeError):
        sets["you"].prefactor = 2.0


HALF, BRAIN = torch.float16, torch.bfloat16

# (table, dtype, restarts): (best positions, cond(Q) under the eigenvalue shift). Printed digits.
PUBLISHED = {
    ("gram_newton_schulz", HALF, 1): ((2,), "84.6"),
    ("gram_newton_schulz", HALF, 2): ((1, 2), "60.9"),
    ("nanochat", HALF, 1): ((2,), "118.6"),
    ("safety 1e-2", HALF, 1): ((1,), "679"),
    ("you", HALF, 1): ((2,), "53"),
    ("you", HALF, 2): ((1, 3), "35"),
    ("keller_jordan", HALF, 1): ((3,), "62.5"),
    ("keller_jordan", HALF, 2): ((2, 3), "19"),
    ("nanochat", BRAIN, 2): ((1, 2), "102"),
    ("safety 1e-2", BRAIN, 2): ((1, 2), "105"),
    ("gram_newton_schulz", BRAIN, 2): ((1, 2), "82"),
    ("you", BRAIN, 2): ((1, 3), "34"),
    ("keller_jordan", BRAIN, 1): ((2,), "148"),
}


@pytest.fixture(scope="module")
def tables(opt) -> dict:
    return {
        **{n: s.rows_for(5) for n, s in opt.COEFFICIENT_SETS.items() if len(s.rows) in (1, 5)},
        "nanochat": opt.polar_express_coefficients(),
        "safety 1e-2": opt.polar_express_coefficients(safety=1e-2),
    }


@pytest.mark.parametrize(("table", "dtype", "count"), PUBLISHED, ids=str)
def test_published_sets(restarts, tables, table, dtype, count) -> None:
    positions, printed = PUBLISHED[table, dtype, count]
    rows = tables[table]
    assert restarts.restart_positions(rows, dtype, count) == positions
    condition = restarts.worst_condition(rows, dtype, positions)
    digits = len(printed.partition(".")[2])
    assert f"{condition:.{digits}f}" == printed


def test_without_restart_the_condition_explodes(restarts, tables) -> None:
    rows = tables["gram_newton_schulz"]
    assert f"{restarts.worst_condition(rows, HALF, ()):.1e}" == "2.7e+12"
    one = [restarts.worst_condition(tables[t], BRAIN, (1,)) for t in ("nanochat", "safety 1e-2")]
    assert all(2.5e4 < condition < 1.1e5 for condition in one)


def test_defaults_keep_rounding_small(restarts, tables, opt) -> None:
    assert restarts.restart_positions(tables["nanochat"], HALF) == (2,)
    assert restarts.restart_positions(tables["gram_newton_schulz"], HALF) == (2,)
    # {1} is the best single restart for safety 1e-2, but its condition number 679 is too large.
    assert restarts.restart_positions(tables["safety 1e-2"], HALF) == (1, 2)
    # bfloat16 ends up restarting before every step: the direct iteration.
    assert restarts.restart_positions(tables["nanochat"], BRAIN) == (1, 2, 3, 4)
    for steps in range(1, 9):
        rows = opt.polar_express_coefficients(steps)
        positions = restarts.restart_positions(rows, HALF)
        assert restarts.worst_condition(rows, HALF, positions) <= 200


@pytest.mark.parametrize("count", [-1, 5, 1.0, True])
def test_bad_count(restarts, tables, count) -> None:
    with pytest.raises(ValueError, match=f"restarts={count!r}"):
        restarts.restart_positions(tables["nanochat"], HALF, count)


def test_unstable_count_raises(restarts, opt) -> None:
    with pytest.raises(ValueError, match="unstable"):
        restarts.restart_positions(opt.polar_express_coefficients(10), torch.bfloat16, 1)


def derive(*arguments: str, tool: str = "derive_coefficients") -> subprocess.CompletedProcess:
    tool = ROOT / "tools" / f"{tool}.py"
    return subprocess.run([sys.executable, tool, *arguments], capture_output=True, text=True)


def test_python_rows_are_those_of_the_package(opt) -> None:
    result = derive("--steps", "6", "--lower", "0.01", "--safety", "0.05")
    assert result.returncode == 0, result.stderr
    namespace: dict = {}
    exec(result.stdout, namespace)
    assert namespace["ROWS"] == opt.polar_express_coefficients(6, 0.01, 0.05)
    assert "divide X by 1.05" in result.stdout


def test_gram_polynomials_are_a_best_fit() -> None:
    """Within the allowed error, lifts by rounding included; a refit gains next to nothing."""
    options = ("--iterations", "8", "--points", "160")
    result = derive(*options, tool="derive_gram_polynomials")
    assert result.returncode == 0, result.stderr
    band, error, refitted = result.stdout.splitlines()
    assert band == "on [1.2e-3, 1]: [0.9422, 1.1009]; slope at 0: 1010.6"
    assert error == "largest error: 0.9762 of the allowed one"
    assert 0.96 < float(refitted.split(": ")[1]) < 0.98
