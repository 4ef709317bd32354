"""TRL: what its trainers and collators do per process, made to mean what it means in one process.

Its losses run where a script's own loss runs (`losses.py`). Nothing here imports TRL.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.axis import check_own_functions
from hf_parallel.axes.pipeline.batches import COUNTED
from hf_parallel.axes.pipeline.unscheduled import serve_script
from hf_parallel.axes.tensor.vocab_parallel import Scaling, compute_first_row, compute_log_probs
from hf_parallel.hooks import model_parts, runtime
from hf_parallel.hooks.logits_read import does_keep_no_logits
from hf_parallel.hooks.patching import patch, refuse_unpatched, replace, replacing
from hf_parallel.hooks.trainer.rows import JOINED
from hf_parallel.hooks.trl import experimental, online, servers
from hf_parallel.model.shrink import keeps_documents_apart
from hf_parallel.ranks import messages
from hf_parallel.ranks.local import get_local
from hf_parallel.ranks.mesh import get_stored
from hf_parallel.rollouts.reference import ask_server, decode_scores

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, Trainer, TrainingArguments
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


# ---- `reference=http://host:port`: TRL's reference model is served from elsewhere, and no rank of the policy holds
# it
# GRPO, RLOO and DPO call their reference as `model(input_ids, attention_mask, labels, fused_lm_head=True).log_probs`:
# what stands in its place asks for these numbers.


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
        told = {
            "input_ids": input_ids.tolist(),
            "mask": attention_mask.tolist(),
            "labels": labels.tolist(),
            "temperature": self.temperature,
            "autocast": None if dtype == "none" else dtype.removeprefix("torch."),
        }

        # Asked once for all ranks of the group, which get the answer or the error.
        ask = functools.partial(ask_server, self.address, "log_probs", self.timeout, told)
        answer = ask() if self.group is None else messages.send_from_one(ask, self.group)
        scores = decode_scores(answer["log_probs"], (labels.shape[0], labels.shape[1] - 1))
        return SimpleNamespace(log_probs=scores.to(input_ids.device))


@patch(
    "trl.trainer.{dpo_trainer:DPOTrainer,grpo_trainer:GRPOTrainer,rloo_trainer:RLOOTrainer}.__init__",
    "loads the reference on every rank",
)
def init(original: Callable, self: Trainer, model: object, *args: object, **kwargs: object) -> None:
    """Where a reference is served, it is not loaded: of two models that the trainer would load it is the second.

    Raises:
        SpecError: nobody would ask it, or it is a model of another kind than the policy.
    """
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

    def add_head_to_loaded(model: object, *args: object, **kwargs: object) -> None:
        if not isinstance(model, ServedReference):
            add_head(model, *args, **kwargs)

    with replacing(module, create_model_from_path=served, add_fused_lm_head=add_head_to_loaded):
        original(self, model, *args, **kwargs)
    if not isinstance(self.ref_model, ServedReference):
        why = "adapters have their reference in the policy itself" if self.ref_model is None else "ref_model is given"
        refuse(f"reference={address}", why, "reference=none")
    facts = ask_server(address, "reference", min(_PATIENCE, self.ref_model.timeout))
    dtype, vocabulary = str(self.model.dtype).removeprefix("torch."), self.model.config.get_text_config().vocab_size
    if facts["dtype"] != dtype:
        why = f"serves {facts['model']} in {facts['dtype']}, the policy is in {dtype}"
        refuse(f"reference={address}", why, f"--dtype {dtype} there")
    if facts["vocabulary"] != vocabulary:
        why = f"{facts['model']} has a vocabulary of {facts['vocabulary']}, the policy of {vocabulary}"
        refuse(f"reference={address}", why, do="serve the model that training starts from")


#: Trainers whose batches are [all chosen; all rejected].
_PAIRS = ("trl.trainer.dpo_trainer.DPOTrainer", "trl.trainer.reward_trainer.RewardTrainer")
_TOKENS = ("trl.trainer.sft_trainer.SFTTrainer",)
_EXAMPLES = (*_PAIRS, "trl.trainer.kto_trainer.KTOTrainer", *experimental.PREFERENCES)
#: Trainers whose `training_step` only brings activations to the host and back, if asked to.
_OFFLOADING_STEPS = (*_EXAMPLES, *_TOKENS)


#: DPO's losses that are no sum over pairs -> what they do with those of a data rank.
_COUPLED = {
    "sft": "a mean over the chosen tokens",
    **dict.fromkeys(("aot", "aot_unpaired"), "a comparison of sorted pairs"),
}


def check_trl_trainer(
    trainer: Trainer,
    args: TrainingArguments,
    eval_dataset: object,
    model: PreTrainedModel | None = None,
    train_dataset: Sized | None = None,
) -> None:
    """Refuse TRL's other trainers: what they do per process is not known to be that of one process."""
    # TRL's among its classes, the innermost one; none of another library's trainer.
    kind = online.find_trl_class(trainer)
    if kind is None:
        servers.check_servers(trainer, args)
        return
    refuse_unpatched(kind.__module__, "trl.trainer.utils")
    if kind.__name__ == "DPOTrainer" and hasattr(kind, "concatenated_forward") and not _makes_pairs_itself(trainer):
        _refuse_columns_of_pairs()
    makes_adapters = hasattr(sys.modules[kind.__module__], "get_peft_model")
    if getattr(model, "is_loaded_in_4bit", False) and not makes_adapters:  # older ones cast adapters on 4 bits
        refuse(kind.__name__, "on a base in 4 bits casts shards in TRL before 0.26", "trl 0.26 or newer")
    model_parts.check_losses(kind, args)
    config = runtime.mesh().config
    # TRL computes some numbers of all examples of a batch together, where ranks or stages have a part of it.
    losses, data_ranks = getattr(args, "loss_type", None) or [], config.data_parallel_size
    for loss in [losses] if isinstance(losses, str) else losses:
        if data_ranks > 1 and kind.__name__ == "DPOTrainer" and loss in _COUPLED:
            why = f"is {_COUPLED[loss]} of a batch, of which each of {data_ranks} data ranks has a part"
            refuse(f"loss_type={loss}", why, "loss_type=sigmoid")
    if getattr(trainer, "padding_free", False) and (data_ranks > 1 or config.pp_size > 1):
        _check_joined_rows(model, args)
    check_own_functions(config, kind.__name__ if does_keep_no_logits(kind) else None)
    servers.check_servers(trainer, args)
    if kind.__module__.startswith("trl.experimental."):
        experimental.check_experimental_trainer(trainer, args, train_dataset, eval_dataset)
    if f"{kind.__module__}.{kind.__qualname__}" in (*_TOKENS, *_EXAMPLES, *experimental.OTHERS):
        return
    if f"{kind.__module__}.{kind.__qualname__}" in online.TRAINERS:
        online.check_online_trainer(trainer, args, eval_dataset, model)
        return
    refuse(
        ".".join([*kind.__module__.split(".")[:3], kind.__name__]),  # as it is imported
        "not known to this version",
        do="the trainers of `trl sft`, `dpo`, `kto`, `reward`, `grpo`, `rloo` and `distillation` work, and CPO, ORPO, "
        "TPO, GKD, GOLD, IWOPD, OnlineDPO, SDFT, SDPO and GMPO of trl.experimental",
    )


