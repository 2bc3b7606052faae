"""Which experts a token visits, and with which weights.

The rule is always named: nothing is guessed from the attributes of a model. A model that brings its
own router keeps it; these are for models built from our parts, and for tests.

    score    | models                                              | function
    softmax  | Qwen, OLMoE, Mixtral, MiniMax, gpt-oss              | softmax_top_k
    softmax  | Mistral 4: groups, no correction                    | group_top_k
    sigmoid  | DeepSeek-V3, GLM, MiniMax-M2: groups and correction | group_top_k

gpt-oss takes the softmax over its chosen logits: that is the softmax over all, renormalized.
T tokens (any leading shape), E experts, k experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.checks import DTYPES, check_dense

SCORES = ("softmax", "sigmoid")
# Keeps the renormalization finite where all chosen sigmoids underflow (DeepSeek-V3's model code).
NORM_EPS = 1e-20


@dataclass(frozen=True)
class RouterRule:
    """How router logits become experts and weights; see `select_experts`."""

    score: str
    top_k: int
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r} is unknown; pass one of {', '.join(SCORES)}")
        _check_counts(self.top_k, self.n_group, self.topk_group)
        _check_factor(self.routed_scaling_factor)


def softmax_top_k(
    router_logits: Tensor, top_k: int, *, norm_topk_prob: bool = True
) -> tuple[Tensor, Tensor]:
    """The top_k most probable experts and their probabilities, in float32.

    Args:
        router_logits: (..., E), any floating dtype; float64 is computed in float64.
        top_k: experts per token.
        norm_topk_prob: divide the chosen probabilities by their sum.

    Returns:
        top_k_index (..., k) int64 and top_k_weights (..., k) float32, most probable first.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: logits that are no floating tensor with E >= top_k.
    """
    logits = _wide(router_logits, top_k)
    weights, index = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return index, weights


def group_top_k(
    router_logits: Tensor,
    top_k: int,
    *,
    score: str = "sigmoid",
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The top_k experts within the best groups, weighted by their scores without correction.

    A group's score is the sum of its two largest corrected scores; the corrected scores of the
    groups that are not kept become 0, as in the models' code: a kept expert whose corrected score
    is negative loses against them.

    Args:
        router_logits: (..., E), any floating dtype; float64 is computed in float64.
        top_k: experts per token.
        score: "sigmoid" or "softmax" of the logits.
        correction_bias: (E,), added to the scores for choosing only; gets no gradient.
        n_group: number of groups of neighbouring experts; 1 for none.
        topk_group: groups kept per token.
        norm_topk_prob: divide the chosen scores by their sum plus 1e-20.
        routed_scaling_factor: multiplies the weights.

    Returns:
        top_k_index (..., k) int64 and top_k_weights (..., k) float32.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: sizes that do not fit each other, or an unknown score.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    logits = _wide(router_logits, top_k)
    experts = logits.shape[-1]
    _check_counts(top_k, n_group, topk_group)
    if experts % n_group or top_k > experts // n_group * topk_group:
        raise ValueError(
            f"{experts} experts do not form n_group={n_group} groups of which topk_group="
            f"{topk_group} hold top_k={top_k} experts; n_group must divide the number of experts"
        )
    if correction_bias is not None:
        check_dense("correction_bias", correction_bias)
        if correction_bias.shape != (experts,):
            raise ValueError(
                f"correction_bias must be ({experts},), got {tuple(correction_bias.shape)}"
            )
        if correction_bias.device != logits.device:
            raise ValueError(
                f"correction_bias is on {correction_bias.device}, router_logits on "
                f"{logits.device}; move it there"
            )
    _check_factor(routed_scaling_factor)
    if score not in SCORES:
        raise ValueError(f"score={score!r} is unknown; pass one of {', '.join(SCORES)}")
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores.detach()
    if correction_bias is not None:
        choice = choice + correction_bias.detach().to(choice.dtype)
    if n_group > 1:
        choice = _keep_groups(choice, n_group, topk_group)
    index = torch.topk(choice, top_k, dim=-1).indices
    weights = scores.gather(-1, index)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NORM_EPS)
    return index, weights * routed_scaling_factor


def select_experts(
    router_logits: Tensor, rule: RouterRule, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply a rule to router logits (..., E).

    Args:
        router_logits: (..., E).
        rule: what to compute. Plain softmax without groups, correction and factor is
            `softmax_top_k`, everything else `group_top_k`.
        correction_bias: (E,) or None.

    Returns:
        top_k_index (..., k) int64 and top_k_weights (..., k) float32.

    Raises:
        TypeError, ValueError: as `group_top_k`.
    """
    if not isinstance(rule, RouterRule):
        raise TypeError(f"rule must be a RouterRule, got {type(rule).__name__}")
    plain = rule.n_group == 1 and rule.routed_scaling_factor == 1.0 and correction_bias is None
    if rule.score == "softmax" and plain:
        return softmax_top_k(router_logits, rule.top_k, norm_topk_prob=rule.norm_topk_prob)
    return group_top_k(
        router_logits,
        rule.top_k,
        score=rule.score,
        correction_bias=correction_bias,
        n_group=rule.n_group,
        topk_group=rule.topk_group,
        norm_topk_prob=rule.norm_topk_prob,
        routed_scaling_factor=rule.routed_scaling_factor,
    )


