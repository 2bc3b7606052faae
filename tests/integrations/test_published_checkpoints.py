"""Checkpoints that others have quantised: their bits, no 16-bit copy, LoRA that trains."""

import copy
import os
import re
import subprocess
import sys
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors, relative_error
from ..conftest import ROOT
from ._models import (
    FP32,
    STACKS,
    attached,
    build,
    experts_of,
    logits,
    set_random_lora,
    step,
    tokens,
)
from ._published import (
    BNB,
    CHANNELS,
    FP8,
    MXFP4,
    bnb_decoded,
    bnb_state,
    fp8_decoded,
    mxfp4_decoded,
    tiny,
    write,
    write_bnb,
    write_fp8,
    write_mxfp4,
    write_tensors,
)
from ._trainers import plain_trainer, settings
from .test_peft import wrap, wrappers_of

NAMES = {  # of an expert's matrices in the files: gate, up, down
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
    "deepseek_v3": ("gate_proj", "up_proj", "down_proj"),
}
SIDES = ("absmax", "quant_map", "quant_state", "_scale", "_scales", "_scale_inv")


@pytest.fixture
def load(opt):
    def loaded(folder, **options):
        options = {"device_map": "cpu", "dtype": torch.bfloat16} | options
        return opt.integrations.load_quantized(folder, **options)

    return loaded


def with_decoded(folder, loaded, read, tmp_path):
    """transformers' own model, in float32, over what the files decode to."""
    files = load_file(folder / "model.safetensors")
    tensors = {
        name: read(files, name.removesuffix("_blocks"))
        for name in files
        if not any(part in name for part in SIDES)
    }
    tensors = {name.removesuffix("_blocks"): tensor for name, tensor in tensors.items()}
    loaded.config.save_pretrained(tmp_path / "decoded")
    save_file(tensors, tmp_path / "decoded" / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "decoded", experts_implementation="eager", dtype=torch.bfloat16
    )


def assert_same_model(loaded, expected):
    """Every weight that transformers has, decoded to bfloat16."""
    ours, theirs = dict(loaded.named_modules()), dict(expected.named_parameters())
    for name, parameter in theirs.items():
        module, _, leaf = name.rpartition(".")
        value = getattr(ours[module], leaf)
        if hasattr(value, "decode"):
            value = value.decode(dtype=torch.bfloat16)
        # + 0: on the CPU bitsandbytes decodes FP4's code of -0.0 to 0.0, on the GPU it does not
        assert_same_bits(value + 0, parameter + 0)


@pytest.mark.parametrize(
    ("name", "quant_type", "nested", "storage"),
    [
        ("qwen3_moe", "nf4", False, torch.uint8),
        ("qwen3_moe", "fp4", True, torch.uint8),
        ("mixtral", "fp4", False, torch.uint8),
        ("mixtral", "nf4", True, torch.bfloat16),
        ("deepseek_v3", "nf4", True, torch.uint8),
    ],
)
def test_bitsandbytes_expert_by_expert(load, tmp_path, name, quant_type, nested, storage):
    """The packed bytes are the files' own, and every weight is what bitsandbytes decodes.

    FSDP wants one dtype for all parameters: bitsandbytes then stores its bytes as bfloat16.
    """
    options = {"nested": nested, "quant_type": quant_type, "storage": storage}
    folder = write_bnb(tiny(name), tmp_path / "bnb", **options)
    files = load_file(folder / "model.safetensors")
    loaded = load(folder)
    assert_same_model(loaded, with_decoded(folder, loaded, bnb_decoded, tmp_path))
    for module, experts in loaded.named_modules():
        if not module.endswith(".experts"):
            continue
        prefix = module.replace(".mlp.", ".block_sparse_moe.") if name == "mixtral" else module
        for target, parts in (("gate_up_proj", NAMES[name][:2]), ("down_proj", NAMES[name][2:])):
            stack = getattr(experts, target)
            keys = [f"{prefix}.{e}.{p}.weight" for e in range(stack.shape[0]) for p in parts]
            stored = torch.cat([files[key].reshape(-1) for key in keys])
            assert_same_bits(stack.packed, stored.view(torch.uint8))
            assert stack.format.quant_type == quant_type
    assert not hasattr(loaded.config, "quantization_config")
    ids = tokens()
    assert torch.isfinite(loaded(ids).logits).all()


