"""sentence-transformers: its "processes" are data ranks.

What sentence-transformers does on one of them all ranks of a model do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.gradients import end_last_micro_batch
from hf_parallel.axes.data.parameters import make_identical
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.accelerator import defer_reduction
from hf_parallel.hooks.accelerate.paired_losses import (
    ExamplesOfRanks,
    OfAllRanks,
    count_examples_of_ranks,
)
from hf_parallel.hooks.patching import patch, read_library_version, replacing
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trainer.means import correct_mean
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import gather_sequence
from hf_parallel.ranks.messages import gather_objects

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainingArguments


@patch("sentence_transformers:SentenceTransformerTrainer.__init__", "draws and compares by process", before="6.2")
def refuse_older_trainer(original: Callable, self: Trainer, *args: object, **kwargs: object) -> None:
    """Refuse a trainer whose modules are not those that are replaced here, a cross-encoder's among them."""
    if all(kind.__module__ != "sentence_transformers.base.trainer" for kind in type(self).__mro__):
        found = read_library_version("sentence_transformers")
        why = "its batches and losses would be those of a process"
        refuse(f"sentence_transformers {found}", why, "sentence_transformers 6.2")
    original(self, *args, **kwargs)


@patch("sentence_transformers.base.trainer:distributed_evaluation", "splits by rank")
@contextlib.contextmanager
def distributed_evaluation(original: Callable, model: nn.Module, enabled: bool = True) -> Iterator[bool]:
    """Every rank runs the evaluator: its rows are not shared out over ranks that hold parts of one model."""
    with original(model, enabled=enabled and runtime.find_parallel_state(model) is None) as runs:
        yield runs


@patch(
    "sentence_transformers.base.training_args:BaseTrainingArguments.__post_init__", "drops the last batch by process"
)
def keep_last_batch(original: Callable, self: TrainingArguments) -> None:
    """Drop a ragged last batch only if the script says so, or where `build_dataloader` cannot share it out."""
    asked, self.dataloader_drop_last = self.dataloader_drop_last, True  # else it would say that it drops the batch
    original(self)
    self.dataloader_drop_last = asked


class PartsOfBatches:
    """A batch sampler that gives the batches of one process in parts, one for each data rank in turn.

    Which texts a batch holds may depend on its size: those of one table, or no two that are alike.
    """

    def __init__(self, batch_sampler: Any, ranks: int) -> None:
        self.batch_sampler, self.ranks = batch_sampler, ranks
        self.batch_size, self.drop_last = batch_sampler.batch_size // ranks, True

    @property
    def sampler(self) -> Any:
        """The order of single texts, which accelerate exchanges for one that goes by a seed."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        return len(self.batch_sampler) * self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batch_sampler:
            yield from (batch[start : start + self.batch_size] for start in range(0, len(batch), self.batch_size))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as accelerate tells its own samplers."""
        self.batch_sampler.set_epoch(epoch)


