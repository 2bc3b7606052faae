"""An optimizer's groups, names and state: added, saved and loaded, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import say_once
from .groups.blocks import check_names, with_own_names
from .groups.options import AdamWOptions, MuonOptions
from .groups.param_groups import ONE_KIND, Format, check_unique, group_of_zero
from .groups.parameters import label
from .state.saving import loaded_state, masked_options, unmasked_options
from .state.slots import Slot, complete_state, slots_of


class GroupedOptimizer(torch.optim.Optimizer):
    """Checked groups of two kinds, the names of their parameters, and their state.

    State is made for every parameter at once, with or without a gradient, at the first step or
    load: until then an optimizer takes no memory, also where a trainer shards the model after it
    was constructed.
    """

    format: Format
    offloaded: bool = False
    _constructing = False  # groups are added one by one, and one warning speaks of all
    _guesses: Sequence[str] = ()

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._names: list[list[str | None]] = []  # parallel to param_groups, which hold none
        self._loading: dict[Any, Any] | None = None
        self._constructing = True
        super().__init__(params, defaults)
        self._constructing = False
        self._warn_of_guesses()

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check a group and add it; on an error nothing has changed. The next step makes its state.

        Names, or the shape, decide about a group without a mark: it becomes two if it has both
        kinds.

        Raises:
            ValueError, TypeError: the message names the group, the parameter and the option.
        """
        self._check_count()
        first = len(self.param_groups)
        parts, guess = self.format.with_marks(param_group, self.defaults, f"group {first}")
        if not self.format.is_marked(param_group):
            of_zero = group_of_zero(first) or {"params": []}
            if len(self.format.with_marks(of_zero, self.defaults, f"group {first}")[0]) > 1:
                raise ValueError(f"group {first}: {ONE_KIND}")
        found = []
        for number, part in enumerate(parts, start=first):
            group, names = self.format.complete(part, self.defaults, f"group {number}")
            found.append((f"group {number}", group, names))
        groups, names_of = [g for _, g, _ in found], [names for _, _, names in found]
        check_unique([*self.param_groups, *groups], [*self._names, *names_of])
        options = [self.format.options(group) for group in groups]
        for (where, group, names), of_group in zip(found, options, strict=True):
            self._check_group(of_group, _labelled(where, group["params"], names))
        self.adopt(found)
        for (where, group, names), of_group in zip(found, options, strict=True):
            for here, param, name in _labelled(where, group["params"], names):
                self.slots(param, name, of_group, here)  # raises what the first step would
            check_names(of_group, names, where)
        self.param_groups += groups
        self._names += names_of
        if guess:
            self._guesses = [*self._guesses, guess]
        if not self._constructing:
            self._warn_of_guesses()

    def _warn_of_guesses(self) -> None:
        """Say which groups without marks and names were told apart by shape."""
        if self._guesses:
            say_once(
                "groups without use_muon and without names go by shape: %s. Embeddings and heads "
                "among them belong to adamw: pass get_default_muon_param_groups(model), or "
                "model.named_parameters()",
                "; ".join(self._guesses),
            )
        self._guesses = ()

    def _check_group(
        self, options: MuonOptions | AdamWOptions, entries: Sequence[tuple[str, Tensor, str | None]]
    ) -> None:
        """Raise if a group does not fit what the optimizer as a whole was told."""

    def adopt(self, groups: Sequence[tuple[str, dict[str, Any], Sequence[str | None]]]) -> None:
        """Decide where the state of new parameters is kept, before any is made.

        What raises here leaves no decision behind.
        """

    def adopt_all(self) -> None:
        """`adopt` for the groups as they are; trainers may have swapped parameters."""
        self.adopt(
            [(f"group {i}", group, self._names[i]) for i, group in enumerate(self.param_groups)]
        )

    def slots(self, param: Tensor, name: str | None, options: Any, where: str) -> dict[str, Slot]:
        """The state that this process keeps for a parameter."""
        return slots_of(param, name, options, where)

    def note_refused_load(self) -> None:
        """A state_dict was refused, or a part of one that other processes have parts of."""

    def parameter_names(self, group: int) -> list[str | None]:
        """The names of a group's parameters, None where none was given.

        Groups hold those of pairs alone, as torch's do: a flat checkpoint copies all names of a
        group with each of its parameters, 1.8 GB for 6,144 names of 50 bytes.
        """
        return list(self._names[group])

    def labelled(self, number: int) -> list[tuple[str, Tensor, str | None]]:
        """(label for messages, parameter, name) of every parameter of a group."""
        return _labelled(
            f"group {number}", self.param_groups[number]["params"], self._names[number]
        )

    def _check_count(self) -> None:
        added, there = len(self._names), len(self.param_groups)
        if added != there:
            raise ValueError(
                f"{added} groups were added and there are {there}; add groups with "
                "add_param_group, and construct an optimizer anew to take one away"
            )

    def has_state(self) -> bool:
        """Whether state of any parameter was made; `state[param]` alone makes an empty dict."""
        return any(self.state.get(p) for group in self.param_groups for p in group["params"])

    def fit_state(self) -> None:
        """Make the state of exactly the parameters in the groups, as far as it is not there.

        Trainers that shard a model swap its parameters in `param_groups` after construction.

        Raises:
            ValueError: a parameter or an option changed so that the state no longer fits.
            RuntimeError: state is missing, and a CUDA graph is being captured.
        """
        states = self.completed_state()
        for gone in [key for key in self.state if isinstance(key, Tensor) and key not in states]:
            del self.state[gone]
        self.state.update(states)

    @torch.no_grad()
    def completed_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of every parameter, with zeros for what was not made yet; nothing changes.

        Raises: as `fit_state`.
        """
        states = {}
        self.adopt_all()
        for number, group in enumerate(self.param_groups):
            options = self.format.options(group, f"group {number}")
            for where, param, name in self.labelled(number):
                slots = self.slots(param, name, options, where)
                held = self.state.get(param, {})
                states[param] = complete_state(held, slots, param, where, offloaded=self.offloaded)
            check_names(options, self._names[number], f"group {number}")
        return states

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but with a word for a function in adjust_lr_fn.

        So weights-only loading works; loading keeps the function of the optimizer it loads into.
        Before the first step it has no state.
        """
        self._check_count()
        for number, group in enumerate(self.param_groups):
            self.format.options(group, f"group {number}")
            self.format.tidy(group)  # numbers of numpy, which weights-only loading refuses
        params = [param for group in self.param_groups for param in group["params"]]
        if self.has_state() and not all(param in self.state for param in params):
            self.fit_state()  # of a group that was added since the last step
        state_dict = super().state_dict()
        state_dict["param_groups"] = [masked_options(group) for group in state_dict["param_groups"]]
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state_dict exactly: float32 state of bfloat16 parameters stays float32.

        One without state, from before a first step, leaves the state to the next step.
        Options that an older state_dict does not have keep their present values. Everything is
        checked before anything changes. Where ranks have parts of the state each, of sharded
        parameters or with gradients="unreduced", and one refuses its part while others load theirs,
        the next step raises on all of them.

        Raises:
            ValueError: groups, kinds, options, names, keys, shapes, dtypes or values do not fit
                this optimizer, or there are options or state that it does not know.
        """
        last = self.register_load_state_dict_pre_hook(GroupedOptimizer._prepare_load)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.note_refused_load()
            raise
        finally:
            last.remove()
            self._loading = None

    @torch.no_grad()
    def _prepare_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check and copy everything; hand torch a state_dict without state, which it would cast."""
        saved_groups, saved_state = state_dict["param_groups"], dict(state_dict["state"])
        for number, group in enumerate(saved_groups):
            if not isinstance(group, Mapping) or "params" not in group:
                raise ValueError(
                    f"saved group {number} has no 'params'; load what state_dict() returned"
                )
            if group["params"] and not {"kind", "use_muon"} & group.keys():
                raise ValueError(
                    f"saved group {number} has no {self.format.mark!r}, so that it is of another "
                    "optimizer; of torch.optim.Muon or AdamW load convert_state_dict(optimizer, "
                    "state, source='torch')"
                )
        saved_sizes = [len(group["params"]) for group in saved_groups]
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"the state_dict has groups of {saved_sizes} parameters, the optimizer of {sizes}"
            )
        merged, loading = [], {}
        without = not any(saved_state.get(key) for g in saved_groups for key in g["params"])
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            where = f"group {number}"
            self.format.settle(group)
            kind = self.format.kind(group)
            # torch.distributed.checkpoint keeps nothing of a group without parameters.
            marked = saved["params"] or {"kind", "use_muon"} & saved.keys()
            saved_kind = self.format.kind(saved, f"saved {where}") if marked else kind
            if saved_kind != kind:
                raise ValueError(
                    f"{where}: the saved group is of kind {saved_kind!r}, this one of {kind!r}"
                )
            self.format.check_saved(saved, group, type(self).__name__, where)
            own = unmasked_options(saved, group, where)
            self.format.options(own, where, check=True)
            merged.append(with_own_names(own, group, self._names[number], where))
            options = self.format.options(merged[-1], where)
            labelled = self.labelled(number)
            for saved_id, (here, param, name) in zip(saved["params"], labelled, strict=True):
                slots = self.slots(param, name, options, here)
                if without:
                    continue
                saved_one = saved_state.pop(saved_id, None)
                kept = saved_one if slots else {}  # else another rank has it
                loading[param] = loaded_state(kept, slots, param, here, offloaded=self.offloaded)
            check_names(options, self._names[number], where)
        unlisted = [key for key in saved_state if isinstance(key, int)]
        if unlisted:
            raise ValueError(f"the state_dict has state for {unlisted}, which no group lists")
        self._loading = {**saved_state, **loading}
        return {**state_dict, "param_groups": merged, "state": {}}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self.__dict__.get("_loading") is not None:
            state["state"].update(self._loading)
        super().__setstate__(state)
        self._loading = None


def _labelled(
    where: str, params: Sequence[Tensor], names: Sequence[str | None]
) -> list[tuple[str, Tensor, str | None]]:
    if len(params) != len(names):
        raise ValueError(
            f"{where} was constructed with {len(names)} parameters and now has {len(params)}; add "
            "parameters with add_param_group"
        )
    return [
        (label(where, index, name), param, name)
        for index, (param, name) in enumerate(zip(params, names, strict=True))
    ]
