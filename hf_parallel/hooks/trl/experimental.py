"""TRL's experimental trainers: what they do per process, made to mean what it means in one process.

CPO, ORPO and TPO add a mean over tokens to a mean over examples: each is taken over the global batch. GKD draws
completions of the global batch in place of its answers.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sized
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.nn.functional import pad
from torch.utils.data import Sampler
from transformers.trainer_utils import has_length

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.unscheduled import serve_script
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, read_library_version, replacing
from hf_parallel.hooks.trainer.means import correct_over_data_ranks
from hf_parallel.hooks.trl.online import is_trainer_among
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainingArguments
    from trl.experimental.sdft.sdft_trainer import DistillationLogits

#: Their batches hold chosen and rejected answers apart.
APART = ("trl.experimental.cpo.cpo_trainer.CPOTrainer", "trl.experimental.orpo.orpo_trainer.ORPOTrainer")
_TRIPLES = ("trl.experimental.tpo.tpo_trainer.TPOTrainer",)
#: They learn from chosen and rejected answers, and have no reference model.
PREFERENCES = (*APART, *_TRIPLES)
_IW_OPD = ("trl.experimental.iw_opd.iw_opd_trainer.IWOPDTrainer",)
#: They load the batches of a step at once.
_WINDOWS = ("trl.experimental.gold.gold_trainer.GOLDTrainer", *_IW_OPD)
#: They draw answers in their `training_step`, which computes the loss, too.
_DRAWS = ("trl.experimental.online_dpo.online_dpo_trainer.OnlineDPOTrainer",)
#: Their own teachers, of what they have drawn.
_SDPO = ("trl.experimental.sdpo.sdpo_trainer.SDPOTrainer",)
_OWN_TEACHERS = ("trl.experimental.sdft.sdft_trainer.SDFTTrainer", *_SDPO)
#: They have a teacher, and a loss that is a sum over tokens.
DISTILLS = ("trl.experimental.gkd.gkd_trainer.GKDTrainer", *_WINDOWS)
OTHERS = (*DISTILLS, *_DRAWS, *_OWN_TEACHERS)


def check_experimental_trainer(
    trainer: Trainer, args: TrainingArguments, train_dataset: Sized | None, eval_dataset: object
) -> None:
    """Refuse what has not been compared with one process, or would not be the same."""
    config = runtime.mesh().config
    apart, draws = is_trainer_among(trainer, APART), is_trainer_among(trainer, _DRAWS)
    several = config.data_parallel_size > 1
    if several and not args.dataloader_drop_last:
        _refuse_repeated_prompts(trainer, args, train_dataset, eval_dataset)
    named = [  # settings, and why they are refused
        ("use_vllm", "has not been compared with one process"),
        ("use_teacher_server", "has not been compared with one process"),
        *[("generate_during_eval", "each data rank would show examples of its own")] * apart,
        *[("uld_use_hybrid_loss", "logs a loss of the last example of each rank")] * (several or config.pp_size > 1),
    ]
    for key, why in named:
        if getattr(args, key, False):
            refuse(f"{type(trainer).__name__} with {key}=True", why, f"{key}=False")
    refusals = [
        (read_library_version("trl") < Version("1.16"), "", "has not been compared in TRL before 1.16", "trl 1.16"),
        (
            (apart or draws) and config.cp_size > 1,
            f" with cp_size={config.cp_size}",
            "its metrics run over padding, which parts of sequences leave out",
            f"tp_size={config.cp_size}",
        ),
        (
            apart and trainer.is_encoder_decoder,
            " with an encoder and a decoder",
            "has not been compared with one process",
            "a causal model",
        ),
        (
            draws and config.pp_size > 1,
            f" with pp_size={config.pp_size}",
            "it computes its loss in its training_step",
            f"tp_size={config.pp_size}",
        ),
        (
            is_trainer_among(trainer, (*_WINDOWS, *_DRAWS, *_OWN_TEACHERS)) and config.shares_batches,
            f" with batch_shares={config.batch_shares}",
            "it draws as many answers on all ranks",
            "batch_shares=even",
        ),
        (
            getattr(trainer, "_is_vlm", False),
            " with a processor of images",
            "images are not shared out",
            "a tokenizer",
        ),
    ]
    for asked, spelled, why, works in refusals:
        if asked:
            refuse(f"{type(trainer).__name__}{spelled}", why, works)


def _refuse_repeated_prompts(
    trainer: Trainer, args: TrainingArguments, train_dataset: Sized | None, eval_dataset: object
) -> None:
    """Refuse data sets whose last batch would be filled with prompts that some data rank answers again."""
    ranks = runtime.mesh().config.data_parallel_size
    asked: list[tuple[object, int, int]] = []  # data set, answers to each prompt, answers in a batch
    if is_trainer_among(trainer, _DRAWS):
        asked = [(train_dataset, 1, args.train_batch_size * ranks)]
    elif is_trainer_among(trainer, _OWN_TEACHERS):
        several = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        answers = args.num_generations_eval or args.num_generations
        asked = [(one, answers, args.eval_batch_size * ranks) for one in several if one is not None]
    for dataset, answers, batch in asked:
        rows = len(dataset) * answers if isinstance(dataset, Sized) and has_length(dataset) else None
        if rows is None or rows % batch:
            what = f"{type(trainer).__name__} with {rows or 'an unknown number of'} answers in batches of {batch}"
            why = f"of {ranks} data ranks some would answer prompts of the last batch twice"
            refuse(what, why, "dataloader_drop_last=True")


def count_rows_of_example(trainer: Trainer) -> int:
    """Return how many rows an example has: TPO's batch is [all chosen; all rejected; all references]."""
    if not is_trainer_among(trainer, _TRIPLES):
        return 1
    return 3 if trainer.tpo_alpha else 2


