"""Parameters cut into matrices: experts, fused parts, heads, convolutions, columns; batches."""

import math

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_error_at_most
from ._steps import TinyTransformer, new_gradients, parameters, train

EXPERTS = {"expert_keys": ("experts",)}
FUSED = {"kind": "muon", "lr": 0.05, "weight_decay": 0.2}  # every feature of the rule is on


def by_rows(*sizes: int):
    """The parts of every expert's rows, those of all experts one after another."""
    return lambda t: [part for rows in t.split(sizes, dim=1) for part in rows.unbind()]


# What is given -> the matrices that it stands for, and the shape of their statistics.
CUTS = {
    "one head": ((32, 12), {"num_heads": 1}, lambda t: [t], (32, 1)),
    "heads": ((32, 12), {"num_heads": 2}, lambda t: t.split(16), (2, 16, 1)),
    "wide heads": ((32, 12), {"num_heads": 8}, lambda t: t.split(4), (8, 1, 12)),
    "experts": ((3, 10, 6), EXPERTS, lambda t: t.unbind(), (3, 10, 1)),
    "wide experts": ((3, 6, 10), EXPERTS, lambda t: t.unbind(), (3, 1, 10)),
    # gate_up stacks (E, 2 I, H): split_sizes apply to the rows of every expert
    "fused experts": ((3, 14, 6), {**EXPERTS, "split_sizes": (10, 4)}, by_rows(10, 4), (48,)),
    # tall and wide parts keep their statistics one after another
    "parts": ((32, 12), {"split_sizes": [20, 6, 6]}, lambda t: t.split([20, 6, 6]), (44,)),
    "equal": ((32, 12), {"split_sizes": [8, 8, 16]}, lambda t: t.split([8, 8, 16]), (40,)),
    "one part": ((32, 12), {"split_sizes": [32]}, lambda t: [t], (32,)),
    "filters": ((8, 3, 2, 2), {}, lambda t: [t.flatten(1)], (1, 12)),
    "5-D": ((4, 2, 3, 2, 2), {}, lambda t: [t.flatten(1)], (1, 24)),
    "flat": ((6, 2, 5), {"flatten": True}, lambda t: [t.flatten(1)], (1, 10)),
    # under an expert key a router or one expert's own matrix is a matrix
    "a matrix beside experts": ((6, 4), EXPERTS, lambda t: [t], (6, 1)),
}


@pytest.mark.sees_defect("convolutions and N-D tensors are refused")
@pytest.mark.kernels_ci
@pytest.mark.parametrize("beta2", [0.9, None])
@pytest.mark.parametrize(("shape", "options", "pieces", "kept"), CUTS.values(), ids=CUTS)
def test_cuts_equal_separate_parameters(opt, device, shape, options, pieces, kept, beta2) -> None:
    (param,) = parameters([shape], dtype=torch.float64, device=device)
    params = [nn.Parameter(piece.detach().clone()) for piece in pieces(param)]
    rule = {**FUSED, "beta2": beta2}
    fused = opt.MuonAdamW([{**rule, "params": [("experts.w", param)], **options}])
    separate = opt.MuonAdamW([{**rule, "params": params}])
    for step in range(3):
        new_gradients([param], seed=step)
        for single, grad in zip(params, pieces(param.grad), strict=True):
            single.grad = grad.clone()
        fused.step()
        separate.step()
    for single, piece in zip(params, pieces(param.detach()), strict=True):
        assert_error_at_most(piece, single.detach(), 1e-12)
    if beta2 is not None:
        held = fused.state[param]["second_momentum_buffer"]
        assert held.shape == kept
        statistics = [separate.state[p]["second_momentum_buffer"].flatten() for p in params]
        assert_error_at_most(held.flatten(), torch.cat(statistics), 1e-12)


@pytest.mark.sees_defect(
    "expert keys match substrings: shared_experts, routers",
    "return any(parts[i : i + len(wanted)] == wanted for i in range(last + 1))",
    "return last >= 0 and key in name",
)
@pytest.mark.parametrize(
    ("name", "key", "found"),
    [
        ("layers.0.mlp.experts.w1", "experts", True),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.experts", "experts", True),
        ("layers.0.moe.experts.w1", "moe.experts", True),
        ("mlp.shared_experts.w1", "experts", False),
        ("mlp.experts_gate.w1", "experts", False),
        ("experts_w1", "experts", False),
        ("my.expert.w", "experts", False),
    ],
)
def test_expert_keys_match_whole_components(opt, device, name, key, found) -> None:
    """The group before is empty, as that of a pipeline stage that holds no layers."""
    (param,) = parameters([(3, 4, 5)], device=device)
    groups = [{"params": of, "use_muon": True} for of in ([], [(name, param)])]
    if not found:
        with pytest.raises(ValueError, match=r"shape \(3, 4, 5\) is 3-D; .*flatten"):
            opt.Muon(groups, expert_keys=[key])
        return
    optimizer = opt.Muon(groups, expert_keys=[key], beta2=0.9)
    optimizer.step()
    assert optimizer.state[param]["second_momentum_buffer"].shape == (3, 1, 5)


