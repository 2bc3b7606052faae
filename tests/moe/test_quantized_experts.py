"""4-bit experts as modules and as records: quantised, moved, saved, loaded, active ones."""

import copy
import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from .._compare import assert_same_bits, assert_same_tensors
from ..conftest import module_fixture
from ..kernels.test_nf4_dequant import oracle, stack_of_bitsandbytes
from ._eager import pack

weights = module_fixture("moe.quantized.expert_weights")

SHAPE = (5, 24, 40)
ODD = (5, 7, 9)  # 63 elements per expert
FORMATS = (
    {},
    {"nested": True},
    {"quant_type": "fp4"},
    {"blocksize": 256},  # more than an odd expert has
)


def draw(shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_equal(left, right) -> None:
    assert left.quantized_weight().shape == right.quantized_weight().shape
    assert_same_tensors(dict(left.named_parameters()), dict(right.named_parameters()))


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("shape", (SHAPE, ODD, (1, 1, 1)), ids=str)
def test_expert_by_expert_equals_the_whole_stack(opt, shape, options):
    """Blocks that straddle experts are those of the flattened stack."""
    module = opt.moe.QuantizedExperts.from_weight(draw(shape), **options)
    blocksize, quant_type = options.get("blocksize", 64), options.get("quant_type", "nf4")
    packed, absmax = opt.nf4_quantize(draw(shape), blocksize, quant_type=quant_type)
    assert_same_bits(module.packed, packed)
    if not options.get("nested"):
        assert_same_bits(module.absmax, absmax)
    decoded = module.decode(dtype=torch.float32)
    scale = absmax.max()
    assert (decoded - draw(shape).float()).abs().max() <= 0.2 * scale
    assert module.decode().dtype == torch.bfloat16


def test_counts_and_shapes_of_experts_are_checked(opt):
    kind, stack = opt.moe.QuantizedExperts, draw(SHAPE).unbind(0)
    for words, call in (
        ("holds 4 of 5", lambda: kind.from_experts(stack[:4], SHAPE)),
        ("expected 5 experts", lambda: kind.from_experts([*stack, stack[0]], SHAPE)),
        (r"expert 0 has shape \(24, 39\)", lambda: kind.from_experts([stack[0][:, 1:]], SHAPE)),
        ("experts is empty", lambda: kind.from_experts([], SHAPE)),
        ("blocksize must be one of", lambda: kind(SHAPE, blocksize=48)),
        ("quant_type must be one of", lambda: kind(SHAPE, quant_type="int4")),
        (r"shape \(E, N, K\)", lambda: kind((5, 0, 4))),
        ("shape must be", lambda: kind((-1, 4, 64))),
        (r"weight must be \(E, N, K\)", lambda: kind.from_weight(torch.tensor(1.0))),
        ("num_experts must be at least 1, got 0", lambda: opt.moe.choose_strategy(3, 0)),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_each_expert_is_released_before_the_next_is_read(opt):
    """At most two experts are alive: the one being quantised and the one being read."""
    made = []

    def experts():
        for expert in range(8):
            tensor = torch.full((64, 64), float(expert + 1))
            made.append(weakref.ref(tensor))
            assert sum(entry() is not None for entry in made) <= 2
            yield tensor
            del tensor

    opt.moe.QuantizedExperts.from_experts(experts(), (8, 64, 64))


@pytest.mark.parametrize("change", ("half", "bfloat16", "double"))
@pytest.mark.parametrize("options", FORMATS[:2], ids=str)
def test_dtypes_of_the_model_leave_the_format_alone(opt, change, options):
    """A model cast to bfloat16 must not round absmax."""
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), **options)
    before = copy.deepcopy(module)
    getattr(nn.Sequential(module), change)()
    assert_equal(module, before)
    module.to(torch.float16)
    assert_equal(module, before)


def test_devices_are_followed(opt):
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), nested=True)
    moved = copy.deepcopy(module).to("meta")
    assert {parameter.device.type for parameter in moved.parameters()} == {"meta"}
    assert moved.quantized_weight().device.type == "meta"
    back = module.quantized_weight().to("cpu")
    assert_same_bits(back.decode(), module.decode())
    assert back.to(torch.float16) is back


