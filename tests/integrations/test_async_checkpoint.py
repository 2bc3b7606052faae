"""save_optimizer_async: what was when it was called, whole, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from .._compare import assert_same_bits
from ..optimizers._steps import parameters, train
from ..optimizers.test_offload import assert_same_values
from ..optimizers.test_state import MAKERS, SHAPES, muon
from .test_checkpoint import FILES, ONE_MATRIX, contents, copies, saved_in


@pytest.fixture
def gate(submodule, monkeypatch):
    """Saving threads stop before they write, until the event is set."""
    module = submodule("integrations.checkpoints.checkpoint")
    event, write = threading.Event(), module.write

    def held(*arguments) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()
        assert not in_thread or event.wait(60)
        write(*arguments)

    monkeypatch.setattr(module, "write", held)
    yield event
    event.set()


def twin(make, opt, params, folder):
    other = make(opt, copies(params), lr=0.9)
    opt.load_optimizer(other, folder)
    return other


@pytest.mark.parametrize("offload", [False, True])
@MAKERS
def test_later_steps_do_not_reach_the_checkpoint(opt, device, make, offload, gate, tmp_path):
    """Training goes on while the thread has not written anything yet."""
    params = parameters(SHAPES, device=device)
    optimizer = make(opt, params)
    if offload:
        optimizer.turn_on_cpu_offload()
    train(optimizer, params, 2)
    opt.save_optimizer(optimizer, tmp_path / "sync")
    at_call = copies(params)
    pending = opt.save_optimizer_async(optimizer, tmp_path / "async")
    train(optimizer, params, 3, seed=50)
    for group in optimizer.param_groups:
        group["lr"] = 0.7
    assert not pending.done()
    with pytest.raises(TimeoutError, match=r"takes longer than 0\.01 seconds"):
        pending.wait(0.01)
    assert not (tmp_path / "async").exists()
    gate.set()
    pending.wait(60)
    assert pending.done()
    assert contents(tmp_path / "async") == contents(tmp_path / "sync")
    assert_same_values(
        twin(make, opt, at_call, tmp_path / "async"), twin(make, opt, at_call, tmp_path / "sync")
    )


def test_a_tensor_rate_is_that_of_the_call(opt, device, gate, tmp_path) -> None:
    lr = torch.tensor(0.25, device=device)
    params = parameters([(4, 6)], device=device)
    pending = opt.save_optimizer_async(opt.Muon(params, lr=lr), tmp_path)
    lr.fill_(0.75)
    gate.set()
    pending.wait(60)
    other = opt.Muon(params, lr=torch.tensor(0.0, device=device))
    opt.load_optimizer(other, tmp_path)
    assert_same_bits(other.param_groups[0]["lr"], torch.tensor(0.25, device=device))


def test_saves_to_one_folder_keep_their_order(opt, device, tmp_path) -> None:
    """The last call wins, and never more than one is under way."""
    params = parameters([(64, 64)], device=device)
    optimizer = opt.Muon(params)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = 0.1 * step
        pending = opt.save_optimizer_async(optimizer, tmp_path)
    pending.wait(60)
    opt.load_optimizer(optimizer, tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 9
    assert contents(tmp_path).keys() == FILES


def test_a_plain_save_and_a_load_wait_for_it(opt, device, gate, tmp_path) -> None:
    """Otherwise the older checkpoint would replace the newer one, or none would be found yet."""
    params = parameters([(6, 4)], device=device)
    optimizer = opt.Muon(params, lr=0.25)
    opt.save_optimizer_async(optimizer, tmp_path)
    threading.Timer(0.2, gate.set).start()
    other = opt.Muon(params)
    opt.load_optimizer(other, tmp_path)
    assert other.param_groups[0]["lr"] == 0.25
    gate.clear()
    opt.save_optimizer_async(optimizer, tmp_path)
    optimizer.param_groups[0]["lr"] = 0.5
    threading.Timer(0.2, gate.set).start()
    opt.save_optimizer(optimizer, tmp_path)
    opt.load_optimizer(other, tmp_path)
    assert other.param_groups[0]["lr"] == 0.5


def test_an_error_is_raised_by_wait_and_by_the_next_save(
    opt, device, tmp_path, monkeypatch, caplog
) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(opt, params)
    opt.save_optimizer_async(optimizer, tmp_path).wait(60)
    before = (tmp_path / "optimizer.safetensors").read_bytes()
    train(optimizer, params, 1)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    pending = opt.save_optimizer_async(optimizer, tmp_path)
    with pytest.raises(OSError, match="disk full"):
        pending.wait(60)
    assert f"saving to {tmp_path} failed" in caplog.text
    opt.save_optimizer_async(optimizer, tmp_path)  # its error has been told
    for save in (opt.save_optimizer_async, opt.save_optimizer, opt.load_optimizer):
        with pytest.raises(OSError, match="disk full"):
            save(optimizer, tmp_path)
        opt.save_optimizer_async(optimizer, tmp_path)
    with pytest.raises(OSError, match="disk full"):
        opt.load_optimizer(optimizer, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "optimizer.safetensors").read_bytes() == before
    opt.save_optimizer_async(optimizer, tmp_path).wait(60)
    assert (tmp_path / "optimizer.safetensors").read_bytes() != before
    assert contents(tmp_path).keys() == FILES


SAVER = f"""{ONE_MATRIX}
opt.save_optimizer_async(optimizer, sys.argv[1]).wait()
real = os.replace
def replace(source, target):
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = replace
buffer.fill_(1)
opt.save_optimizer_async(optimizer, sys.argv[1])
buffer.fill_(2)
if sys.argv[3] == "killed":
    signal.pause()
"""


@pytest.mark.parametrize(("how", "value"), [("killed", 0.0), ("ends", 1.0)])
def test_a_process_that_dies_or_ends(opt, repo_id, device, forks, how, value, tmp_path) -> None:
    """Killed in mid-save the previous checkpoint is whole; a normal end finishes the new one."""
    root = Path(opt.__file__).resolve().parent.parent.parent
    done = forks.run("-c", SAVER, tmp_path, f"{repo_id}={root}", how, device.type)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    assert saved_in(opt, tmp_path)[1] == value


@pytest.mark.gpu
def test_the_copies_are_ordered_before_the_next_step(opt, device, tmp_path) -> None:
    """Without a wait of the host: the stream is kept busy while the call returns."""
    param = nn.Parameter(torch.zeros(4096, 4096, device=device))
    optimizer = opt.Muon([("w", param)])
    optimizer.fit_state()
    buffer = optimizer.state[param]["momentum_buffer"]
    buffer.fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    pending = opt.save_optimizer_async(optimizer, tmp_path)
    busy = not torch.cuda.current_stream(device).query()
    buffer.fill_(2)
    assert busy
    pending.wait(60)
    opt.load_optimizer(optimizer, tmp_path)
    assert (optimizer.state[param]["momentum_buffer"] == 1).all()
