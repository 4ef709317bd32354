"""Expert parallelism (Lepikhin et al., 2021): whole experts on different ranks, to which tokens travel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy
    from hf_parallel.model.experts import ExpertFacts


@dataclass(frozen=True)
class ExpertPart:
    """The part of experts in a plan. `experts`: by layer; `balanced`: the auxiliary loss is a known one.

    `waits`: it is asked for under pp, whose backward passes wait for all forward ones.
    """

    experts: dict[str, ExpertFacts]
    ranks: int
    balanced: bool
    waits: bool
    capacity_factor: float | None = None

    @property
    def per_rank(self) -> int:
        """Experts of a layer on each rank."""
        return next(iter(self.experts.values())).count // self.ranks


@dataclass(frozen=True)
class MixtureFacts:
    """Experts of each layer, by full name; whether the loss that balances them is known, and asked for."""

    experts: dict[str, ExpertFacts]
    balanced: bool
    asked: bool


class Experts(Axis["MixtureFacts", ExpertPart]):
    """A second view of ranks that other axes have: no axis of the mesh. Without ep it keeps losses exact."""

    name = "ep"
    always_on = True

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> MixtureFacts:
        """Read which modules hold experts, and how."""
        from hf_parallel.model.experts import has_known_balance, iterate_experts, read_expert_facts

        found = {name: read_expert_facts(module) for name, module in iterate_experts(model)}
        balanced = bool(found) and hasattr(model, "config") and has_known_balance(model)
        return MixtureFacts(found, balanced, balanced and bool(getattr(model.config, "output_router_logits", False)))

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: MixtureFacts) -> ExpertPart | None:
        """Give each rank equally many experts.

        Raises:
            SpecError: there are no experts, or ranks cannot hold or limit them.
        """
        factor, waits = config.expert_capacity_factor, facts.asked and config.pp_size > 1
        none = f"{anatomy.name} has no experts that transformers keeps side by side"
        asked = f"ep_size={config.ep_size}"
        if config.ep_size > 1 and not facts.experts:
            refuse(asked, none, "ep_size=1")
        if config.ep_size > 1 and anatomy.replaced_forward is not None:
            why = f"{anatomy.replaced_forward} has a forward of its own, which would not communicate"
            refuse(asked, why, "ep_size=1")
        for name, of_layer in facts.experts.items() if config.ep_size > 1 else ():
            if of_layer.dense:
                refuse(asked, f"{of_layer.kind} computes every expert for every token, so none travels", "ep_size=1")
            if of_layer.count % config.ep_size:
                # The next smaller number of ranks that divides so many experts, and the ranks there are.
                inner, ranks, count = config.cp_size * config.tp_size, config.expert_ranks, of_layer.count
                smaller = range(inner, config.ep_size)
                fewer = max((n for n in smaller if n % inner == count % n == ranks % n == 0), default=1)
                refuse(asked, f"does not divide the {count} experts of {name}", f"ep_size={fewer}")
            if of_layer.unknown:
                refuse(asked, f"what {of_layer.kind} does with its {of_layer.unknown[0]} is not known", "ep_size=1")
        if factor is not None:
            asked, works = f"expert_capacity_factor={factor:g}", "leave it out"
            dense = next((of_layer.kind for of_layer in facts.experts.values() if of_layer.dense), None)
            if not facts.experts:
                refuse(asked, none, do=works)
            if dense is not None:
                refuse(asked, f"{dense} computes every expert for every token, so none is dropped", do=works)
            if config.shares_batches:
                refuse(
                    f"batch_shares={config.batch_shares}",
                    f"{asked} gives each data rank as much room",
                    "batch_shares=even",
                )
        return ExpertPart(facts.experts, config.ep_size, facts.balanced, waits, factor) if facts.experts else None

    def notes(self, part: ExpertPart) -> list[str]:
        whole = part.per_rank * part.ranks
        waits = "output_router_logits: all forward passes come before the backward passes, which needs more memory"
        shared = [f"experts: each rank holds {part.per_rank} of the {whole} of every layer"] if part.ranks > 1 else []
        return [*shared, *([waits] if part.waits else [])]

    def apply(self, model: PreTrainedModel, part: ExpertPart | None, building: Building) -> None:
        """Keep this rank's experts of each layer, and let tokens travel to them."""
        from hf_parallel.axes.experts.layers import share_out

        if part is not None and part.ranks > 1:
            share_out(model, part.experts, building.mesh, building.sequence_flag)

    def finish(self, model: PreTrainedModel, part: ExpertPart | None, building: Building) -> None:
        """Balance experts over all data ranks and stages, count how evenly tokens fall on them, limit their room."""
        from hf_parallel.axes.experts.balance import (
            LOAD,
            CallBalance,
            Capacity,
            ExpertLoad,
            StageBalance,
            balance_over_data_ranks,
        )
        from hf_parallel.model.anatomy import has_own_parameters
        from hf_parallel.model.experts import iterate_experts

        if part is None:
            return
        mesh, count = building.mesh, max(facts.count for facts in part.experts.values())
        limit = part.capacity_factor
        capacity = None if limit is None else Capacity(limit, mesh, building.sequence_flag)
        own = [module for _, module in iterate_experts(model) if has_own_parameters(module)]
        vars(model)[LOAD] = ExpertLoad(own, count, mesh, capacity)  # counts from here on
        if capacity is not None:
            for name, facts in part.experts.items():
                module = model.get_submodule(name)
                if has_own_parameters(module):  # not where another stage holds it
                    module.register_forward_pre_hook(functools.partial(capacity.limit, facts.count))
        if part.balanced and building.pipeline is not None:
            last_rank = building.pipeline.last_rank
            balance = StageBalance(model, count, mesh, last_rank, building.whole_tokens)
            building.services.balance = functools.partial(CallBalance, balance)
        elif part.balanced and mesh.data_size > 1:
            balance_over_data_ranks(model, mesh)


EXPERTS = Experts()
