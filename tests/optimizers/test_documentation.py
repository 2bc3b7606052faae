"""The docstrings list the arguments that exist, and nothing else."""

from __future__ import annotations

import inspect
import re

import pytest


def documented_arguments(docstring: str) -> set[str]:
    """The names before the colons of the Args section; "a, b: text" counts as two."""
    section = inspect.cleandoc(docstring).split("Args:\n", 1)[1].split("\n\n", 1)[0]
    heads = re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE)
    return {name for head in heads for name in head.split(", ")}


@pytest.mark.sees_defect("the documentation lists arguments that do not exist")
@pytest.mark.parametrize(
    "name",
    [
        "Muon",
        "MuonAdamW",
        "DistMuonAdamW",
        "default_is_muon",
        "get_default_muon_param_groups",
        "save_optimizer",
        "load_optimizer",
        "save_optimizer_async",
        "convert_state_dict",
        "profile_steps",
        "ProfileCallback",
    ],
)
def test_documented_arguments_are_the_arguments(opt, name) -> None:
    subject = getattr(opt, name)
    arguments = set(inspect.signature(subject).parameters) - {"self"}
    assert documented_arguments(subject.__doc__) == arguments


def test_step_keeps_the_predecessors_argument_names(opt) -> None:
    arguments = list(inspect.signature(opt.Muon.step).parameters)
    assert arguments == ["self", "closure", "qk_logits"]
    assert documented_arguments(opt.Muon.step.__doc__) == {"closure", "qk_logits"}


def test_every_option_of_a_group_is_an_argument_of_muon(opt, submodule) -> None:
    """And has a default in MuonAdamW, except lr; AdamW's own are named as in Muon."""
    options = submodule("optimizers.groups.options")
    names = set(options.option_names(options.MuonOptions))
    assert names <= set(inspect.signature(opt.Muon).parameters)
    defaults = submodule("optimizers.muon_adamw").DEFAULTS
    own = submodule("optimizers.groups.param_groups").DEFAULT_KEYS
    adamw = {own.get(name, name) for name in options.option_names(options.AdamWOptions)}
    assert set(defaults) == (names | adamw) - {"lr"}