@patch("sentence_transformers.base.trainer:BaseTrainer._build_dataloader", "draws batches of one data rank")
def build_dataloader(original: Callable, self: Any, dataset: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
    """Draw the batches of one process; each data rank takes its part of them.

    A ragged last batch is shared out as other trainers' is, where neither the sampler nor the loss needs full batches.
    """
    ranks = runtime.mesh().data_size
    whole = original(self, dataset, batch_size * ranks, *args, **kwargs)
    if ranks == 1:
        return whole
    drawn: Any = whole.batch_sampler
    plain = isinstance(dataset, IterableDataset) or type(drawn).__name__ == "DefaultBatchSampler"
    why = None if plain else f"{type(drawn).__name__} draws full batches"
    if (why := why or _find_need_for_full_batches(self)) is None and not self.args.dataloader_drop_last:
        self.accelerator.even_batches = True
        return original(self, dataset, batch_size, *args, **kwargs)
    if not self.args.dataloader_drop_last:
        report.say(f"dataloader_drop_last=True with {ranks} data ranks: {why}")
    with replacing(self.args, dataloader_drop_last=True):
        whole = original(self, dataset, batch_size * ranks, *args, **kwargs)
        drawn = whole.batch_sampler
        if self.accelerator.split_batches or not hasattr(drawn, "set_epoch"):
            return original(self, dataset, batch_size, *args, **kwargs)
    vars(whole)["batch_sampler"] = PartsOfBatches(drawn, ranks)
    return whole


def _find_need_for_full_batches(trainer: Any) -> str | None:
    """Return why data ranks must have equally many examples: where a loss gathers them, or what it finds, itself."""
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    for part in itertools.chain(*(loss.modules() for loss in losses)):
        gathers = hasattr(part, "gather_across_devices") and not hasattr(part, "compute_loss_from_embeddings")
        if gathers or hasattr(part, "mini_batch_size") or type(part).__name__ == "SparseAutoEncoder":
            return f"{type(part).__name__} computes with as many examples on each"
    return None


@patch("sentence_transformers.base.trainer:BaseTrainer.track_loss_components", "takes each rank's part for as large")
def track_loss_components(original: Callable, self: Trainer, loss: dict[str, torch.Tensor]) -> None:
    """Weigh the parts of a loss by how many examples of the batch this data rank has."""
    share = record_of(self).step.share
    original(self, {name: value.detach() * share for name, value in loss.items()})


@patch("sentence_transformers.base.trainer:BaseTrainer.prepare_loss", "may hold own weights")
def prepare_loss(original: Callable, self: Trainer, loss: nn.Module, model: nn.Module) -> object:
    """Shard what the loss and the model share; no data rank would average weights of the loss alone.

    The trainer is being made, and its model sharded.

    Raises:
        SpecError: it has such weights.
    """
    prepared, mesh, kind = original(self, loss, model), runtime.mesh(), type(model)
    if issubclass(kind, FSDPModule):
        # An object that is made of FSDP2's class of a model, as to load a checkpoint, is one of the script's class.
        # FSDP2 itself makes it too, but calls its `__init__` without what it is given later.
        plain: Any = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))

        def new(cls: type, *args: object, **kwargs: object) -> object:
            made = plain.__new__(plain)
            if args or kwargs:
                made.__init__(*args, **kwargs)
            return made

        kind.__new__ = new  # type: ignore[method-assign,assignment]
    alone = [name for name, p in prepared.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if alone and mesh.data_size > 1:
        refuse(
            f"{type(prepared).__name__} trains {alone[0]}",
            f"{mesh.data_size} data ranks would train it apart",
            do=f"tp={mesh.config.world_size} works, and so does a layer in the model",
        )
    if mesh.data_size > 1:
        for part in prepared.modules():
            names = {
                kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("sentence_transformers.")
            }
            if "SparseAutoEncoder" in names:
                _find_dead_latents_together(part)
            elif "ContrastiveLoss" in names and not part.size_average:
                _sum_over_data_ranks(part)
            else:
                _compare_over_data_ranks(part)
    return prepared


def _find_dead_latents_together(encoder: Any) -> None:
    """Let a latent be dead that no example of any data rank has used for a while."""
    mask: Any = encoder.auxk_mask_fn

    def mask_together(latents: torch.Tensor) -> torch.Tensor:
        if encoder.training and torch.is_grad_enabled():  # each rank has just counted its own examples
            dist.all_reduce(encoder.stats_last_nonzero, dist.ReduceOp.MIN, group=runtime.mesh().data_group)
        return mask(latents)

    encoder.auxk_mask_fn = mask_together


def _sum_over_data_ranks(loss: Any) -> None:
    """Let a loss be the sum over all data ranks' pairs of texts."""
    mesh, forward = runtime.mesh(), loss.forward

    def add_up(*args: object, **kwargs: object) -> torch.Tensor:
        value = forward(*args, **kwargs)
        present = torch.tensor(float(not runtime.is_absent()), device=value.device)
        dist.all_reduce(present, group=mesh.data_group)
        return correct_mean(value * present, torch.ones_like(present))

    loss.forward = add_up


#: Losses that compare the embeddings of a batch with each other, and take them in one call.
_COMPARING = {
    *("CoSENTLoss", "OnlineContrastiveLoss", "GlobalOrthogonalRegularizationLoss", "FlopsLoss"),
    "CSRReconstructionLoss",
    *("BatchAllTripletLoss", "BatchHardTripletLoss", "BatchSemiHardTripletLoss"),
}
#: Losses that compare the examples of a batch in a way that cannot be gathered from outside, and others that work.
#: What GIST gathers itself makes other numbers than one process's.
_CLOSED = {
    "sentence_transformer.losses.gist_embed.GISTEmbedLoss": "MultipleNegativesRankingLoss",
    "sentence_transformer.losses.cached_gist_embed.CachedGISTEmbedLoss": "MultipleNegativesRankingLoss",
    "sentence_transformer.losses.mega_batch_margin.MegaBatchMarginLoss": "MultipleNegativesRankingLoss",
    "cross_encoder.losses.multiple_negatives_ranking.MultipleNegativesRankingLoss": "LambdaLoss",
}


def _is_embedding(value: object) -> bool:
    return torch.is_tensor(value) and value.is_floating_point() and value.ndim == 2


def _compare_over_data_ranks(loss: nn.Module) -> None:
    """Let a loss that compares examples see those of all data ranks, as one process does.

    Raises:
        SpecError: the loss has no place where they could be gathered.
    """
    kinds = [kind for kind in type(loss).__mro__ if kind.__module__.startswith("sentence_transformers.")]
    paths = [f"{kind.__module__.partition('.')[2]}.{kind.__name__}" for kind in kinds]
    name, ranks = type(loss).__name__, runtime.mesh().data_size
    for other in (_CLOSED[path] for path in paths if path in _CLOSED):
        why = f"it compares the examples of a batch, of which each of {ranks} data ranks sees its own"
        refuse(name, why, do=f"tp={runtime.mesh().config.world_size} works, and so does {other}")
    if any(path.startswith("cross_encoder.losses.") for path in paths) and hasattr(loss, "mini_batch_size"):
        _score_documents_of_all_ranks(loss)
    if getattr(loss, "gather_across_devices", None) is False and kinds:
        loss.gather_across_devices = True  # type: ignore[assignment]
        report.say(f"{name} compares the examples of {ranks} data ranks: gather_across_devices=True")
    gathers = getattr(loss, "gather_across_devices", False)
    compute: Any = getattr(loss, "compute_loss_from_embeddings", None)
    if compute is None or not (gathers or any(kind.__name__ in _COMPARING for kind in kinds)):
        return

    def over_all(embeddings: Any, *labels: torch.Tensor | None) -> object:
        if gathers and cast(runtime.Runtime, runtime.current()).real_rows is None:
            return compute(embeddings, *labels)  # it gathers itself, as many of each rank
        # CSR gives all features of a batch, of which it compares rows of numbers.
        own = [part for part in tree_leaves(embeddings) if _is_embedding(part)]
        examples = count_examples_of_ranks(own[0])
        gathered = tree_map(lambda part: OfAllRanks.apply(part, examples) if _is_embedding(part) else part, embeddings)
        with replacing(loss, **({"gather_across_devices": False} if gathers else {})):
            return compute(
                gathered, *(OfAllRanks.apply(label, examples) if label is not None else None for label in labels)
            )

    loss.compute_loss_from_embeddings = over_all  # type: ignore[assignment]


def _score_documents_of_all_ranks(loss: nn.Module) -> None:
    """Let a loss over lists of documents see the queries of all data ranks, as one process does.

    Its mean is over pairs of documents or over documents, of which ranks have unlike numbers; and they would call the
    model unlike numbers of times.
    """
    compute, group = loss.forward, runtime.mesh().data_group

    def over_all(inputs: list[list], labels: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        real = 0 if runtime.is_absent() else len(labels)
        own = [column[:real] for column in inputs], [label.cpu() for label in labels[:real]]
        gathered = gather_objects(own, group)
        columns = [list(itertools.chain(*column)) for column in zip(*(part[0] for part in gathered), strict=True)]
        every: Any = [label.to(labels[0].device) for part in gathered for label in part[1]]
        vars(loss)["model"] = _SharedEncoder(loss.model)
        try:
            return compute(columns, every, *args, **kwargs)
        finally:
            del vars(loss)["model"]

    loss.forward = over_all  # type: ignore[method-assign]


class _SharedEncoder:
    """A cross-encoder whose pairs are shared out over the data ranks, and their scores gathered."""

    def __init__(self, model: Any) -> None:
        self._model, self._pairs = model, ExamplesOfRanks([], 0, runtime.mesh().data_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def preprocess(self, pairs: list, **kwargs: object) -> object:
        """Tokenize this rank's pairs; one all the same where it has none, because all ranks call the model."""
        mesh = runtime.mesh()
        share = -(-len(pairs) // mesh.data_size)
        shares = [pairs[share * rank :][:share] for rank in range(mesh.data_size)]
        self._pairs = ExamplesOfRanks([len(part) for part in shares], mesh.data_rank, mesh.data_group)
        return self._model.preprocess(shares[mesh.data_rank] or pairs[:1], **kwargs)

    def __call__(self, features: object) -> dict[str, object]:
        """Return the scores of the pairs of all ranks."""
        output = self._model(features)
        return {**output, "scores": OfAllRanks.apply(output["scores"], self._pairs)}


@patch("sentence_transformers.util.distributed:get_rank", "finds its rows by process", copies=True)
def data_rank(original: Callable) -> int:
    """Whose rows these are among those of all data ranks."""
    return runtime.mesh().data_rank


@patch("sentence_transformers.util.distributed:all_gather", "gathers over all processes", copies=True)
def all_gather(original: Callable, tensor: torch.Tensor, with_grad: bool = False) -> torch.Tensor:
    """The rows of all data ranks; those of one model have the same."""
    mesh = runtime.mesh()
    if mesh.data_size == 1:
        return tensor
    rows = gather_sequence(tensor.reshape(len(tensor), -1), mesh.data_group)
    rows = rows.reshape(-1, *tensor.shape[1:])
    if not with_grad:
        rows = rows.detach()
        rows[mesh.data_rank * len(tensor) :][: len(tensor)] = tensor
    return rows


# ---- Cached losses (Gao et al., 2021), which compute the backward pass of a batch in mini-batches -------------------


@patch("sentence_transformers.base.losses.gradcache:_ddp_replay_context", "knows DDP alone")
@contextlib.contextmanager
def replay_mini_batch(original: Callable, model: nn.Module, synchronize: bool) -> Iterator[None]:
    """Reduce gradients with the last mini-batch, where `zero_stage` lets ranks hold whole ones until then."""
    with original(model, synchronize), contextlib.nullcontext() if synchronize else defer_reduction(model):
        yield


@patch("sentence_transformers.base.losses.gradcache:_backward_hook", "knows DDP alone", copies=True)
def replay_mini_batches(original: Callable, *args: object, **kwargs: object) -> None:
    """End the step also where the last mini-batch is one of frozen weights, such as a document encoder's."""
    original(*args, **kwargs)
    for each in runtime.list_parallel_states(bind_by_name(original, args, kwargs)["loss_obj"].model):
        end_last_micro_batch(each.root)


# ---- setfit, which trains a head in a loop of its own ---------------------------------------------------------------


@patch("setfit.modeling:SetFitModel.fit", "each data rank would train a head of its own, on batches of its own order")
def fit_alike(original: Callable, self: Any, *args: object, **kwargs: object) -> None:
    """Train a differentiable head on whole batches on every rank: its loader is not shared out, nor is the head."""
    mesh = runtime.mesh()
    if mesh.data_size > 1 and self.has_differentiable_head:
        for axis in ("dp_replicate", "dp_shard"):
            runtime.equalise_random_state(axis, 0)
        make_identical(self.model_head, mesh.device)
        report.say(
            f"setfit trains its head in a loop of its own: each of {mesh.data_size} data ranks takes whole batches"
        )
    original(self, *args, **kwargs)
