"""tools/derive_*.py print what the package computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..conftest import ROOT


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


def test_markdown_of_a_named_set() -> None:
    result = derive("--set", "keller_jordan", "--lower", "0.01", "--format", "markdown")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| 3.444500000 | -4.775000000 | 2.031500000 |") == 5
    assert "[0.682, 1.134], slope 485" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--set", "you", "--steps", "6"), "5 steps"), (("--lower", "0"), "lower must be in (0, 1]")],
)
def test_errors_are_messages(arguments, words) -> None:
    result = derive(*arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


def test_gram_polynomials_are_a_best_fit() -> None:
    """Within the allowed error, lifts by rounding included; a refit gains next to nothing."""
    options = ("--iterations", "8", "--points", "160")
    result = derive(*options, tool="derive_gram_polynomials")
    assert result.returncode == 0, result.stderr
    band, error, refitted = result.stdout.splitlines()
    assert band == "on [1.2e-3, 1]: [0.9422, 1.1009]; slope at 0: 1010.6"
    assert error == "largest error: 0.9762 of the allowed one"
    assert 0.96 < float(refitted.split(": ")[1]) < 0.98
