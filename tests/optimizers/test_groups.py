"""What the constructor and add_param_group refuse, and how they say it."""

import math
import re

import pytest
import torch
from torch import nn

from ._steps import nothing_written, parameters, values


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 3))


SWITCHES = ("nesterov", "none_grad", "flatten", "cautious", "shaped_decay", "row_equilibration")
SWITCHES += ("renormalize", "transposed")
MUON_OPTIONS = [
    *((name, 1, TypeError, f"{name} must be True or False, got 1") for name in SWITCHES),
    ("lr", -0.1, ValueError, "lr must be finite and at least 0, got -0.1"),
    ("lr", math.nan, ValueError, "lr must be finite"),
    ("lr", math.inf, ValueError, "lr must be finite"),
    ("lr", "fast", TypeError, "lr must be a number, got 'fast'"),
    ("lr", True, TypeError, "lr must be a number, got True"),
    ("lr", torch.tensor([1.0, 2.0]), ValueError, "a Tensor lr must hold one"),
    ("lr", torch.tensor(1), ValueError, "a Tensor lr must hold one floating-point"),
    ("lr", torch.tensor(-1.0), ValueError, "lr must be finite and at least 0, got -1.0"),
    ("momentum", 1.0, ValueError, r"momentum must lie in \[0, 1\), got 1.0"),
    ("momentum", -0.5, ValueError, "momentum must lie in"),
    ("momentum", None, TypeError, "momentum must be a number, got None"),
    ("ns_steps", 0, ValueError, "ns_steps must be at least 1, got 0"),
    ("ns_steps", 101, ValueError, "ns_steps must be at most 100, got 101"),
    ("ns_steps", 2**62, ValueError, "ns_steps must be at most 100"),
    ("ns_steps", 5.0, TypeError, "ns_steps must be an integer, got 5.0"),
    ("ns_steps", True, TypeError, "ns_steps must be an integer, got True"),
    ("ns_coefficients", "kj", ValueError, "ns_coefficients must be one of 'polar_express', 'kel"),
    ("ns_coefficients", (1.0, 2.0), ValueError, "ns_coefficients: each row"),
    ("ns_coefficients", ((1.0, 2.0, 3.0),), ValueError, "ns_coefficients: .*1 rows and steps=5"),
    ("ns_coefficients", 3.4, TypeError, "ns_coefficients must be a name"),
    ("eps", -1e-7, ValueError, "eps must be finite and at least 0"),
    ("weight_decay", -1e-3, ValueError, "weight_decay must be finite and at least 0"),
    ("weight_decay", torch.ones(2), ValueError, "a Tensor weight_decay must hold one"),
    ("adjust_lr_fn", "match_rms", ValueError, "adjust_lr_fn must be one of 'match_rms_adamw'"),
    ("method", "svd", ValueError, "method must be one of 'auto'"),
    ("momentum_form", "nag", ValueError, "momentum_form must be one of 'heavy_ball', 'ema'"),
    ("beta2", 1.0, ValueError, "beta2 must lie in"),
    ("beta2", "off", TypeError, "beta2 must be a number"),
    ("dtype", torch.int8, ValueError, "dtype must be one of float16, .*torch.int8"),
    ("dtype", "float16", TypeError, "dtype must be a torch.dtype or None, got 'float16'"),
    ("dtype", torch.float8_e4m3fn, ValueError, "dtype must be one of"),
    ("momentum_dtype", torch.int32, ValueError, "momentum_dtype must be one of"),
    ("rounding", "up", ValueError, "rounding must be one of 'nearest', 'stochastic', 'resid"),
    ("rounding_seed", -1, ValueError, r"rounding_seed must have 64 bits, in \[0, 2\^64\), got -1"),
    ("rounding_seed", 1 << 64, ValueError, "rounding_seed must have 64 bits"),
    ("num_heads", 0, ValueError, "num_heads must be at least 1"),
    ("num_heads", "all", TypeError, "num_heads must be an integer"),
    ("split_sizes", 4, TypeError, "split_sizes must be a sequence of row counts, got 4"),
    ("split_sizes", [4, 0], ValueError, "split_sizes must be at least 1, got 0"),
    ("split_sizes", [], TypeError, "split_sizes must be a sequence of row counts"),
    ("expert_keys", "experts", TypeError, "expert_keys must be a sequence of name components"),
    ("expert_keys", [1], TypeError, "expert_keys must be a sequence of name components"),
]
ADAMW_OPTIONS = [
    ("betas", (0.9,), ValueError, r"betas must be two numbers, got \(0.9,\)"),
    ("betas", 0.9, ValueError, "betas must be two numbers"),
    ("betas", (0.9, 1.0), ValueError, "betas must lie in"),
    ("betas", ("a", "b"), TypeError, "betas must be a number"),
    ("eps", -1.0, ValueError, "eps must be finite and at least 0"),
    ("lr", -1.0, ValueError, "lr must be finite"),
    ("weight_decay", "x", TypeError, "weight_decay must be a number"),
    ("none_grad", 1, TypeError, "none_grad must be True or False"),
    ("rounding", "up", ValueError, "rounding must be one of"),
    ("rounding_seed", 0.5, TypeError, "rounding_seed must be an integer, got 0.5"),
]
PARAMETERS = [
    (lambda: nn.Parameter(torch.ones(3)), ValueError, "Muon needs at least 2 dimensions"),
    (lambda: nn.Parameter(torch.ones(())), ValueError, "Muon needs at least 2 dimensions"),
    (lambda: nn.Parameter(torch.ones(2, 3, 4)), ValueError, "is 3-D"),
    (lambda: torch.ones(2, 2, dtype=torch.complex64), ValueError, "must be real"),
    (lambda: torch.ones(2, 2, dtype=torch.int32), ValueError, "must be floating-point"),
    (lambda: torch.ones(2, 2).to_sparse(), ValueError, "must be dense"),
    (lambda: matrix() * 2, ValueError, "not a leaf"),
    (lambda: [[1.0]], TypeError, "must be a torch.Tensor, got list"),
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ns_steps": 3}, "'gram_polynomial' is made for ns_steps=5, got ns_steps=3"),
        ({"dtype": torch.bfloat16}, "'gram_polynomial' amplifies the rounding of .*bfloat16"),
    ],
)
def test_what_gram_polynomial_cannot_serve(opt, changed, message) -> None:
    """Refused in the constructor, and at a step before AdamW has moved anything."""
    with pytest.raises(ValueError, match=f"group 0: method={message}"):
        opt.Muon([matrix()], method="gram_polynomial", **changed)
    params = parameters([(4, 3), (3,)])
    groups = [
        {"params": params[1:], "use_muon": False},
        {"params": params[:1], "use_muon": True, "method": "gram_polynomial"},
    ]
    optimizer = opt.Muon(groups)
    optimizer.step()
    optimizer.param_groups[1].update(changed)
    with nothing_written(optimizer), pytest.raises(ValueError, match=f"group 1: method={message}"):
        optimizer.step()


