"""QK-clip: exact for shared key heads, safe for strange logits, on the device, on any rows."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from .._compare import (
    assert_all_same_bits,
    assert_error_at_most,
    assert_same_bits,
    assert_same_tensors,
)
from ._steps import CLASSES, in_place, new_gradients, nothing_written, parameters, values
from .test_numbers import NoHostReads

D, T = 4, 10.0  # rows of a head, threshold
MHA = {"q_indices": [0, 1, 2], "k_indices": [0, 1, 2], "head_dim": D, "threshold": T}
GQA = {"q_indices": range(6), "k_indices": [0, 0, 0, 1, 1, 1], "head_dim": D, "threshold": T}
MLA = {
    "q_indices": [0, 1, 2],
    "k_indices": [0, 1, 2],
    "threshold": T,
    "is_mla": True,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
INF, NAN = math.inf, math.nan


def gamma(logit: float) -> float:
    return T / logit if math.isfinite(logit) and logit > T else 1.0


def build(opt, name, named, config, **options):
    """An optimizer whose update changes nothing, so that only the clip is left."""
    mark = {"use_muon": True} if name == "Muon" else {"kind": "muon"}
    group = {"params": [p for _, p in named], "names": [n for n, _ in named], **mark}
    frozen = {"lr": 0.0, "weight_decay": 0.0, "none_grad": False, **options}
    return getattr(opt, name)([group | frozen], clip_config=config)


def layer(shapes, number=0, *, seed=0, device="cpu", dtype=torch.float32):
    """{"wq": rows, ...} -> named parameters of one layer."""
    params = parameters(
        [(rows, 6) for rows in shapes.values()], seed=seed, device=device, dtype=dtype
    )
    return [
        (f"layers.{number}.attn.{kind}.weight", p) for kind, p in zip(shapes, params, strict=True)
    ]


def heads(before, after, rows):
    """The factor of every run of `rows` rows; each must be one number."""
    factors = (after.detach().double() / before.double()).unflatten(0, (-1, rows)).flatten(1)
    torch.testing.assert_close(
        factors, factors[:, :1].expand_as(factors), rtol=3e-7, atol=0, msg="one factor per head"
    )
    return factors[:, 0].tolist()


def clipped(opt, device, config, rows, logits, *, name="Muon"):
    """(before, after) of the projections of layer 0 with so many rows, after a step's clip."""
    named = layer(rows, device=device)
    before = values(p for _, p in named)
    build(opt, name, named, config).step(qk_logits={0: torch.tensor(logits, device=device)})
    return [(old, param.detach()) for old, (_, param) in zip(before, named, strict=True)]


# Heads -> their logits, and the factor of all heads' rows.
ALONE = {
    "numbers": (range(3), [5.0, 40.0, 11.0], [1.0, 0.5, math.sqrt(T / 11)]),
    # Repeats are allowed, the smallest scale wins; unnamed heads stay.
    "repeated": ([1, 1, 0], [20.0, 40.0, 5.0], [1.0, 0.5, 1.0]),
    "strange": (
        range(7),
        [NAN, INF, -INF, 0.0, -50.0, T, 3.4e38],
        [1.0] * 6 + [math.sqrt(T / 3.4e38)],
    ),
}


@pytest.mark.sees_defect("an infinite logit zeroes its head")
@pytest.mark.parametrize(("indices", "logits", "expected"), ALONE.values(), ids=ALONE)
@CLASSES
def test_one_query_head_per_key_head(opt, device, name, indices, logits, expected) -> None:
    config = MHA | {"q_indices": indices, "k_indices": indices}
    rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), len(logits) * D)
    *both, value = clipped(opt, device, config, rows, logits, name=name)
    for old, new in both:
        assert new.isfinite().all()
        assert heads(old, new, D) == pytest.approx(expected, rel=1e-5)
        for factor, before, after in zip(expected, old.split(D), new.split(D), strict=True):
            assert factor < 1 or torch.equal(before, after)
    assert_same_bits(*value)