def test_nothing_trains_and_nothing_is_a_buffer(opt):
    """DistributedDataParallel broadcasts buffers in every step."""
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE), nested=True)
    assert not list(module.buffers())
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("shape", (SHAPE, ODD), ids=str)
def test_state_dict_round_trip(opt, shape, options):
    module = opt.moe.QuantizedExperts.from_weight(draw(shape), **options)
    fresh = opt.moe.QuantizedExperts(shape, **options)
    fresh.load_state_dict(module.state_dict())
    assert_equal(fresh, module)
    assigned = opt.moe.QuantizedExperts(shape, **options, device="meta")
    assigned.load_state_dict(module.state_dict(), assign=True)
    assert_equal(assigned, module)


def test_a_state_of_another_format_is_refused_before_anything_is_written(opt):
    module = opt.moe.QuantizedExperts.from_weight(draw(SHAPE))
    before = copy.deepcopy(module)
    other = opt.moe.QuantizedExperts.from_weight(-draw(SHAPE), quant_type="fp4")
    with pytest.raises(ValueError, match="the state describes experts"):
        module.load_state_dict(other.state_dict())
    assert_equal(module, before)
    with pytest.raises(ValueError, match="no description of 4-bit experts"):
        opt.moe.QuantizedExperts.from_state_dict({"packed": module.packed})


@pytest.mark.parametrize("options", (*FORMATS, {"quant_type": "mxfp4"}, {"quant_type": "fp8"}))
def test_from_a_record_without_a_copy(opt, options):
    """Seen as the record is, which a square stack tells by its values alone, and saved so."""
    module = opt.moe.QuantizedExperts.from_weight(
        draw((3, 32, 32)), strategy="selective", **options
    )
    for record in (module.quantized_weight(), module.transpose(1, 2)):
        again = opt.moe.QuantizedExperts.from_quantized(record)
        assert again.packed.data_ptr() == module.packed.data_ptr()
        assert again.strategy == "selective" and again.transposed is record.transposed
        assert_same_bits(again.decode(), record.decode())
        state = nn.ModuleDict({"down_proj": again}).state_dict()
        assert_equal(opt.moe.QuantizedExperts.from_state_dict(state, "down_proj."), again)
    assert not torch.equal(again.decode(), module.decode())


def test_a_record_is_checked_again_when_it_is_another_one(opt, submodule, begun):
    """What was checked once costs a layer nothing; another tensor, size or strategy is seen."""
    packed = opt.moe.QuantizedExperts.from_weight(torch.randn(2, 64, 64))
    seen = begun(submodule("kernels.quant.formats").Blockwise4Bit, "check")
    first = packed.quantized_weight()
    seen.clear()
    again = packed.quantized_weight()
    assert not seen and vars(again) == vars(first)
    other = packed.packed.detach() ^ 255
    packed.packed.data = other
    assert packed.quantized_weight().packed.data_ptr() == other.data_ptr()
    state = {name: value.clone() for name, value in packed.state_dict().items()}
    packed.load_state_dict(state, assign=True)
    record = packed.quantized_weight()
    assert record.packed is packed.packed and record.packed.data_ptr() == state["packed"].data_ptr()
    packed.strategy, packed.transposed = "chunked", True
    record = packed.quantized_weight()
    assert (record.strategy, record.shape) == ("chunked", packed.shape) and record.transposed
    packed.strategy = "quick"
    with pytest.raises(ValueError, match="strategy must be one of"):
        packed.quantized_weight()
    packed.strategy = "auto"
    packed.packed.data = packed.packed.data[1:]
    for _ in range(2):
        with pytest.raises(ValueError, match="packed must be 4096 bytes"):
            packed.quantized_weight()


