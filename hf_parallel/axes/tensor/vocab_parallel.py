"""The vocabulary over tp ranks: embedding, head and cross-entropy on 1/tp of it (Shoeybi et al., 2019, section 3).

Rank r holds rows r * ceil(V / tp) …, so any vocabulary can be cut; the last ranks may hold fewer. The head returns a
DTensor that is cut along the vocabulary: the loss works on the parts, and whole logits come into being only when the
script reads them from the model's output.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_parallel.axes.axis import SequenceParallelFlag
from hf_parallel.axes.tensor.cross_entropy import cross_entropy
from hf_parallel.axes.tensor.layers import ColumnParallel, TensorParallelLayer, become, local
from hf_parallel.axes.tensor.region import Region
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.collectives import reduce_from_group
from hf_parallel.collectives.when_read import whole_when_read
from hf_parallel.model.targets import item_count, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


def vocab_parallel(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    styles: dict[str, str],
    device: torch.device,
    own_loss: bool,
    overlap: bool = False,
) -> None:
    """Split embedding and head, in place; with `own_loss` the model's causal loss works on parts of the logits."""
    for name, style in styles.items():
        if style not in ("embedding_rowwise", "colwise_gather_output"):
            continue
        module = model.get_submodule(name)
        region = Region(
            module, mesh.get_group(), SequenceParallelFlag(False), overlap=overlap
        )  # whole sequences on both sides
        if style == "embedding_rowwise":
            _embedding(module, mesh, device, region)
        else:
            _head(module, mesh, device, region, own_loss)
    if own_loss and "colwise_gather_output" in styles.values():
        model.loss_function = functools.partial(causal_loss, model.loss_function)


def gather_when_read(model: nn.Module) -> None:
    """Let whoever reads the split logits of an output get whole ones. Call it after `fully_shard`.

    FSDP2's own hook reads all of an output in every step: it must run before this one, or it has the logits gathered.
    """
    model.register_forward_hook(functools.partial(whole_logits, DTensor))
    # FSDP2 fears in-place changes of outputs that are views; what a script reads here is a new tensor.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class VocabParallel(TensorParallelLayer):
    """ids […] -> […, hidden]: each rank looks up the rows it holds, the others count as zero."""

    num_embeddings: int
    padding_idx: int | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.adapted:  # with the rows that `locate` gave, and the padding
            return F.embedding(input, local(self.weight), self.padding_idx)
        rows, inside, padding = self.locate(input)
        output = F.embedding(rows, local(self.weight), padding)
        return reduce_from_group(output * inside.unsqueeze(-1), self.region.group)

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """The rows here of these ids, which of the ids are here, and the row here that gets no gradient."""
        check_range(ids, self.num_embeddings, "index out of range in self")
        # Not of the weight's shape: a wrapper asks before data ranks have gathered it.
        group = self.region.group
        first = first_row(self.num_embeddings, group)
        held = min(-(-self.num_embeddings // group.size()), self.num_embeddings - first)
        inside = (ids >= first) & (ids < first + held)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < held:
            padding = None  # it lives on another rank
        return (ids - first).clamp(0, held - 1), inside, padding


class VocabParallelHead(ColumnParallel):
    """x […, hidden] -> logits […, V] as a DTensor cut along V, or whole where `whole` is set."""

    out_features: int
    mesh: DeviceMesh
    whole: bool = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input)
        return logits if self.adapted else self.leave(logits)

    def leave(self, logits: torch.Tensor) -> torch.Tensor:
        self.region.close()
        shape = torch.Size((*logits.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(
            logits, self.mesh, [Shard(len(shape) - 1)], run_check=False, shape=shape, stride=stride
        )
        return cut.full_tensor() if self.whole else cut


def causal_loss(
    whole_loss: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """transformers' causal loss: labels are shifted by one; sum / `num_items_in_batch`, or the mean without it."""
    if not isinstance(logits, DTensor):
        return whole_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    group = logits.device_mesh.get_group()
    target = targets_of(labels, shift_labels, ignore_index).to(logits.device)
    first = first_row(logits.shape[-1], group)
    check_range(target, logits.shape[-1], "target out of bounds", ignore_index)
    loss = cross_entropy(logits.to_local(), target, first, group, ignore_index)
    return loss / item_count(target, num_items_in_batch, ignore_index)


def first_row(vocabulary: int, group: dist.ProcessGroup) -> int:
    """The first row of this rank: all ranks before it hold ceil(V / n)."""
    return min(vocabulary, group.rank() * -(-vocabulary // group.size()))


def check_range(ids: torch.Tensor, size: int, problem: str, ignored: int = 0) -> None:
    """Stop at ids that no rank holds, as one process does; a GPU asserts it in its own time.

    Raises:
        IndexError: on a CPU, an id is neither in [0, size) nor `ignored`.
    """
    fits = (((ids >= 0) & (ids < size)) | (ids == ignored)).all()
    try:
        torch._assert_async(fits, problem)
    except RuntimeError:
        low, high = (int(bound) for bound in ids.masked_fill(ids == ignored, 0).aminmax())
        raise IndexError(f"{problem}: from {low} to {high}, of {size} in the vocabulary") from None


def _full(logits: Any) -> torch.Tensor:
    return logits.full_tensor()


def whole_logits(kind: type, model: nn.Module, args: tuple, output: object) -> None:
    """A forward hook: logits of this kind, which knows its `full_tensor`, are whole once they are read."""
    if isinstance(output, dict) and isinstance(dict.get(output, "logits"), kind):
        whole_when_read(output, "logits", _full)


def _embedding(module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    shard_parameter(module, "weight", mesh, 0, device)
    if type(module) is nn.Embedding:
        become(module, VocabParallel, region)
    else:  # a subclass keeps what it adds (such as scaling) and finds the lookup in the parts behind it
        split: Any = module
        kind: type = type(module)
        split.__class__, split.region = _lookup_behind(kind), region


@functools.cache
def _lookup_behind(cls: type) -> type:
    return type(cls.__name__, (cls, VocabParallel, nn.Embedding), {"__module__": cls.__module__})


def _head(module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region, own_loss: bool) -> None:
    shard_parameter(module, "weight", mesh, 0, device)
    shard_parameter(module, "bias", mesh, 0, device)
    head = become(module, VocabParallelHead, region)
    head.mesh, head.whole = mesh, not own_loss
