"""`rollouts=one_step_behind`: the completions of the next step are drawn while this one trains.

    step t    send the weights of t - 1 steps | ask for the completions of step t + 1 | train on those asked for before

A batch names the rows of the one after it, so that their prompts are known. TRL asks for its completions as before,
and finds the answer to the question that was asked a step earlier. Their log-probabilities are those of the weights
that drew them: TRL's importance sampling, exp(log-probability now - log-probability then), makes up for the lag.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hf_parallel.ask.keys.run import ONE_STEP_BEHIND
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.data import replacing
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.trainer.record import record_of
from hf_parallel.hooks.trl import server_mode
from hf_parallel.hooks.trl.servers import ASKED_AHEAD
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from torch.utils.data import BatchSampler, DataLoader
    from trl import GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
#: In the first row of a batch: the rows of the generation batch after it.
_NEXT = "_hf_parallel_next"


def is_on() -> bool:
    """Are completions drawn ahead?"""
    return runtime.mesh().config.rollouts == ONE_STEP_BEHIND


# ---- which prompts come next ---------------------------------------------------------------------------------------


class Upcoming:
    """A batch sampler that names, behind the rows of a batch, those of the batch `distance` later, if there is one."""

    def __init__(self, batch_sampler: BatchSampler, distance: int) -> None:
        self.batch_sampler, self.distance = batch_sampler, distance
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        waiting: deque[list[int]] = deque()
        for batch in self.batch_sampler:
            waiting.append(list(batch))
            if len(waiting) > self.distance:
                yield waiting.popleft() + waiting[-1]
        yield from waiting

    def set_epoch(self, epoch: int) -> None:
        """As accelerate tells its own samplers."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


def _collated(collate: Callable, rows: int, examples: list) -> list:
    batch = collate(examples[:rows])
    if len(examples) > rows:
        batch = [{**batch[0], _NEXT: collate(examples[rows:])}, *batch[1:]]
    return batch


@patch(f"{_GRPO}.get_train_dataloader", "shows no batch before its turn", since="1.16")
def get_train_dataloader(original: Callable, self: GRPOTrainer) -> DataLoader:
    """Batches that know the one after them."""
    loader = original(self)
    if not is_on():
        return loader
    base = getattr(loader, "base_dataloader", loader)
    if getattr(base, "batch_sampler", None) is None:
        refuse(ASKED_AHEAD, "a stream does not show its next rows", do="a train_dataset with a length works")
    if self.accelerator.is_main_process:
        _questions(self.vllm_generation.vllm_client).forget()  # of a training that was stopped
    generation = self.vllm_generation
    vars(generation)["generate"] = functools.partial(_then_ahead, self, type(generation).generate.__get__(generation))
    rows = self._train_batch_size * self.args.steps_per_generation
    vars(base)["batch_sampler"] = Upcoming(base.batch_sampler, self.args.steps_per_generation * self.num_iterations)
    base.collate_fn = functools.partial(_collated, base.collate_fn, rows)
    return loader


def take_upcoming(trainer: GRPOTrainer, inputs: list[dict]) -> None:
    """Remember the rows after these, and leave them out of what reward functions see."""
    record_of(trainer).upcoming = inputs[0].pop(_NEXT, None)


# ---- asking ahead --------------------------------------------------------------------------------------------------


class Questions:
    """Rank 0's, at TRL's client: one that is not answered yet, or whose answer is not taken yet."""

    def __init__(self) -> None:
        self.asked: object = None
        self.answer: Future | None = None
        self.ahead = False  # what is asked now is for later

    def begin(self, asked: object, call: Callable[[], dict]) -> None:
        """Ask in a thread of its own."""
        if self.answer is not None:
            raise RuntimeError("hf_parallel: completions that were drawn ahead were not asked for")
        self.asked, self.answer = asked, Future()
        threading.Thread(target=_call, args=(call, self.answer), daemon=True).start()

    def taken(self, asked: object) -> dict | None:
        """The answer, if this was asked ahead. Another question waits for its turn."""
        self.wait()
        if self.answer is None or asked != self.asked:
            return None
        answer = self.answer
        self.forget()
        return answer.result()

    def wait(self) -> None:
        """Until the server is done with it."""
        if self.answer is not None:
            self.answer.exception()

    def forget(self) -> None:
        """Leave the answer where it is."""
        self.wait()
        self.asked = self.answer = None


def _call(call: Callable[[], dict], answer: Future) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


def _questions(client: VLLMClient) -> Questions:
    return vars(client).setdefault("_hf_parallel_questions", Questions())


@patch("trl.generation.vllm_client:VLLMClient.generate", "waits for what it asks", since="1.16")
def generate(original: Callable, self: VLLMClient, prompts: list, *args: object, **kwargs: object) -> dict:
    """What was asked ahead is there, or soon will be."""
    questions, asked = _questions(self), (prompts, args, kwargs)
    call = functools.partial(original, self, prompts, *args, **kwargs)
    if questions.ahead:
        questions.begin(asked, call)
        return {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}
    return questions.taken(asked) or call()


@patch(
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights",
    "sends parts, while completions are drawn",
    since="1.16",
)
def sync_weights(original: Callable, self: VLLMGeneration) -> None:
    """Completions that are being drawn are drawn to their end by the weights that they began with."""
    if hasattr(self, "vllm_client"):
        _questions(self.vllm_client).wait()
    with server_mode.shown_whole(self):
        original(self)


def _then_ahead(trainer: GRPOTrainer, generate: Callable, *args: object, **kwargs: object) -> object:
    """Now that the server has this step's weights and these completions are there: draw for the next step."""
    drawn = generate(*args, **kwargs)
    record = record_of(trainer)
    rows, record.upcoming = record.upcoming, None
    if rows is not None and trainer.model.training and not _is_last(trainer):
        _ask_ahead(trainer, generate, [copy.deepcopy(row["prompt"]) for row in rows])
    return drawn


def _is_last(trainer: GRPOTrainer) -> bool:
    """Will no step train on what is generated next?"""
    every, calls = trainer.args.steps_per_generation * trainer.num_iterations, trainer.args.gradient_accumulation_steps
    steps = (trainer._step % calls + every) // calls
    return trainer.state.global_step + steps >= trainer.state.max_steps


def _ask_ahead(trainer: GRPOTrainer, generate: Callable, prompts: list) -> None:
    """As TRL itself would ask, but that nobody waits for the answer."""
    ids, images, _ = trainer._tokenize_prompts(prompts)
    generation = trainer.vllm_generation
    questions = _questions(generation.vllm_client) if trainer.accelerator.is_main_process else Questions()
    with replacing(questions, ahead=True):
        generate(prompts=ids, images=images, num_generations=trainer.num_generations)