def _check_joined_rows(model: PreTrainedModel | None, args: TrainingArguments) -> None:
    """Refuse a batch joined to one row whose examples have to do with each other: ranks and stages join others."""
    alpha, config = getattr(args, "neftune_noise_alpha", None), runtime.mesh().config
    if alpha is not None:
        why = "draws noise by the tokens of a whole batch joined to one row, of which ranks and stages have a part"
        refuse(f"neftune_noise_alpha={alpha:g} with padding_free or packing", why, "neftune_noise_alpha=None")
    if model is None:
        return
    kernel, model = str(model.config._attn_implementation), getattr(model, "get_base_model", lambda: model)()
    apart = True
    with contextlib.suppress(Exception):  # a model of which no small copy can be tried
        apart = keeps_documents_apart(model, kernel)
    if not apart:
        where = f"{config.data_parallel_size} data ranks and pp_size={config.pp_size}"
        why = f"attention ({kernel}) reads the examples before in its row, and ranks and stages join others"
        do = "packing=False with padding_free=False works, and flash attention, which tells examples apart"
        refuse(f"packing or padding_free of {type(model).__name__} with {where}", why, do=do)


def _makes_pairs_itself(trainer: Trainer) -> bool:
    """Return whether a subclass of DPO before TRL 0.29 has its own batches, as LLaMA-Factory's.

    They may hold anything.
    """
    own = getattr(type(trainer), "concatenated_forward", None)
    return own is not None and not own.__module__.startswith("trl.")


