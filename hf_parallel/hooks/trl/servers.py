"""Settings that say who serves a trainer: refused where nobody would ask, before anything trains."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel import checkpoint
from hf_parallel.ask.keys.run import IN_TURN, ONE_STEP_BEHIND
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replace, replacing
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.rollouts import reference

if TYPE_CHECKING:
    from torch.utils.data import BatchSampler, DataLoader
    from transformers import PreTrainedModel, Trainer, TrainingArguments
    from trl import GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration


# ---- TRL's `use_vllm` with `vllm_mode=server`: completions come from another process, weights go there in buckets
# Rank 0 of all asks for the completions of the global batch; each data rank takes its rows, all ranks of a model the
# same. Weights are gathered from the shards of all stages as they are sent: no rank holds the whole model.


_CLIENT = "trl.generation.vllm_client:VLLMClient"
#: What PEFT puts around a layer, which its weight's own name has not.
_WRAPPERS = (".base_layer", "modules_to_save.default.")


# ---- weights --------------------------------------------------------------------------------------------------------


class WholeModel(nn.Module):
    """Stands for a parallel model where TRL reads the weights that it sends. Has no modules of its own."""

    generation: VLLMGeneration
    model: PreTrainedModel

    def __init__(self, generation: VLLMGeneration) -> None:
        super().__init__()
        vars(self).update(generation=generation, model=generation.model)

    def named_parameters(  # type: ignore[override] # tensors, which TRL takes
        self, *args: object, **kwargs: object
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of all stages on rank 0, which sends them; the others take part and yield nothing."""
        kept, model, base, prefix = self.generation, self.model, self.model, None
        if hasattr(model, "peft_config"):
            base, prefix = model.get_base_model(), getattr(model, "prefix", None)

        def own(name: str) -> str | None:
            """Return the name of a base's parameter without wrappers; None for what an adapter has or trains."""
            if prefix is not None and (prefix in name or "original_module" in name):
                return None
            for wrapper in _WRAPPERS if prefix is not None else ():
                name = name.replace(wrapper, "")
            return name

        if not hasattr(kept, "_hf_parallel_groups"):  # what is sent, in its order; collective the first time
            kept._hf_parallel_groups = checkpoint.make_parameter_groups(base, runtime.mesh(), own)
        groups = kept._hf_parallel_groups
        if kept._weight_metadata is None:  # asked for names and shapes, which are known without the values
            for entry in (entry for group in groups for entry in group.entries):
                yield entry.name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            return
        adapted = hasattr(model, "merge_adapter")
        if adapted:
            model.merge_adapter()
        try:
            stored = checkpoint.list_local_parameters(base)
            local = {name: tensor for given, tensor in stored.items() if (name := own(given)) is not None}
            for name, tensor in checkpoint.stream_tensors(groups, local, runtime.mesh(), reference.BUCKET):
                yield name, tensor.to(runtime.mesh().device)
        finally:
            if adapted:
                model.unmerge_adapter()


# ---- how far the server is off -------------------------------------------------------------------------------------


def correct_means(trainer: GRPOTrainer, outputs: dict) -> None:
    """TRL logs the mean over processes of means over their tokens: of the global batch it is one over all tokens."""
    mesh, ratio = runtime.mesh(), outputs.get("importance_sampling_ratio")
    if ratio is None or mesh.data_size == 1:
        return
    mask = outputs["completion_mask"].bool()
    gap = (outputs["old_per_token_logps"] - outputs["sampling_per_token_logps"]).abs()
    weights = ratio.flatten() if ratio.shape[1] == 1 else ratio[mask]  # of sequences, or of tokens
    gap, weights = gap[mask & ~gap.isnan()], weights[~weights.isnan()]
    totals = torch.stack(
        [gap.sum(), weights.sum(), *(torch.tensor(v.numel(), device=v.device) for v in (gap, weights))]
    )
    dist.all_reduce(totals, group=mesh.data_group)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for place, name in enumerate(("sampling_logp_difference", "importance_sampling_ratio")):
        metrics[f"sampling/{name}/mean"][-1] = float(totals[place] / totals[place + 2].clamp(min=1))


# ---- the stand-in for vLLM's server ---------------------------------------------------------------------------------


@replace(
    "trl.generation.{vllm_client,vllm_generation}:is_vllm_available",
    "asks for vLLM where only its server is talked to",
    since="1.16",
)
def assume_available(original: Callable) -> Callable:
    """Take the server for available: whether it is needed it tells in `init_communicator`."""
    return lambda *args, **kwargs: True


