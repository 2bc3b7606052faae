"""save_optimizer, load_optimizer and save_optimizer_async: exact, matched by name, atomic."""

import errno
import fcntl
import json
import os
import resource
import signal
import threading
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from .._compare import assert_same_bits
from ..optimizers._steps import parameters, train
from ..optimizers.test_offload import assert_same_values
from ..optimizers.test_state import (
    MAKERS,
    NAMES,
    SHAPES,
    assert_same_state,
    muon,
    state_tensors,
)

FILES = {"optimizer.safetensors", "optimizer.json"}


def copies(params):
    return [nn.Parameter(param.detach().clone()) for param in params]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def disk_full(*_, **__):
    raise OSError("disk full")


def options_of(optimizer):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.kernels_ci
def test_every_kind_of_option_round_trips(opt, device, tmp_path) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(
        opt,
        params,
        lr=0.1 + 0.2,  # 0.30000000000000004: shortest decimal forms are exact
        weight_decay=numpy.float32(0.1),
        dtype=torch.float32,
        momentum_dtype=torch.bfloat16,
        adjust_lr_fn="none",
        adamw_betas=(0.8, 0.999),
        num_heads=None,
    )
    optimizer.param_groups[0]["ns_steps"] = numpy.int64(4)
    optimizer.param_groups[1]["initial_lr"] = 1e-3  # as schedulers leave it
    optimizer.param_groups[1]["milestones"] = [1, (2, None), {"a": True}]  # as users may
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    optimizer.param_groups[1]["own"] = {"a.b": one, "a": {"b": two}}
    opt.save_optimizer(optimizer, tmp_path)
    assert contents(tmp_path).keys() == FILES
    readable = json.loads((tmp_path / "optimizer.json").read_text())
    assert readable["class"] == "Muon"
    assert readable["groups"][0]["names"] == optimizer.parameter_names(0)
    assert readable["groups"][0]["options"]["momentum"] == 0.95
    other = muon(opt, copies(params))
    other.param_groups[1] |= {"milestones": None, "own": None}
    opt.load_optimizer(other, tmp_path)
    assert options_of(other) == options_of(optimizer)
    assert type(other.param_groups[0]["ns_steps"]) is int
    assert isinstance(other.param_groups[1]["adamw_betas"], tuple)
    assert isinstance(other.param_groups[0]["split_sizes"]["qkv"], tuple)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tensor_learning_rate(opt, device, dtype, tmp_path) -> None:
    lr = torch.tensor(0.1, dtype=dtype, device=device)
    params = parameters(SHAPES, device=device)
    opt.save_optimizer(muon(opt, params, lr=lr), tmp_path)
    other = muon(opt, copies(params), lr=torch.tensor(0.5, device=device))
    opt.load_optimizer(other, tmp_path)
    assert_same_bits(other.param_groups[0]["lr"], lr)
    assert other.param_groups[0]["lr"].device == lr.device
    number = muon(opt, copies(params), lr=0.5)
    opt.load_optimizer(number, tmp_path)
    assert_same_bits(number.param_groups[0]["lr"], lr)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", None])
def test_parameters_are_matched_by_name_and_without_names_by_position(
    opt, device, prefix, tmp_path
) -> None:
    """In another order, and under the names that a wrapped model gives them."""
    first, second = parameters([(6, 4), (6, 4)], device=device)
    optimizer = opt.Muon([("a", first), ("b", second)])
    train(optimizer, [first, second], 2)
    opt.save_optimizer(optimizer, tmp_path)
    twins = copies([first, second])
    named = [] if prefix is None else [(prefix + "b", twins[1]), (prefix + "a", twins[0])]
    other = opt.Muon(named or twins)
    opt.load_optimizer(other, tmp_path)
    for param, twin in zip((first, second), twins, strict=True):
        expected = optimizer.state[param]["momentum_buffer"]
        assert_same_bits(other.state[twin]["momentum_buffer"], expected)
    if named:  # the names of the state_dict are in the order of its parameters
        assert other.state_dict()["param_groups"][0]["param_names"] == ["b", "a"]
    if prefix is None:
        assert_same_state(other, optimizer)