def _refuse_columns_of_pairs() -> NoReturn:
    refuse("DPOTrainer", "in TRL before 0.29 keeps chosen and rejected rows apart", "trl 0.29 or newer")


@patch(
    "trl.trainer.dpo_trainer:DPOTrainer.concatenated_forward",
    "keeps chosen and rejected rows apart, which a subclass may ask for",
    before="0.29",
)
def concatenated_forward(original: Callable, self: Trainer, *args: object, **kwargs: object) -> NoReturn:
    """Refuse TRL's own way of pairs where a subclass that is let through asks for it after all."""
    _refuse_columns_of_pairs()


def count_trl_rows_per_example(trainer: Trainer) -> int | None:
    """2 where batches hold pairs; None if it is no trainer of TRL's, or makes batches of its own."""
    if _makes_pairs_itself(trainer):
        return None
    if online.is_trainer_among(trainer, _PAIRS):
        return 2
    known = online.is_trainer_among(trainer, (*_TOKENS, *_EXAMPLES, *experimental.OTHERS))
    return experimental.count_rows_of_example(trainer) if known else None


def is_sft(trainer: Trainer) -> bool:
    """Return whether it is TRL's SFT: the model's own loss, and figures of it."""
    return online.is_trainer_among(trainer, _TOKENS)


def count_targets_of_mean(trainer: Trainer, batch: dict) -> torch.Tensor | None:
    """Over how many targets SFT's own loss is a mean where it is given no count, as before an evaluation in 5.23."""
    of_tokens = is_sft(trainer) or online.is_trainer_among(trainer, experimental.DISTILLS)
    of_tokens = of_tokens and not experimental.aligns_tokenizers(trainer)
    if not of_tokens or trainer.compute_loss_func is not None or is_loss_of_subclass(trainer):
        return None
    return (batch["labels"][..., 1:] != -100).sum().float()


def _list_own_losses(trainer: Trainer) -> list[Callable]:
    """List each `compute_loss` that comes before TRL's own: of subclasses, or assigned to the trainer."""
    found = []
    for kind in type(trainer).__mro__:
        own = vars(kind).get("compute_loss")
        function = inspect.unwrap(own) if callable(own) else own
        if str(getattr(function, "__module__", "")).startswith("trl."):
            break
        if function is not None:
            found.append(function)
    return found


def is_loss_of_subclass(trainer: Trainer) -> bool:
    """Return whether a subclass of one of TRL's trainers computes its loss alone: its code names no `compute_loss`."""
    codes = [getattr(own, "__code__", None) for own in _list_own_losses(trainer)]
    return any(code is not None and "compute_loss" not in code.co_names for code in codes)


def is_loss_of_sft(trainer: Trainer) -> bool:
    """Return whether the loss is that of TRL's SFT, to which neither a subclass nor a function adds anything."""
    distills = online.is_trainer_among(trainer, experimental.DISTILLS)
    return is_sft(trainer) and not distills and trainer.compute_loss_func is None and not _list_own_losses(trainer)


def does_subclass_add_to_loss(trainer: Trainer) -> bool:
    """Return whether a subclass of SFTTrainer has a `compute_loss` that calls that of TRL, and may add to it."""
    return is_sft(trainer) and bool(_list_own_losses(trainer)) and not is_loss_of_subclass(trainer)


def add_head_to_copy(trainer: Trainer, copy: nn.Module) -> None:
    """Let a copy of the model that SFT trains answer as SFT asks it, for log-probabilities in the place of logits."""
    if is_sft(trainer):
        module = sys.modules["trl.trainer.sft_trainer"]
        add_head = getattr(module, "add_fused_lm_head", None)  # TRL since 1.9
        if add_head is not None:
            add_head(copy, outputs=("log_probs", "entropy", "is_top1"))


@dataclass
class FunctionMean:
    """Over how many targets the mean of a script's loss function runs; None: it is not known to be over targets."""

    targets: torch.Tensor | None = None


