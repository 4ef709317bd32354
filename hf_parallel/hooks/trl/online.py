"""TRL's trainers that generate: their processes are data ranks, and their numbers those of one process.

TRL spreads a generation batch over processes, gathers the rewards, and takes each process's advantages out of what was
gathered. The ranks of one model are one such process: they take the same prompts and draw the same tokens. Rows are
padded and shuffled over the global batch, so that each micro-batch holds the rows it holds in one process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sized
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.tensor import DTensor

from hf_parallel.apply.weights import full_tensor
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.unscheduled import serve_script
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, read_library_version, replacing
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trl import servers
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import Trainer
    from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

#: Their loss is a sum over tokens, which they divide by the tokens of all processes, and compares with a teacher.
_DISTILLS = ("trl.trainer.distillation_trainer.DistillationTrainer",)
#: GRPO with another loss, a mean over rows whatever `loss_type` says.
_MEANS = ("trl.experimental.gmpo.gmpo_trainer.GMPOTrainer",)
_SAMPLES = ("trl.trainer.grpo_trainer.GRPOTrainer", "trl.trainer.rloo_trainer.RLOOTrainer")
TRAINERS = (*_SAMPLES, *_MEANS, *_DISTILLS)
#: Losses of GRPO that are a sum over tokens, divided by their number over all processes.
_SUMS = ("cispo", "dapo", "vespo")


def check_online_trainer(
    trainer: GRPOTrainer | RLOOTrainer | DistillationTrainer,
    args: GRPOConfig | RLOOConfig | DistillationConfig,
    eval_dataset: object,
    model: nn.Module | None = None,
) -> None:
    """Refuse what would not be the same on all ranks of a model, or not that of one process, by name."""
    from transformers.trainer_utils import has_length

    data_ranks = runtime.mesh().data_size
    if is_trainer_among(trainer, _DISTILLS):
        _check_distillation(args)
    eval_datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    several = f"with {data_ranks} data ranks, "
    old = args.use_vllm and read_library_version("trl") < Version("1.16")
    packed = args.use_vllm and getattr(model, "is_quantized", False)
    tools = getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None)
    if data_ranks > 1 and any(one is not None and not has_length(one) for one in eval_datasets):
        _refuse_without_length(trainer, data_ranks)
    refusals = [
        (old, "use_vllm=True", "TRL before 1.16 speaks another protocol to its server", "trl 1.16"),
        (
            args.use_vllm and args.vllm_mode != "server",
            f"vllm_mode={getattr(args, 'vllm_mode', None)}",
            "a vLLM in each process would hold the whole model",
            "vllm_mode=server",
        ),
        (packed, "use_vllm=True", "a server cannot be sent the weights of a packed base", "a base in 16 bits"),
        (
            getattr(args, "use_transformers_continuous_batching", False),
            "use_transformers_continuous_batching=True",
            "its scheduler knows one process",
            "False",
        ),
        (getattr(args, "cast_lm_head_to_fp32", False), "cast_lm_head_to_fp32=True", "it replaces the head", "False"),
        (tools, "tools or environments", "ranks would call them different numbers of times", "reward functions alone"),
        (getattr(trainer, "rollout_func", None), "rollout_func", "ranks would roll out apart", "TRL's own generation"),
        (trainer._is_vlm, "a processor of images", "images are not shared out", "a tokenizer"),
        (
            data_ranks > 1 and getattr(trainer, "aux_loss_enabled", False),
            f"router_aux_loss_coef={getattr(trainer, 'router_aux_loss_coef', 0)}",
            several + "the balance of experts would be that of each rank's rows",
            "router_aux_loss_coef=0",
        ),
        (
            data_ranks > 1 and getattr(trainer, "_entropy_bonus_enabled", False),
            f"entropy_coef={getattr(args, 'entropy_coef', 0)}",
            several + "the mean entropy would be a mean of means",
            "entropy_coef=0 without use_adaptive_entropy",
        ),
    ]
    for asked, spelled, why, works in refusals:
        if asked:
            refuse(f"{type(trainer).__name__} with {spelled}", why, works)


def _refuse_without_length(trainer: Trainer, data_ranks: int) -> NoReturn:
    what = f"{type(trainer).__name__} with an eval_dataset without a length"
    refuse(what, f"with {data_ranks} data ranks, its last batch would count rows twice", "a Dataset")


def _check_distillation(args: DistillationConfig) -> None:
    """Refuse what has not been compared with one process."""
    config = runtime.mesh().config
    for axis, size in (("pp", config.pp_size), ("cp", config.cp_size)):
        if size > 1:
            why = "its loss multiplies hidden states of all tokens by the head"
            refuse(f"DistillationTrainer with {axis}_size={size}", why, f"tp_size={size}")
    if args.use_vllm:
        refuse("DistillationTrainer with use_vllm=True", "has not been compared with one process", "use_vllm=False")


# ---- which rows, which random numbers -----------------------------------------------------------------------------


@patch("trl.trainer.{grpo,rloo}_trainer:pad", "pads by process")
@patch("trl.trainer.distillation_trainer:pad", "pads by process", since="1.16")
@patch("trl.experimental.{sdft.sdft,sdpo.sdpo}_trainer:pad", "pads by process", since="1.16")
def pad(
    original: Callable, tensors: list, padding_value: float = 0, padding_side: str = "right", **kwargs: object
) -> torch.Tensor:
    """To the longest row of the global batch: models with absolute positions count padding too."""
    padded, mesh = original(tensors, padding_value, padding_side, **kwargs), runtime.mesh()
    longest = torch.tensor(padded.shape[1], device=mesh.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=mesh.data_group)
    missing = int(longest) - padded.shape[1]
    sides = (missing, 0) if padding_side == "left" else (0, missing)
    return torch.nn.functional.pad(padded, sides, value=padding_value)


class _ToShuffle(dict):
    """A generation batch that `split_tensor_dict` shuffles."""


@patch("trl.trainer.utils:shuffle_sequence_dict", "shuffles by process", copies=True)
def shuffle_sequence_dict(original: Callable, seq_dict: dict) -> dict:
    """Left to `split_tensor_dict`, which knows the number of parts, where ranks have other rows or random states."""
    return original(seq_dict) if runtime.mesh().data_size * runtime.mesh().size("pp") == 1 else _ToShuffle(seq_dict)


@patch("trl.trainer.utils:split_tensor_dict", "splits by process", copies=True)
def split_tensor_dict(original: Callable, tensor_dict: dict, num_chunks: int) -> list[dict]:
    """Cut the generation batch of all data ranks, so that they share each part as one process would cut it."""
    mesh, batch, parts = runtime.mesh(), tensor_dict, num_chunks
    if mesh.data_size * mesh.size("pp") == 1 or "prompt_ids" not in batch:  # GOLD cuts before it generates
        return original(batch, parts)
    # Drawn for one part, too: later draws, of completions, are those of one process then.
    shuffle = torch.randperm if isinstance(tensor_dict, _ToShuffle) else torch.arange
    order = shuffle(len(batch["prompt_ids"]) * mesh.data_size).to(mesh.device)
    if parts > 1:  # stages drop out, and so draw, apart
        for group in (mesh.data_group, mesh.group("pp")):
            dist.broadcast(order, group=group, group_src=0)
        own = order.view(parts, mesh.data_size, -1)[:, mesh.data_rank].flatten()
        batch = dict(tensor_dict)
        for key, value in tensor_dict.items():
            if torch.is_tensor(value) and value.ndim:  # tensors of all data ranks have the same shape
                held = [torch.empty_like(value) for _ in range(mesh.data_size)]
                dist.all_gather(held, value.contiguous(), group=mesh.data_group)
                batch[key] = torch.cat(held)[own]
    return original(batch, parts)


# ---- generation and rewards -----------------------------------------------------------------------------------------


#: Real rows of each data rank's batch, while it is generated and scored; None if none is repeated.
_scored: ContextVar[list[int] | None] = ContextVar("scored", default=None)


@patch(
    "trl.trainer.{grpo_trainer:GRPOTrainer,rloo_trainer:RLOOTrainer}._generate_and_score_completions",
    "takes rows by process, repeated ones too",
)
@patch(
    "trl.trainer.distillation_trainer:DistillationTrainer._generate_and_score_completions",
    "takes rows by process, repeated ones too",
    since="1.16",
)
def generate_and_score(
    original: Callable, self: GRPOTrainer | RLOOTrainer | DistillationTrainer, inputs: list[dict]
) -> dict:
    """Generate with one random state on the ranks of one model, and score the rows that are not repeated."""
    runtime.equalise_within_model(0)
    record = record_of(self)
    record.upcoming = inputs[0].pop(servers.NEXT_ROWS, None)  # no reward function sees the rows after these
    # The rows of each data rank's batch that are not repeats; None if all are real, as in training.
    real, mesh, state, rows = None, runtime.mesh(), self.accelerator.gradient_state, len(inputs)
    if not self.model.training and mesh.data_size > 1:
        batches = state.active_dataloader.batch_sampler
        while hasattr(batches, "batch_sampler"):
            batches = batches.batch_sampler
        if not isinstance(batches.sampler, Sized):
            _refuse_without_length(self, mesh.data_size)
    if not self.model.training and mesh.data_size > 1 and state.end_of_dataloader:
        # The sampler repeats what the data set has once.
        left = 0 if batches.drop_last else len(batches.sampler) % (rows * mesh.data_size)
        real = [max(0, min(rows, left - rank * rows)) for rank in range(mesh.data_size)] if left else None
    record.step.generated = real
    if real is not None:
        # A longer prompt of a repeated row would pad the others, and models with absolute positions count padding.
        first = messages.send_from_one(lambda: inputs[0], mesh.data_group)
        own = real[mesh.data_rank]
        inputs = inputs[:own] + [first] * (rows - own)
    token = _scored.set(real)
    try:
        if real is None:
            outputs = original(self, inputs)
        else:
            lengths = functools.partial(_generate_with_real_lengths, self.accelerator, sum(real), self._generate)
            changed: dict[str, Callable] = {"_generate": lengths}
            rewards = getattr(self, "_calculate_rewards", None)
            if rewards is not None and rewards.__module__.startswith("trl."):  # a script's own may count on all rows
                changed["_calculate_rewards"] = functools.partial(_reward_real_rows, self, real, rewards)
            if scores := getattr(self, "_get_per_token_logps_and_entropies", None):
                changed["_get_per_token_logps_and_entropies"] = functools.partial(_zero_repeated_scores, real, scores)
            with replacing(self, **changed), _keep_logs_of_real_rows(self, rows * mesh.data_size - sum(real)):
                outputs = _without_repeats(self, real, original(self, inputs))
    finally:
        _scored.reset(token)
    servers.correct_means(self, outputs)
    return outputs


@patch("trl.trainer.{grpo,rloo}_trainer:gather", "takes every process's word for its rewards, and repeated rows")
def gather(original: Callable, tensor: torch.Tensor) -> torch.Tensor:
    """Rewards, a column for each function: what one says may differ from call to call, so one rank of a model counts.

    Repeated rows have none, which TRL leaves out of its means.
    """
    gathered, mesh, generated = original(tensor), runtime.mesh(), _scored.get()
    if gathered.ndim != 2:  # RLOO's penalties
        return gathered
    for axis in ("pp", "cp", "tp"):
        if mesh.size(axis) > 1:
            dist.broadcast(gathered, group=mesh.group(axis), group_src=0)
    if generated is not None:
        gathered[sum(generated) :] = torch.nan
    return gathered


@patch(
    "trl.trainer.{grpo_trainer:GRPOTrainer,rloo_trainer:RLOOTrainer}._get_per_token_logps_and_entropies",
    "asks one stage",
)
def per_token_scores(
    original: Callable, self: GRPOTrainer | RLOOTrainer, model: nn.Module, *args: object, **kwargs: object
) -> object:
    """Before the loss, policy and reference are asked for log-probabilities: the last stage of a pipeline answers."""
    state = runtime.find_parallel_state(model)
    if state is None or state.pipeline is None or state.pipeline.pipelines.session is not None:
        return original(self, model, *args, **kwargs)
    return serve_script(state.pipeline, {}, lambda: original(self, model, *args, **kwargs))[0]


@patch("trl.trainer.distillation_trainer:_chunked_divergence_loss", "sends gradients to the teacher", since="1.16")
def divergence_of_teacher(original: Callable, *args: object, **kwargs: object) -> object:
    """Gather the teacher's head without autograd: it is sharded again once the teacher has run, and never trains."""
    given = bind_by_name(original, args, kwargs)
    dtype = given["teacher_hidden_states"].dtype
    for name in ("teacher_lm_head_weight", "teacher_lm_head_bias"):
        if isinstance(given.get(name), DTensor):
            given[name] = full_tensor(given[name]).to(dtype)
    return original(**given)


