"""Kernels compiled for a GPU that is not there, and kept."""

import copy
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import Future
from unittest import mock

import pytest
import torch

from ...conftest import module_fixture

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

compiler = module_fixture("kernels.launch.triton_compile")
CPU = torch.device("cpu")
OPTIONS = {"num_warps": 2, "launch_pdl": True}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of triton.jit, whatever interprets kernels here; the cache is empty."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "scaled_copy.py"
    source.write_text(
        "import triton.language as tl\n\n\n"
        "def scaled_copy(x, out, n, one, scale, nothing, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    value = tl.load(x + at * one, mask=at < n) * scale\n"
        "    tl.store(out + at, value, mask=at < n)\n"
    )
    spec = importlib.util.spec_from_file_location("scaled_copy", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return JITFunction(module.scaled_copy, do_not_specialize=["n"])


def arguments(n: int = 64, one: int = 1, scale: float = 2.0) -> tuple:
    x = torch.zeros(80, dtype=torch.bfloat16)
    x = x[-x.data_ptr() % 16 // 2 :]  # 16-byte aligned
    return x, x[1:], n, one, scale, None


def test_a_specialization_is_tritons(compiler, kernel) -> None:
    found = compiler.specialization(kernel, arguments(), {"BLOCK": 64})
    assert found.signature == {
        "x": "*bf16",
        "out": "*bf16",
        "n": "i32",
        "one": "constexpr",
        "scale": "fp32",
        "nothing": "constexpr",
        "BLOCK": "constexpr",
    }
    assert found.constants == {(3,): 1, (5,): None, (6,): 64}
    assert found.attributes == {(0,): [["tt.divisibility", 16]]}, "out is not aligned, n is free"
    found = compiler.specialization(kernel, arguments(2**31, 48), {"BLOCK": 64})
    assert found.signature["n"] == "i64" and found.signature["one"] == "i32"
    assert (3,) in found.attributes and (3,) not in found.constants
    with pytest.raises(TypeError, match="n is True, no tensor or number"):
        compiler.specialization(kernel, arguments(True), {"BLOCK": 64})


def test_every_dtype_that_the_experts_take_has_a_type(compiler, kernel, submodule) -> None:
    from triton.runtime.jit import mangle_type

    checks = submodule("kernels.checks")
    for dtype in (*checks.DTYPES, *checks.INTEGERS):
        x = torch.zeros(16, dtype=dtype)
        found = compiler.specialization(kernel, (x, x, 64, 1, 2.0, None), {"BLOCK": 64})
        assert found.signature["x"] == mangle_type(x)


COMPILED_ONCE = """
import importlib

import torch
from kernels import get_kernel
from triton.backends.compiler import GPUTarget
from scaled_copy import kernel

package = get_kernel({repo_id!r}, version=1, backend={backend!r}, trust_remote_code=True)
compiler = importlib.import_module(package.__name__ + ".kernels.launch.triton_compile")
x = torch.zeros(64, dtype=torch.bfloat16)
options = dict(num_warps=2, launch_pdl=True)

for arch in (80, 90):
    target = GPUTarget("cuda", arch, 32)

    def begun(block, **more):
        found = compiler.specialization(kernel, (x, x, 64, 1, 2.0, None), dict(BLOCK=block))
        return compiler.begin(kernel, found, options | more, target)

    made = compiler.machine_code(begun(64))
    assert made.code[:4] == b"\\x7fELF"
    assert (made.name, made.threads, made.shared) == ("scaled_copy", 64, 0)
    again = begun(64)
    assert again.made is None, "it is in the cache"
    assert compiler.machine_code(again) == made
    assert compiler.machine_code(begun(32)).code != made.code
    try:
        compiler.machine_code(begun(64, launch_cooperative_grid=True))
    except RuntimeError as error:
        assert "more than a plain launch" in str(error)
    else:
        raise AssertionError("a cooperative launch")
"""


def run_compiling(*arguments: str, **variables: str) -> str:
    """What Python prints in a process of its own, which succeeds and compiles.

    Where kernels were interpreted, none can be compiled any more.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_once_and_kept(kernel, repo_id, device, tmp_path) -> None:
    with open(tmp_path / "scaled_copy.py", "a") as source:
        source.write(
            "\n\nfrom triton.runtime.jit import JITFunction\n\n"
            'kernel = JITFunction(scaled_copy, do_not_specialize=["n"])\n'
        )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    run_compiling(
        "-c", COMPILED_ONCE.format(repo_id=repo_id, backend=device.type), PYTHONPATH=paths
    )


@pytest.fixture
def order(compiler, monkeypatch):
    """Numbers of the jobs that had their turn; none has one before `_turn` is released."""
    begun = types.SimpleNamespace(found=[], finished=[], loaded=[])

    def first(kernel, found, options, device):
        begun.found.append(options["number"])
        return options["number"]

    def rest(number):
        begun.finished.append(number)
        return compiler.Compiled(b"", "scaled_copy", 64, number)

    def in_memory(found, device):
        begun.loaded.append(threading.get_ident())
        return 1

    monkeypatch.setattr(compiler, "_begin", first)
    monkeypatch.setattr(compiler, "machine_code", rest)
    monkeypatch.setattr(compiler, "_in_memory", in_memory)
    monkeypatch.setattr(compiler, "_kernels", {})
    compiler.settle()
    compiler._turn.acquire()
    yield begun
    if compiler._turn.locked():
        compiler._turn.release()
    compiler.settle()


def wait_for(happened) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def asked(compiler, kernel, number, device=CPU):
    found = compiler.specialization(kernel, arguments(), {"BLOCK": 64})
    return compiler.compile_kernel(kernel, found, {"number": number}, device)


def test_asked_for_twice_it_is_loaded_once(compiler, kernel, order) -> None:
    kernels = [asked(compiler, kernel, 7) for _ in range(3)]
    assert len(set(kernels)) == 1 and order.found == [], "it is compiled in another thread"
    compiler._turn.release()
    for _ in range(2):
        assert kernels[0].loaded() == compiler.Loaded(1, 64, 7)
    assert order.found == order.finished == [7]
    assert order.loaded == [threading.get_ident()], "the driver is called in this thread alone"


def test_the_longest_goes_first_and_the_background_last(compiler, kernel, order) -> None:
    short = copy.copy(kernel)
    short._src = "def short(): pass"
    compiler.in_background(asked, compiler, kernel, 5)
    compiler.in_background(asked, compiler, kernel, 1)
    asked(compiler, short, 2)
    asked(compiler, kernel, 3)
    asked(compiler, kernel, 4)
    compiler._turn.release()
    wait_for(lambda: len(order.finished) == 5)
    assert order.found == [3, 4, 2, 5, 1]


def test_settling_drops_what_was_begun_ahead(compiler, kernel, order) -> None:
    compiler.in_background(asked, compiler, kernel, 1)
    asked(compiler, kernel, 2)
    threading.Timer(0.1, compiler._turn.release).start()
    compiler.settle()
    assert order.found == order.finished == [2]
    assert asked(compiler, kernel, 1).loaded().shared == 1, "it can be asked for again"


def test_settling_looks_again_after_what_runs_in_the_background(
    compiler, kernel, order, monkeypatch
) -> None:
    """It may ask for kernels after the first look, and they would compile while a clock runs."""
    runs, looked = threading.Event(), threading.Event()

    def asks_late():
        runs.set()
        looked.wait(30)
        asked(compiler, kernel, 1)
        compiler._here.later = False  # as a caller that needs its kernel at once
        asked(compiler, kernel, 2)

    def compiles_slowly(number):
        time.sleep(0.2)
        order.finished.append(number)
        return compiler.Compiled(b"", "scaled_copy", 64, number)

    monkeypatch.setattr(compiler, "machine_code", compiles_slowly)
    compiler.in_background(asks_late)
    compiler._turn.release()
    assert runs.wait(30)
    threading.Timer(0.1, looked.set).start()
    compiler.settle()
    assert 2 in order.finished, "the first may have begun before it could be dropped"
    assert all(job.future.done() for job, _ in compiler._kernels.values())


def test_what_ran_in_the_background_is_let_go(compiler, order) -> None:
    class Weight:
        pass

    weight = Weight()
    gone = weakref.ref(weight)
    compiler.in_background(lambda _: None, weight)
    del weight
    compiler._turn.release()
    wait_for(lambda: gc.collect() >= 0 and gone() is None)


@pytest.fixture
def new_pool(compiler):
    """Threads of a test's own: `compiler._pool` makes them at the first call."""
    compiler._pool.cache_clear()
    yield compiler._pool
    compiler._pool().shutdown()
    compiler._pool.cache_clear()


def test_a_process_nicer_than_the_threads_compiles(compiler, monkeypatch) -> None:
    """Only root may lower a niceness."""
    given = []

    def setpriority(which, thread, niceness):
        if niceness < 19:
            raise PermissionError(13, "Permission denied")
        given.append((which, thread, niceness))

    monkeypatch.setattr(os, "getpriority", lambda which, thread: 19)
    monkeypatch.setattr(os, "setpriority", setpriority)
    compiler._yield_to_others()
    assert given == [(os.PRIO_PROCESS, threading.get_native_id(), 19)]


def test_threads_that_do_not_start_are_told_to_who_waits(
    compiler, kernel, new_pool, order, monkeypatch
) -> None:
    fails = mock.Mock(side_effect=PermissionError("no thread may start"))
    monkeypatch.setattr(compiler, "_yield_to_others", fails)
    compiler._turn.release()
    asked_first = asked(compiler, kernel, 1)
    assert isinstance(asked_first._compiled.exception(30), RuntimeError)
    asked_after = asked(compiler, kernel, 2)
    assert isinstance(asked_after._compiled.exception(30), RuntimeError)
    with pytest.raises(RuntimeError, match="no thread compiles any more: BrokenThreadPool"):
        asked_after.loaded()
    assert compiler._queue == []


def test_what_the_end_of_a_process_cuts_off_is_told_to_who_waits(
    compiler, kernel, new_pool, order
) -> None:
    threads = new_pool()._max_workers  # each of them is given one turn
    waiting = [asked(compiler, kernel, number) for number in range(threads + 1)]
    new_pool().shutdown(wait=False, cancel_futures=True)
    waiting.append(asked(compiler, kernel, threads + 1))
    compiler._turn.release()
    errors = [one._compiled.exception(30) for one in waiting]
    told = [str(error) for error in errors if error is not None]
    assert len(told) >= 2, "the last two have no turn"
    assert all("no thread compiles any more" in text for text in told)


def test_what_was_for_later_can_be_hurried(compiler, kernel, order) -> None:
    job = compiler._Job(Future(), len(kernel.src), lambda: order.found.append(1), lambda _: None)
    compiler._enqueue(job, later=True)
    asked(compiler, kernel, 2)
    compiler._enqueue(job)
    compiler._turn.release()
    compiler.settle()
    job.future.result(10)
    assert order.found == [2, 1]


def test_what_fails_in_the_background_is_logged(compiler, caplog) -> None:
    def prepares_nothing(value):
        raise ValueError(f"{value} is no height")

    compiler.in_background(prepares_nothing, 7)
    wait_for(lambda: "7 is no height" in caplog.text)
    assert "prepares_nothing failed beside the training" in caplog.text