@contextlib.contextmanager
def watch_loss_function(trainer: Trainer, items: object) -> Iterator[FunctionMean]:
    """Note what a `compute_loss_func` takes its mean over where SFT gives it no count, as in an evaluation.

    We call it once more with a count. A function that divides by the count then takes its own mean over targets, too.
    """
    function, seen = trainer.compute_loss_func, FunctionMean()
    if items is not None or function is None or not is_sft(trainer):
        yield seen
        return

    def watched(outputs: object, labels: torch.Tensor, num_items_in_batch: object = None) -> torch.Tensor:
        loss = function(outputs, labels, num_items_in_batch=num_items_in_batch)
        count = (labels[..., 1:] != -100).sum().float()
        # Twice the number of targets, so that a function that ignores the count does not look like one that reads it.
        halved = function(outputs, labels, num_items_in_batch=2 * count)
        if not count or torch.allclose(2 * halved.detach().float(), loss.detach().float(), rtol=1e-3):
            seen.targets = count
        return loss

    with replacing(trainer, compute_loss_func=watched):
        yield seen


def is_known(trainer: Trainer) -> bool:
    """Return whether it is one of TRL's trainers. What their losses are means over is known."""
    return count_trl_rows_per_example(trainer) is not None or online.is_trainer_among(trainer, online.TRAINERS)


def does_only_offload_in_steps(trainer: Trainer) -> bool:
    """Return whether its `training_step` is Trainer's, but for activations on the host, which it has not asked for."""
    kind = next((cls for cls in type(trainer).__mro__ if "training_step" in vars(cls)), None)
    name = None if kind is None else f"{kind.__module__}.{kind.__qualname__}"
    return name in _OFFLOADING_STEPS and not trainer.args.activation_offloading


def needs_whole_batches(trainer: Trainer) -> bool:
    """Return whether the loss is known not to be one of micro-batches. A few rows may look as if it were."""
    # GRPO's losses that are none of single rows: a quantile over the batch, a mean (entropy) of its tokens.
    couples = getattr(trainer, "top_entropy_quantile", 1.0) < 1 or online.get_loss_type(trainer) == "bnpo"
    couples = couples or getattr(trainer, "_entropy_bonus_enabled", False)
    known = online.is_trainer_among(trainer, online.TRAINERS)
    return experimental.takes_whole_batches(trainer) or (couples and known)


@patch(
    "trl.trainer.{dpo_trainer:DPOTrainer,kto_trainer:KTOTrainer}.compute_ref_log_probs", "asks one stage", since="1.6"
)
def reference_log_probs(
    original: Callable, self: Trainer, *args: PreTrainedModel | dict
) -> object:  # before TRL 1.9 without the model
    """Before training TRL asks the reference by itself: in a pipeline only the last stage can answer."""
    model = args[0] if len(args) > 1 else self.ref_model or self.model  # TRL before 1.9 hands over the batch alone
    state = runtime.find_parallel_state(model)
    if state is None or state.pipeline is None:
        return original(self, *args)
    with torch.no_grad():
        return serve_script(state.pipeline, dict(args[-1]), lambda: original(self, *args))[0]