@pytest.mark.sees_defect("no ranges are checked")
@pytest.mark.sees_defect("add_param_group skips every check and falls back to use_muon=True")
@pytest.mark.parametrize(("option", "value", "error", "message"), MUON_OPTIONS, ids=str)
def test_wrong_option_of_a_muon_group(opt, option, value, error, message) -> None:
    """In the constructor, in a group, and in add_param_group alike, naming the group."""
    with pytest.raises(error, match=f"group 0: {message}"):
        opt.Muon([matrix()], **{option: value})
    with pytest.raises(error, match=f"group 0: {message}"):
        opt.MuonAdamW([{"kind": "muon", "params": [matrix()], "lr": 0.1, option: value}])
    optimizer = opt.Muon([matrix()])
    with pytest.raises(error, match=f"group 1: {message}"):
        optimizer.add_param_group({"params": [matrix()], "use_muon": True, option: value})
    assert_unchanged(optimizer)


OF_TENSORS = ("betas", (0.9, torch.tensor(0.95)), TypeError, "betas must be a number")


@pytest.mark.parametrize(
    ("option", "value", "error", "message"), [*ADAMW_OPTIONS, OF_TENSORS], ids=str
)
def test_wrong_option_of_an_adamw_group(opt, option, value, error, message) -> None:
    with pytest.raises(error, match=f"group 0: {message}"):
        opt.MuonAdamW([{"kind": "adamw", "params": [matrix()], "lr": 0.1, option: value}])
    key = f"adamw_{option}" if option in ("betas", "eps") else option
    with pytest.raises(error, match=f"group 0: {message}"):
        opt.Muon([{"params": [matrix()], "use_muon": False}], **{key: value})


