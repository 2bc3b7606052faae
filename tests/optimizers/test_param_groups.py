"""Which parameters are hidden matrices: by module type, then by name."""

import pytest
import torch
from torch import nn

from ._steps import TinyTransformer


def split(opt, model, *args) -> tuple[set[str], set[str]]:
    muon, adamw = opt.get_default_muon_param_groups(model, *args, no_decay=False)
    assert muon["use_muon"] is True
    assert adamw["use_muon"] is False
    by_name = dict(model.named_parameters())
    for group in (muon, adamw):
        for name, param in zip(group["names"], group["params"], strict=True):
            assert by_name[name] is param
    return set(muon["names"]), set(adamw["names"])


def anonymous() -> nn.Module:
    """Module types decide where names say nothing; d leads onto the vocabulary, last."""
    return nn.ModuleDict(
        {
            "a": nn.Embedding(40, 8),
            "b": nn.ModuleList([nn.Linear(8, 8, bias=False)]),
            "c": nn.EmbeddingBag(10, 8),
            "d": nn.Linear(8, 40, bias=False),
        }
    )


def tied() -> nn.Module:
    """An embedding that is met first as a matrix of a layer."""
    layers = nn.ModuleList([nn.Linear(8, 40, bias=False), nn.Linear(8, 8)])
    model = nn.ModuleDict({"layers": layers, "encode": nn.Embedding(40, 8)})
    model["encode"].weight = layers[0].weight
    return model


def frozen() -> nn.Module:
    model = TinyTransformer()
    model.embed_tokens.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


class Declared(nn.ModuleDict):
    """Says which module is its head, by transformers' interface."""

    def get_output_embeddings(self) -> nn.Module:
        return self["to_words"]


def parametrized() -> nn.Module:
    """Magnitudes are vectors; a parametrized head or embedding is one all the same."""
    weight_norm = nn.utils.parametrizations.weight_norm
    layers = (nn.Embedding(40, 8), nn.Linear(8, 6), nn.Linear(6, 40))
    return nn.Sequential(*map(weight_norm, layers))


def heads(**linears: nn.Module) -> nn.Module:
    """Linears outside the layers: which of them lead to the vocabulary?"""
    layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))])
    tables = {"tokens": nn.Embedding(256, 64), "kinds": nn.Embedding(2, 64)}
    return nn.ModuleDict({**tables, "blocks": layers, **linears})


LAYERS = {f"layers.{i}.{part}" for i in (0, 1) for part in ("qkv", "output")}
INNER = {"blocks.0.0", "blocks.0.1"}
FROM, ONTO = nn.Linear(64, 256), nn.Linear(256, 64)
# Models, and the modules whose weights are Muon's; tied parameters appear once.
MODELS = {
    "transformer": (TinyTransformer(), LAYERS),
    "tied transformer": (TinyTransformer(tied=True), LAYERS),
    "frozen layers": (frozen(), {"layers.1.qkv", "layers.1.output"}),
    "types before names": (anonymous(), {"b.0"}),
    "tied under any name": (tied(), {"layers.1"}),
    "no head": (
        nn.ModuleDict({"tokens": nn.Embedding(8, 8), "blocks": nn.ModuleList([nn.Linear(8, 8)])}),
        {"blocks.0"},  # as wide as the vocabulary
    ),
    "parametrized": (parametrized(), {"1.parametrizations.weight.original1"}),
    "declared": (Declared({"a": nn.Linear(4, 4), "to_words": nn.Linear(4, 9)}), {"a"}),
    "not last": (heads(to_logits=FROM, after=nn.Linear(64, 64)), {"after", *INNER}),
    "padded": (heads(first=nn.Linear(64, 64), padded=nn.Linear(64, 320)), {"first", *INNER}),
    "too wide": (
        heads(wide=nn.Linear(64, 512), narrow=nn.Linear(512, 64)),
        {"wide", "narrow", *INNER},
    ),
    "sequential": (
        heads(to_words=nn.Sequential(FROM, nn.Linear(256, 256))),
        {"to_words.0", *INNER},
    ),
    "inner": (heads(mixer=nn.Sequential(FROM, ONTO)), {"mixer.0", "mixer.1", *INNER}),
    "value": (heads(value=nn.Linear(64, 1)), INNER),
}