@patch(f"{_CLIENT}.init_communicator", "knows vLLM's NCCL engine alone", since="1.16")
def init_communicator(original: Callable, self: VLLMClient, device: int | torch.device = 0) -> None:
    """To the stand-in, which names another way, over that."""
    found = self.get_server_info()["weight_transfer_config"]
    if found is None or found["backend"] != reference.BACKEND:
        if importlib.util.find_spec("vllm") is None:
            what = f"the server at {self.base_url} takes weights over NCCL, for which vLLM is needed here too"
            refuse("use_vllm=True", what, "a server of `python -m hf_parallel.rollouts`")
        original(self, device)
        return
    info = {
        "master_address": reference.find_address_towards(self.host),
        "master_port": self.group_port,
        "rank_offset": 1,
        "world_size": self.get_world_size() + 1,
    }
    with _ask_beside(self, "init_weight_transfer_engine", init_info=info):
        self.communicator = reference.Channel(info, 0)


@contextlib.contextmanager
def _ask_beside(client: VLLMClient, what: str, **told: dict) -> Iterator[None]:
    """A request beside what is done: inside of it the server waits for this side."""
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(client._post, f"{client.base_url}/{what}", json=told)
        yield
        answer.result()


@patch(f"{_CLIENT}.update_named_params", "sends over vLLM's NCCL engine alone", since="1.16")
def update_named_params(original: Callable, self: VLLMClient, metadata: list, named_params: Iterator) -> None:
    """Announced over HTTP, then sent."""
    if not isinstance(self.communicator, reference.Channel):
        original(self, metadata, named_params)
        return
    names, dtype_names, shapes = (list(column) for column in zip(*metadata, strict=True))
    info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
    if not self._updating_weights:
        self._start_weight_update()
    with _ask_beside(self, "update_weights", update_info=info):
        self.communicator.send(tensor for _, tensor in named_params)
    if not self._updating_weights:
        self._finish_weight_update()


ASKED_AHEAD = f"rollouts={ONE_STEP_BEHIND}"
#: Trainers that ask their reference in the way that is known.
_WITH_REFERENCE = ("DPOTrainer", "GRPOTrainer", "RLOOTrainer")


def refuse_loop() -> None:
    """A loop without a Trainer asks nobody."""
    current = runtime.current()
    for name, default in (("rollouts", IN_TURN), ("reference", None)):
        value = default if current is None else getattr(current.config, name)
        if value != default:
            refuse(f"{name}={value}", "only TRL's trainers ask servers", f"{name}={str(default).lower()}")


