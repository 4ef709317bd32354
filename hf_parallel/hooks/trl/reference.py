"""`reference=http://host:port`: TRL's reference model is served from elsewhere, and no rank of the policy holds it.

GRPO, RLOO and DPO call their reference as `model(input_ids, attention_mask, labels, fused_lm_head=True).log_probs`:
what stands in its place asks for these numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_parallel.collectives import objects
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.data import replacing
from hf_parallel.hooks.patching import patch
from hf_parallel.rollouts.reference import ask, from_text
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

#: Seconds that the server may take to say who it is.
_PATIENCE = 60


class ServedReference(nn.Module):
    """Without weights of its own. Made on all ranks at the same time."""

    def __init__(self, address: str, temperature: float) -> None:
        super().__init__()
        self.address, self.temperature = address, temperature
        mesh = runtime.mesh()
        self.timeout = mesh.config.reference_timeout_s
        self.group = mesh.group_on_host("tp") if mesh.size("tp") > 1 else None

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        fused_lm_head: bool = False,
        use_cache: bool | None = None,
        **others: object,
    ) -> SimpleNamespace:
        """Log-probabilities of the labels; the first rank of a tp group asks."""
        given = next((name for name, value in others.items() if value is not None), None)
        if given or attention_mask is None or labels is None:
            refuse(
                f"reference={self.address}", f"is not asked about {given or 'rows without a mask'}", "reference=none"
            )
        assert labels is not None
        kind = input_ids.device.type
        dtype = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "none"
        text = self._scores(
            input_ids=input_ids.tolist(),
            mask=attention_mask.tolist(),
            labels=labels.tolist(),
            temperature=self.temperature,
            autocast=None if dtype == "none" else dtype.removeprefix("torch."),
        )
        scores = from_text(text, (labels.shape[0], labels.shape[1] - 1))
        return SimpleNamespace(log_probs=scores.to(input_ids.device))

    def _scores(self, **told: object) -> str:
        """One rank's question, and its answer or its error for all of the group."""

        def answer() -> str:
            return ask(self.address, "log_probs", self.timeout, told)["log_probs"]

        return answer() if self.group is None else objects.from_one(answer, self.group)

    def check(self, policy: PreTrainedModel) -> None:
        """Refuse a model of another kind than the policy's."""
        facts, what = ask(self.address, "reference", min(_PATIENCE, self.timeout)), f"reference={self.address}"
        dtype = str(policy.dtype).removeprefix("torch.")
        if facts["dtype"] != dtype:
            refuse(
                what,
                f"serves {facts['model']} in {facts['dtype']}, the policy is in {dtype}",
                f"--dtype {dtype} there",
            )
        vocabulary = policy.config.get_text_config().vocab_size
        if facts["vocabulary"] != vocabulary:
            why = f"{facts['model']} has a vocabulary of {facts['vocabulary']}, the policy of {vocabulary}"
            refuse(what, why, do="serve the model that training starts from")


@patch(
    "trl.trainer.{dpo_trainer:DPOTrainer,grpo_trainer:GRPOTrainer,rloo_trainer:RLOOTrainer}.__init__",
    "loads the reference on every rank",
)
def init(original: Callable, self: Trainer, model: object, *args: object, **kwargs: object) -> None:
    """Where a reference is served, it is not loaded: of two models that the trainer would load it is the second."""
    address = runtime.mesh().config.reference
    if address is None:
        original(self, model, *args, **kwargs)
        return
    module = sys.modules[original.__module__]
    load, add_head = getattr(module, "create_model_from_path", None), getattr(module, "add_fused_lm_head", None)
    if load is None or add_head is None:
        refuse(f"reference={address}", "this TRL asks its reference in another way", "trl 1.16")
    loads = iter([load] if isinstance(model, str) else [])

    def served(*args: object, **kwargs: object) -> object:
        return next(loads, lambda *_, **__: ServedReference(address, getattr(self, "temperature", 1.0)))(
            *args, **kwargs
        )

    def headed(model: object, *args: object, **kwargs: object) -> None:
        if not isinstance(model, ServedReference):
            add_head(model, *args, **kwargs)

    with replacing(module, create_model_from_path=served, add_fused_lm_head=headed):
        original(self, model, *args, **kwargs)
    if not isinstance(self.ref_model, ServedReference):
        why = "adapters have their reference in the policy itself" if self.ref_model is None else "ref_model is given"
        refuse(f"reference={address}", why, "reference=none")
    self.ref_model.check(self.model)