@pytest.mark.sees_defect("tied weights are unknown")
@pytest.mark.parametrize(("model", "muon"), MODELS.values(), ids=MODELS)
def test_hidden_matrices(opt, model, muon) -> None:
    """Embeddings, heads, norms and vectors go to AdamW; frozen parameters are left out."""
    found, adamw = split(opt, model)
    assert {name.removesuffix(".weight") for name in found} == muon
    assert found | adamw == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("wrapper", [None, "_orig_mod", "module", "_checkpoint_wrapped_module"])
@pytest.mark.parametrize(
    ("widths", "muon"),
    [((64, 128, 256), {"1"}), ((64, 128, 320), {"1"}), ((64, 128, 64), {"1", "2"})],
)
def test_a_plain_sequential(opt, widths, muon, wrapper) -> None:
    """Its numbers are no layers: the last Linear is a head where it leads to the vocabulary."""
    first, hidden, last = widths
    model = nn.Sequential(
        nn.Embedding(256, first), nn.Linear(first, hidden), nn.Linear(hidden, last)
    )
    prefix = f"{wrapper}." if wrapper else ""
    model = nn.ModuleDict({wrapper: model}) if wrapper else model
    assert split(opt, model)[0] == {f"{prefix}{name}.weight" for name in muon}


def test_fused_attention_is_split(opt) -> None:
    """Q, K and V of torch's own attention are three matrices, of one parameter."""
    model = nn.Module()
    model.embed = nn.Embedding(40, 8)
    model.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])
    model.separate = nn.MultiheadAttention(8, 2, kdim=4)  # keeps them apart itself
    muon, *_ = opt.get_default_muon_param_groups(model)
    assert muon["split_sizes"] == {"layers.0.self_attn.in_proj_weight": (8, 8, 8)}


def test_the_split_is_logged(opt, submodule, caplog) -> None:
    name = submodule("optimizers.groups.default_groups").__name__
    with caplog.at_level("INFO", logger=name):
        opt.get_default_muon_param_groups(anonymous())
    (record,) = [record for record in caplog.records if record.name == name]
    assert record.getMessage().splitlines() == [
        "parameter groups:",
        "muon             (8, 8)   b.0.weight",
        "adamw            (40, 8)  d.weight",
        "adamw, no decay  (40, 8)  a.weight",
        "adamw, no decay  (10, 8)  c.weight",
    ]


def test_experts_and_convolutions(opt) -> None:
    """Stacks of experts by whole components, without their biases; ready to be used."""
    up, bias = torch.randn(3, 8, 6), torch.zeros(3, 8)
    model = nn.ModuleDict(
        {
            "router": nn.Linear(6, 3, bias=False),
            "experts": nn.ParameterDict({"up": up, "up_bias": bias}),
            "shared_experts": nn.Linear(6, 8, bias=False),
            "conv": nn.Conv2d(3, 4, 2),
            "conv1d": nn.Conv1d(4, 4, 3),
        }
    )
    muon, adamw = split(opt, model)
    assert muon == {"router.weight", "experts.up", "shared_experts.weight", "conv.weight"}
    assert adamw == {"experts.up_bias", "conv.bias", "conv1d.weight", "conv1d.bias"}
    groups = opt.get_default_muon_param_groups(model)
    assert groups[0]["expert_keys"] == ("experts",)
    opt.Muon(groups).step()


def test_another_rule_decides_alone(opt) -> None:
    model = TinyTransformer()
    muon, _ = split(opt, model, lambda name, param: name == "embed_tokens.weight")
    assert muon == {"embed_tokens.weight"}


def test_only_modules_are_accepted(opt) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        opt.get_default_muon_param_groups([torch.ones(2, 2)])