@pytest.mark.sees_defect(
    "one matrix at a time", "            room = most\n", "            room = 0\n"
)
def test_same_shapes_are_orthogonalized_as_one_batch(opt, submodule, device, watch) -> None:
    shapes = [(4, 6), (6, 4), (4, 6), (12, 6), (4, 6)]
    params = parameters(shapes, device=device)
    step = submodule("optimizers.step")
    batches = watch(step, "orthogonalize", lambda _, x, **__: tuple(x.shape))
    named = zip(["a", "b", "c", "qkv", "d"], params, strict=True)
    opt.Muon(named, split_sizes={"qkv": (4, 4, 4)}).step()
    assert sorted(batches) == [(1, 6, 4), (6, 4, 6)]


@pytest.mark.sees_defect("one batch over all experts with full-size temporaries")
@pytest.mark.sees_defect("the copies are as large as the model")
def test_batches_are_bounded_and_cover_everything_once(submodule) -> None:
    """Chunks are bounded by bytes whatever the number of experts or heads."""
    blocks = submodule("optimizers.groups.blocks")
    limit = 40  # elements
    cases = [
        (torch.zeros(7, 2, 5), blocks.Blocks(7, (2,), 1, 5, split=False)),  # 4 experts a piece
        (torch.zeros(24, 5), blocks.Blocks(None, (24,), 12, 5, split=False)),  # 4 heads a piece
        (torch.zeros(3, 24, 5), blocks.Blocks(3, (24,), 12, 5, split=False)),
        (torch.zeros(3, 13, 5), blocks.Blocks(3, (2, 11), 1, 5, split=True)),  # 11 x 5 > limit
        (torch.zeros(9, 9), blocks.Blocks(None, (9,), 1, 9, split=False)),
    ]
    for tensor, cut in cases:
        statistics = torch.zeros(cut.second_moment_shape())
        for piece in cut.pieces(limit):
            piece.view(tensor).add_(1)
            piece.statistics_view(statistics).add_(1)
            elements = piece.matrices * math.prod(piece.matrix)
            assert piece.view(tensor).numel() == elements
            assert elements <= limit or piece.matrices == 1
        assert (tensor == 1).all()
        assert (statistics == 1).all()


@pytest.fixture
def hopper(submodule, monkeypatch):
    """The module of plans as on an H200: float16 iterates in slices of any length."""
    chunks = submodule("optimizers.plan")
    monkeypatch.setattr(submodule("orthogonalize.slices"), "batch_is_free", lambda *_: True)
    monkeypatch.setattr(chunks, "default_dtype", lambda dtype, device: torch.float16)
    return chunks


def bytes_at_once(chunks, m: int, n: int, count: int) -> int:
    """Directions in float32, results in float16, and the largest slice."""
    m, n = min(m, n), max(m, n)
    in_slice = chunks.slice_for(m, n, torch.float16, torch.device("cpu")).at_once(count)
    return 6 * m * n * count + 2 * in_slice * max(m * n + 5 * m * m, 2 * m * n + m * m)