@pytest.mark.sees_defect(
    "query heads that share a key head are clipped too much",
    "QUERY: self._rows(QUERY, query / beside, query)",
    "QUERY: self._rows(QUERY, query.sqrt(), query)",
)
@pytest.mark.parametrize(
    "logits",
    [[20.0, 5.0, 80.0, 9.0, 3.0, 10.0], [NAN, 40.0, INF, -1.0, 12.0, NAN]],
    ids=["numbers", "strange"],
)
@CLASSES
def test_shared_key_heads_are_exact(opt, device, name, logits) -> None:
    """Motif over-clips: the key head min sqrt(gamma), each query head its own."""
    found = clipped(opt, device, GQA, {"wq": 6 * D, "wk": 2 * D}, logits, name=name)
    query, key = (heads(old, new, D) for old, new in found)
    scales = [*map(gamma, logits)]
    assert key == pytest.approx([min(scales[:3]) ** 0.5, min(scales[3:]) ** 0.5], rel=1e-6)
    assert [q * key[i // 3] for i, q in enumerate(query)] == pytest.approx(scales, rel=1e-6)
    for group, (old, new) in enumerate(zip(*(x.split(3 * D) for x in found[0]), strict=True)):
        assert key[group] < 1 or torch.equal(old, new)


@pytest.mark.parametrize("names", [("wq_b", "wkv_b"), ("q_proj", "kv_b_proj")])
def test_latent_attention(opt, device, names) -> None:
    """Nope rows by sqrt(gamma), rope rows of the queries by gamma, value rows not at all."""
    rows, logits = {names[0]: 3 * 5, names[1]: 3 * 7, "wkv_a": 8}, [40.0, -3.0, 16.0]
    before, after = zip(*clipped(opt, device, MLA, rows, logits), strict=True)
    for head, logit in enumerate(logits):
        g = gamma(logit)
        for index, rows, factors in (
            (0, 5, [g**0.5] * 3 + [g] * 2),
            (1, 7, [g**0.5] * 3 + [1.0] * 4),
        ):
            block = slice(head * rows, (head + 1) * rows)
            expected = before[index][block].double() * torch.tensor(factors).to(device)[:, None]
            assert_error_at_most(after[index][block], expected, 2e-7)
    assert_same_bits(after[2], before[2])


NAMES = {
    "layers.3.self_attn.q_proj.weight": 3,
    "model.layers.12.wk.weight": 12,
    "blocks.1.7.wq.weight": 7,
    "_orig_mod.layers.2.attn._checkpoint_wrapped_module.k_proj.weight": 2,
    "module.layers.4.wq.weight": 4,
    "layers.0.attn.v_proj.weight": None,
    "layers.0.attn.wq_b.weight": None,
    "layers.0.attn.q_proj.lora_A.weight": None,
    "layers.0.experts.1.q_proj.weight": None,
    "attn.q_proj.weight": None,  # no layer
    "0.wq": None,  # two components: the last but one is the layer
    "wq.weight": None,
    "layers.0.q_proj.x.weight": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_which_names_match(opt, submodule, name) -> None:
    """The last component but one is the kind, the last of digits alone the layer."""
    config = submodule("optimizers.groups.options").parse_clip_config(MHA)
    entries = [("here", nn.Parameter(torch.zeros(12, 4)), name)]
    found = submodule("optimizers.qk_clip").find_targets(config, entries)
    assert [target.layer for target in found] == [
        layer for layer in [NAMES[name]] if layer is not None
    ]


def test_experts_and_vectors_are_never_clipped(opt, device) -> None:
    """Neither stacks nor single experts, under any expert key, nor biases."""
    named = [
        ("layers.0.experts.q_proj.weight", nn.Parameter(torch.ones(2, 3 * D, 6, device=device))),
        ("layers.0.heads.1.q_proj.weight", nn.Parameter(torch.ones(3 * D, 6, device=device))),
        ("layers.0.heads.stack", nn.Parameter(torch.ones(2, 4, 4, device=device))),
    ]
    optimizer = build(opt, "Muon", named, MHA, expert_keys=["experts", "heads"])
    new_gradients([p for _, p in named], seed=0)
    before = values(p for _, p in named)
    high = torch.full((3,), 100.0, device=device)
    optimizer.step(qk_logits={0: high, 1: high})
    assert_all_same_bits((p for _, p in named), before)


@pytest.mark.sees_defect("a layer without logits is a KeyError")
@CLASSES
def test_layers_without_logits_and_logits_without_layers(opt, device, name) -> None:
    named = layer({"wq": 12, "wk": 12}, 0, device=device)
    named += layer({"wq": 12, "wk": 12}, 1, seed=7, device=device)
    before = values(p for _, p in named)
    optimizer = build(opt, name, named, MHA)
    high = torch.full((3,), 40.0, device=device)
    optimizer.step(qk_logits={1: high, 17: torch.zeros(5)})
    assert_all_same_bits((p for _, p in named[:2]), before[:2])
    for old, (_, param) in zip(before[2:], named[2:], strict=True):
        assert heads(old, param, D) == pytest.approx([0.5] * 3)
    now = values(p for _, p in named)
    optimizer.step()
    optimizer.step(qk_logits={})
    assert_all_same_bits((p for _, p in named), now)


@pytest.mark.parametrize("kind", ["wq", "wk"])
def test_a_projection_alone_takes_the_whole_clip(opt, device, kind) -> None:
    """The other one is frozen or shared between layers: every logit still ends at most at t."""
    rows, logits = {kind: (6 if kind == "wq" else 2) * D}, [20.0, 5.0, 80.0, 9.0, 3.0, 10.0]
    (found,) = clipped(opt, device, GQA, rows, logits)
    expected = [gamma(s) for s in logits] if kind == "wq" else [T / 80, 1.0]
    assert heads(*found, D) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scaled_rows_are_rounded_once(opt, device, dtype) -> None:
    """A clipped step is the plain one, times a float32 factor, rounded to the dtype once."""
    runs = []
    for logits in (None, {0: torch.tensor([5.0, 40.0, 11.0], device=device)}):
        named = layer({"wq": 12, "wk": 12}, device=device, dtype=dtype)
        build(opt, "Muon", named, MHA, lr=0.05, weight_decay=0.1).step(qk_logits=logits)
        runs.append([p.detach() for _, p in named])
    gammas = torch.tensor([1.0, T / 40, T / 11], device=device)
    root = gammas.sqrt()
    for plain, clipped, scale in zip(*runs, (gammas / root, root), strict=True):
        wide = plain.to(torch.promote_types(dtype, torch.float32))
        expected = wide * scale.repeat_interleave(D)[:, None]
        assert_same_bits(clipped, expected.to(dtype))


def test_parameters_without_gradients_are_clipped_with_their_partner(opt, device) -> None:
    """Half a clip would scale the logits by something else than gamma."""
    named = layer({"wq": 12, "wk": 12}, device=device)
    named[1][1].grad = None
    before = values(p for _, p in named)
    build(opt, "Muon", named, MHA).step(qk_logits={0: torch.full((3,), 40.0, device=device)})
    for old, (_, param) in zip(before, named, strict=True):
        assert heads(old, param, D) == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("offload", [False, True], ids=["on device", "offloaded"])
def test_the_clip_comes_after_the_update_and_outside_of_the_momentum(opt, device, offload) -> None:
    """Never inside the input of the iteration: state equals that of a step without clip."""
    states, weights = [], []
    for logits in (None, {0: torch.full((3,), 40.0, device=device)}):
        named = layer({"wq": 12, "wk": 12}, device=device)
        optimizer = build(opt, "MuonAdamW", named, MHA, lr=0.1, weight_decay=0.2)
        if offload:
            optimizer.turn_on_cpu_offload()
        optimizer.step(qk_logits=logits)
        optimizer.state_dict()  # waits for what is on its way
        states.append([optimizer.state[p] for _, p in named])
        weights.append([p.detach() for _, p in named])
    for one, other in zip(*states, strict=True):
        assert_same_tensors(one, other)
    for plain, clipped in zip(*weights, strict=True):
        torch.testing.assert_close(clipped, plain * 0.5, rtol=1e-6, atol=0)


@pytest.mark.sees_defect("every logit is read on the host")
@CLASSES
def test_a_clipped_step_never_waits_for_the_device(opt, device, name) -> None:
    named = layer({"wq": 6 * D, "wk": 2 * D}, device=device)
    optimizer = build(opt, name, named, GQA, lr=0.1)
    logits = {0: torch.full((6,), 40.0, device=device)}
    with NoHostReads():
        for _ in range(3):
            optimizer.step(qk_logits=logits)
        optimizer.step(qk_logits={0: logits[0].cpu()})


@CLASSES
@pytest.mark.gpu
def test_a_captured_clip_equals_the_eager_one(opt, device, name) -> None:
    """Ten replays with logits that change; the graph reads them."""
    results = []
    for captured in (False, True):
        named = layer({"wq": 6 * D, "wk": 2 * D}, device=device)
        params, logits = [p for _, p in named], torch.full((6,), 5.0, device=device)
        optimizer = build(opt, name, named, GQA, lr=0.02)
        run = in_place(optimizer, params, captured, qk_logits={0: logits})
        for step in range(10):
            logits.copy_(torch.linspace(1, 10 * step + 1, 6))
            run(step)
        results.append(values(params))
    assert_all_same_bits(*results)


@CLASSES
def test_logits_without_a_configuration_are_refused(opt, device, name) -> None:
    """They must not be ignored in silence; empty index lists say that it is meant."""
    named = layer({"wq": 12, "wk": 12}, device=device)
    before = values(p for _, p in named)
    with pytest.raises(ValueError, match="qk_logits was given, but no QK-clip is configured"):
        build(opt, name, named, None, lr=0.1).step(qk_logits={0: torch.ones(3)})
    optimizer = build(opt, name, named, {"q_indices": [], "k_indices": [], "head_dim": 128})
    optimizer.step(qk_logits={0: torch.full((3,), 1e3, device=device)})
    assert_all_same_bits((p for _, p in named), before)


def test_the_configuration_survives_copies(opt, device) -> None:
    named = layer({"wq": 12, "wk": 12}, device=device)
    optimizer = build(opt, "Muon", named, MHA)
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        param = clone.param_groups[0]["params"][0]
        old = param.detach().clone()
        clone.step(qk_logits={0: torch.full((3,), 40.0, device=device)})
        assert heads(old, param, D) == pytest.approx([0.5] * 3)
    logits = MHA["q_indices"]
    assert optimizer.clip_config.as_dict()["q_indices"] == tuple(logits)


def test_sharded_logits_are_put_together(opt) -> None:
    """Heads of tensor parallelism; a part of them is not taken for all."""

    class Placement:
        def is_replicate(self):
            return False

    class Sharded(torch.Tensor):
        placements = (Placement(),)

        def to_local(self):
            raise AssertionError("a part of the heads is taken for all of them")

        def full_tensor(self):
            return torch.tensor([40.0, 5.0, 1.0])

    named = layer({"wq": 3 * D, "wk": 3 * D})
    before = values(p for _, p in named)
    logits = torch.ones(3).as_subclass(Sharded)
    build(opt, "Muon", named, MHA).step(qk_logits={0: logits})
    assert heads(before[0], named[0][1], D) == pytest.approx([0.5, 1.0, 1.0])


CONFIGS = {
    "no mapping": ([1], TypeError, "clip_config must be a dict or None, got list"),
    "unknown": ({"heads": 1}, ValueError, "unknown key 'heads'; it takes q_indices"),
    "lengths": (MHA | {"k_indices": [0]}, ValueError, "q_indices has 3 entries and k_indices 1"),
    "one list": (MHA | {"k_indices": []}, ValueError, "q_indices has 3 entries and k_indices 0"),
    "index": (MHA | {"q_indices": [0, 1, 2.5]}, TypeError, "q_indices must hold integers, got 2.5"),
    "negative": (MHA | {"k_indices": [0, 1, -1]}, ValueError, "from 0 on, got -1"),
    "no list": (MHA | {"q_indices": 3}, TypeError, "q_indices must be a sequence"),
    "threshold": (MHA | {"threshold": 0}, ValueError, "threshold must be .* above 0, got 0"),
    "nan": (MHA | {"threshold": NAN}, ValueError, "threshold must be finite and above 0, got nan"),
    "text": (MHA | {"threshold": "10"}, TypeError, "threshold must be a number, got '10'"),
    "head_dim": (MHA | {"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    "head_dim text": (MHA | {"head_dim": "4"}, TypeError, "head_dim must be an integer, got '4'"),
    "mla": (MLA | {"v_head_dim": None}, ValueError, "v_head_dim must be given with is_mla=True"),
    "switch": (MHA | {"is_mla": 1}, TypeError, "is_mla must be True or False, got 1"),
    "two keys": (MHA | {"q_indices": [0, 0, 1]}, ValueError, "0 is given the key heads 0 and 1"),
    "rows": (MHA | {"head_dim": 5}, ValueError, r"'layers\.0\.attn\.wq\.weight': 12 rows"),
    "heads": (MHA | {"q_indices": [0, 1, 3]}, ValueError, "names head 3, but 12 rows hold 3 heads"),
    "mla rows": (MLA, ValueError, "12 rows are no multiple of the 5 of a head; correct the head"),
}


@CLASSES
@pytest.mark.parametrize("case", CONFIGS)
def test_wrong_configurations_are_refused_at_construction(opt, name, case) -> None:
    config, error, message = CONFIGS[case]
    with pytest.raises(error, match=message):
        build(opt, name, layer({"wq": 12, "wk": 12}), config)


def test_a_group_that_does_not_fit_is_not_added(opt) -> None:
    optimizer = build(opt, "Muon", layer({"wq": 12, "wk": 12}), MHA)
    (other,) = layer({"q_proj": 12})
    bad = nn.Parameter(torch.ones(13, 6))
    for name, param, message in (
        ("layers.1.attn.wq.weight", bad, "13 rows are no multiple of the 4"),
        (*other, "layer 0 has a query projection on cpu beside group 0, parameter 'layers.0"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [param], "names": [name], "use_muon": True})
        assert len(optimizer.param_groups) == 1
        assert param not in optimizer.state


LOGITS = {
    "list": ([torch.ones(3)], TypeError, "qk_logits must map layer numbers to tensors"),
    "number": ({0: 5.0}, TypeError, r"qk_logits\[0\] must be a floating-point tensor, got float"),
    "integers": ({0: torch.ones(3).long()}, TypeError, "must be a floating.*, got torch.int64"),
    "length": ({0: torch.ones(2)}, ValueError, r"each of the 3 entries .*, got shape \(2,\)"),
    "tokens": ({0: torch.ones(3, 3)}, ValueError, r"got shape \(3, 3\)"),
    "device": ({0: torch.ones(3, device="meta")}, ValueError, "is on meta, the layer on"),
}


@CLASSES
@pytest.mark.parametrize("case", LOGITS)
def test_wrong_logits_are_refused_before_anything_is_written(opt, device, name, case) -> None:
    logits, error, message = LOGITS[case]
    named = layer({"wq": 12, "wk": 12}, device=device)
    optimizer = build(opt, name, named, MHA, lr=0.1)
    with nothing_written(optimizer), pytest.raises(error, match=message):
        optimizer.step(qk_logits=logits)