# ---- ragged last batches of an evaluation --------------------------------------------------------------------------


def _generate_with_real_lengths(accelerator: Accelerator, real: int, original: Callable, prompts: list) -> object:
    """`_generate`, which tells of lengths: those of the rows that are not repeated."""
    gather = accelerator.gather
    with replacing(accelerator, gather=lambda tensor: gather(tensor)[:real]):
        return original(prompts)


def _reward_real_rows(
    trainer: GRPOTrainer | RLOOTrainer, real: list[int], original: Callable, *columns: list
) -> object:
    """Ask for the rewards of rows that are not repeated, which count in what reward functions log.

    A rank without one asks about a single row, because reward models may be sharded. Its answers are dropped.
    """
    rows, own = len(columns[0]), real[runtime.mesh().data_rank]

    def padded(rewards: torch.Tensor) -> torch.Tensor:
        return ask_all(torch.nn.functional.pad(rewards, (0, 0, 0, rows - len(rewards)), value=torch.nan))

    module = sys.modules[original.__module__]
    ask_all = module.gather
    with replacing(module, gather=padded):
        rewards = original(*(column[: max(1, own)] for column in columns))
    for values in getattr(trainer, "_pending_metrics", {}).values():  # means over rows, weighted by them
        values[:] = values * own
    for values in getattr(trainer, "_pending_extra_logs", {}).values():
        values[own:] = [None] * (rows - own)
    return rewards