def test_what_a_step_needs_at_once_is_bounded(hopper) -> None:
    """512 MiB and one batch of 256; no smaller batches than that asks for."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(64, 9000, (200, 2), generator=generator).tolist()
    for m, n in [(768, 768), (1536, 2048), (2048, 768), *shapes]:
        count = hopper.matrices_at_once(m, n, torch.float32, torch.device("cpu"))
        assert count == 1 or bytes_at_once(hopper, m, n, count) <= 768 << 20
        more = bytes_at_once(hopper, m, n, count + 1) > 768 << 20
        assert more or 4 * m * n * (count + 1) > 256 << 20, (m, n, count)


@pytest.mark.parametrize(
    ("shape", "batches"),
    [
        ((128, 1536, 2048), [16] * 8),  # 21 and a rest of 2 by the bytes of directions alone
        ((128, 2048, 768), [32] * 4),  # 42 and a rest of 2
        ((2048, 2048), [16, 16]),
        ((1280, 1280), [32]),
        ((512, 2048), [32]),
        ((4096, 4096), [4] * 8),
        ((3584, 3584), [3] * 10 + [2]),
    ],
    ids=str,
)
def test_batches_of_models_are_equal(submodule, hopper, shape, batches) -> None:
    """A last batch of a few matrices would take nearly as long as a full one."""
    blocks = submodule("optimizers.groups.blocks")
    count, params = (shape[0], 1) if len(shape) == 3 else (None, 32)
    cut = blocks.Blocks(count, (shape[-2],), 1, shape[-1], split=False)
    tensors = [torch.empty(shape, device="meta") for _ in range(params)]
    planned = hopper.plan_chunks(
        [(k, tensor, cut) for k, tensor in enumerate(tensors)],
        {tensor: {} for tensor in tensors},
        contiguous=False,
    )
    assert [chunk.matrices for chunk in planned] == batches


TRANSPOSED = {"transposed": True}
MISFITS = [
    ({"num_heads": 5}, r"num_heads=5 does not divide the 12 rows of \(12, 4\)"),
    ({"split_sizes": (4, 4)}, r"split_sizes=\(4, 4\) add up to 8, but \(12, 4\) has 12"),
    ({"num_heads": 2, "split_sizes": (6, 6)}, "split_sizes and num_heads both cut the rows"),
    ({"num_heads": {"other": 2}}, r"num_heads\['other'\] names no parameter of the group"),
    ({"split_sizes": {"w": (4, 4)}}, r"split_sizes=\(4, 4\) add up to 8"),
    ({"split_sizes": (5, 5), **TRANSPOSED}, r"add up to 10, but \(12, 4\) has 4 columns"),
    ({"num_heads": 3, **TRANSPOSED}, "num_heads=3 does not divide the 4 columns"),
    ({"num_heads": 2, "rounding": "stochastic", **TRANSPOSED}, "use rounding='residual'"),
]


@pytest.mark.parametrize(("options", "message"), MISFITS, ids=str)
def test_cuts_that_do_not_fit(opt, options, message) -> None:
    (param,) = parameters([(12, 4)])
    with pytest.raises(ValueError, match=message):
        opt.Muon([("w", param)], **options)


def test_what_cannot_be_transposed(opt) -> None:
    """Filters, and a projection whose rows QK-clip scales."""
    with pytest.raises(ValueError, match=r"transposed takes matrices \(in, out\)"):
        opt.Muon(parameters([(4, 3, 2, 2)]), **TRANSPOSED)
    clip = {"q_indices": [0], "k_indices": [0], "head_dim": 4}
    group = {"params": parameters([(8, 8)]), "names": ["layers.0.attn.q_proj.weight"]}
    with pytest.raises(ValueError, match=r"'layers.0.attn.q_proj.weight'.*is transposed"):
        opt.Muon([{**group, "use_muon": True, **TRANSPOSED}], clip_config=clip)


@pytest.mark.sees_defect("a key that matches nothing is ignored")
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    ("keys", "missing"),
    [(["exprts"], "exprts"), (["experts", "moe.experts"], "moe.experts")],
    ids=str,
)
def test_an_expert_key_that_names_nothing_is_said(
    opt, dispatch, said, device, keys, missing, flatten
) -> None:
    """With flatten=True a typing mistake would orthogonalize a whole stack as one matrix."""
    stack, plain, other = parameters([(3, 4, 5), (4, 4), (4, 4)], device=device)
    groups = [[("w", plain)], [("experts", stack if flatten else other)]]
    groups = [{"params": params, "use_muon": True} for params in groups]
    opt.Muon(groups, expert_keys=["experts"], flatten=flatten)
    assert not said("expert_keys")
    opt.Muon(groups, expert_keys=keys, flatten=flatten)
    (message,) = said("expert_keys")
    assert message == (
        f"expert_keys {missing!r} is a component of no parameter's name; a stack of experts that "
        "it was meant for is not taken apart"
    )
    optimizer = opt.Muon([("w", plain)])
    optimizer.add_param_group({"params": [("v", other)], "use_muon": True, "expert_keys": keys})
    dispatch.say_once.cache_clear()
    optimizer.step()
    assert said("expert_keys").count(message) == 2


TURNED = ["wide", "tall", "square", "layers.experts.up"]
TURNED_SHAPES = [(24, 10), (10, 24), (16, 16), (3, 12, 6)]  # (out, in)
TURNED_OPTIONS = {
    "original": {"adjust_lr_fn": "original"},
    "spectral": {"adjust_lr_fn": "spectral"},
    "callable": {"adjust_lr_fn": lambda lr, rows, columns: lr * rows / columns},
    "shaped decay": {"adjust_lr_fn": "original", "shaped_decay": True, "cautious": True},
    "variance": {"beta2": 0.9},
    "rows": {"row_equilibration": True, "renormalize": True, "beta2": 0.9},
    "heads": {"num_heads": 2, "beta2": 0.9},
    "parts": {
        "split_sizes": {"wide": (4, 12, 8), "square": (8, 8), "layers.experts.up": (5, 7)},
        "beta2": 0.9,
        "row_equilibration": True,
    },
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("options", TURNED_OPTIONS.values(), ids=TURNED_OPTIONS)
def test_the_steps_of_the_transposes(opt, device, options) -> None:
    """In float64, with decay: rates, statistics and cuts are of outputs and inputs."""
    plain = parameters(TURNED_SHAPES, dtype=torch.float64, device=device)
    turned = [nn.Parameter(p.detach().mT.contiguous()) for p in plain]
    group = {"names": TURNED, "use_muon": True, "expert_keys": ["experts"], **options}
    one = opt.Muon([{**group, "params": plain}], lr=5e-3, weight_decay=0.5)
    other = opt.Muon([{**group, "params": turned, "transposed": True}], lr=5e-3, weight_decay=0.5)
    for seed in range(4):
        new_gradients(plain, seed=seed)
        for param, twin in zip(plain, turned, strict=True):
            twin.grad = param.grad.mT.contiguous()
        one.step()
        other.step()
    for param, twin in zip(plain, turned, strict=True):
        assert_error_at_most(twin.detach().mT, param.detach(), 1e-12)
        for key, value in one.state[param].items():
            assert other.state[twin][key].numel() == value.numel()


@pytest.mark.parametrize("rounding", ["residual", "nearest"])
def test_bfloat16_parts_in_columns(opt, device, rounding) -> None:
    """Pieces with strides, their residuals beside them; saved, loaded, and kept in host memory."""
    options = {"split_sizes": (4, 12, 8), "beta2": 0.9, "rounding": rounding, "transposed": True}
    sets = [parameters([(10, 24)], dtype=torch.bfloat16, device=device) for _ in range(2)]
    one, other = (opt.Muon([{"params": p, "use_muon": True, **options}], lr=5e-3) for p in sets)
    train(one, sets[0], 4)
    train(other, sets[1], 2)
    other.turn_on_cpu_offload()
    train(other, sets[1], 1, seed=102)
    other.load_state_dict(other.state_dict())
    assert other.offloaded
    train(other, sets[1], 1, seed=103)
    assert_all_same_bits(*sets)


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers")

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()

    return model_of


def test_gpt2(opt, gpt2) -> None:
    """c_attn (in, 3 out) is cut into Q, K and V by columns."""
    model = gpt2()
    groups = opt.get_default_muon_param_groups(model)
    muon, _, undecayed = groups
    assert muon["transposed"] is True and model.transformer.wte.weight in set(undecayed["params"])
    name = "transformer.h.0.attn.c_attn.weight"
    assert muon["split_sizes"][name] == (8, 8, 8) and len(muon["split_sizes"]) == 2
    assert "columns (8, 8, 8)" in groups.table()


def test_a_model_with_both_kinds(opt, gpt2) -> None:
    """Those of Conv1D are in a further group; every parameter is in one of them."""
    model = nn.ModuleDict({"text": gpt2(), "other": TinyTransformer()})
    groups = opt.get_default_muon_param_groups(model)
    assert [group.get("transposed", False) for group in groups] == [False, False, False, True]
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(".c_" in name for name in groups[-1]["names"])
    assert set(groups[-1]["split_sizes"]) <= set(groups[-1]["names"])
    assert opt.Muon(groups).param_groups[-1]["transposed"] is True


@pytest.mark.parametrize("wrapped", [True, False])
def test_convolutions_that_are_called_conv1d_are_none_of_gpt2(opt, gpt2, wrapped: bool) -> None:
    """As in audio models: they wrap a convolution, or are one with a weight (out, in, width)."""

    class Conv1D(nn.Module if wrapped else nn.Conv1d):
        def __init__(self) -> None:
            super().__init__(*(() if wrapped else (4, 6, 3)))
            if wrapped:
                self.conv = nn.Conv1d(4, 6, 3)

    model = nn.ModuleDict({"text": gpt2(), "c_attn": Conv1D()})
    muon, *others = opt.get_default_muon_param_groups(model)
    assert muon["transposed"] is True and all(".c_" in name for name in muon["names"])
    convolution = "c_attn.conv.weight" if wrapped else "c_attn.weight"
    assert [convolution in group["names"] for group in others] == [True, False]
    muon, *_ = opt.get_default_muon_param_groups(nn.Sequential(Conv1D(), nn.Linear(6, 4)))
    assert muon["names"] == ["1.weight"] and "transposed" not in muon