def test_bitsandbytes_of_transformers_5(load, tmp_path):
    """It quantises every Linear and leaves experts, which are none, in 16 bits."""
    tiny("qwen3_moe").save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "bnb")
    loaded = load(tmp_path / "bnb")
    expected = load(tmp_path / "dense")
    for mine, other in zip(experts_of(loaded), experts_of(expected), strict=True):
        assert_same_tensors(mine.state_dict(), other.state_dict())
    weight = model.model.layers[0].self_attn.q_proj.weight
    from bitsandbytes.functional import dequantize_4bit

    found = loaded.model.layers[0].self_attn.q_proj.weight
    assert_same_bits(found, dequantize_4bit(weight.data, weight.quant_state).to(found.dtype))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_bitsandbytes_stacks(load, tmp_path, name, nested):
    """Stacks as `bitsandbytes.nn.parametrize` has them in a state dict."""
    model = tiny(name)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    for key in [key for key in tensors if key.endswith(STACKS)]:
        tensors |= bnb_state(key, tensors[key], compress_statistics=nested, quant_type="nf4")
    loaded = load(write_tensors(model, tmp_path / "bnb", BNB, tensors))
    for name, experts in loaded.named_modules():
        if name.endswith(".experts"):
            for target in STACKS:
                stack, key = getattr(experts, target), f"{name}.{target}"
                assert_same_bits(stack.packed, tensors[key].reshape(-1))
                assert_same_bits(stack.decode(), bnb_decoded(tensors, key))


def test_what_is_not_taken_from_bitsandbytes(load, tmp_path):
    folder = write_bnb(tiny("qwen3_moe"), tmp_path / "bnb")
    with pytest.raises(ValueError, match=r"quant_type='fp4'.* is quant_type='nf4' blocksize=64"):
        load(folder, quant_type="fp4")
    with pytest.raises(ValueError, match=r"blocksize=128.*leave that out"):
        load(folder, blocksize=128)
    path = folder / "model.safetensors"
    whole = load_file(path)

    key = "model.layers.0.mlp.experts.1.up_proj.weight"
    value = bnb_decoded(whole, key)
    others = {name: tensor for name, tensor in whole.items() if not name.startswith(key)}
    blocks = bnb_state(key, value, quant_type="nf4", blocksize=128)
    values = {f"{key}.quant_map": torch.linspace(-1, 1, 16)}
    for tensors, words in (
        (others | {key: value}, r"in 10 tensors, of which 9 are packed"),
        (others | blocks, r"gate_up_proj mixes .*blocksize=128.*blocksize=64"),
        (whole | values, r"1\.up_proj\.weight has other values than nf4"),
    ):
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            load(folder)
    odd = tiny("qwen3_moe", moe_intermediate_size=3, hidden_size=72)
    with pytest.raises(ValueError, match="straddle"):
        load(write_bnb(odd, tmp_path / "odd"))


def test_mxfp4_of_gpt_oss(load, tmp_path):
    """Blocks and scales are the files' own; the model sees them the other way round."""
    folder = write_mxfp4(tiny("gpt_oss"), tmp_path / "mxfp4")
    files = load_file(folder / "model.safetensors")
    loaded = load(folder)
    assert_same_model(loaded, with_decoded(folder, loaded, mxfp4_decoded, tmp_path))
    experts = loaded.model.layers[1].mlp.experts
    for target in STACKS:
        stack, key = getattr(experts, target), f"model.layers.1.mlp.experts.{target}"
        assert stack.format.quant_type == "mxfp4"
        assert_same_bits(stack.packed, files[f"{key}_blocks"].reshape(-1))
        assert_same_bits(stack.scales, files[f"{key}_scales"].reshape(-1))
    assert torch.isfinite(loaded(tokens()).logits).all()


def test_what_we_pack_is_what_is_published(opt, load, tmp_path):
    """In memory, and while 16-bit files are read; along the sum, as in gpt-oss's own files."""
    model = tiny("gpt_oss")
    model.save_pretrained(tmp_path / "dense")

    def change(key, tensor):
        if not key.endswith(STACKS):
            return {key: tensor}
        blocks, scales = opt.mxfp4_quantize(tensor.transpose(1, 2))
        return {f"{key}_blocks": blocks, f"{key}_scales": scales}

    expected = load(write(model, tmp_path / "mxfp4", MXFP4, change)).state_dict()
    opt.integrations.quantize_experts(model, "mxfp4")
    for found in (model, load(tmp_path / "dense", quant_type="mxfp4")):
        assert_same_tensors(found.state_dict(), expected)
    small = build("gpt_oss")
    with pytest.raises(ValueError, match="must be a multiple of it, got 24"):
        opt.integrations.quantize_experts(small, "mxfp4")
    assert small.config._experts_implementation == "eager"


