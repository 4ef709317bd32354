"""When head and loss in chunks of tokens need less memory than whole logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_parallel.ask.config import ParallelConfig

#: Tokens whose logits exist at a time, at the least.
CHUNK = 512
#: Schedules whose last stage goes backward after each forward: of the others several micro-batches wait, each with a
#: gradient of the head.
ONE_WAITS = ("1f1b", "interleaved_1f1b")
#: Bytes of whole logits at the fullest moment, each with its probability and its gradient in fp32.
_WHOLE = 12


def find_reason_against_chunks(config: ParallelConfig) -> str | None:
    """Return why a pipeline with this schedule keeps whole logits unless it is told otherwise; None if it does not."""
    schedule, told = config.pipeline_schedule, config.lean_loss == "true"
    if config.pp_size == 1 or schedule in ONE_WAITS or told:
        return None
    return f"pipeline_schedule={schedule} would keep a gradient of the head per micro-batch"


def count_tokens_of_chunk(hidden: int, trains: bool) -> int:
    """Return how many tokens are computed at a time.

    Each chunk reads and writes the head's whole gradient in fp32: on an H100 chunks of 512 tokens cost 6 to 17 % of
    a step. Logits of half as many tokens as the hidden width are as large as the head's gradient that a product gives.

    Args:
        hidden: width of the head's input.
        trains: has the head's weight a gradient?
    """
    return max(CHUNK, hidden // 2) if trains else CHUNK


def compute_chunk_bytes(hidden: int, trains: bool, width: int) -> int:
    """Return bytes per word of the vocabulary at a chunk's fullest moment, beside the head's gradient in fp32.

    Logits in fp32 and as products give them; or their gradient and that of the head, as products do.

    Args:
        width: bytes of what products read and write.
    """
    tokens = count_tokens_of_chunk(hidden, trains)
    return max(tokens * (4 + width * (width < 4)), width * (tokens + hidden) * trains)


def compute_fewest_tokens(hidden: int, trains: bool, width: int, split: bool) -> int:
    """From how many tokens on chunks need less memory than whole logits. Per word of the vocabulary, in bytes:

        whole     12 per token, or where tp splits the vocabulary the logits and their gradient
        chunks    the head's gradient in fp32, and `compute_chunk_bytes`

    Args:
        hidden: width of the head's input.
        trains: has the head's weight a gradient?
        width: bytes of what products read and write.
    """
    chunks = 4 * hidden * trains + compute_chunk_bytes(hidden, trains, width)
    return max(count_tokens_of_chunk(hidden, trains) + 1, math.ceil(chunks / (2 * width if split else _WHOLE)))