@pytest.mark.parametrize("packed", [("down_proj",), ("gate_up_proj", "down_proj")])
@pytest.mark.parametrize("quant_type", ["nf4", "mxfp4", "fp8"])
def test_merging_an_adapter_is_refused_before_anything_is_written(opt, packed, quant_type):
    """With down packed alone, too: gate_up comes first."""
    experts = opt.moe.Experts(4, 64, 32)
    experts.add_adapter(r=2, alpha=4)
    for entry in experts.expert_lora.values():
        torch.nn.init.normal_(entry.lora_B["default"].weight)
    pack(opt.moe, experts, packed, quant_type=quant_type)
    before = {key: value.clone() for key, value in experts.state_dict().items()}
    for merge in (experts.merge, experts.merge_and_unload):
        with pytest.raises(ValueError, match=f"the weight is {quant_type}: an adapter cannot be"):
            merge()
    assert not experts.expert_lora.merged
    assert_same_tensors(experts.state_dict(), before)


def routed(opt, ids, experts):
    return opt.moe.expert_sort(torch.tensor(ids), experts)


def parametrized(shape, *, nested=False, storage=torch.uint8, quant_type="nf4"):
    """A module whose gate_up_proj bitsandbytes has parametrized, and what that decodes to.

    By the format's definition: the whole stack must not be decoded by bitsandbytes.
    """
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(draw(shape, torch.float32))
    options = {"compress_statistics": nested, "quant_type": quant_type, "blocksize": 32}
    parametrize.replace_parameter_4bit(module, "gate_up_proj", **options)
    entry = module.parametrizations["gate_up_proj"]
    packed = entry.original.detach().reshape(-1)
    stack = stack_of_bitsandbytes(packed, entry[0].quant_state, shape[1:])
    expected = oracle(stack, range(shape[0]), torch.float32)
    entry.original = nn.Parameter(packed.view(storage).reshape(-1, 1), False)

    def refuse(packed):
        raise AssertionError("the whole stack was decoded")

    entry[0].forward = refuse
    return module, expected