@pytest.mark.parametrize(
    ("config", "block"),
    [(FP8, (128, 128)), (FP8 | {"weight_block_size": None}, (0, 0)), (CHANNELS, (1, 0))],
    ids=["128 x 128", "per tensor", "per row"],
)
@pytest.mark.parametrize(("name", "width"), [("qwen3_moe", 128), ("deepseek_v3", 192)])
def test_fp8_expert_by_expert(load, tmp_path, name, config, block, width):
    """Bytes are the files' own; of 192 rows the second block has 64, and up's begin below them."""
    model = tiny(name, hidden_size=256, moe_intermediate_size=width)
    folder = write_fp8(model, tmp_path / "fp8", config, block)
    files = load_file(folder / "model.safetensors")
    loaded = load(folder)
    assert_same_model(loaded, with_decoded(folder, loaded, fp8_decoded, tmp_path))
    prefix = "model.layers.1.mlp.experts"
    stack = loaded.get_submodule(prefix).gate_up_proj
    keys = [
        f"{prefix}.{e}.{p}.weight" for e in range(stack.shape[0]) for p in ("gate_proj", "up_proj")
    ]
    assert_same_bits(
        stack.packed, torch.cat([files[key].reshape(-1).view(torch.uint8) for key in keys])
    )


def test_fp8_scales_that_are_powers_of_two(load, tmp_path):
    """DeepSeek-V3.1 publishes them as e8m0, others as its bytes."""
    folder = write_fp8(tiny("qwen3_moe", hidden_size=256), tmp_path / "fp8", FP8, (128, 128))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    loaded = {}
    for kind in (torch.float32, torch.float8_e8m0fnu, torch.uint8):
        changed = dict(tensors)
        for key, value in tensors.items():
            if key.endswith("_scale_inv"):
                power = value.to(torch.float8_e8m0fnu)
                changed[key] = power.view(kind) if kind is torch.uint8 else power.to(kind)
        save_file(changed, path, metadata={"format": "pt"})
        loaded[kind] = load(folder).state_dict()
    for kind in (torch.float8_e8m0fnu, torch.uint8):
        assert_same_tensors(loaded[kind], loaded[torch.float32])