def test_what_cannot_be_saved_is_named_by_the_call(opt, tmp_path) -> None:
    """Before anything is written, or a thread begins."""
    other = torch.optim.SGD(parameters([(4, 3)]), lr=0.1)
    for function in (opt.save_optimizer, opt.save_optimizer_async, opt.load_optimizer):
        with pytest.raises(TypeError, match="optimizer must be a Muon or a MuonAdamW, got SGD"):
            function(other, tmp_path)
    for save in (opt.save_optimizer, opt.save_optimizer_async):
        optimizer = opt.Muon(parameters([(4, 3)]))
        optimizer.param_groups[0]["callback"] = object()
        with pytest.raises(TypeError, match=r"group.0.callback: a object cannot be saved"):
            save(optimizer, tmp_path)
        del optimizer.param_groups[0]["callback"]
        optimizer.state["note"] = {"x": 1}
        with pytest.raises(TypeError, match=r"state without a parameter cannot .*: \['note'\]"):
            save(optimizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["save_optimizer", "save_optimizer_async"])
@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_failed_save_keeps_the_previous_one(opt, name, step, monkeypatch, tmp_path) -> None:
    """And nothing else; a full disk is an OSError."""
    params = parameters([(64, 64)])
    optimizer = opt.Muon(params)

    def save() -> None:
        pending = getattr(opt, name)(optimizer, tmp_path)
        if pending is not None:
            pending.wait()

    save()
    before = contents(tmp_path)
    train(optimizer, params, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        if step == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        else:
            patch.setattr(os, step, disk_full)
        try:
            with pytest.raises(OSError, match=r"disk full|File too large"):
                save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


@pytest.mark.sees_defect(
    "the folder is not flushed after a rename", "        os.fsync(folder)  #", "        pass  #"
)
def test_a_rename_reaches_the_disk(opt, watch, tmp_path) -> None:
    """Every new file is flushed before its rename, the folder that holds its name after it."""
    opened = "/proc/self/fd/{}".format
    events = watch(os, "fsync", lambda _, file: ("flush", Path(os.readlink(opened(file)))))
    watch(os, "replace", lambda _, source, target: ("rename", Path(source)), events)
    opt.save_optimizer(opt.Muon(parameters([(4, 3)])), tmp_path)
    renamed = [at for at, (kind, _) in enumerate(events) if kind == "rename"]
    assert len(renamed) == len(FILES)
    for at in renamed:
        assert ("flush", events[at][1]) in events[:at]
        assert ("flush", tmp_path) in events[at:]


def test_two_savers_to_one_folder(opt, tmp_path) -> None:
    """Neither fails, neither mixes with the other, and no temporary file stays."""
    makers = [(0.25, 1.0), (0.5, 2.0)]
    failures = []

    def save(lr: float, value: float) -> None:
        param = nn.Parameter(torch.zeros(64, 64))
        optimizer = opt.Muon([("w", param)], lr=lr)
        optimizer.step()
        optimizer.state[param]["momentum_buffer"].fill_(value)
        try:
            for _ in range(30):
                opt.save_optimizer(optimizer, tmp_path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=maker) for maker in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert contents(tmp_path).keys() == FILES
    assert saved_in(opt, tmp_path) in makers


def saved_in(opt, folder: Path) -> tuple[float, float]:
    """The rate of a matrix of 64 x 64, and the one number that all of its momentum is."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = opt.Muon([("w", param)])
    opt.load_optimizer(optimizer, folder)
    value = optimizer.state[param]["momentum_buffer"].unique().item()
    return optimizer.param_groups[0]["lr"], value


SAVER = """
import os, signal, sys
folder, os.environ["LOCAL_KERNELS"], backend, save, killed_at = sys.argv[1:]
import torch
from kernels import get_kernel
repo_id = os.environ["LOCAL_KERNELS"].split("=")[0]
opt = get_kernel(repo_id, version=1, backend=backend, trust_remote_code=True)
param = torch.nn.Parameter(torch.zeros(64, 64))
optimizer = opt.Muon([("w", param)])
optimizer.step()
buffer = optimizer.state[param]["momentum_buffer"]
opt.save_optimizer(optimizer, folder)
real, count = os.replace, 0
def replace(source, target):
    global count
    count += 1
    if count == int(killed_at):
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = replace
buffer.fill_(1)
optimizer.param_groups[0]["lr"] = 0.5
getattr(opt, save)(optimizer, folder)
buffer.fill_(2)
"""


@pytest.mark.parametrize(
    ("save", "killed_at", "found"),  # found: rate and momentum
    [
        ("save_optimizer", 1, (1e-3, 0.0)),
        ("save_optimizer", 2, (0.5, 1.0)),
        ("save_optimizer_async", 1, (1e-3, 0.0)),
        ("save_optimizer_async", 0, (0.5, 1.0)),
    ],
)
def test_a_process_that_is_killed_or_ends_leaves_one_whole_checkpoint(
    opt, repo_id, device, forks, save, killed_at, found, tmp_path
) -> None:
    """Killed at the first rename the old one is there, at the second the new one, unmixed; a
    normal end finishes what a thread writes."""
    root = Path(opt.__file__).resolve().parent.parent.parent
    words = (tmp_path, f"{repo_id}={root}", device.type, save, killed_at)
    result = forks.run("-c", SAVER, *words)
    assert result.returncode == (-signal.SIGKILL if killed_at else 0), result.stderr
    assert saved_in(opt, tmp_path) == found
    opt.save_optimizer(opt.Muon(parameters([(4, 3)])), tmp_path)
    assert contents(tmp_path).keys() == FILES


GONE = object()


def rewrite(files, folder: Path, changes: dict[str, object]) -> None:
    """Change a checkpoint's header by path and its tensors by name; `files` writes it."""
    path = folder / "optimizer.safetensors"
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["optimizer"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for place, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[place] = value
        elif place.startswith("state.") and value is GONE:
            tensors = {key: x for key, x in tensors.items() if not key.startswith(place)}
        elif place.startswith("state."):
            tensors[place].view(-1)[-1] = value
        else:
            inner, keys = header, [int(key) if key.isdigit() else key for key in place.split(".")]
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value
            if value is GONE:
                del inner[keys[-1]]
    files.write_tensors(path, tensors, {"optimizer": json.dumps(header)})


TWO = torch.zeros(2)
OPTION, STATE = "groups.0.options", "the loaded"
NO_VALUE = r"groups\[0\].options.{}: .* is no value that save_optimizer writes"
FAULTS = [
    ({"format": 99}, "has format 99, this version reads 1"),
    ({"class": "Adam"}, "is of Adam, the optimizer Muon"),
    ({"groups.1": GONE, "state.1.": GONE}, "has 1 groups, the optimizer 2"),
    ({"groups.0.names.3": "c"}, rf"group 0: nothing was saved for \['{NAMES[3]}'\]; .*: \['c'\]"),
    ({"groups.0.names.3": GONE, "state.0.3.": GONE}, "3 parameters were saved, 4 are present"),
    ({f"{OPTION}.momentum": "much"}, "group 0: momentum must be"),
    ({f"{OPTION}.lr": float("nan")}, "group 0: lr must be finite"),
    ({"state.0.2.momentum_buffer": TWO}, rf"'wide': {STATE} .* shape \(2,\), expected \(4, 12\)"),
    ({"class": GONE}, "class must be a str, got None"),
    ({"groups": GONE}, "groups must be a list, got None"),
    ({"groups": [1, 2]}, r"groups\[0\] must be a dict, got 1"),
    ({"groups.1.names": GONE}, r"groups\[1\].names must be a list"),
    ({"groups.1.names": [3]}, r"groups\[1\].names must hold strings and null, got \[3\]"),
    ({OPTION: GONE}, r"groups\[0\].options must be a dict, got None"),
    ({f"{OPTION}.lr": {"tensor": "a", "dtype": "float32"}}, NO_VALUE.format("lr")),
    ({f"{OPTION}.lr": {"tensor": "group.0.lr"}}, NO_VALUE.format("lr")),
    ({f"{OPTION}.dtype": {"dtype": "load"}}, NO_VALUE.format("dtype")),
    ({f"{OPTION}.dtype": {"dict": [1]}}, NO_VALUE.format("dtype")),
    ({"state.0.7.momentum_buffer": TWO}, "'state.0.7.momentum_buffer' belongs to no parameter and"),
    ({"state.2.0.momentum_buffer": TWO}, "'state.2.0.momentum_buffer' belongs to no parameter"),
    ({"state.a.0.b": TWO}, "belongs to no"),
    ({"x": TWO}, "tensor 'x' belongs to no"),
    ({"state.1.0.step": torch.nan}, f"group 1, .*'table': {STATE} step holds nan; it must be fin"),
    ({"state.1.1.step": torch.inf}, f"'bias': {STATE} step holds inf; it must"),
    ({"state.1.0.exp_avg_sq": torch.nan}, f"'table': {STATE} exp_avg_sq holds nan; it must be at"),
]


@pytest.mark.parametrize(("changes", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    opt, submodule, device, changes, message, tmp_path
) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(opt, params)
    optimizer.fit_state()
    opt.save_optimizer(optimizer, tmp_path)
    train(optimizer, params, 2)
    kept = [tensor.clone() for _, tensor in state_tensors(optimizer)]
    rewrite(submodule("integrations.tensor_file"), tmp_path, changes)
    with pytest.raises(ValueError, match=message) as caught:
        opt.load_optimizer(optimizer, tmp_path)
    assert str(tmp_path / "optimizer.safetensors") in str(caught.value)
    for (_, tensor), old in zip(state_tensors(optimizer), kept, strict=True):
        assert_same_bits(tensor, old)


HEADERS = ["", "{", "[]", "null", "[" * 100000]


@pytest.mark.parametrize(
    "what",
    ["nothing", "others", 0, 4, 100, -1, *HEADERS],
    ids=lambda x: f"{x:.9}" if isinstance(x, str) else x,
)
def test_what_is_no_checkpoint(opt, submodule, what, tmp_path) -> None:
    """No file, tensors of somebody else, a file cut off there, a header that is no JSON object."""
    optimizer, path = opt.Muon(parameters([(4, 3)])), tmp_path / "optimizer.safetensors"
    error, words = ValueError, str(path)
    if what == "nothing":
        error, words = FileNotFoundError, "no optimizer checkpoint"
    elif what == "others":
        save_file({"x": torch.zeros(1)}, path)
        words = "was not written by save_optimizer"
    elif isinstance(what, int):
        opt.save_optimizer(optimizer, tmp_path)
        path.write_bytes(path.read_bytes()[:what])
        words = f"{path} is damaged or no safetensors file"
    else:
        files = submodule("integrations.tensor_file")
        files.write_tensors(path, {}, {"optimizer": what})
    with pytest.raises(error, match=words):
        opt.load_optimizer(optimizer, tmp_path)


def test_a_flipped_bit_anywhere_is_reported(opt, submodule, tmp_path) -> None:
    """One of every byte: of lengths, names, dtypes, shapes, options, checksums and tensors."""
    params = parameters([(4, 2), (0, 4)])
    optimizer = opt.Muon(params, beta2=0.9)
    train(optimizer, params, 1)
    read = submodule("integrations.checkpoint").read
    opt.save_optimizer(optimizer, tmp_path)
    path = tmp_path / "optimizer.safetensors"
    written = path.read_bytes()
    unseen = []
    for place in range(len(written)):
        flipped = bytearray(written)
        flipped[place] ^= 1 << (place * 7 % 8)
        path.write_bytes(flipped)
        try:
            read(path)
            unseen.append(place)
        except ValueError as error:
            assert str(path) in str(error)
    assert unseen == []
    with pytest.raises(ValueError, match=r"is damaged: the checksums of 'state\.\d\.\d\.\w+'"):
        path.write_bytes(written[:-1] + bytes([written[-1] ^ 4]))
        read(path)
    path.write_bytes(written)
    opt.load_optimizer(optimizer, tmp_path)


def test_files_have_the_mode_of_any_other(opt, tmp_path) -> None:
    """A job of another user of the group may read them."""
    opt.save_optimizer(opt.Muon(parameters([(4, 3)])), tmp_path)
    (tmp_path / "any").touch()
    expected = (tmp_path / "any").stat().st_mode
    assert {(tmp_path / name).stat().st_mode for name in FILES} == {expected}


def test_a_save_leaves_what_another_is_writing(opt, submodule, tmp_path) -> None:
    optimizer = opt.Muon(parameters([(4, 3)]))
    with submodule("integrations.tensor_file").replacing(tmp_path / "optimizer.json") as file:
        file.write(b"mine")
        opt.save_optimizer(optimizer, tmp_path)
    assert (tmp_path / "optimizer.json").read_bytes() == b"mine"
    assert contents(tmp_path).keys() == FILES


def test_a_file_that_was_taken_for_left_behind_is_made_again(opt, monkeypatch, tmp_path) -> None:
    """Another saver may come between its making and its lock."""
    taken = []
    flock = fcntl.flock

    def late(opened, how) -> None:
        if not taken:
            (left,) = tmp_path.iterdir()
            taken.append(left.name)
            left.unlink()
        flock(opened, how)

    monkeypatch.setattr(fcntl, "flock", late)
    opt.save_optimizer(opt.Muon(parameters([(4, 3)])), tmp_path)
    assert taken and contents(tmp_path).keys() == FILES


def test_without_locks_nothing_is_taken_for_left_behind(opt, monkeypatch, tmp_path) -> None:
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    left, gone = tmp_path / "optimizer.safetensors.0.tmp", tmp_path / "optimizer.json.0.tmp"
    left.touch()
    gone.symlink_to("nowhere")
    opt.save_optimizer(opt.Muon(parameters([(4, 3)])), tmp_path)
    gone.unlink()
    assert contents(tmp_path).keys() == FILES | {left.name}


def test_a_tensor_file_holds_any_tensor(submodule, device, tmp_path) -> None:
    """Any other reader of the format reads the same."""
    files = submodule("integrations.tensor_file")
    tensors = {
        str(dtype): torch.arange(-6, 6, device=device).to(dtype).view(3, 4).t()
        for dtype in files.DTYPES
    }
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5, dtype=torch.float64)}
    path = tmp_path / "any.safetensors"
    files.write_tensors(path, tensors, {"text": "\u00e9\n"})
    found, texts = files.read_tensors(path)
    assert texts["text"] == "\u00e9\n"
    for read in (found, load_file(path)):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert_same_bits(read[name], tensor.cpu())
    with pytest.raises(TypeError, match=r"x: a tensor of torch\.complex64 cannot be saved"):
        files.write_tensors(path, {"x": torch.zeros(2, dtype=torch.complex64)}, {})


@pytest.fixture
def gate(submodule, monkeypatch):
    """Saving threads stop before they write, until the event is set."""
    module = submodule("integrations.checkpoint")
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
    """Training goes on while the thread has not written anything yet, at another rate."""
    params = parameters(SHAPES, device=device)
    lr = torch.tensor(0.05, device=device)
    optimizer = make(opt, params, lr=lr)
    if offload:
        optimizer.turn_on_cpu_offload()
    train(optimizer, params, 2)
    opt.save_optimizer(optimizer, tmp_path / "sync")
    at_call = copies(params)
    pending = opt.save_optimizer_async(optimizer, tmp_path / "async")
    train(optimizer, params, 3, seed=50)
    lr.fill_(0.7)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.7
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

    monkeypatch.setattr(os, "replace", disk_full)
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