class Router(nn.Module):
    """A linear gate and a rule.

    Logits have the dtype of the gate: build it in float32 for models that route in float32. `gate`
    is called as a module, so a LoRA around it and hooks on it stay in force.

    Args:
        hidden: H.
        num_experts: E.
        rule: how logits become experts and weights.
        correction: hold `e_score_correction_bias` (E,), zeros at first, as a buffer.
        bias: give the gate a bias.
        device: of the parameters.
        dtype: of the gate.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        rule: RouterRule,
        *,
        correction: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.gate = nn.Linear(hidden, num_experts, bias=bias, device=device, dtype=dtype)
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device) if correction else None
        self.register_buffer("e_score_correction_bias", zeros)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (..., E), top_k_index (..., k) and top_k_weights (..., k) of states (..., H)."""
        logits = self.gate(hidden_states.to(self.gate.weight.dtype))
        return logits, *select_experts(logits, self.rule, self.e_score_correction_bias)


def _wide(router_logits: Tensor, top_k: int) -> Tensor:
    check_dense("router_logits", router_logits)
    _check_count("top_k", top_k)
    if router_logits.dtype not in DTYPES or router_logits.ndim == 0:
        raise ValueError(
            "router_logits must be floating (..., experts) of 16 bits or more, got "
            f"{router_logits.dtype} of shape {tuple(router_logits.shape)}"
        )
    if not 1 <= top_k <= router_logits.shape[-1]:
        raise ValueError(
            f"top_k must be 1 to {router_logits.shape[-1]}, the experts of router_logits, got "
            f"{top_k}"
        )
    return router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))


def _check_counts(top_k: int, n_group: int, topk_group: int) -> None:
    counts = {"top_k": top_k, "n_group": n_group, "topk_group": topk_group}
    for name, value in counts.items():
        _check_count(name, value)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be 1 to n_group={n_group}, got {topk_group}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def _check_factor(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"routed_scaling_factor must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"routed_scaling_factor must be finite, got {value!r}")


def _keep_groups(choice: Tensor, n_group: int, topk_group: int) -> Tensor:
    """choice (..., E) with the experts of the weaker groups set to 0."""
    grouped = choice.unflatten(-1, (n_group, -1))  # (..., n_group, E / n_group)
    best = torch.topk(grouped, min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.topk(best, topk_group, dim=-1).indices
    mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
    return torch.where(mask.unsqueeze(-1), grouped, 0.0).flatten(-2)