def test_fp8_stacks(load, tmp_path):
    """As transformers keeps experts itself: (E, N, K) and (E, N / 128, K / 128)."""
    model = tiny("qwen3_moe", hidden_size=256, moe_intermediate_size=128)
    apart = load(write_fp8(model, tmp_path / "apart", FP8, (128, 128)))
    tensors = {}
    for key, value in apart.state_dict().items():
        name, _, part = key.rpartition(".")
        module = apart.get_submodule(name)
        if not hasattr(module, "stored"):
            tensors[key] = value.clone()
        elif part == "packed":
            tensors[name] = value.view(torch.float8_e4m3fn).view(module.shape).clone()
        elif part == "scales":
            tensors[f"{name}_scale_inv"] = value.view(module.shape[0], -1, 256 // 128).clone()
            if name.endswith("down_proj"):
                tensors[f"{name}_scale_inv"] = value.view(module.shape[0], -1, 1).clone()
    stacked = load(write_tensors(model, tmp_path / "stacked", FP8, tensors))
    assert_same_tensors(stacked.state_dict(), apart.state_dict())


def test_what_is_not_taken_of_fp8(load, tmp_path):
    folder = write_fp8(tiny("qwen3_moe", hidden_size=256), tmp_path / "fp8", FP8, (128, 128))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    key = "model.layers.0.mlp.experts.1.up_proj.weight"
    for part, value, message in (
        (f"{key}_scale_inv", torch.ones(3, 2), "has 6 scales for 1 x 64 x 256"),
        (key, torch.ones(64, 256, dtype=torch.int8), r"torch\.int8 with scales, no e4m3"),
    ):
        save_file(tensors | {part: value}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(folder)


def channels(*weights) -> dict:
    """A configuration of compressed-tensors with these groups."""
    return CHANNELS | {"config_groups": {f"g{n}": {"weights": w} for n, w in enumerate(weights)}}


ROWS = CHANNELS["config_groups"]["group_0"]["weights"]
REFUSED = [
    ({"quant_method": "awq"}, r"quantised already, by .*awq.*dequantize=True"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
    (channels(ROWS | {"type": "int"}), "compressed-tensors.*only 8-bit floats are known"),
    (channels(ROWS, ROWS | {"block_structure": [128, 128]}), r"block_structure: .*\(128, 128\)"),
    (channels(None), r"of its matrices, \[\]"),
    (FP8 | {"weight_block_size": [96, 96]}, r"powers of two.* got \(96, 96\)"),
    (FP8 | {"weight_block_size": 128}, "not iterable|unpack"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_other_ways_to_quantise_are_refused(load, tmp_path, config, words):
    folder = write(tiny("qwen3_moe"), tmp_path, config, lambda key, tensor: {key: tensor})
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_fp8_stacks_whose_scales_do_not_divide(load, tmp_path):
    """One scale is that of all experts; other numbers must be as many for each."""
    model = tiny("qwen3_moe", hidden_size=64)
    config = FP8 | {"weight_block_size": None}
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {k: v for k, v in model.state_dict().items() if ".experts." not in k}
    for key, value in model.state_dict().items():
        if ".experts." in key:
            tensors[key] = value.to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.tensor(0.5)
    loaded = load(write_tensors(model, tmp_path / "one", config, tensors))
    assert (experts_of(loaded)[0].gate_up_proj.scales == 0.5).all()
    tensors[f"{stack}_scale_inv"] = torch.ones(len(model.state_dict()[stack]) + 1)
    with pytest.raises(ValueError, match=r"gate_up_proj_scale_inv in .* scales for 5 x 128 x 64"):
        load(write_tensors(model, tmp_path / "more", config, tensors))


def test_memory_that_the_recipe_computes(opt, load, tmp_path):
    """Of weights: those of a model that was loaded, and of its LoRA."""
    page = (ROOT / "docs/recipes/gpt-oss-20b.md").read_text()
    code = re.search(r"^def memory.*?(?=^\S*published = )", page, re.MULTILINE | re.DOTALL).group()
    found: dict = {}
    exec(code, found)
    model = load(write_mxfp4(tiny("gpt_oss"), tmp_path / "mxfp4"))
    computed = found["memory"](model.config, tokens=11, rank=3)
    opt.integrations.attach_lora(model, r=3, lora_alpha=7)
    bytes_of = {"experts": 0, "lora": 0, "rest": 0}
    for name, parameter in model.named_parameters():
        packed = name.endswith((".packed", ".scales"))
        part = "lora" if ".expert_lora." in name else "experts" if packed else "rest"
        bytes_of[part] += parameter.nbytes
    assert bytes_of["experts"] == computed["experts, MXFP4"]
    assert bytes_of["lora"] == computed["LoRA, float32"]
    assert bytes_of["rest"] == computed["everything else, bfloat16"]


PEAK = """
import os, sys, threading, time
import torch
from kernels import get_kernel
sys.path.insert(0, {root!r})
opt = get_kernel({repo_id!r}, version=1, backend="cpu", trust_remote_code=True)
from transformers import Qwen3MoeConfig
torch.set_num_threads(1)

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

load = opt.integrations.load_quantized
load({warm!r}, device_map="cpu")  # imports and first uses
for folder in {folders!r}:
    before, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    model = load(folder, device_map="cpu")
    done.set()
    thread.join()
    print("PEAK", peak[0] - before, sum(p.nbytes for p in model.parameters()))
    del model
"""


def peaks(repo_id, warm, folders) -> list[tuple[int, int]]:
    """Bytes of anonymous memory while each folder is loaded, and those of what remains."""
    script = PEAK.format(root=str(ROOT), repo_id=repo_id, warm=str(warm), folders=folders)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "LOCAL_KERNELS": f"{repo_id}={ROOT}",
            # glibc raises it by what was freed, and then keeps what tensors leave in its heap.
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("PEAK")]
    assert len(lines) == len(folders)
    return [(int(peak), int(kept)) for peak, kept in lines]


@pytest.mark.sees_defect("the 16-bit stacks exist while the model is loaded")
def test_host_peak_is_two_experts(repo_id, device, tmp_path):
    """Beside what remains: of dense stacks of 48 MiB, and of packed ones of 8.5 MiB or more."""
    if device.type != "cpu":
        pytest.skip("host memory is measured with the CPU variant")
    experts, hidden, intermediate = 16, 512, 1024
    sizes = {"hidden_size": hidden, "num_hidden_layers": 1}
    qwen = tiny("qwen3_moe", moe_intermediate_size=intermediate, num_experts=experts, **sizes)
    oss = tiny("gpt_oss", intermediate_size=intermediate, num_local_experts=experts, **sizes)
    qwen.save_pretrained(tmp_path / "apart")
    tensors = {name: tensor.contiguous() for name, tensor in qwen.state_dict().items()}
    folders = [
        tmp_path / "apart",
        write_tensors(qwen, tmp_path / "stacked", None, tensors),
        write_bnb(qwen, tmp_path / "bnb"),
        write_fp8(qwen, tmp_path / "fp8", FP8, (128, 128)),
        write_mxfp4(oss, tmp_path / "mxfp4"),
    ]
    warm = write_bnb(tiny("qwen3_moe"), tmp_path / "warm")
    measured = peaks(repo_id, warm, [*map(str, folders)])
    assert all(kept < 0.35 * experts * 3 * hidden * intermediate * 2 for _, kept in measured[:2])
    for (peak, kept), element_bytes in zip(measured, (2, 2, 1, 1, 1), strict=True):
        # The allocator and the interpreter take a few MiB of their own.
        budget = kept + 2 * (2 * hidden * intermediate * element_bytes) + (6 << 20)
        assert peak <= budget, f"{peak / 2**20:.1f} of {kept / 2**20:.1f} MiB"


WRITERS = {
    "nf4": lambda folder: write_bnb(tiny("qwen3_moe"), folder),
    "mxfp4": lambda folder: write_mxfp4(tiny("gpt_oss"), folder),
    "fp8": lambda folder: write_fp8(tiny("qwen3_moe", hidden_size=256), folder, FP8, (128, 128)),
}


@pytest.fixture(scope="module", params=WRITERS)
def files(request, tmp_path_factory):
    return request.param, WRITERS[request.param](tmp_path_factory.mktemp(request.param) / "files")


@pytest.fixture
def load_files(opt, device, files):
    def loaded(folder=files[1]):
        return opt.integrations.load_quantized(folder, dtype=torch.float32, device_map=device)

    return loaded


@pytest.fixture
def exact(load_files, tmp_path):
    """transformers' own model in float64, over what the experts decode to."""
    loaded = load_files()
    tensors = {}
    for name, value in loaded.state_dict().items():
        stack = loaded.get_submodule(name.rpartition(".")[0])
        if hasattr(stack, "decode"):
            name, value = name.rpartition(".")[0], stack.decode(dtype=torch.float32)
        tensors[name] = value
    model = AutoModelForCausalLM.from_config(loaded.config, experts_implementation="eager")
    model.load_state_dict(tensors)
    return model.to(loaded.device, torch.float64).eval()


def steps_in_other_orders(model):
    """Steps whose layers add up their products in an order drawn for each call."""
    linear, generator = torch.nn.functional.linear, torch.Generator().manual_seed(0)

    def permuted(x, weight, bias=None):
        order = torch.randperm(x.shape[-1], generator=generator).to(x.device)
        return linear(x[..., order], weight[:, order], bias)

    with mock.patch.object(torch.nn.functional, "linear", permuted):
        return [step(model) for _ in range(8)]


def test_gradients_against_float64(opt, load_files, exact, files) -> None:
    """Through the model: attention and both projections, in PEFT's layers, which are bypassed; at
    most 5 times the root mean square error of transformers' own model in float32 over decoded
    experts, over 8 orders of its sums.

    A model of two layers is conditioned worst in one direction, so that all of an error grows or
    shrinks with one rounding: over orders of the same sums, float32's own error of a gradient went
    from 2e-6 to 2e-5, and no single one of them bounds another. The error over their root mean
    square follows Student's t of 8 degrees of freedom, which exceeds 5 once in 950. TF32 rounds
    products to 5e-4.
    """
    model = load_files()
    formats = {getattr(e, target).format.quant_type for e in experts_of(model) for target in STACKS}
    assert formats == {files[0]}
    base = logits(model)
    options = {"parameters": [f"experts.{target}" for target in STACKS], "modules": ["q_proj"]}
    plain = wrap(copy.deepcopy(exact).float(), **options)
    model, exact = wrap(model, **options), wrap(exact, **options)
    assert len(wrappers_of(model)) == 4
    opt.integrations.use_in_transformers(model)
    (found, gradients), (expected, wanted) = map(step, (model, exact))
    usual = steps_in_other_orders(plain)

    def budget(errors) -> float:
        return 5 * (sum(error**2 for error in errors) / len(usual)) ** 0.5

    logits_apart = (relative_error(dense, expected) for dense, _ in usual)
    assert relative_error(found, expected) <= budget(logits_apart)
    assert relative_error(found, base) > 0.01
    assert gradients.keys() == wanted.keys() and any("experts" in key for key in gradients)
    for key, gradient in wanted.items():
        allowed = budget(relative_error(dense[key], gradient) for _, dense in usual)
        assert relative_error(gradients[key], gradient) <= min(allowed, 1e-4), key
    with pytest.raises(ValueError, match="an adapter cannot be merged"):
        model.merge_adapter()


def test_adapters_of_ours_are_pefts(opt, load_files, exact, tmp_path) -> None:
    model = load_files()
    opt.integrations.use_in_transformers(model)
    base = logits(model)
    attached(opt, model)
    with pytest.raises(ValueError, match="an adapter cannot be merged"):
        opt.integrations.merge_lora(model)
    opt.integrations.save_peft_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(exact, tmp_path / "adapter")
    found = logits(model)
    assert_error_at_most(found, logits(theirs), FP32)
    again = load_files()
    opt.integrations.load_peft_adapter(again, tmp_path / "adapter")
    assert_same_bits(logits(again), found)
    with opt.integrations.lora_disabled(again):
        assert_same_bits(logits(again), base)


def test_saved_and_loaded(opt, load_files, tmp_path) -> None:
    """By ours and by transformers, before there are adapters and with them."""
    model = load_files()
    base, before = logits(model), model.state_dict()
    model.save_pretrained(tmp_path / "base")
    adapted = logits(attached(opt, model))
    model.save_pretrained(tmp_path / "whole")
    set_random_lora(model, seed=5)
    model.load_state_dict(load_file(tmp_path / "whole/model.safetensors"))  # as Trainer resumes
    assert_same_bits(logits(model), adapted)
    again = load_files(tmp_path / "base")
    assert_same_tensors(again.state_dict(), before)
    assert_same_bits(logits(again), base)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    for loaded in (load_files(tmp_path / "whole"), theirs.to(model.device)):
        assert_same_tensors(loaded.state_dict(), model.state_dict())
        assert_same_bits(logits(loaded), logits(model))


def test_steps_with_experts_in_host_memory(opt, load_files) -> None:
    """ExpertOffload over what was loaded, our LoRA on it: the same bits, also when it is off."""
    models = [load_files(), load_files()]
    for model in models:
        opt.integrations.use_in_transformers(model)
        torch.manual_seed(0)
        attached(opt, model)
    offload = opt.moe.ExpertOffload(models[1])
    (expected, wanted), (found, gradients) = map(step, models)
    assert_same_bits(found, expected)
    assert gradients.keys() == wanted.keys() and any("lora" in name for name in gradients)
    for name, value in wanted.items():
        assert_same_bits(gradients[name], value)
    offload.turn_off()
    assert_same_bits(logits(models[1]), logits(models[0]))


def test_trainer_goes_on_from_its_checkpoint(opt, load_files, device, tmp_path) -> None:
    """Another model of the same files, with another adapter until the checkpoint is there."""

    def trained_by(seed: int, checkpoint: str | None) -> dict[str, torch.Tensor]:
        model = load_files()
        opt.integrations.use_in_transformers(model)
        torch.manual_seed(seed)
        attached(opt, model)
        arguments = settings(tmp_path, device) | {"max_steps": 4, "save_steps": 2}
        plain_trainer(model, arguments).train(resume_from_checkpoint=checkpoint)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    expected = trained_by(0, None)
    assert expected and all("lora" in name for name in expected)
    assert_same_tensors(trained_by(1, str(tmp_path / "checkpoint-2")), expected)
