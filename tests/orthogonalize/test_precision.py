"""The process's precision of float32 products: reduced ones stay out, settings stay as they are."""

from __future__ import annotations

import threading

import pytest
import torch

from .._compare import assert_same_bits
from ._matrices import matrix

BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
VALUES = {"cpu": ("none", "ieee", "bf16", "tf32"), "cuda": ("none", "ieee", "tf32")}


def read(*switch: str) -> str:
    return torch._C._get_fp32_precision_getter(*switch)


def write(switch: tuple[str, str], value: str) -> None:
    torch._C._set_fp32_precision_setter(*switch, value)


@pytest.fixture
def switches(device):
    """(everything, backend, matmul), "none" in a new process, and again after the test."""
    backend = BACKENDS[device.type]
    found = (("generic", "all"), (backend, "all"), (backend, "matmul"))
    for switch in found:
        write(switch, "none")
    yield found
    for switch in found:
        write(switch, "none")


def test_settings_and_their_inheritance_are_left_alone(opt, device, switches) -> None:
    """Every combination of the three levels answers later changes as if no call had been made."""
    x = torch.randn(4, 6, device=device)
    values = VALUES[device.type]

    def answers(settings: tuple[str, ...], call: bool) -> list[str]:
        for switch, value in zip(switches, settings, strict=True):
            write(switch, value)
        if call:
            opt.orthogonalize(x, dtype=torch.float32)
        seen = [read(*switch) for switch in switches]
        for changed in switches:
            write(changed, "ieee" if read(*changed) != "ieee" else "tf32")
            seen += [read(*switch) for switch in switches]
        return seen

    for settings in [(a, b, c) for a in values for b in values for c in values]:
        assert answers(settings, call=True) == answers(settings, call=False), settings


def test_an_inherited_precision_follows_its_source(opt, device, switches) -> None:
    """A value read through inheritance and written back would stay for good."""
    everything, _, matmul = switches
    write(everything, "tf32")
    opt.orthogonalize(torch.randn(4, 6, device=device), dtype=torch.float32)
    assert read(*matmul) == "tf32"
    write(everything, "ieee")
    assert read(*matmul) == "ieee"


def test_threads_leave_the_setting_as_it_was(opt, device, switches) -> None:
    """Overlapping calls: none gets reduced products, and the last one restores the first's."""
    x = matrix("gaussian", 64, 128).float().to(device)
    strict = opt.orthogonalize(x, dtype=torch.float32)
    write(switches[2], "tf32")
    results, start = [], threading.Barrier(4)

    def work() -> None:
        start.wait()
        results.extend(opt.orthogonalize(x, dtype=torch.float32) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(*switches[2]) == "tf32"
    assert len(results) == 200
    for result in results:
        assert_same_bits(result, strict)


def test_overlapping_holds(submodule, device, switches) -> None:
    """The first to leave must not release the switch under the second."""
    ieee_float32 = submodule("orthogonalize.products").ieee_float32
    write(switches[2], "tf32")
    first, second = (ieee_float32(device, torch.float32) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert read(*switches[2]) == "ieee"
    second.__exit__(None, None, None)
    assert read(*switches[2]) == "tf32"


def test_a_change_during_a_hold_stands(submodule, device, switches) -> None:
    ieee_float32 = submodule("orthogonalize.products").ieee_float32
    write(switches[2], "tf32")
    with ieee_float32(device, torch.float32):
        write(switches[2], "none")
    assert read(*switches[2]) == "none"


def test_other_dtypes_touch_nothing(submodule, device, switches) -> None:
    ieee_float32 = submodule("orthogonalize.products").ieee_float32
    write(switches[2], "tf32")
    with ieee_float32(device, torch.float16):
        assert read(*switches[2]) == "tf32"
