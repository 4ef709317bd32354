"""When head and loss in chunks of tokens need less memory than whole logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_parallel.ask.config import ParallelConfig

CHUNK = 512  # tokens whose logits exist at a time
#: Schedules whose last stage goes backward after each forward: of the others several micro-batches wait, each with a
#: gradient of the head.
ONE_WAITS = ("1f1b", "interleaved_1f1b")
#: Bytes of whole logits at the fullest moment, each with its probability and its gradient in fp32.
_WHOLE = 12


def why_not_in(config: ParallelConfig) -> str | None:
    """Why a pipeline, its schedule chosen, has whole logits unless it is told otherwise."""
    schedule, told = config.pipeline_schedule, config.lean_loss == "true"
    if config.pp_size == 1 or schedule in ONE_WAITS or told:
        return None
    return f"pipeline_schedule={schedule} would keep a gradient of the head per micro-batch"


def fewest_tokens(hidden: int, trains: bool, width: int, split: bool) -> int:
    """From how many tokens on chunks need less memory than whole logits. Per word of the vocabulary, in bytes:

        whole     12 per token, or where tp splits the vocabulary the logits and their gradient
        chunks    logits of 512 tokens, and the head's gradient, in fp32 and as they are multiplied

    Args:
        hidden: width of the head's input.
        trains: has the head's weight a gradient?
        width: bytes of what products read and write.
    """
    chunks = (4 + width) * (CHUNK + hidden * trains)
    return max(CHUNK + 1, math.ceil(chunks / (2 * width if split else _WHOLE)))