@pytest.mark.sees_defect("1-D and 3-D parameters surface only at the first step")
@pytest.mark.parametrize(("make", "error", "message"), PARAMETERS)
def test_wrong_parameter(opt, make, error, message) -> None:
    """1-D, 3-D, complex, sparse and integer parameters, named, before anything is added."""
    with pytest.raises(error, match=f"group 0, parameter 1: .*{message}"):
        opt.Muon([{"params": [matrix(), make()], "use_muon": True}])
    optimizer = opt.Muon([matrix()])
    group = {"params": [matrix(), make()], "names": ["a", "b"], "use_muon": True}
    with pytest.raises(error, match=f"group 1, parameter 'b': .*{message}"):
        optimizer.add_param_group(group)
    assert_unchanged(optimizer)
    if message not in ("Muon needs at least 2 dimensions", "is 3-D"):
        with pytest.raises(error, match=f"group 0, parameter 0: .*{message}"):
            opt.Muon([{"params": [make()], "use_muon": False}])


def assert_unchanged(optimizer) -> None:
    """One group of one parameter, and nothing of a refused one."""
    assert len(optimizer.param_groups) == 1
    assert not optimizer.state
    assert optimizer.parameter_names(0) == [None]


SHARED = matrix()
# What is changed in a Muon group of no parameters
GROUPS = [
    ({"params": [matrix()], "use_muon": 1}, TypeError, "use_muon must be True or False, got 1"),
    ({"kind": "sgd"}, ValueError, "kind must be 'muon' or 'adamw', got 'sgd'"),
    ({"kind": "muon", "use_muon": False}, ValueError, "contradicts"),
    ({"momentums": 1}, ValueError, "'momentums'; write 'momentum'"),
    ({"ns_step": 1}, ValueError, "'ns_step'; write 'ns_steps'"),
    ({"use_muon": False, "nestrov": 1}, ValueError, "'nestrov'; write 'nesterov'"),
    ({"use_muon": False, "amsgrad": True}, ValueError, "unknown key 'amsgrad'"),
    ({"adamw_lr": 0.1}, ValueError, "argument of the optimizer"),
    ({"clip_config": {}}, ValueError, "unknown key 'clip_config'"),
    ({"use_muon": False, "ns_steps": 3}, ValueError, "an option of muon groups"),
    ({"adamw_eps": 3}, ValueError, "an option of adamw groups"),
    ({"params": {matrix()}}, TypeError, "a set has no fixed order"),
    ({"params": 3}, TypeError, "params must be an iterable, got int"),
    ({"params": [matrix()], "names": []}, ValueError, "0 names for 1 parameters"),
    ({"params": [matrix()], "names": "a"}, TypeError, "names must be a sequence"),
    ({"params": [matrix()], "names": [1]}, TypeError, "name must be a string"),
    ({"params": [("a", matrix()), matrix()]}, ValueError, "give a name with every parameter"),
    ({"params": [("a", matrix()), ("a", matrix())]}, ValueError, "the name is already that of"),
    ({"params": [SHARED, SHARED]}, ValueError, "parameter 1: this parameter is already group 0"),
    ({"params": [torch.ones(2, 3, 4)], "expert_keys": ["e"]}, ValueError, "needs the names"),
]


@pytest.mark.sees_defect("names and parameters of different lengths are cut short in silence")
@pytest.mark.sees_defect("an unknown kind is found at the step")
@pytest.mark.parametrize(("group", "error", "message"), GROUPS, ids=lambda value: str(value)[:60])
def test_wrong_group(opt, group, error, message) -> None:
    with pytest.raises(error, match=f"group 0.*{message}"):
        opt.Muon([{"params": [], "use_muon": True, **group}])