def adds_mean_over_tokens(trainer: Trainer) -> bool:
    """Return whether a mean over the tokens of an answer may be added to a loss that is a mean over examples."""
    return is_trainer_among(trainer, PREFERENCES) or aligns_tokenizers(trainer)


def aligns_tokenizers(trainer: Trainer) -> bool:
    """Return whether GOLD compares two tokenizers' texts: its loss is then a mean over examples, not over tokens."""
    return is_trainer_among(trainer, _WINDOWS) and getattr(trainer.args, "use_uld_loss", False)


def takes_whole_batches(trainer: Trainer) -> bool:
    """Return whether a pipeline cannot cut its batches.

    CPO's and ORPO's have no `input_ids`, TPO and SDPO may take a mean over their tokens, and IW-OPD computes from
    lengths where prompts end, which nothing may be hidden from to see how the loss may be cut.
    """
    if is_trainer_among(trainer, _SDPO):
        return trainer.args.distillation_weight < 1 and trainer.loss_type in _OF_TOKENS
    return is_trainer_among(trainer, (*APART, *_IW_OPD)) or (
        is_trainer_among(trainer, _TRIPLES) and bool(trainer.tpo_alpha)
    )


def _find_longest(*masks: torch.Tensor) -> int:
    """Return how many tokens the longest real row of the global batch has."""
    longest = torch.stack([mask.sum(1).max() for mask in masks]).max() * (not runtime.is_absent())
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=runtime.mesh().data_group)
    return int(longest)


@patch(
    "trl.experimental.{cpo.cpo_trainer:CPOTrainer,orpo.orpo_trainer:ORPOTrainer}.concatenated_forward",
    "pads by process",
    since="1.16",
)
def concatenated_forward(original: Callable, self: Trainer, model: nn.Module, batch: dict) -> object:
    """Pad to the longest real row of the global batch: the mean logits of the metrics run over padding, too."""
    padding = self.padding_value if hasattr(self, "padding_value") else self.pad_token_id  # ORPO, CPO
    values = {"attention_mask": 0, "input_ids": padding, "labels": -100}
    longest = _find_longest(batch["chosen_attention_mask"], batch["rejected_attention_mask"])
    fitted = dict(batch)
    for name in (f"{kind}_{key}" for kind in ("chosen", "rejected") for key in values):
        missing = longest - batch[name].shape[1]  # negative where a row that only fills the batch is longer
        fitted[name] = pad(batch[name], (0, missing), value=values[name.split("_", 1)[1]])
    return original(self, model, fitted)


