"""Do the outputs of a model stay the same when short documents are joined to one row? Tried on a small copy of it.

A forward that takes position_ids says nothing: models let states, convolutions or an attention of their own run on
from one document into the next, count positions from the beginning of the row, or look both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.ask.spec import first_line
from hf_parallel.model.anatomy import token_readers
from hf_parallel.model.shrink import VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Longer than the windows, chunks and convolutions of a small copy, in fewer tokens than its positions.
LENGTHS = (19, 11, 13)
#: Of the largest output: sums in another order are off by 1e-6, another position or document by 1e-1 and more.
TOLERANCE = 1e-3
#: The same where flash attention wants 16 bits.
TOLERANCE_16_BITS = 5e-2


def why_not_told_apart(copy: PreTrainedModel) -> str | None:
    """Why this small model trains on other numbers when its documents are joined, or None if it does not.

    Compared are the logits of each token, and the loss with the first label of each document left out.
    """
    copy = copy.eval()
    name, tolerance = type(copy).__name__, TOLERANCE if copy.dtype == torch.float32 else TOLERANCE_16_BITS
    try:
        documents = _documents(copy)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            apart = [_outputs(copy, document) for document in documents]
            together = _outputs(copy, torch.cat(documents, 1), torch.cat(list(_positions(documents)), 1))
    except Exception as error:
        return f"{name} cannot be tried on joined examples ({type(error).__name__}: {first_line(error)})"
    alone = torch.cat([logits for logits, _ in apart], 1)
    if together[0].shape != alone.shape or not _same(together[0], alone, tolerance):
        return f"{name} cannot tell examples of one row apart: its outputs for two of them are not those of each alone"
    targets = [length - 1 for length in LENGTHS]
    mean = torch.stack([loss * count for (_, loss), count in zip(apart, targets, strict=True)]).sum() / sum(targets)
    if not _same(together[1], mean, tolerance):
        return f"the loss of {name} is not a mean over each token's next one, which joined examples need"
    return None


def reads_former_document(copy: PreTrainedModel) -> bool:
    """Do outputs of a document depend on another that stands before it in the row, where positions begin anew?

    Models that do not give `position_ids` to transformers' mask functions, such as gpt-oss, read it with any kernel
    but flash attention.
    """
    backbone = token_readers(copy.eval())[0]
    first, second, _ = _documents(copy)
    positions = torch.cat(list(_positions((first, second))), 1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        rows = (torch.cat((before, second), 1) for before in (first, first.flip(1)))
        hidden = (backbone(input_ids=row, position_ids=positions).last_hidden_state for row in rows)
        one, other = (states[:, first.shape[1] :] for states in hidden)
    return not _same(one, other, TOLERANCE)


def _documents(copy: PreTrainedModel) -> list[torch.Tensor]:
    generator, device = torch.Generator().manual_seed(5), next(copy.parameters()).device
    highest = min(VOCABULARY, copy.get_input_embeddings().weight.shape[0]) - 8
    return [torch.randint(5, highest, (1, length), generator=generator).to(device) for length in LENGTHS]


def _same(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def _positions(documents: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (torch.arange(document.shape[1], device=document.device)[None] for document in documents)


def _outputs(
    model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss of one row."""
    labels, given = tokens.clone(), {}
    if positions is not None:
        labels[positions == 0] = -100
        given["position_ids"] = positions
    else:
        given["attention_mask"] = torch.ones_like(tokens)
    outputs: Any = model(input_ids=tokens, labels=labels, **given)
    return outputs.logits.float(), outputs.loss.float()