@pytest.mark.sees_defect("duplicate names collapse")
def test_names_and_parameters_are_unique_over_all_groups(opt) -> None:
    optimizer = opt.Muon([{"params": [SHARED], "names": ["w"], "use_muon": True}])
    with pytest.raises(ValueError, match="group 1, parameter 'w': the name is already"):
        optimizer.add_param_group({"params": [matrix()], "names": ["w"], "use_muon": False})
    with pytest.raises(ValueError, match="this parameter is already group 0, parameter 'w'"):
        optimizer.add_param_group({"params": [SHARED], "use_muon": False})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [matrix()], "use_muon": True})  # groups without names, too
    assert [optimizer.parameter_names(number) for number in range(2)] == [["w"], [None]]


REFUSED = {
    "an option": {"momentum": 2.0},
    "a shape": {"params": [matrix(), nn.Parameter(torch.ones(3))]},
    "a name of the first group": {"names": ["b", "w"]},
    "a name for an option": {"num_heads": {"d": 2}},
    "a number of heads": {"num_heads": {"c": 3}},
}


@pytest.mark.sees_defect(
    "a refused group leaves its names",
    "        self.adopt(found)\n",
    "        self._names += names_of\n        names_of = []\n        self.adopt(found)\n",
)
@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_group_leaves_no_names(opt, why) -> None:
    """Mended, it takes the place of the refused one, as if that had never been."""
    first, second, third = matrix(), matrix(), matrix()
    optimizer = opt.Muon([{"params": [first], "names": ["w"], "use_muon": True}])
    group = {"params": [second, third], "names": ["b", "c"], "use_muon": True}
    with pytest.raises(ValueError, match="group 1"):
        optimizer.add_param_group({**group, **REFUSED[why]})
    with pytest.raises(IndexError):
        optimizer.parameter_names(1)
    optimizer.add_param_group(group)
    assert [optimizer.parameter_names(number) for number in (0, 1)] == [["w"], ["b", "c"]]
    optimizer.step()
    assert list(optimizer.state) == [first, second, third]


def without_rate(kind: str):
    return lambda opt: opt.MuonAdamW([{"kind": kind, "params": [matrix()]}])


def lazy(opt):
    opt.muon.get_default_muon_param_groups(torch.nn.Sequential(torch.nn.LazyLinear(4)))


EXPANDED = torch.nn.Parameter(torch.ones(1, 4).expand(6, 4))
GROUP = {"params": [], "use_muon": True}
CALLS = [
    (TypeError, "got one Tensor", lambda o: o.Muon(matrix())),
    (TypeError, r"pass get_default_muon_param_groups\(model\)", lambda o: o.Muon(nn.Linear(3, 4))),
    (TypeError, "a set has no fixed order", lambda o: o.Muon({matrix()})),
    (ValueError, "empty", lambda o: o.Muon([])),
    (TypeError, "group 1: must be a dict, got Parameter", lambda o: o.Muon([GROUP, matrix()])),
    (TypeError, "argument 'momentum_compile'", lambda o: o.Muon([matrix()], momentum_compile=True)),
    (TypeError, "'momentm'; write 'momentum'", lambda o: o.Muon([matrix()], momentm=0.9)),
    (ValueError, "=True is Motif's", lambda o: o.Muon([matrix()], use_distributed_muon=True)),
    (ValueError, "group 0: 'params' is missing", lambda o: o.Muon([{"use_muon": True}])),
    (ValueError, "group 0: lr must be given for kind 'muon'", without_rate("muon")),
    (ValueError, "group 0: lr must be given for kind 'adamw'", without_rate("adamw")),
    (ValueError, "not initialized; run the", lambda o: o.Muon(nn.LazyLinear(4).parameters())),
    (ValueError, "not initialized; run the model once", lazy),
    (ValueError, r"strides \(0, 1\).*clone", lambda o: o.Muon([{**GROUP, "params": [EXPANDED]}])),
]


@pytest.mark.parametrize(("error", "message", "call"), CALLS)
def test_what_the_constructors_refuse_as_a_whole(opt, error, message, call) -> None:
    with pytest.raises(error, match=message):
        call(opt)
    opt.Muon([matrix()], use_distributed_muon=False)