@patch("trl.experimental.tpo.tpo_trainer:TPOTrainer._compute_loss", "averages means over tokens", since="1.16")
def compute_triple_loss(
    original: Callable, self: Trainer, model: nn.Module, inputs: dict, return_outputs: bool
) -> object:
    """Weigh the mean entropy, which TPO gathers before anything else, by the tokens of each part of the batch."""
    tokens = inputs["completion_mask"][:, 1:].sum().float()
    gather, calls = self.accelerator.gather_for_metrics, itertools.count()

    def by_tokens(value: torch.Tensor) -> torch.Tensor:
        if next(calls):
            return gather(value)
        totals = self.accelerator.gather(torch.stack([torch.where(tokens == 0, 0, value * tokens), tokens])[None])
        return totals[:, 0].sum() / totals[:, 1].sum()

    with replacing(self.accelerator, gather_for_metrics=by_tokens):
        return original(self, model, inputs, return_outputs)


# ---- GKD ------------------------------------------------------------------------------------------------------------


@patch("trl.experimental.gkd.gkd_trainer:GKDTrainer.training_step", "draws and pads by process", since="1.16")
def draw_completions(
    original: Callable, self: Trainer, model: nn.Module, inputs: dict, num_items_in_batch: object = None
) -> torch.Tensor:
    """Let all ranks draw completions or none, those of one model the same."""
    _prepare_to_draw(self, inputs)
    own = random.random()  # on each rank, whose further numbers are then those of one process
    drawn = messages.send_from_one(lambda: own)
    with replacing(sys.modules[original.__module__], random=SimpleNamespace(random=lambda: drawn)):
        return original(self, model, inputs, num_items_in_batch)


@patch(
    "trl.experimental.{gkd.gkd_trainer:GKDTrainer,gold.gold_trainer:GOLDTrainer,"
    "iw_opd.iw_opd_trainer:IWOPDTrainer}.compute_loss",
    "pads by process",
    since="1.16",
)
def compute_divergence(
    original: Callable,
    self: Trainer,
    model: nn.Module,
    inputs: dict,
    return_outputs: bool = False,
    num_items_in_batch: object = None,
) -> object:
    """Evaluate rows that are padded to the longest one of the global batch."""
    if not self.model.training:
        inputs = dict(inputs)
        _fit_left(self, inputs, "attention_mask", "input_ids", "labels", "byte_offsets")
    return original(self, model, inputs, return_outputs, num_items_in_batch)


@patch(
    "trl.experimental.{gold.gold_trainer:GOLDTrainer,iw_opd.iw_opd_trainer:IWOPDTrainer}._fill_buffer",
    "draws and pads by process",
    since="1.16",
)
def fill_buffer(original: Callable, self: Trainer, generation_batch: dict, buffer_steps: int) -> None:
    """Draw the completions of a step, those of one model the same."""
    batch = dict(generation_batch)
    _prepare_to_draw(self, batch)
    original(self, batch, buffer_steps)


@patch(
    "trl.experimental.{gold.gold_trainer:GOLDTrainer,iw_opd.iw_opd_trainer:IWOPDTrainer}._get_train_sampler",
    "cuts steps by process",
    since="1.16",
)
def sample_windows(original: Callable, self: Trainer, dataset: object = None) -> Sampler:
    """Give each data rank its rows of each part of a step, in which one process draws completions, or does not."""
    parts, ranks = self.args.gradient_accumulation_steps, runtime.mesh().data_size
    return _Windows(
        original(self, dataset), torch.arange(parts * ranks * self._train_batch_size).view(parts, ranks, -1)
    )