def _zero_repeated_scores(real: list[int], original: Callable, *args: object, **kwargs: object) -> tuple:
    """Log-probabilities of repeated rows are zero: policy and reference agree about them."""
    logps, *others = original(*args, **kwargs)
    logps[real[runtime.mesh().data_rank] :] = 0
    return logps, *others


@contextlib.contextmanager
def _keep_logs_of_real_rows(trainer: GRPOTrainer | RLOOTrainer | DistillationTrainer, repeated: int) -> Iterator[None]:
    """Collect the columns of a batch apart, then add them without the last rows: TRL's columns drop their oldest ones.

    Args:
        repeated: rows of all data ranks that are repeats, the last ones.
    """
    logs = trainer._logs
    batch: dict[str, list | dict[str, list]] = {
        key: defaultdict(list) if isinstance(value, dict) else [] for key, value in logs.items()
    }
    with replacing(trainer, _logs=batch):
        yield
    for key, found in batch.items():
        if isinstance(found, dict):
            columns = [(logs[key][name], column) for name, column in found.items()]
        else:
            columns = [(logs[key], found)]
        for kept, column in columns:
            kept.extend(column[: len(column) - repeated])


def _without_repeats(trainer: GRPOTrainer | RLOOTrainer | DistillationTrainer, real: list[int], outputs: dict) -> dict:
    """Repeated rows keep their place but have no token that counts; means are of the real ones."""
    mesh, mask = runtime.mesh(), outputs["completion_mask"].clone()
    mask[real[mesh.data_rank] :] = 0
    tokens = torch.stack([outputs["completion_mask"].sum(), mask.sum()])
    dist.all_reduce(tokens, group=mesh.data_group)
    rows, metrics = len(mask) * mesh.data_size, trainer._metrics["eval"]
    changed = {"completion_mask": mask}
    if "num_items_in_batch" in outputs:
        changed["num_items_in_batch"] = tokens[1]
    if is_trainer_among(trainer, _DISTILLS):
        return {**outputs, **changed}
    groups = getattr(trainer, "scale_rewards", "group") != "batch" and trainer.num_generations_eval > 1
    if groups and getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize":
        metrics["frac_reward_zero_std"][-1] *= rows / sum(real)
    if trainer.beta and not hasattr(trainer, "loss_type"):  # RLOO's penalty is part of its rewards
        metrics["kl"][-1] *= float(tokens[0] / tokens[1].clamp(min=1))
    return {**outputs, **changed}