HIDDEN = ["model.layers.0.self_attn.q_proj.weight", "layers.3.attention.output.dense.weight"]
HIDDEN += ["layers.3.attention.output.weight", "encoder.1.head.weight", "weight"]
HIDDEN += ["transformer.h.0.mlp.c_fc.weight", "layers.0.mlp.shared.weight"]
OUTSIDE = ["output.weight", "head.weight", "model.lm_head.weight", "lm_head.0.weight", "pos_emb"]
OUTSIDE += ["model.embed_tokens.weight", "tok_embeddings.weight", "transformer.wte.weight"]
OUTSIDE += ["transformer.wpe.weight", "value_embeds.0.weight", "model.norm.weight"]
OUTSIDE += ["rwkv.emb.weight", "shared.weight", "model.shared.weight"]
OUTSIDE += ["block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
OUTSIDE += [f"{prefix}.output.weight" for prefix in ("_orig_mod.module", "_orig_mod", "module")]


@pytest.mark.sees_defect("embed_tokens, wte, tok_embeddings and output go to Muon")
@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        *((name, (4, 4), True) for name in HIDDEN),
        *((name, (4, 4), False) for name in OUTSIDE),
        ("blocks.0.conv.weight", (4, 4, 2, 2), True),
        ("layers.0.mlp.experts.w1", (2, 4, 4), True),
        ("value.weight", (1, 4), False),
        ("layers.0.gate.weight_g", (4, 1), False),
        ("layers.0.conv.weight", (1, 4, 2, 2), False),
        ("layers.0.depthwise.weight", (4, 1, 3, 3), True),
        ("layers.0.experts.gate", (4, 1, 8), False),
        ("layers.0.experts.w1", (1, 4, 8), True),
        ("layers.0.mlp.experts.gate_up_proj_bias", (2, 4), False),
        ("layers.0.mlp.shared_experts.w1", (2, 4, 4), False),
        ("layers.0.conv1d.weight", (4, 1, 4), False),
        ("layers.0.q_proj.weight", (4,), False),
    ],
)
def test_default_is_muon(opt, name, shape, expected) -> None:
    assert opt.default_is_muon(name, torch.empty(shape)) is expected


def fused() -> nn.Module:
    attention = nn.ModuleDict({"qkv_proj": nn.Linear(8, 16, bias=False)})
    attention.num_heads, attention.num_key_value_heads, attention.head_dim = 4, 2, 2
    stacks = {"gate_up_proj": torch.randn(3, 12, 8), "down_proj": torch.randn(3, 8, 6)}
    return nn.ModuleDict(
        {
            "attention": attention,
            "block": nn.ModuleDict({"c_attn": nn.Linear(8, 24)}),
            "mlp": nn.ModuleDict({"gate_up_proj": nn.Linear(8, 20, bias=False)}),
            "experts": nn.ParameterDict(stacks),
            "other": nn.ModuleDict({"qkv_proj": nn.Linear(8, 22, bias=False)}),
            "q": nn.ModuleDict({"lora_A": nn.Linear(8, 2, bias=False)}),
        }
    )


def test_fused_projections(opt, caplog) -> None:
    """Cut by the heads that the module states, by thirds or by halves; or logged."""
    model = fused()
    muon, adamw, undecayed = opt.get_default_muon_param_groups(model)
    assert muon["split_sizes"] == {
        "attention.qkv_proj.weight": (8, 4, 4),
        "block.c_attn.weight": (8, 8, 8),
        "mlp.gate_up_proj.weight": (10, 10),
        "experts.gate_up_proj": (6, 6),
    }
    assert "other.qkv_proj.weight (22, 8) looks fused" in caplog.text
    assert adamw["names"] == ["q.lora_A.weight"]
    assert undecayed["names"] == ["block.c_attn.bias"]
    assert undecayed["weight_decay"] == 0.0
    opt.Muon([muon, adamw, undecayed]).step()
    muon, *_ = opt.get_default_muon_param_groups(model, split_fused=False)
    assert "split_sizes" not in muon


@pytest.mark.parametrize("called", ["query_key_value", "qkv", "wqkv", "Wqkv", "W_pack", "c_attn"])
def test_what_may_keep_its_parts_head_by_head_is_said_not_to_be_cut(opt, caplog, called) -> None:
    """And keys and values of GPT-2's attention to another sequence, in (in, 2 out)."""
    layer = nn.Linear(8, 24)
    if called == "c_attn":
        layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(16, 8)
    muon, *_ = opt.get_default_muon_param_groups(nn.ModuleDict({called: layer}))
    assert "split_sizes" not in muon and muon.get("transposed", False) == (called == "c_attn")
    assert f"{called}.weight {tuple(layer.weight.shape)} looks fused" in caplog.text


def test_three_groups(opt) -> None:
    model = TinyTransformer()
    groups = opt.get_default_muon_param_groups(model, adamw_lr=1e-4)
    assert [group.get("lr") for group in groups] == [None, 1e-4, 1e-4]
    _, adamw, undecayed = groups
    assert adamw["names"] == ["lm_head.weight"]
    assert {p.ndim for p in undecayed["params"]} == {1, 2}
    assert "embed_tokens.weight" in undecayed["names"]
    with pytest.raises(ValueError, match=r"returns three groups.* no_decay=False for two"):
        _, adamw = opt.get_default_muon_param_groups(model)
    _, adamw = opt.get_default_muon_param_groups(model, no_decay=False)
    assert "weight_decay" not in adamw
    assert len(opt.Muon(groups).param_groups) == 3