@patch(
    "trl.experimental.iw_opd.iw_opd_trainer:IWOPDTrainer._compute_iw_opd_loss", "logs means of a rank", since="1.16"
)
def importance_loss(original: Callable, self: Trainer, *args: object, **kwargs: object) -> torch.Tensor:
    """Log means, least and largest numbers of the global batch."""
    metrics = self._metrics["train" if self.model.training else "eval"]
    known = {name: len(values) for name, values in metrics.items()}
    loss = original(self, *args, **kwargs)
    labels = bind_by_name(original, (self, *args), kwargs)["labels"]
    own = {name: metrics[name].pop() if len(metrics[name]) > known.get(name, 0) else 0.0 for name in _IMPORTANCE}
    found = self.accelerator.gather(torch.tensor([[(labels != -100).sum(), *own.values()]], device=labels.device))
    found = found[found[:, 0] > 0]  # ranks without a token have logged nothing
    for (name, combine), values in zip(_IMPORTANCE.items(), found.T[1:], strict=True):
        if len(found):
            metrics[name].append(combine(values, found[:, 0]).item())
    return loss


#: Metrics of IW-OPD's loss -> how those of data ranks, and their numbers of tokens, become one.
_IMPORTANCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(
        [f"iw_opd/mean_{name}" for name in ("advantage", "abs_advantage", "weight")],
        lambda values, tokens: (values * tokens).sum() / tokens.sum(),
    ),
    "iw_opd/min_weight": lambda values, tokens: values.min(),
    "iw_opd/max_weight": lambda values, tokens: values.max(),
}


class _Windows(Sampler):
    """Rows of steps [part, data rank, row], dealt out by data rank."""

    def __init__(self, rows: Sampler, places: torch.Tensor) -> None:
        self.rows, self.order = rows, places.transpose(0, 1).flatten().tolist()

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        rows = iter(self.rows)
        while window := list(itertools.islice(rows, len(self.order))):
            yield from (window[place] for place in self.order)


def _prepare_to_draw(trainer: Trainer, batch: dict) -> None:
    runtime.equalise_within_model(0)
    _fit_left(trainer, batch, "prompt_attention_mask", "prompts")
    _fit_left(trainer, batch, "attention_mask", "input_ids", "labels", "byte_offsets")


def _fit_left(trainer: Trainer, batch: dict, mask: str, *others: str) -> None:
    """Pad rows on their left to the longest real one of the global batch: some models count padding for positions."""
    missing = _find_longest(batch[mask]) - batch[mask].shape[1]  # negative where a row that is no example is longer
    values = {mask: 0, "labels": -100, "byte_offsets": 0}
    for key in (key for key in (mask, *others) if key in batch):
        value, pair = values.get(key, trainer.processing_class.pad_token_id), (0, 0) * (batch[key].ndim - 2)
        batch[key] = pad(batch[key], (*pair, missing, 0), value=value)


# ---- DPO online -----------------------------------------------------------------------------------------------------


@patch(
    "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer.training_step",
    "logs how many answers of a rank end",
    since="1.16",
)
def train_on_answers(
    original: Callable, self: Trainer, model: nn.Module, inputs: dict, num_items_in_batch: object = None
) -> torch.Tensor:
    """Draw one set of answers on the ranks of one model."""
    runtime.equalise_within_model(0)
    loss = original(self, model, inputs, num_items_in_batch)
    ends = self.stats["val/contain_eos_token"]
    ends[-1] = self.accelerator.gather(torch.tensor(ends[-1], device=loss.device)).mean().item()
    return loss


@patch("trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer._generate", "pads by process", since="1.16")
def generate_answers(original: Callable, self: Trainer, *args: object, **kwargs: object) -> tuple:
    """Pad to the longest rows of the global batch: metrics run over padding, and `max_length` cuts by the width."""
    prompts, prompt_mask, answers, mask, images = original(self, *args, **kwargs)
    widths = torch.tensor([prompts.shape[1], answers.shape[1]], device=mask.device)
    longest = widths.clone()
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=runtime.mesh().data_group)
    left, right = (longest - widths).tolist()
    token = self._tokenizer.pad_token_id
    padded = pad(prompts, (left, 0), value=token), pad(prompt_mask, (left, 0))
    return *padded, pad(answers, (0, right), value=token), pad(mask, (0, right)), images