def check_servers(trainer: Trainer, args: TrainingArguments) -> None:
    """Refuse a Trainer that would not ask, or not what was meant."""
    config, name = runtime.mesh().config, type(trainer).__name__
    kinds = {cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")}
    if config.rollouts != IN_TURN:
        if "GRPOTrainer" not in kinds:
            refuse(ASKED_AHEAD, f"{name} does not weigh what older weights drew", do="GRPOTrainer does")
        if not args.use_vllm:
            why = "drawing in the training's own processes takes its turn: use_vllm=False"
            refuse(ASKED_AHEAD, why, f"rollouts={IN_TURN}")
        if not args.vllm_importance_sampling_correction:
            why = "nothing would make up for the lag: vllm_importance_sampling_correction=False"
            refuse(ASKED_AHEAD, why, "vllm_importance_sampling_correction=True")
    if config.reference is None:
        return
    what = f"reference={config.reference}"
    if kinds.isdisjoint(_WITH_REFERENCE):
        refuse(what, f"{name} asks no reference model", do="`trl grpo`, `trl rloo` and `trl dpo` do")
    if getattr(args, "sync_ref_model", False):
        refuse(what, "a server's model does not follow the policy: sync_ref_model=True", "sync_ref_model=False")
    if getattr(args, "precompute_ref_log_probs", False):
        why = "log-probabilities computed before training need no second model: precompute_ref_log_probs=True"
        refuse(what, why, "reference=none")
    if args.beta == 0:
        refuse(what, "there is no reference with beta=0", "reference=none")


# ---- `rollouts=one_step_behind`: the completions of the next step are drawn while this one trains -------------------
#     step t    send the weights of t - 1 steps | ask for the completions of step t + 1 | train on those asked for
# before
#
# A batch names the rows of the one after it, so that their prompts are known. TRL asks for its completions as before,
# and finds the answer to the question that was asked a step earlier. Their log-probabilities are those of the weights
# that drew them: TRL's importance sampling, exp(log-probability now - log-probability then), makes up for the lag.


_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
#: In the first row of a batch: the rows of the generation batch after it.
NEXT_ROWS = "_hf_parallel_next"


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
        """Set the epoch, as accelerate tells its own samplers."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


def _collate_lengths(collate: Callable, rows: int, examples: list) -> list:
    batch = collate(examples[:rows])
    if len(examples) > rows:
        batch = [{**batch[0], NEXT_ROWS: collate(examples[rows:])}, *batch[1:]]
    return batch


@patch(f"{_GRPO}.get_train_dataloader", "shows no batch before its turn", since="1.16")
def get_train_dataloader(original: Callable, self: GRPOTrainer) -> DataLoader:
    """Batches that know the one after them."""
    loader = original(self)
    if runtime.mesh().config.rollouts != ONE_STEP_BEHIND:
        return loader
    base = getattr(loader, "base_dataloader", loader)
    if getattr(base, "batch_sampler", None) is None:
        refuse(ASKED_AHEAD, "a stream does not show its next rows", do="a train_dataset with a length works")
    if self.accelerator.is_main_process:
        _get_questions(self.vllm_generation.vllm_client).forget()  # of a training that was stopped
    generation = self.vllm_generation
    vars(generation)["generate"] = functools.partial(
        _generate_ahead, self, type(generation).generate.__get__(generation)
    )
    rows = self._train_batch_size * self.args.steps_per_generation
    vars(base)["batch_sampler"] = Upcoming(base.batch_sampler, self.args.steps_per_generation * self.num_iterations)
    base.collate_fn = functools.partial(_collate_lengths, base.collate_fn, rows)
    return loader


# ---- asking ahead --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Questions:
    """The question of rank 0 at TRL's client that is not answered yet, or whose answer is not taken yet."""

    asked: object = None
    answer: Future | None = None
    ahead: bool = False  # what is asked now is for later

    def begin(self, asked: object, call: Callable[[], dict]) -> None:
        """Ask in a thread of its own."""
        if self.answer is not None:
            raise RuntimeError("hf_parallel: completions that were drawn ahead were not asked for")
        self.asked, self.answer = asked, Future()
        threading.Thread(target=_call_and_answer, args=(call, self.answer), daemon=True).start()

    def taken(self, asked: object) -> dict | None:
        """The answer, if this was asked ahead. Another question waits for its turn."""
        self.wait()
        if self.answer is None or asked != self.asked:
            return None
        answer = self.answer
        self.forget()
        return answer.result()

    def wait(self) -> None:
        """Wait until the server is done with it."""
        if self.answer is not None:
            self.answer.exception()

    def forget(self) -> None:
        """Leave the answer where it is."""
        self.wait()
        self.asked = self.answer = None


def _call_and_answer(call: Callable[[], dict], answer: Future) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


def _get_questions(client: VLLMClient) -> Questions:
    return vars(client).setdefault("_hf_parallel_questions", Questions())


@patch("trl.generation.vllm_client:VLLMClient.generate", "waits for what it asks", since="1.16")
def generate(original: Callable, self: VLLMClient, prompts: list, *args: object, **kwargs: object) -> dict:
    """Return the completions that were asked ahead, or ask for them."""
    questions, asked = _get_questions(self), (prompts, args, kwargs)
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
        _get_questions(self.vllm_client).wait()
    # What TRL would read itself is this rank's part of its own stage.
    parallel = runtime.find_parallel_state(self.model) is not None
    with replacing(self, model=WholeModel(self)) if parallel else contextlib.nullcontext():
        original(self)


def _generate_ahead(trainer: GRPOTrainer, generate: Callable, *args: object, **kwargs: object) -> object:
    """Now that the server has this step's weights and these completions are there: draw for the next step."""
    drawn = generate(*args, **kwargs)
    record = record_of(trainer)
    rows, record.upcoming = record.upcoming, None
    every, calls = trainer.args.steps_per_generation * trainer.num_iterations, trainer.args.gradient_accumulation_steps
    begins = trainer.state.global_step + (trainer._step % calls + every) // calls  # the step that would train on them
    if rows is None or not trainer.model.training or begins >= trainer.state.max_steps:
        return drawn
    # Asked as TRL itself would ask, but without waiting for the answer.
    ids, images, _ = trainer._tokenize_prompts([copy.deepcopy(row["prompt"]) for row in rows])
    client = trainer.vllm_generation.vllm_client if trainer.accelerator.is_main_process else None
    questions = Questions() if client is None else _get_questions(client)
    with replacing(questions, ahead=True):
        generate(prompts=ids, images=images, num_generations=trainer.num_generations)
    return drawn
