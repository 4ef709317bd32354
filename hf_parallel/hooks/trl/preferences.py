"""TRL's trainers that learn from preferences: KTO's pairs, and numbers of a data rank's examples in their metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.unscheduled import serve_script
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.shares import cut_of
from hf_parallel.hooks.patching import patch, read_library_version, replacing
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trl import experimental, online
from hf_parallel.model.calls import bind_by_name

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_REWARDS = ("trl.trainer.reward_trainer.RewardTrainer",)


# ---- KTO ---------------------------------------------------------------------------------------------------------


@patch("trl.trainer.kto_trainer:KTOTrainer._prepare_dataset", "pairs per process", since="1.6")
def prepare_dataset(
    original: Callable,
    self: Trainer,
    dataset: object,
    processing_class: object,
    args: TrainingArguments,
    dataset_name: str,
) -> object:
    """KTO pairs prompts with completions of the same batch: of the global batch, as in one process."""
    with replacing(args, per_device_train_batch_size=args.per_device_train_batch_size * runtime.mesh().data_size):
        return original(self, dataset, processing_class, args, dataset_name)


class _SizeOfRank(int):
    """A number of examples per data rank, which is small or large by that of all data ranks."""

    def __le__(self, most: int) -> bool:
        return int(self) * runtime.mesh().data_size <= most


@patch("trl.trainer.kto_trainer:KTOTrainer.__init__", "wants two examples on each process; before 1.6 pairs those")
def init_kto(original: Callable, self: Trainer, *args: object, **kwargs: object) -> None:
    """Take one example per data rank: its prompt is paired with the completion of another rank's.

    Raises:
        SpecError: the version does not, and this is no subclass with pairs of its own, as LLaMA-Factory's is.
    """
    if read_library_version("trl") < Version("1.6"):
        refuse("KTOTrainer", "in TRL before 1.6 pairs prompts with completions of one process", "trl 1.6 or newer")
    given: TrainingArguments | None = bind_by_name(original, (self, *args), kwargs).get("args")
    sized: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if given is not None:
        sized = replacing(given, per_device_train_batch_size=_SizeOfRank(given.per_device_train_batch_size))
    with sized:
        original(self, *args, **kwargs)


@patch("trl.trainer.kto_trainer:KTOTrainer._compute_kl_logps", "mean of means", since="1.6")
def kl_logps(original: Callable, self: Trainer, model: nn.Module, batch: dict) -> object:
    """KTO averages the means of data ranks that have rows: weighted by them, unlike parts give the whole mean."""
    logps = original(self, model, batch)
    if hasattr(online.find_trl_class(self), "kto_loss"):
        return logps
    if torch.is_tensor(batch.get("ref_KL_logps")):  # precomputed: the loss reads them after this
        batch["ref_KL_logps"] = _weigh_by_rows(self, batch["ref_KL_logps"])
    return _weigh_by_rows(self, logps)


@patch("trl.trainer.kto_trainer:KTOTrainer.kto_loss", "mean of means", before="1.6")
def kto_loss(
    original: Callable,
    self: Trainer,
    policy_chosen_logps: torch.Tensor,
    policy_rejected_logps: torch.Tensor,
    policy_KL_logps: torch.Tensor | None,
    reference_chosen_logps: torch.Tensor,
    reference_rejected_logps: torch.Tensor,
    reference_KL_logps: torch.Tensor | None,
) -> object:
    """Weigh log-probabilities that a subclass has computed in its own way."""
    policy_KL_logps, reference_KL_logps = (_weigh_by_rows(self, it) for it in (policy_KL_logps, reference_KL_logps))
    policy = policy_chosen_logps, policy_rejected_logps, policy_KL_logps
    return original(self, *policy, reference_chosen_logps, reference_rejected_logps, reference_KL_logps)


def _weigh_by_rows(trainer: Trainer, logps: torch.Tensor | None) -> torch.Tensor | None:
    rows = _count_own_trl_examples(trainer)
    if logps is None or rows is None:
        return logps
    totals = torch.tensor([float(rows), float(rows > 0)], device=logps.device)
    dist.all_reduce(totals, group=runtime.mesh().data_group)
    return logps * (rows * totals[1] / totals[0])


def _count_own_trl_examples(trainer: Trainer) -> int | None:
    """Return how many examples of the step in progress are this data rank's; None where all have as many."""
    cut, rows = cut_of(trainer.accelerator.gradient_state), record_of(trainer).step.real_rows
    return rows if rows is not None or cut is None else cut[runtime.mesh().data_rank]


# ---- rewards -------------------------------------------------------------------------------------------------------


def count_metrics_by_rows(trainer: Trainer) -> contextlib.AbstractContextManager:
    """Count each real example once in numbers that TRL averages over data ranks."""
    rows, gather = _count_own_trl_examples(trainer), trainer.accelerator.gather_for_metrics
    if not rows or not online.is_trainer_among(trainer, (*_REWARDS, *experimental.APART)):
        return contextlib.nullcontext()

    def by_rows(value: torch.Tensor) -> torch.Tensor:
        mean = value.ndim == 0 and value.is_floating_point()
        return gather(value.expand(rows) if mean else value)

    return replacing(trainer.accelerator, gather_for_metrics=by_rows)


@patch(
    "trl.experimental.{cpo.cpo_trainer:CPOTrainer,orpo.orpo_trainer:ORPOTrainer}.get_batch_loss_metrics",
    "evaluates apart from its `compute_loss`",
    since="1.16",
)
def batch_loss_metrics(
    original: Callable, self: Trainer, model: nn.Module, batch: dict, train_eval: str = "train"
) -> object:
    """Evaluate as `compute_loss` does: the last stage of a pipeline answers, metrics are of real examples."""
    if train_eval == "train":
        return original(self, model, batch, train_eval)
    state = runtime.find_parallel_state(model)
    with count_metrics_by_rows(self):
        if state is None or state.pipeline is None:
            return original(self, model, batch, train_eval)
        return serve_script(state.pipeline, dict(batch), lambda: original(self, model, batch, train_eval))[0]