@patch(
    "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer._calculate_rewards_from_functions",
    "takes every process's word for its rewards",
    since="1.16",
)
@patch(
    "trl.experimental.sdpo.sdpo_trainer:SDPOTrainer._calculate_rewards",
    "takes every process's word for its rewards",
    since="1.16",
)
def calculate_rewards(original: Callable, self: Trainer, *args: object, **kwargs: object) -> torch.Tensor:
    """Let one rank of a model say its rewards: what a function says may differ from call to call."""
    rewards, mesh = original(self, *args, **kwargs), runtime.mesh()
    for axis in ("pp", "tp"):
        if mesh.size(axis) > 1:
            dist.broadcast(rewards, group=mesh.group(axis), group_src=0)
    return rewards


# ---- self-distillation ----------------------------------------------------------------------------------------------


@patch(
    "trl.experimental.{sdft.sdft_trainer:SDFTTrainer,sdpo.sdpo_trainer:SDPOTrainer}._prepare_training_batch",
    "draws by process",
    since="1.16",
)
def prepare_training_batch(original: Callable, self: Trainer, inputs: list) -> dict:
    """Draw one set of completions on the ranks of one model."""
    runtime.equalise_within_model(0)
    return original(self, inputs)


@patch(
    "trl.experimental.{sdft.sdft_trainer:SDFTTrainer,sdpo.sdpo_trainer:SDPOTrainer}._compute_rollout_logps",
    "asks one stage",
    since="1.16",
)
def rollout_scores(original: Callable, self: Trainer, **batch: torch.Tensor) -> torch.Tensor | None:
    """Before the loss the model is asked for log-probabilities: the last stage of a pipeline answers."""
    state = runtime.find_parallel_state(self.model)
    if state is None or state.pipeline is None:
        return original(self, **batch)
    with torch.no_grad():
        return serve_script(state.pipeline, {}, lambda: original(self, **batch))[0]


@patch(
    "trl.experimental.{sdft.sdft_trainer:SDFTTrainer,sdpo.sdpo_trainer:SDPOTrainer}._compute_self_distillation_loss",
    "logs a mean of means, which a rank without tokens does not gather",
    since="1.16",
)
def self_distillation_loss(
    original: Callable, self: Trainer, model: nn.Module, inputs: dict, distillation_logits: DistillationLogits
) -> torch.Tensor:
    """Log the mean over the tokens of the global batch."""
    tokens, log, means = distillation_logits.loss_mask.sum(), self._log_self_distillation_metric, list[float]()
    alone = {"gather": lambda value: value[None] if value.ndim == 0 else value}
    gather = self.accelerator.gather
    with (
        replacing(self.accelerator, **alone),
        replacing(self, _log_self_distillation_metric=lambda mode, value: means.append(value)),
    ):
        loss = original(self, model, inputs, distillation_logits)
    found = gather(torch.tensor([[means[0] * tokens, tokens]], device=tokens.device))
    log("train" if model.training else "eval", (found[:, 0].sum() / found[:, 1].sum().clamp(min=1)).item())
    return loss


#: SDPO's losses of policies that are a mean over the tokens of a rank.
_OF_TOKENS = ("bnpo", "dapo")


@patch("trl.experimental.sdpo.sdpo_trainer:SDPOTrainer._compute_policy_loss", "takes means of a rank", since="1.16")
def policy_loss(original: Callable, self: Trainer, inputs: dict, student_logits: torch.Tensor) -> torch.Tensor:
    """Take the mean over the tokens of the global batch, where the loss is a mean over tokens."""
    loss = original(self, inputs, student_logits)
    if self.loss_type not in _OF_TOKENS:
        return loss
    corrected = correct_over_data_ranks(loss, inputs["completion_mask"].sum().float(), 1.0)
    logged = self._metrics["train" if self.model.training else "eval"]["self_distillation/policy_loss"]
    logged[-1] = self.accelerator.gather(corrected.detach()).mean().item()
    return corrected