@pytest.mark.parametrize("storage", (torch.uint8, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("shape", (SHAPE, (3, 16, 64)), ids=str)
def test_bitsandbytes_experts_are_recognised_by_their_attributes(
    weights, shape, nested, quant_type, storage
):
    module, expected = parametrized(shape, nested=nested, storage=storage, quant_type=quant_type)
    record = weights.expert_weight(module, "gate_up_proj")
    found = (record.shape, record.format.blocksize, record.format.nested)
    assert found == (shape, 32, nested)
    # +0 and -0 are equal: FP4 has both
    assert torch.equal(record.decode(dtype=torch.float32), expected)
    some = torch.tensor([2, 0])
    seen = record.transpose(1, 2).decode(some, torch.float32)
    assert torch.equal(seen, expected[some].transpose(1, 2))


@pytest.mark.sees_defect("the shape of a projection is guessed from the hidden size")
def test_shape_comes_from_the_caller_where_the_state_has_none(weights):
    module, expected = parametrized(SHAPE)
    state = module.parametrizations["gate_up_proj"][0].quant_state
    state.shape = torch.Size((expected.numel(),))
    with pytest.raises(ValueError, match=r"pass shape=\(E, N, K\)"):
        weights.expert_weight(module, "gate_up_proj")
    record = weights.expert_weight(module, "gate_up_proj", SHAPE)
    assert_same_bits(record.decode(dtype=torch.float32), expected)
    with pytest.raises(ValueError, match="as many elements"):
        weights.expert_weight(module, "gate_up_proj", (5, 24, 41))


@pytest.mark.sees_defect("formats that nobody knows are returned whole")
def test_unknown_formats_are_refused(weights):
    module = nn.Module()
    module.float8 = nn.Parameter(torch.zeros(2, 3, 4).to(torch.float8_e4m3fn), False)
    module.bytes = nn.Parameter(torch.zeros(12, 1, dtype=torch.uint8), False)
    for name, words in (
        ("float8", r"float8_e4m3fn \(2, 3, 4\)"),
        ("bytes", "neither a dense weight"),
        ("gate_up", r"name=.gate_up. of Module is NoneType: neither"),
    ):
        with pytest.raises(ValueError, match=words):
            weights.expert_weight(module, name)


UNREAD = {  # what is said: whether the scales are nested, and what is changed of the state
    "in blocks of 128": (True, lambda state: setattr(state.state2, "blocksize", 128)),
    "quant_type must be one of": (False, lambda state: setattr(state, "quant_type", "int4")),
    "absmax on meta, but the packed bytes are on cpu": (
        False,
        lambda state: setattr(state, "absmax", state.absmax.to("meta")),
    ),
    r"Bnb4bitParametrization, Identity.*use_in_transformers\(model\)": (False, None),
}


@pytest.mark.parametrize("words", UNREAD)
def test_unknown_states_of_bitsandbytes_are_refused(weights, words):
    nested, change = UNREAD[words]
    module, _ = parametrized(SHAPE, nested=nested)
    entry = module.parametrizations["gate_up_proj"]
    change(entry[0].quant_state) if change else entry.append(nn.Identity())
    with pytest.raises(ValueError, match=words):
        weights.expert_weight(module, "gate_up_proj")


def test_dense_weights_pass_through(weights):
    module = nn.Module()
    module.down_proj = nn.Parameter(torch.zeros(2, 3, 4))
    assert weights.expert_weight(module, "down_proj") is module.down_proj


def test_record_checks_its_sizes(weights):
    nf4 = weights.format_of("nf4", blocksize=32)
    good = {"packed": torch.zeros(24, dtype=torch.uint8), "absmax": torch.zeros(2)}
    record = weights.QuantizedWeight(nf4, good, (2, 4, 6))
    with pytest.raises(ValueError, match="only dimensions 1 and 2"):
        record.transpose(0, 1)
    for words, changes in (
        ("packed must be 25 bytes", {"stored": (2, 5, 5)}),
        (r"shape \(E, N, K\)", {"stored": (8, 6)}),
        ("strategy must be one of", {"strategy": "best"}),
        (r"must be those named \['packed', 'absmax'\]", {"tensors": {"absmax": good["absmax"]}}),
    ):
        with pytest.raises(ValueError, match=words):
            weights.QuantizedWeight(nf4, **{"tensors": good, "stored": (2, 4, 6)} | changes)
    with pytest.raises(TypeError, match=r"tensors\['absmax'\] must be a dense .*list"):
        weights.QuantizedWeight(nf4, {**good, "absmax": [0.0, 0.0]}, (2, 4, 6))


ROUTINGS = {
    "first and last inactive": [[1, 2], [2, 1]],
    "middle inactive": [[0, 4], [4, 0], [0, 0]],
    "all active": [[0, 1], [2, 3], [4, 0]],
    "one expert": [[3, 3]],
    "sentinels": [[-1, 5], [3, 9]],
    "nothing but sentinels": [[-1, 5]],
}


@pytest.mark.sees_defect("inactive experts are remapped to whatever lay in memory")
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_active_experts(opt, ids):
    order = routed(opt, ids, 5)
    active = opt.moe.active_experts(order)
    given = torch.tensor(ids)
    known = (given >= 0) & (given < 5)
    expected = given[known].unique()
    count = len(expected)
    assert active.ids.shape == (min(5, given.numel()),)
    assert torch.equal(active.ids[:count], expected)
    assert len(set(active.ids.tolist())) == len(active.ids)  # the rest are valid ids as well
    assert ((active.ids >= 0) & (active.ids < 5)).all()
    place = torch.full((5,), -1).index_copy(0, expected, torch.arange(count))
    assert torch.equal(active.position, place)
    assert torch.equal(active.offsets[:count], order.offsets[expected])
    assert (active.offsets[count:] == order.offsets[-1]).all()
    assert torch.equal(active.remap(given), torch.where(known, place[given.clamp(0, 4)], -1))


@pytest.mark.sees_defect("an empty batch has no experts and divides by zero")
def test_active_experts_of_an_empty_batch(opt):
    order = opt.moe.expert_sort(torch.zeros(0, 2, dtype=torch.long), 5)
    active = opt.moe.active_experts(order)
    assert active.ids.shape == (0,) and active.offsets.tolist() == [0]
    assert active.position.tolist() == [-1] * 5
    experts = opt.moe.QuantizedExperts.from_weight(draw(SHAPE, torch.float32))
    decoded = opt.moe.selective_expert_weights(experts.quantized_weight(), active, torch.bfloat16)
    assert decoded.shape == (0, 24, 40)


@pytest.mark.sees_defect("which experts are active is found by a wait for the device")
def test_active_experts_do_not_wait_for_the_device(opt):
    """Under a fake tensor mode no value exists that the host could read."""
    order = opt.moe.expert_sort(torch.zeros(3, 2, dtype=torch.long), 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def ids(offsets, slots):
        changed = opt.moe.ExpertOrder(
            slots, offsets, order.rows, order.tiles, order.tokens, 2, 5, order.tile_rows
        )
        return opt.moe.active_experts(changed).ids

    assert torch.equal(ids(order.offsets, order.slots), opt.moe.active_experts(order).ids)


@pytest.mark.sees_defect("the number of experts is guessed from the highest active one")
def test_selective_weights_dense_and_packed(opt):
    order = routed(opt, [[4, 1], [1, 1]], 5)
    active = opt.moe.active_experts(order)
    experts = opt.moe.QuantizedExperts.from_weight(draw(SHAPE, torch.float32))
    dense = experts.decode(dtype=torch.float32)
    select = opt.moe.selective_expert_weights
    packed = select(experts.quantized_weight(), active, torch.float32)
    assert_same_bits(packed, select(dense, active))
    assert_same_bits(packed[:2], dense[[1, 4]])
    for weight in (dense, torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"weight of shape .* must hold 4 experts"):
            select(weight, opt.moe.active_experts(routed(opt, [[0]], 4)))
    with pytest.raises(ValueError, match="dtype is needed"):
        select(experts.quantized_weight(), active)
    with pytest.raises(ValueError, match="a dense weight keeps its dtype"):
        select(dense, active, torch.bfloat16)
    with pytest.raises(TypeError, match="got list"):
        select([dense], active)


def test_blocks_that_leave_their_row_are_reported_once(opt, dispatch, caplog):
    """Where a GPU would decode inside the product; not on the CPU, nor for a strategy by name."""
    dispatch.say_once.cache_clear()
    half = SimpleNamespace(is_cuda=True, element_size=lambda: 2)
    straddling = opt.moe.QuantizedExperts((2, 4, 96)).quantized_weight()
    named = dataclasses.replace(straddling, strategy="chunked")
    whole = opt.moe.QuantizedExperts((2, 4, 128)).quantized_weight()
    assert whole.fusable_over(half) and not named.fusable_over(half)
    assert not straddling.fusable_over(torch.zeros(1, 96))
    assert not caplog.records
    assert not straddling.fusable_over(half) and not straddling.fusable_over(half)
    (record,) = caplog.records
    assert "experts are decoded to memory" in record.getMessage()
    assert "blocks of 64 leave their row of 96 elements" in record.getMessage()


def test_the_report_does_not_break_a_graph(submodule, dispatch, caplog):
    module = submodule("moe.quantized.expert_weights")
    dispatch.say_once.cache_clear()

    @torch.compile(fullgraph=True, backend="eager")
    def traced(x: torch.Tensor) -> torch.Tensor:
        module._report("blocks of 64 leave their row of 96 elements")
        return x + 1

    assert traced(torch.zeros(2)).tolist() == [1, 1]
    said = [record for record in caplog.records if "leave their row" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("quant_type", ["nf4", "fp8"])
def test_layers_compile_for_any_number_of_tokens(opt, device, quant_type) -> None:
    """The strategy is chosen by a number of rows that the trace leaves open."""
    dynamo = torch._dynamo
    dynamo.reset()
    layer = opt.moe.Experts(5, 24, 40, device=device)
    pack(opt.moe, layer, quant_type=quant_type)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    counted = dynamo.utils.counters
    counted.clear()
    for tokens in (11, 13, 17):
        x = draw((tokens, 24), torch.float32).to(device).requires_grad_()
        ids = torch.arange(2 * tokens, device=device).reshape(tokens, 2) % 5
        gates = torch.full((tokens, 2), 0.5, device=device)
        out, expected = compiled(x, ids, gates), layer(x, ids, gates)
        assert_same_bits(out, expected)
        (found,), (wanted,) = (torch.autograd.grad(y.sum(), x) for y in (out, expected))
        assert_same_bits(found, wanted)
    assert counted["stats"]["unique_graphs"] == 1
