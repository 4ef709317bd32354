"""Experts of a layer that one module holds side by side, each weight a stack of one matrix per expert.

    gate_up_proj   [experts, 2 width, hidden]      transposed, as GPT-OSS's   [experts, hidden, 2 width]
    down_proj      [experts, hidden, width]                                   [experts, width, hidden]

transformers' experts interface says how a module holds them; `forward` takes tokens, and of each token which experts
see it with what weight.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_parallel.model.anatomy import get_text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRAITS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
#: Kinds that run every token through every expert, the tokens of one expert after those of another.
DENSE = {"Llama4TextExperts"}


@dataclass(frozen=True)
class ExpertFacts:
    """Experts of one layer. `widths`: of each weight the dim that runs along an expert's width, None if none does.

    `packed`: the weights that hold [gate | up] along it. `unknown`: parameters of which it is not known what they do.
    """

    kind: str
    count: int
    width: int
    widths: dict[str, int | None]
    packed: frozenset[str]
    dense: bool
    unknown: tuple[str, ...] = ()


def is_experts(module: object) -> bool:
    """Return whether a module holds experts side by side."""
    return type(module).__name__ in DENSE or all(hasattr(module, trait) for trait in _TRAITS)


def iterate_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold experts, by full name."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def read_expert_facts(module: nn.Module) -> ExpertFacts:
    """Return the facts about a module that holds experts."""
    kind = type(module).__name__
    dense = kind in DENSE
    transposed = dense or module.is_transposed
    rows = 2 if transposed else 1
    widths: dict[str, int | None] = {
        "gate_up_proj": rows,
        "up_proj": rows,
        "down_proj": 1 if transposed else 2,
        "gate_up_proj_bias": 1,
        "up_proj_bias": 1,
        "down_proj_bias": None,
    }
    held = {name: parameter for name, parameter in module.named_parameters() if "." not in name}
    own = {name: dim for name, dim in widths.items() if name in held}
    gates = {"gate_up_proj", "gate_up_proj_bias"} & set(own)
    packed = gates if dense or module.is_concatenated else set()
    unknown = tuple(name for name, _ in module.named_parameters() if name not in widths)
    down = held["down_proj"]
    return ExpertFacts(kind, len(down), down.shape[1 if transposed else 2], own, frozenset(packed), dense, unknown)


# ---- the loss that balances them ---------------------------------------------------------------------------------

_FUNCTION = "load_balancing_loss_func"
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def has_known_balance(model: PreTrainedModel) -> bool:
    """Return whether a model has the auxiliary loss of nearly all in transformers, and a coefficient for it."""
    function = getattr(sys.modules.get(type(model).__module__), _FUNCTION, None)
    known = function is not None and list(inspect.signature(function).parameters) == _PARAMETERS
    return known and balance_coefficient(model) is not None and count_experts_per_token(model) is not None


def balance_coefficient(model: PreTrainedModel) -> float | None:
    """Return the weight of the auxiliary loss in the model's loss."""
    return _read_setting(model, _COEFFICIENTS)


def count_experts_per_token(model: PreTrainedModel) -> Any:
    """Return how many experts a token has."""
    return _read_setting(model, ("num_experts_per_tok",))


def _read_setting(model: Any, names: tuple[str, ...]) -> Any:
    places = (model, model.config, get_text_config(model))
    found = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in found if value is not None), None)


def iterate_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the modules whose outputs are router logits: full name, module, and the place among its outputs."""
    declared = (getattr(module, "_can_record_outputs", None) or {} for module in model.modules())
    found: object = next((known["router_logits"] for known in declared if "router_logits" in known), [])
    recorders, modules = (found if isinstance(found, list) else [found]), dict(model.named_modules())
    for name, module in modules.items():
        for recorder in recorders:
            kind = getattr(recorder, "target_class", recorder)
            layer = getattr(recorder, "layer_name", None)
            if isinstance(kind, type) and issubclass(type(module), kind) and f".{layer or name}." in f".{name}.":
                yield name, module, getattr(recorder, "index", 1)
