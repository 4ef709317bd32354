"""What trainers that generate need to be compared: draws that belong to a row, and rewards that belong to a text.

Real draws come from one random state per process: other numbers of processes draw other tokens. Here the number that
decides over a token follows from the row's place in the global batch, so that one process draws what many do.
"""

import os
from collections.abc import Callable

import torch
from transformers import GenerationMixin, TrainerCallback

END = 0  # of sequence, among the tokens of `trl_scripts.make_tokenizer`
ENDS = 0.15  # of all draws: rows must have other lengths, and data ranks other longest rows


def draw_by_row(data_rank: int = 0, each: int | None = None, blocks: int = 1) -> None:
    """From now on a draw of this process depends on the call of `generate`, the row of the global batch, the token.

    How the rows of a generation batch are shuffled depends on the call alone.

    Args:
        each: rows of a full batch on each data rank, where some batches have fewer; None if all are alike.
        blocks: how many times a prompt is there: all first answers, then all second ones.
    """
    place = {"call": 0, "token": 0}
    sample = GenerationMixin._sample

    def counted(self, *args, **kwargs):
        place.update(call=place["call"] + 1, token=0)
        return sample(self, *args, **kwargs)

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        rows = len(probabilities)
        held = rows // blocks
        own = [1_000 * (i // held) + data_rank * (each or held) + i % held for i in range(rows)]
        numbers = torch.stack([_number(place["call"], row, place["token"]) for row in own])
        place["token"] += 1
        inside = ((numbers - ENDS) / (1 - ENDS)).clamp(min=0)[:, None]
        tokens = torch.searchsorted(probabilities.double().cumsum(1), inside).clamp(max=probabilities.shape[1] - 1)
        return torch.where(numbers[:, None] < ENDS, END, tokens)

    def randperm(count: int, generator: torch.Generator | None = None, **kwargs) -> torch.Tensor:
        return shuffle(count, generator=generator or torch.Generator().manual_seed(place["call"]), **kwargs)

    shuffle = torch.randperm
    GenerationMixin._sample, torch.multinomial, torch.randperm = counted, multinomial, randperm


class SeedEachStep(TrainerCallback):
    """Each step goes on from a random state of its own: real draws compare, whatever was drawn before.

    That of another rank is another one: what ranks must share they have to make equal.
    """

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step + 1000 * int(os.environ.get("RANK", 0)))


def _number(call: int, row: int, token: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(call * 1_000_003 + row * 1_009 + token)
    return torch.rand((), generator=generator, dtype=torch.float64)


def reward(completions: list[str], **kwargs) -> list[float]:
    """Of a text: many different letters, few letters."""
    return [len(set(text)) - len(text) / 4 + text.count("e") for text in completions]


def second_reward(prompts: list[str], completions: list[str], **kwargs) -> list[float | None]:
    """Another one, which says nothing about some texts."""
    pairs = zip(prompts, completions, strict=True)
    return [None if len(text) % 5 == 0 else float(sum(map(ord, text + prompt)) % 7) for prompt, text in pairs]


def logged_reward(completions: list[str], log_extra: Callable, log_metric: Callable, **kwargs) -> list[float]:
    """`reward`, which logs a column and a mean."""
    rewards = reward(completions)
    log_extra("letters", [len(text) for text in completions])
    log_metric("mean_of_call", sum(rewards) / len(rewards))
    return rewards


async def reward_of_rank(completions: list[str], **kwargs) -> list[float]:
    """Another one on each rank, as a judge's may be at each call; rank 0's is that of one process."""
    return [float(len(set(text)) * (1 + int(os.environ.get("RANK", 0)))) for text in completions]