# ---- the loss -------------------------------------------------------------------------------------------------------


def find_trl_class(trainer: Trainer) -> type | None:
    """Return the innermost of TRL's classes among those of a trainer; None if it is of another library."""
    return next((cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")), None)


def is_trainer_among(trainer: Trainer, names: tuple[str, ...]) -> bool:
    """Return whether its class, or a base of it, is one of these of TRL's."""
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(trainer).__mro__)


def get_loss_type(trainer: Trainer) -> str:
    """Return GRPO's `loss_type`; "" for a trainer that goes by none."""
    return "" if is_trainer_among(trainer, _MEANS) else getattr(trainer, "loss_type", "")


def weigh_online_loss(trainer: Trainer, loss: torch.Tensor, inputs: dict) -> torch.Tensor:
    """Weigh what `compute_loss` returned so that the average over data ranks is the loss of the global batch.

    Means over rows are that already, and sums over tokens, which TRL divides by the tokens of all processes. So is
    the loss of a trainer that generates nothing.
    """
    kind, mesh = get_loss_type(trainer), runtime.mesh()
    generates = is_trainer_among(trainer, TRAINERS)
    if not generates or mesh.data_size == 1 or (trainer.model.training and kind != "bnpo"):
        return loss
    tokens = int(inputs["completion_mask"].sum())
    if trainer.model.training:
        total = torch.tensor(float(tokens), device=mesh.device)
        dist.all_reduce(total, group=mesh.data_group)
        return loss * (tokens * mesh.data_size / max(1.0, float(total)))
    rows, generated = len(inputs["prompt_ids"]), record_of(trainer).step.generated
    real = rows if generated is None else generated[mesh.data_rank]
    of_tokens = kind == "bnpo" or is_trainer_among(trainer, _DISTILLS)
    held, counted = (tokens, tokens) if of_tokens else (1, 1) if kind in _SUMS else (rows, real)
    # Average means over `held` numbers, of which `counted` are not zero by force.
    mean = loss.detach()
    totals = torch.stack([mean.float() * held, torch.full_like(mean, counted, dtype=torch.float32)])
    dist.all_reduce(totals, group=mesh.data_group)
    return totals[0] / totals[1].clamp(min=1)
