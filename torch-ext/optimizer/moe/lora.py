"""LoRA on stacks of experts: registered parameters in PEFT's layout.

`LoraProjection` holds the adapters of one projection, `ExpertAdapters` those of both under one set
of names.

Since PEFT 0.19, for E experts of rank r: `lora_A.weight` is (E*r, in), expert by expert, and
`lora_B.weight` is (out, E*r), read as (out, r, E): the expert varies fastest. The kernels read both
through strides, so nothing is permuted and gradients arrive in the same layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.autocast import without_autocast
from ..kernels.checks import check_tensor
from ..kernels.experts.grouped_lora import LoraFactors
from .layout import ExpertsLayout, ExpertsLora
from .quantized.expert_weights import as_quantized

Piece = tuple[Tensor, tuple[slice, ...]]  # a view, and its elements of the stack (E, n, k)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of the factors
PROJECTIONS = ("gate_up", "down")


def check_factor_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernels read factors of this dtype, and autograd trains them."""
    if dtype not in DTYPES:
        raise ValueError(f"the factors' dtype must be one of {DTYPES}, got {dtype}")


def factor_views(lora_A: Tensor, lora_B: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """PEFT's two matrices as (E, r, in) and (E, out, r): views, no copies.

    Args:
        lora_A: (E*r, in), expert-major.
        lora_B: (out, E*r), read as (out, r, E).
        num_experts: E.

    Returns:
        a (E, r, in) and b (E, out, r) with delta_e = b[e] @ a[e].

    Raises:
        ValueError: shapes that are not two matrices of one rank per expert.
    """
    _check_matrices(lora_A, lora_B, num_experts)
    a = lora_A.unflatten(0, (num_experts, -1))
    b = lora_B.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    return a, b


def _check_matrices(lora_A: Tensor, lora_B: Tensor, num_experts: int) -> None:
    matrices = lora_A.ndim == lora_B.ndim == 2 and lora_A.shape[0] == lora_B.shape[1]
    if not matrices or num_experts < 1 or lora_A.shape[0] % num_experts:
        raise ValueError(
            f"lora_A must be (experts*r, in) and lora_B (out, experts*r) with {num_experts} "
            f"experts, got {tuple(lora_A.shape)} and {tuple(lora_B.shape)}"
        )


class PeftFactors(LoraFactors):
    """Factors that are PEFT's two matrices, seen as stacks where they are asked for.

    Args:
        lora_A: (E*r, in), expert-major.
        lora_B: (out, E*r), read as (out, r, E).
        num_experts: E.
        scaling: Of their product.
        swapped: A meets the layer's output and B its input.

    Attributes:
        matrices: Both of them.
    """

    # Not a and b, which are views of their own at every look: Dynamo of torch 2.11 guards on every
    # field of a frozen dataclass, and takes two views at one address for aliases.
    __dataclass_fields__ = {"scaling": LoraFactors.__dataclass_fields__["scaling"]}  # noqa: RUF012

    def __init__(
        self,
        lora_A: Tensor,
        lora_B: Tensor,
        num_experts: int,
        scaling: float,
        *,
        swapped: bool = False,
    ) -> None:
        # Dynamo of torch 2.11 follows no update of __dict__; a loop over them takes longer.
        object.__setattr__(self, "matrices", (lora_A, lora_B))
        object.__setattr__(self, "num_experts", num_experts)
        object.__setattr__(self, "scaling", scaling)
        object.__setattr__(self, "swapped", swapped)

    def _views(self) -> tuple[Tensor, Tensor]:
        a, b = factor_views(*self.matrices, self.num_experts)
        return (b.mT, a.mT) if self.swapped else (a, b)

    @property
    def a(self) -> Tensor:
        """(E, r, in)."""
        return self._views()[0]

    @property
    def b(self) -> Tensor:
        """(E, out, r)."""
        return self._views()[1]


def leaves_of(
    factors: LoraFactors | None,
) -> tuple[tuple[Tensor | None, Tensor | None], str | None, float]:
    """The tensors of a projection's factors as they are stored; how they lie and are scaled.

    The last two are as in `Form`.
    """
    if factors is None:
        return (None, None), None, 1.0
    scaling = float(factors.scaling)
    if isinstance(factors, PeftFactors):
        return factors.matrices, "swapped" if factors.swapped else "matrices", scaling
    return (factors.a, factors.b), "stacks", scaling


def views_of(
    first: Tensor | None, second: Tensor | None, kind: str | None, num_experts: int
) -> tuple[Tensor | None, Tensor | None]:
    """Factors (E, r, in) and (E, out, r) of what `leaves_of` gave."""
    if kind is None or kind == "stacks":
        return first, second
    views = PeftFactors(first, second, num_experts, 1.0, swapped=kind == "swapped")
    return views.a, views.b


def wanted_of(wants: tuple[bool, bool], kind: str | None) -> tuple[bool, bool]:
    """Which of the factors a and b want a gradient, from which of the leaves do."""
    return wants[::-1] if kind == "swapped" else wants


def gradients_of(da: Tensor, db: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Gradients of the leaves from those of (E, r, in) and (E, out, r); a vector is none."""
    if kind is None or kind == "stacks":
        return da, db
    if kind == "swapped":
        da, db = (one.mT if one.ndim == 3 else one for one in (db, da))
    return (
        da.flatten(0, 1) if da.ndim == 3 else da,
        db.permute(1, 2, 0).flatten(1) if db.ndim == 3 else db,
    )


def selective_lora_weights(
    lora_A: Tensor, lora_B: Tensor, active_experts: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """The factors of some experts, copied out of expert-major stacks.

    Kept for callers that compact their experts. The layers here never need it: the kernels take
    the id of the expert. Gradients are those of `index_select`: one addition per element, no sort.

    Args:
        lora_A: (E*r, in), rows e*r to (e+1)*r belong to expert e.
        lora_B: (out, E*r), columns e*r to (e+1)*r belong to expert e. This is not PEFT's order of
            columns; from PEFT's, take `factor_views` and index its first dimension.
        active_experts: (n,) int32 or int64 ids in [0, E).
        num_experts: E.

    Returns:
        (n*r, in) and (out, n*r), in the order of active_experts.

    Raises:
        TypeError: active_experts is no dense tensor of int32 or int64.
        ValueError: active_experts is not 1-D, or shapes that are not E experts of one rank.
    """
    _check_matrices(lora_A, lora_B, num_experts)
    check_tensor("active_experts", active_experts, 1, (torch.int32, torch.int64))
    a = lora_A.unflatten(0, (num_experts, -1)).index_select(0, active_experts)
    b = lora_B.unflatten(1, (num_experts, -1)).index_select(1, active_experts)
    return a.flatten(0, 1), b.flatten(1, 2)


def checked_alpha(alpha: Any) -> float:
    """The number.

    Raises:
        TypeError: alpha is none.
        ValueError: it is infinite or NaN.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(f"alpha must be a number, got {alpha!r}")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite, got {alpha!r}")
    return alpha


class LoraProjection(nn.Module):
    """The adapters of one projection, by name, at most one of them active.

    The parameters are `lora_A.<name>.weight` and `lora_B.<name>.weight`, as in a PEFT model. The
    projection's weight is not held here: `merge` and `unmerge` get it.

    Args:
        num_experts: E.
        in_features: size of the projection's input.
        out_features: size of its output; for gate_up that is 2I.

    Attributes:
        enabled: False turns LoRA off, and the layer equals its base bit for bit.
        active: name of the adapter in use, or None.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.active: str | None = None
        self.enabled = True
        self._original: Tensor | None = None  # the weight before it was merged

    @property
    def adapters(self) -> list[str]:
        """Names, in the order they were added."""
        return list(self.lora_A)

    @property
    def merged(self) -> bool:
        """Whether the active adapter is part of the weight now."""
        return self._original is not None

    def add_adapter(
        self,
        name: str,
        r: int,
        alpha: float,
        *,
        rslora: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dropout: float = 0.0,
        use_dora: bool = False,
        lora_bias: bool = False,
    ) -> None:
        """Create an adapter that changes nothing yet, and make it the active one if none is.

        A is drawn uniformly from [-1/sqrt(in), 1/sqrt(in)) and B is zero, as in PEFT.

        Args:
            name: without dots; new.
            r: rank, at least 1; any integer.
            alpha: the update is scaled by alpha / r.
            rslora: scale by alpha / sqrt(r) instead (arXiv 2312.03732).
            dtype: of the parameters, floating and of 16 bits or more. float32 is PEFT's choice,
                over any base.
            device: of the parameters.
            dropout: must be 0: a row of A serves every token of an expert at once.
            use_dora: must be False: the norm of W + delta would have to be formed per expert.
            lora_bias: must be False: PEFT has none for stacks of experts.

        Raises:
            TypeError: an option or alpha of a wrong kind.
            ValueError: an option that is not supported, a name in use, a rank below 1, an alpha
                that is not finite, a dtype that cannot train.
        """
        self.check_adapter(
            name, r, dtype=dtype, dropout=dropout, use_dora=use_dora, lora_bias=lora_bias
        )
        scaling = checked_alpha(alpha) / (math.sqrt(r) if rslora else r)
        a = torch.empty(self.num_experts * r, self.in_features, dtype=dtype, device=device)
        b = torch.zeros(self.out_features, self.num_experts * r, dtype=dtype, device=device)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        self.lora_A[name] = _Factor(a)
        self.lora_B[name] = _Factor(b)
        self.scaling[name] = scaling
        if self.active is None:
            self.active = name

    def check_adapter(
        self,
        name: str,
        r: int,
        *,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        use_dora: bool = False,
        lora_bias: bool = False,
        **_: Any,
    ) -> None:
        """Raise the ValueError that `add_adapter` would, and change nothing."""
        check_factor_dtype(dtype)
        for option, value in (
            ("dropout", dropout),
            ("use_dora", use_dora),
            ("lora_bias", lora_bias),
        ):
            if isinstance(value, Tensor):
                raise TypeError(f"{option} must be a number or a bool, got a Tensor")
        if dropout or use_dora or lora_bias:
            raise ValueError(
                "LoRA on a stack of experts has no dropout, no DoRA and no bias, got dropout="
                f"{dropout}, use_dora={use_dora}, lora_bias={lora_bias}; leave them off"
            )
        if isinstance(name, str) and name in self.lora_A:
            raise ValueError(f"adapter {name!r} exists; delete_adapter({name!r}) first")
        if not isinstance(name, str) or not name or "." in name or hasattr(self.lora_A, name):
            raise ValueError(
                f"name={name!r} must be a string without dots that is no attribute of ModuleDict"
            )
        if isinstance(r, bool) or not isinstance(r, int) or r < 1:
            raise ValueError(f"r must be an integer of at least 1, got {r!r}")

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter. If it was active, none is afterwards.

        Raises:
            ValueError: there is no such adapter, or it is merged.
        """
        self.check_known(name)
        if name == self.active:
            self.check_separate("delete_adapter")
        del self.lora_A[name], self.lora_B[name], self.scaling[name]
        if self.active == name:
            self.active = None

    def set_adapter(self, name: str | None) -> None:
        """Use another adapter, or none. Which parameters train is left as it is.

        Raises:
            ValueError: there is no such adapter, several are named, or one is merged.
        """
        if name is not None:
            self.check_known(name)
        self.check_separate("set_adapter")
        self.active = name

    def factors(self) -> LoraFactors | None:
        """What the layer must add to its base: None if switched off, merged, or without adapter.

        Raises:
            ValueError: switched off while merged: the weight is not the base then.
        """
        if not self.enabled:
            self.check_separate("switched off")
            return None
        if self._original is not None or self.active is None:
            return None
        return PeftFactors(*self._active_weights(), self.num_experts, self.scaling[self.active])

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """LoRA is off inside the with block, as for the reference model of DPO.

        Raises:
            ValueError: the adapter is merged into the weight.
        """
        self.check_separate("disabled")
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @torch.no_grad()
    def merge(
        self,
        weight: Tensor,
        layout: ExpertsLayout,
        *,
        keep_on: torch.device | str | None = None,
        factors: tuple[Tensor, Tensor] | None = None,
        pieces: Iterable[Piece] | None = None,
    ) -> None:
        """Add the active adapter to the weight in place: in float32, rounded once, per expert.

        Args:
            weight: (E, out, in), transposed (E, in, out); of several ranks what this one holds.
            layout: says which of the two.
            keep_on: device of the copy of the weight that `unmerge` restores; None: the weight's.
            factors: (lora_A, lora_B) in whole, where ranks share out the parameters.
            pieces: views of `weight` with their places in the stack, where it is a part of it.

        Raises:
            ValueError: the weight has another shape or 4 bits, the adapter is not finite or merged
                already, or there is no active one. Nothing has been written then.
        """
        if pieces is None:
            self.check_mergeable(weight, layout, factors)
            pieces = [(weight, tuple(slice(0, size) for size in weight.shape))]
        a, b = factor_views(*(factors or self._active_weights()), self.num_experts)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._original = weight.detach().to(keep_on or weight.device, copy=True)
        with without_autocast(weight.device):
            for held, (experts, *sides) in pieces:
                inputs, outputs = sides if layout.transposed else reversed(sides)
                target = layout.operand(held)
                for at, expert in enumerate(range(self.num_experts)[experts]):  # a delta at a time
                    delta = (b[expert].to(wide) @ a[expert].to(wide)).T[inputs, outputs]
                    target[at].copy_(target[at].to(wide) + self.scaling[self.active] * delta)

    def check_mergeable(
        self,
        weight: Tensor,
        layout: ExpertsLayout,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Raise the ValueError that `merge` would, and change nothing; `weight` is the stack."""
        self.check_separate("merge")
        if self.active is None:
            raise ValueError("no adapter is active; set_adapter(name) first")
        if (packed := as_quantized(weight)) is not None:
            raise ValueError(
                f"the weight is {packed.format.quant_type}: an adapter cannot be merged into it "
                "without rounding it away; keep it attached, or load the model in 16 bits to merge"
            )
        shape = tuple(layout.operand(weight).shape)
        expected = (self.num_experts, self.in_features, self.out_features)
        if shape != expected:
            raise ValueError(f"weight must be {expected} as (E, in, out), got {shape}")
        if not all(factor.isfinite().all() for factor in factors or self._active_weights()):
            raise ValueError(f"adapter {self.active!r} holds NaN or inf; train it again")

    @torch.no_grad()
    def unmerge(self, weight: Tensor) -> None:
        """Put back the weight as it was before `merge`, bit for bit.

        Raises:
            ValueError: nothing is merged.
        """
        if self._original is None:
            raise ValueError("nothing is merged; merge an adapter first")
        weight.copy_(self._original)
        self._original = None

    def discard(self) -> None:
        """Drop all adapters and the kept original: what is merged stays in the weight."""
        self._original = None
        self.active = None
        for name in self.adapters:
            self.delete_adapter(name)

    def extra_repr(self) -> str:
        """Sizes, and the adapter in use."""
        return (
            f"{self.num_experts}, {self.in_features}, {self.out_features}, active={self.active!r}"
        )

    def check_known(self, name: str | None) -> None:
        """Raise ValueError unless there is an adapter of that name."""
        if not isinstance(name, str):
            raise ValueError(f"one adapter can be in use, got {name!r}; pass its name")
        if name not in self.lora_A:
            raise ValueError(f"adapter {name!r} is unknown; there are {self.adapters}")

    def check_separate(self, action: str) -> None:
        """Raise ValueError if the active adapter is part of the weight."""
        if self.merged:
            raise ValueError(
                f"{action}: adapter {self.active!r} is merged into the weight, which would count "
                "it twice or lose it; unmerge first, or discard the adapters to keep the sum"
            )

    def _active_weights(self) -> tuple[Tensor, Tensor]:
        modules = self._modules  # as `self.lora_A` gives it, in a third of the time
        return modules["lora_A"][self.active].weight, modules["lora_B"][self.active].weight

    def _save_to_state_dict(self, *args, **kwargs) -> None:
        self.check_separate("state_dict")
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.check_separate("load_state_dict")
        super()._load_from_state_dict(*args, **kwargs)


class _Factor(nn.Module):
    """A matrix under the name that PEFT gives it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class ExpertAdapters(nn.ModuleDict):
    """A `LoraProjection` each for "gate_up" and "down", which may hold different adapters.

    Args:
        num_experts: E.
        hidden: H, the input of gate_up and the output of down.
        intermediate: I, the input of down.
        layout: says whether gate_up has 2I columns or I.
    """

    def __init__(
        self, num_experts: int, hidden: int, intermediate: int, layout: ExpertsLayout
    ) -> None:
        width = layout.width(intermediate)
        gate_up = LoraProjection(num_experts, hidden, width)
        super().__init__(
            {"gate_up": gate_up, "down": LoraProjection(num_experts, intermediate, hidden)}
        )
        self.layout = layout

    def add_adapter(
        self,
        name: str = "default",
        *,
        r: int,
        alpha: float,
        targets: Sequence[str] = PROJECTIONS,
        **options: Any,
    ) -> None:
        """Add an adapter to the targets.

        Args:
            name: of the adapter.
            r: rank.
            alpha: the update is scaled by alpha / r (rslora=True: alpha / sqrt(r)).
            targets: "gate_up", "down" or both.
            **options: of `LoraProjection.add_adapter`.

        Raises:
            ValueError: an unknown target, or what `LoraProjection.add_adapter` refuses; no target
                has the adapter then.
        """
        if isinstance(targets, str) or not targets or set(targets) - set(PROJECTIONS):
            raise ValueError(f"targets must be some of {PROJECTIONS}, got {targets!r}")
        targets = tuple(dict.fromkeys(targets))
        for target in targets:
            self[target].check_adapter(name, r, **options)
        checked_alpha(alpha)
        for target in targets:
            self[target].add_adapter(name, r, alpha, **options)

    def set_adapter(self, name: str | None) -> None:
        """Use an adapter wherever a projection has it; None uses none.

        Raises:
            ValueError: no projection has it, several are named, or one is merged.
        """
        having = [p for p in self.values() if name is None or name in p.adapters]
        if not having:
            self["gate_up"].check_known(name)
        for projection in self.values():
            projection.check_separate("set_adapter")
        for projection in self.values():
            projection.set_adapter(name if projection in having else None)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """LoRA is off inside the with block, as for the reference model of DPO."""
        with contextlib.ExitStack() as stack:
            for projection in self.values():
                stack.enter_context(projection.disabled())
            yield

    def factors(self) -> ExpertsLora | None:
        """What the experts must add to their base; None where there is nothing."""
        gate_up, down = self._modules["gate_up"].factors(), self._modules["down"].factors()
        return ExpertsLora(gate_up, down) if gate_up or down else None

    @property
    def merged(self) -> bool:
        """Whether an adapter is part of the weights now."""
        return any(projection.merged for projection in self.values())

    def merge(
        self, weights: Mapping[str, Tensor], *, keep_on: torch.device | str | None = None
    ) -> None:
        """Add the active adapter to the weights in place; copies are kept for `unmerge`.

        Args:
            weights: the weight of each projection, in the layout's order of dimensions.
            keep_on: device of the copies, e.g. "cpu"; None: the weights' own.

        Raises:
            ValueError: no adapter is active, one is merged already, not finite or of another
                shape. Nothing has been written then.
        """
        active = [target for target in PROJECTIONS if self[target].active is not None]
        if not active:
            raise ValueError("no adapter is active; set_adapter(name) first")
        for target in active:
            self[target].check_mergeable(weights[target], self.layout)
        try:
            for target in active:
                self[target].merge(weights[target], self.layout, keep_on=keep_on)
        except BaseException:  # the memory may be too short half-way
            if self.merged:
                self.unmerge(weights)
            raise

    def unmerge(self, weights: Mapping[str, Tensor]) -> None:
        """Put the weights back as they were before `merge`, bit for bit.

        Raises:
            ValueError: nothing is merged.
        """
        if not self.merged:
            raise ValueError("nothing is merged; merge an adapter first")
        for target in PROJECTIONS:
            if self[target].merged:
                self[target].unmerge(weights[target])

    def discard(self) -> None:
        """Drop all adapters and kept copies: what is merged stays in the weights."""
        for projection in self.values():
            projection.discard()
