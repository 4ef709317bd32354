"""Data ranks whose batches are as unlike as they can be: one target on one of them, thousands of tokens on another.

Every choice that a rank makes by its own batch (chunks or whole logits, kernels, what is sent) must leave the order of
collectives alone, or all ranks stand still. All settings are on `auto`.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer

from hf_parallel.hooks.front_ends import sync_over_data_ranks
from hf_parallel.hooks.sentence_transformers import fit_alike
from tests.distributed import RankFailure, run, run_alone_once
from tests.loops import prepare_loop, take_step
from tests.refusals import pattern_of_refusal
from tests.training import (
    GLOBAL_BATCH,
    Tolerance,
    activate,
    arguments_of,
    axes,
    check_numbers,
    fit,
    spec_id,
    trainer_of,
)

LONG, SHORT = 301, 2


class InOrder(Trainer):
    """Examples come as they lie, so that which rank gets long ones is known."""

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


def examples(size: int, data_ranks: int, shift: int, vocabulary: int) -> list[dict]:
    """Whole batches of long examples for one data rank, of short ones for the others, and a ragged end."""
    drawn, each, found = torch.Generator().manual_seed(shift), GLOBAL_BATCH // data_ranks, []
    for i in range(size):
        long = (i // each + shift) % data_ranks == 0
        found.append({"input_ids": torch.randint(1, vocabulary, (LONG if long else SHORT,), generator=drawn)})
    return found


def pad(rows: list[dict]) -> dict:
    """Fill with token 0, which is no target, as far as this batch's longest example."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.stack(
        [torch.nn.functional.pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in rows]
    )
    mask = torch.stack([torch.arange(longest) < len(row["input_ids"]) for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def train(spec: str | None, out: str, folder: str, data_ranks: int, arguments: tuple):
    """An unchanged script; `data_ranks` says which rank's examples are long, in one process too."""
    here = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    vocabulary = model.get_input_embeddings().num_embeddings
    sets = [examples(size, data_ranks, shift, vocabulary) for shift, size in enumerate((2 * GLOBAL_BATCH + 3, 5))]
    changes = arguments_of(out, here, max_steps=3, **dict(arguments))
    options = {"train_dataset": sets[0], "eval_dataset": sets[1], "data_collator": pad}
    return fit(*trainer_of(model, out, settings=changes, kind=InOrder, **options), f"{out}/saved")


#: A chunk needs less memory than whole logits from some 360 tokens on with these models: the long rank's side.
CASES = [
    *(("llama", spec) for spec in ("dp_shard=2", "dp_replicate=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2")),
    *(("llama", spec) for spec in ("cp=2,dp_shard=2", "dp_shard=2,zero_stage=1", "dp_shard=2,attention=torch_flash")),
    ("qwen3", "dp_shard=2,activation_checkpointing=full"),
    ("qwen3_moe", "dp_shard=2,ep=2"),
    ("qwen3_moe", "dp_shard=2"),
]


@pytest.mark.parametrize(("model", "spec"), CASES, ids=spec_id)
def test_one_target_beside_thousands_of_tokens(runs, model, spec):
    runs.compare(train, spec, runs.initial(model, max_position_embeddings=320), 2, (), tolerance=Tolerance())


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,zero_stage=2"])
def test_in_an_accumulation(runs, spec):
    folder = runs.initial("llama", max_position_embeddings=320)
    runs.compare(train, spec, folder, 2, (("gradient_accumulation_steps", 2),), tolerance=Tolerance())


class OneByOne(LlamaForCausalLM):
    """Looks up the tokens of each example by itself, and projects them, as LLaVA does."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        embedded = torch.stack([self.model.embed_tokens(tokens) for tokens in input_ids])
        embedded = embedded + self.model.projector(embedded)
        return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels, **kwargs)


def train_one_by_one(spec: str | None, out: str, folder: str, frozen: bool):
    """Of the 19 examples the last three are a batch: two of one data rank, one of the other."""
    here = activate(spec)
    model = OneByOne.from_pretrained(folder)
    model.get_input_embeddings().requires_grad_(not frozen)
    torch.manual_seed(5 + int(os.environ.get("RANK", 0)))  # rank 0 draws what one process does
    model.model.projector = torch.nn.Linear(model.config.hidden_size, model.config.hidden_size)
    sets = [examples(size, 2, shift, 515) for shift, size in enumerate((2 * GLOBAL_BATCH + 3, 5))]
    options = {"train_dataset": sets[0], "eval_dataset": sets[1], "data_collator": pad}
    changes = arguments_of(out, here, max_steps=4)
    return fit(*trainer_of(model, out, settings=changes, kind=InOrder, **options), f"{out}/saved")


@pytest.mark.parametrize(
    ("spec", "frozen"),
    [
        ("dp_shard=2", False),
        ("dp_shard=2", True),
        ("dp_shard=2,zero_stage=1", False),
        ("tp=2,dp_shard=2", False),
        ("tp=2", False),
    ],
)
def test_a_lookup_for_each_example(runs, spec, frozen):
    """A rank with two examples gathers the embedding as often as one with one; a module of the script's own trains."""
    folder = runs.initial("llama", max_position_embeddings=320)
    runs.compare(train_one_by_one, spec, folder, frozen, tolerance=Tolerance())


def step_late_module(spec: str, folder: str) -> None:
    """One step of a plain loop, with a module that nothing shows to the layout."""
    activate(spec)
    model = OneByOne.from_pretrained(folder)
    model.model.projector = torch.nn.Linear(model.config.hidden_size, model.config.hidden_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(34).view(2, 17)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_a_late_module_that_nothing_shows_is_refused(runs):
    with pytest.raises(RankFailure, match=pattern_of_refusal("model.projector.weight", works="Accelerator.prepare")):
        run(step_late_module, 2, "dp_shard=2", runs.initial("llama"), init=False)


def call_libraries(spec: str) -> tuple:
    """What setfit's head starts from and draws, and whom a metric of torchmetrics asks, on ranks that drew apart."""
    activate(spec)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model, metric, asked = SimpleNamespace(has_differentiable_head=True), SimpleNamespace(process_group=None), []
    model.model_head = torch.nn.Linear(3, 1)
    fit_alike(lambda self: asked.append(torch.rand(1).item()), model)
    sync_over_data_ranks(
        lambda self, *args: asked.append((torch.distributed.get_world_size(args[1]), args[2])), metric
    )
    return model.model_head.weight.sum().item(), *asked


@pytest.mark.parametrize(("spec", "asks"), [("dp_shard=2", (2, True)), ("tp=2", (1, False))])
def test_setfit_and_torchmetrics_over_data_ranks(spec, asks):
    """Heads and orders of examples are rank 0's; a metric asks the data ranks, and nobody where there is one."""
    first, second = run(call_libraries, 2, spec, init=False)
    assert first[2] == second[2] == asks
    assert (first[:2] == second[:2]) == (spec == "dp_shard=2")


#: Rows of the first data rank and of the second: some that no schedule of two stages takes.
ROWS = [(8, 5), (3, 7), (1, 6), (4, 1)]


def loop(spec: str | None, folder: str) -> list[float]:
    """A loop whose data ranks have unlike numbers of rows; in one process the rows of both. Losses and norms."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    drawn, found = torch.Generator().manual_seed(1), []
    for first, second in ROWS:
        ids = torch.randint(0, 500, (first + second, 17), generator=drawn)
        if spec is not None:
            ids = ids[:first] if accelerator.process_index == 0 else ids[first:]
        loss = model(input_ids=ids, labels=ids).loss
        _, norm = take_step(accelerator, model, optimizer, loss)
        found += [(loss if spec is None else accelerator.reduce(loss.detach(), "mean")).item(), norm]
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2,dp_shard=2", "pp=2,dp_replicate=2,pipeline_microbatches=4"])
def test_rows_that_a_schedule_does_not_take(runs, spec):
    folder = runs.initial("llama")
    check_numbers(run(loop, axes(spec)["world"], spec, folder, init=False), run_alone_once(loop, None, folder))
