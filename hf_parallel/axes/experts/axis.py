"""Expert parallelism (Lepikhin et al., 2021): whole experts on different ranks, to which tokens travel."""

from __future__ import annotations

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

    def is_on(self, config: ParallelConfig) -> bool:
        return True

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> MixtureFacts:
        """Read which modules hold experts, and how."""
        from hf_parallel.model.experts import has_known_balance, iterate_experts, read_expert_facts

        found = {name: read_expert_facts(module) for name, module in iterate_experts(model)}
        balanced = bool(found) and hasattr(model, "config") and has_known_balance(model)
        return MixtureFacts(found, balanced, balanced and bool(getattr(model.config, "output_router_logits", False)))

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: MixtureFacts) -> ExpertPart | None:
        """Give each rank equally many experts."""
        if config.ep_size > 1:
            _check_expert_counts(config, anatomy, facts.experts)
        factor, waits = config.expert_capacity_factor, facts.asked and config.pp_size > 1
        if factor is not None:
            _check_capacity(factor, anatomy, facts.experts)
        if factor is not None and config.shares_batches:
            why = f"expert_capacity_factor={factor:g} gives each data rank as much room"
            refuse(f"batch_shares={config.batch_shares}", why, "batch_shares=even")
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
            Capacity,
            StageBalance,
            balance_over_data_ranks,
            limit_experts,
            watch_load,
        )

        if part is None:
            return
        mesh, count = building.mesh, max(facts.count for facts in part.experts.values())
        limit = part.capacity_factor
        capacity = None if limit is None else Capacity(limit, mesh, building.sequence_flag)
        watch_load(model, count, mesh, capacity)
        if capacity is not None:
            limit_experts(model, part.experts, capacity)
        if part.balanced and building.pipeline is not None:
            last_rank = building.pipeline.last_rank
            building.services.balance = StageBalance(model, count, mesh, last_rank, building.whole_tokens)
        elif part.balanced and mesh.data_size > 1:
            balance_over_data_ranks(model, mesh)


def _check_capacity(factor: float, anatomy: Anatomy, experts: dict[str, ExpertFacts]) -> None:
    asked, works = f"expert_capacity_factor={factor:g}", "leave it out"
    if not experts:
        refuse(asked, f"{anatomy.name} has no experts that transformers keeps side by side", do=works)
    for facts in experts.values():
        if facts.dense:
            refuse(asked, f"{facts.kind} computes every expert for every token, so none is dropped", do=works)


def _check_expert_counts(config: ParallelConfig, anatomy: Anatomy, experts: dict[str, ExpertFacts]) -> None:
    asked = f"ep_size={config.ep_size}"
    if not experts:
        refuse(asked, f"{anatomy.name} has no experts that transformers keeps side by side", "ep_size=1")
    if anatomy.replaced_forward is not None:
        refuse(asked, f"{anatomy.replaced_forward} has a forward of its own, which would not communicate", "ep_size=1")
    for name, facts in experts.items():
        if facts.dense:
            refuse(asked, f"{facts.kind} computes every expert for every token, so none travels", "ep_size=1")
        if facts.count % config.ep_size:
            works = _suggest_ep_size(facts.count, config)
            refuse(asked, f"does not divide the {facts.count} experts of {name}", f"ep_size={works}")
        if facts.unknown:
            refuse(asked, f"what {facts.kind} does with its {facts.unknown[0]} is not known", "ep_size=1")


def _suggest_ep_size(count: int, config: ParallelConfig) -> int:
    """The next smaller number of ranks that divides so many experts, and the ranks there are."""
    inner, ranks = config.cp_size * config.tp_size, config.expert_ranks
    fits = (n for n in range(inner, config.ep_size) if n % inner == 0 and count % n == 0 and ranks % n == 0)
    return max(fits, default=1)


EXPERTS = Experts()
