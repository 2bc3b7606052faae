"""dispatch: where each op has a kernel, the reason it gives, and that it is given once."""

import logging
from unittest import mock

import pytest
import torch

GPU = torch.device("cuda", 0)
HOPPER_ONLY = ("matmul_add", "square_chain", "nf4_product", "progress_matmul")
TRITON_ONLY = ("mxfp4_dequant", "fp8_dequant")
WITH_TRITON = ("nf4_dequant", *TRITON_ONLY)


@pytest.fixture
def pretend(dispatch, monkeypatch):
    """`pretend(capability, compiled=..., hip=...)`: what GPU 0 is and whether it has kernels."""

    def call(capability, *, compiled: bool = True, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(dispatch, "has_compiled", lambda op, key: compiled and key == "CUDA")
        monkeypatch.setattr(dispatch, "has_triton", lambda: True)

    return call


def picked(dispatch, op: str) -> str:
    return dispatch.pick.__wrapped__(op, GPU).name


def test_the_table_names_ops_of_the_package(dispatch, opt):
    paths = ("compiled", "triton", "torch", "reference", "caller")
    for op in dispatch.TABLE:
        assert opt.explain(op, device="cpu").split(": ")[0] in paths


NO_XPU = "reference: the loaded variant has no kernel for xpu tensors"
EXPLAINED = {  # on the CPU, on a GPU, elsewhere
    "nf4_dequant": ("compiled: ", "compiled: ", NO_XPU),
    "nf4_quantize": ("compiled: ", "compiled: ", "reference: "),
    "normalize": ("torch: ", "compiled: ", "torch: "),
    "symmetric_matmul": ("reference: float64 products of torch", "compiled: CUDA", "reference: "),
    "matmul_add": ("torch: baddbmm; no kernel for cpu", "", "torch: "),
}


@pytest.mark.parametrize("op", EXPLAINED)
def test_explain_names_the_path(opt, device, op):
    here, elsewhere = EXPLAINED[op][device.type == "cuda"], EXPLAINED[op][2]
    assert opt.explain(op, device=device).startswith(here)
    said = opt.explain(op, device="xpu")
    assert said == NO_XPU if elsewhere == NO_XPU else said.startswith(elsewhere)
    assert opt.explain("nf4_quantize", device="meta") == "compiled: shapes only"


@pytest.mark.parametrize(
    ("op", "problem"),
    [("orthogonalize", {"shape": (768, 768)}), ("nf4_dequant", {}), ("expert_sort", {})],
)
def test_a_device_that_is_not_there_is_said(opt, op, problem):
    """The library's own error was an AssertionError without a word on what to do."""
    device = "cuda:99" if torch.cuda.is_available() else "cuda"
    text = opt.explain(op, device=device, **problem)
    assert text.startswith(f"{device} is not there (")
    assert text.endswith("ask for device='cpu'")
    assert "is not there" in opt.explain(op, device=99, **problem)
    with pytest.raises(RuntimeError, match="nowhere"):
        opt.explain(op, device="nowhere", **problem)
    missing = "shape" if problem else "device"
    with pytest.raises(TypeError, match=rf"explain\('{op}'\): .*'{missing}'"):
        opt.explain(op, **({"device": "cpu"} if problem else {}))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_code_for_9_0_runs_there_alone(dispatch, pretend, capability):
    pretend(capability)
    hopper = capability == (9, 0)
    assert dispatch.is_hopper(GPU) == hopper
    for op in dispatch.TABLE:
        path = dispatch.pick.__wrapped__(op, GPU)
        compiled = op not in TRITON_ONLY and (hopper or op not in HOPPER_ONLY)
        assert (path.name == "compiled") == compiled, op
        said = "CUDA kernel, capability {}.{}".format(*capability)
        assert path.reason.startswith(said) or not compiled


@pytest.mark.parametrize(
    ("capability", "options"),
    [((7, 5), {}), ((9, 0), {"compiled": False}), ((9, 0), {"hip": "6.2"})],
    ids=("before 8.0", "no kernel", "ROCm"),
)
def test_what_runs_on_other_gpus(dispatch, pretend, capability, options):
    pretend(capability, **options)
    by_triton = WITH_TRITON if capability >= (8, 0) else ()
    for op, kernels in dispatch.TABLE.items():
        assert picked(dispatch, op) == ("triton" if op in by_triton else kernels.otherwise), op


@pytest.mark.parametrize(
    ("capability", "taken"),
    [((7, 0), "reference"), ((7, 5), "reference"), ((8, 0), "triton"), ((12, 0), "triton")],
)
def test_layers_of_experts_take_triton_where_it_has_tensor_cores(
    dispatch, pretend, capability, taken
):
    """Below 8.0 its products run without them, spill kilobytes and compile for minutes."""
    pretend(capability)
    choose = dispatch.experts_path.__wrapped__
    path = choose(GPU, torch.float16)
    assert path.name == taken
    assert ("no tensor cores below capability 8.0" in path.reason) == (taken == "reference")
    assert choose(GPU, torch.float16, "triton").name == "triton", "by name it can be tried"


def test_where_triton_is_missing(dispatch, pretend, monkeypatch):
    pretend((9, 0), compiled=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    no_gpu = mock.Mock(side_effect=AssertionError("torch is not compiled with CUDA"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", no_gpu)
    assert all(picked(dispatch, op) == "reference" for op in WITH_TRITON)


def test_a_gpu_of_amd_is_no_hopper(dispatch, pretend):
    """Some of them call their capability 9.0, too."""
    pretend((9, 0))
    assert dispatch.is_hopper(GPU)
    pretend((9, 0), hip="6.2")
    assert not dispatch.is_hopper(GPU)
    assert not dispatch.is_hopper(torch.device("cpu"))


def test_meta_tensors_take_the_op_and_run_no_kernel(dispatch):
    meta = torch.device("meta")
    for op in dispatch.TABLE:
        assert dispatch.pick(op, meta).name == "compiled"
        assert not dispatch.runs_compiled(op, meta)


def test_a_choice_is_a_constant_to_the_compiler(dispatch, device):
    """It asks torch what the library holds, which no graph can."""

    @torch.compile(fullgraph=True, backend="eager")
    def doubled(x):
        return x * 2 if dispatch.runs_compiled("momentum", x.device) else x

    assert torch.equal(doubled(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device))


@pytest.mark.parametrize("op", ("nf4_dequant", "symmetric_matmul", "momentum"))
def test_the_portable_path_is_logged_once(dispatch, caplog, op):
    dispatch.say_once.cache_clear()
    device = torch.device("xpu")
    with caplog.at_level(logging.WARNING, logger=dispatch.__name__):
        for _ in range(2):
            assert dispatch.path_name(op, device) == "reference"
    reason = dispatch.pick(op, device).reason
    assert "xpu" in reason
    assert [record.message for record in caplog.records] == [
        f"{op} runs its portable path, which is slow: {reason}"
    ]


def test_a_choice_of_the_caller_is_no_slow_path(dispatch, caplog):
    dispatch.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=dispatch.__name__):
        assert dispatch.path_name("matmul_add", torch.device("xpu")) == "torch"
        assert dispatch.path_name("square_chain", torch.device("xpu")) == "caller"
    assert not caplog.records