@patch("trl.trainer.callbacks:SyncRefModelCallback._sync_target_model", "writes to gathered weights", since="1.16")
def sync_target_model(original: Callable, model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """Let go of what a loss has gathered of a reference, or of a teacher, to which no backward pass comes."""
    for one in (model, target_model):
        state = runtime.find_parallel_state(one)
        for module in one.modules() if state is None or state.pipeline is None else state.pipeline.stages.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    original(model, target_model, alpha)


# ---- the head ------------------------------------------------------------------------------------------------------


class NoTensor:
    """Nothing is one. TRL gathers a head that is a DTensor; what it looks for is hidden from it."""


@replace("trl.trainer.utils:DTensor", "gathers a split head", since="1.9")
def make_no_tensor(original: type) -> type:
    """For the name DTensor in TRL's module."""
    return NoTensor


@replace("trl.trainer.utils:_ChunkedLogProbFunction", "multiplies by a whole head", since="1.8")
def make_chunked_log_probs(original: type[torch.autograd.Function]) -> type:
    """TRL's product of hidden states and head; over a head that is cut over tp, each rank takes its rows."""

    class LogProbs:
        """Stands in the place of TRL's autograd function."""

        @staticmethod
        def apply(
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            targets: torch.Tensor,
            temperature: float,
            chunk_size: int,
            softcap: float | None = None,
            scale: float = 1.0,
            wanted: tuple[str, ...] = (),
        ) -> tuple:
            """Compute log-probabilities as TRL's `apply` does."""
            # Each rank must have rows: a small vocabulary may leave the last ranks without any.
            mesh = weight.device_mesh if isinstance(weight, DTensor) else None
            each = 0 if mesh is None else -(-weight.shape[0] // mesh.size())
            cut = mesh is not None and mesh.mesh_dim_names == ("tp",) and (mesh.size() - 1) * each < weight.shape[0]
            if mesh is None or not cut:
                whole = (w.full_tensor() if isinstance(w, DTensor) else w for w in (weight, bias))
                return original.apply(hidden, *whole, targets, temperature, chunk_size, softcap, scale, wanted)
            group, vocabulary = mesh.get_group(), weight.shape[0]
            scaling = Scaling(temperature, softcap, scale)
            parts = (
                get_local(weight),
                get_local(bias),
                targets,
                group,
                compute_first_row(vocabulary, group),
                vocabulary,
                scaling,
            )
            scores = compute_log_probs(hidden, *parts)
            others = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
            return scores.log_probs, *(getattr(scores, name) if name in wanted else None for name in others)

    return LogProbs


# ---- batches without padding ---------------------------------------------------------------------------------------


@patch(
    "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call",
    "joins examples to one row, which stages cannot cut and whose repeats cannot be told",
)
def torch_call(original: Callable, self: DataCollatorForLanguageModeling, examples: list[dict]) -> dict:
    """Examples joined to one row cannot be told apart: say whose a token is, or, for a pipeline, keep them in rows."""
    batch = original(self, examples)
    if not self.padding_free:
        return batch
    lengths = [len(example["input_ids"]) for example in examples]
    if runtime.mesh().size("pp") > 1:
        # [1, tokens] -> [examples, longest]. Padding counts on from the last position: it is no sequence of its own.
        # Positions alone tell sequences apart to a model, so the attention mask is there for those who count tokens.
        rows, longest = {}, max(lengths)
        for key, value in (("input_ids", self.pad_token_id), ("labels", -100)):
            rows[key] = pad_sequence(list(batch[key][0, : sum(lengths)].split(lengths)), True, value)
        positions = batch["position_ids"][0, : sum(lengths)].split(lengths)
        counted_on = [torch.cat([p, p[-1] + 1 + torch.arange(longest - len(p))]) for p in positions]
        rows["position_ids"] = torch.stack(counted_on)
        rows["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        rows[COUNTED] = rows["attention_mask"]
        return rows
    if runtime.mesh().data_size > 1:
        whose = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        padding = batch["input_ids"].shape[1] - len(whose)
        batch[JOINED] = torch.cat([whose, whose[-1:].expand(padding)])[None]
    return batch


# ---- precomputed log-probabilities of the reference --------------------------------------------------------------


@patch(
    "trl.trainer.dpo_trainer:DPOTrainer._precompute_ref_logps",
    "looks for rank 0's file in its own folder",
    since="0.29",
)
@patch(
    "trl.trainer.kto_trainer:KTOTrainer._precompute_ref_logps",
    "looks for rank 0's file in its own folder",
    since="1.16",
)
def precompute_reference(
    original: Callable, self: Trainer, dataset: Dataset, *args: object, **kwargs: object
) -> Dataset:
    """Let all ranks read the file that rank 0 writes. A data set in memory has a folder of its own per process."""
    if not hasattr(dataset, "_get_cache_file_path"):  # a stream, which TRL refuses
        return original(self, dataset, *args, **kwargs)
    find = dataset._get_cache_file_path
    with replacing(
        dataset, _get_cache_file_path=lambda fingerprint: messages.send_from_one(lambda: find(fingerprint))
    ):
        return original(self, dataset, *args, **kwargs)


@patch("trl.trainer.utils:hash_module", "cannot read shards", since="0.29", copies=True)
def hash_module(original: Callable, module: nn.Module) -> str:
    """Return one hash of all ranks' parts, for the name of the cache file."""
    if runtime.find_parallel_state(module) is None:
        return original(module)
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        part = get_stored(tensor)
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashlib.sha256(" ".join(messages.gather_objects(digest.hexdigest())).encode()).hexdigest()