@pytest.mark.parametrize(
    ("name", "keyword", "remedy"),
    [
        ("Muon", "fused", "every step is fused and can be captured in a CUDA graph"),
        ("Muon", "capturable", "every step is fused and can be captured in a CUDA graph"),
        ("Muon", "differentiable", ""),
        ("MuonAdamW", "maximize", ""),
        ("Muon", "amsgrad", "AdamW has no such variant here; leave it out"),
        ("Muon", "betas", "write adamw_betas"),
        ("MuonAdamW", "foreach", "every step is fused and can be captured in a CUDA graph"),
        ("MuonAdamW", "betas", "an option of a group: {'params': ..., 'betas': ...}"),
        ("MuonAdamW", "weight_decay", "an option of a group: {'params': ..., 'weight_decay': ...}"),
    ],
)
def test_keywords_of_torchs_adamw_say_what_to_write(opt, name, keyword, remedy) -> None:
    said = re.escape(f"unexpected keyword argument '{keyword}': ") + f".*{re.escape(remedy)}"
    with pytest.raises(TypeError, match=said):
        getattr(opt, name)([{"params": [matrix()], "use_muon": True}], lr=0.01, **{keyword: 0.5})


BY_HAND = [
    (lambda groups: groups.pop(), "2 groups were added and there are 1; .*add_param"),
    (lambda groups: groups.append(dict(groups[0])), "2 groups were .* there are 3; .*add_param"),
    (
        lambda groups: groups[0]["params"].append(matrix()),
        "group 0 was constructed with 1 .* has 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), BY_HAND)
@pytest.mark.parametrize("ask", ["step", "state_dict", "report"])
def test_groups_are_added_by_add_param_group_alone(opt, change, message, ask) -> None:
    params = [matrix(), matrix()]
    optimizer = opt.Muon([{"params": [p], "use_muon": True} for p in params])
    optimizer.step()
    kept = [p.detach().clone() for p in params]
    change(optimizer.param_groups)
    with pytest.raises(ValueError, match=message):
        getattr(optimizer, ask)()
    assert all(torch.equal(p, before) for p, before in zip(params, kept, strict=True))


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_group_keeps_its_kind(opt, use_muon) -> None:
    optimizer = opt.Muon([{"params": [matrix()], "use_muon": use_muon}])
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = not use_muon
    for ask in (optimizer.step, optimizer.state_dict, optimizer.report):
        with pytest.raises(ValueError, match=r"^group 0: .* a group keeps its kind"):
            ask()
    optimizer.param_groups[0]["use_muon"] = use_muon
    optimizer.step()


@pytest.mark.sees_defect(
    "a list of tensors is an AttributeError; other iterators are consumed by the check"
)
@pytest.mark.sees_defect("missing names are a KeyError at the first step")
@pytest.mark.parametrize("form", ["list", "generator", "named", "groups", "tuple"])
def test_forms_of_params(opt, device, form) -> None:
    """A list, an iterator, named parameters or groups; nothing is consumed by the checks."""
    params = parameters([(4, 3), (3, 5)], device=device)
    given = {
        "list": lambda: params,
        "tuple": lambda: tuple(params),
        "generator": lambda: (p for p in params),
        "named": lambda: iter([("a", params[0]), ("b", params[1])]),
        "groups": lambda: ({"params": (p,), "use_muon": True} for p in params),
    }[form]()
    optimizer = opt.Muon(given)
    before = values(params)
    optimizer.step()
    for old, param in zip(before, params, strict=True):
        assert not torch.equal(old, param.detach())
    if form == "named":
        assert optimizer.parameter_names(0) == ["a", "b"]
    group = {"params": [matrix()], "names": ["w"], "use_muon": True}
    opt.Muon([group], lr=0.1)
    assert set(group) == {"params", "names", "use_muon"}  # as the caller made it


@pytest.mark.sees_defect("an empty Muon group is an IndexError")
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_empty_groups(opt, kind) -> None:
    param = matrix()
    param.grad = torch.ones(4, 3)
    optimizer = opt.MuonAdamW(
        [{"kind": kind, "params": [], "lr": 0.1}, {"kind": "muon", "params": [param], "lr": 0.1}]
    )
    optimizer.step()
    assert not torch.equal(param.detach(), torch.ones(4, 3))
    optimizer.load_state_dict(optimizer.state_dict())
