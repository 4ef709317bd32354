"""`pipeline_schedule=pipedream`: the numbers of its rule in one process.

Stage s of p computes micro-batch i of m on weights that are ceil((a - i) / m) steps old, if the pipeline has not
drained since, and on the newest from i = a on. a = p - 1 - s + ceil(2 s / 3).
"""

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer

from tests.distributed import run
from tests.parity.test_delayed_updates import ADAM, STEPS, Case, script
from tests.training import axes, none, weight_differences

LAYERS = 7
SPLITS = {2: (3, 4), 4: (2, 2, 2, 1)}


@dataclass(frozen=True)
class StashedCase(Case):
    """A script, and the pipeline whose rule one process is to follow."""

    stages: int = 2
    micro_batches: int = 1
    data_ranks: int = 1
    ignores_stages: bool = False  # a wrong rule: all stages are as late as the first

    @property
    def rule(self) -> type[Trainer]:
        return StashedRule

    @property
    def spec(self) -> str:
        """The pipeline's part of the spec."""
        split = ",".join(map(str, SPLITS[self.stages]))
        return (
            f"pp={self.stages},pipeline_split=[{split}],pipeline_schedule=pipedream,"
            f"pipeline_microbatches={self.micro_batches}"
        )

    def delay(self, stage: int, micro_batch: int) -> int:
        """How many steps old the weights of a stage are, long after the pipeline has drained."""
        stage = 0 if self.ignores_stages else stage
        ahead = self.stages - 1 - stage + math.ceil(2 * stage / 3)
        return max(0, math.ceil((ahead - micro_batch) / (self.micro_batches * self.accumulation)))

    def stage_of(self, name: str) -> int:
        """The stage that holds a parameter."""
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is None:
            return 0 if "embed_tokens" in name else self.stages - 1
        ends = itertools.accumulate(SPLITS[self.stages])
        return next(stage for stage, end in enumerate(ends) if int(layer[1]) < end)


class StashedRule(Trainer):
    """One process that computes each micro-batch on the weights that each stage would have had."""

    case: StashedCase | None
    history: list[dict[str, torch.Tensor]]
    begins = True

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.case is None:
            return super().training_step(model, inputs, num_items_in_batch)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.begins:
            if self.case.is_fresh(self.state.global_step):
                self.history = []
            self.history.insert(0, {name: p.detach().clone() for name, p in named.items()})
            self.first = 0
        self.begins = self.accelerator.gradient_state.sync_gradients
        losses = []
        for part in self._micro_batches(inputs):
            with _Shown(self, model, named, self.first):
                losses.append(super().training_step(model, part, num_items_in_batch))
            self.first += 1
        return torch.stack(losses).sum()

    def _micro_batches(self, inputs):
        count = self.case.micro_batches * self.case.data_ranks
        rows = len(inputs["input_ids"])
        if rows % count:  # the last of an epoch, on one version of the weights
            return [inputs]
        places = torch.arange(rows).view(self.case.data_ranks, self.case.micro_batches, -1).transpose(0, 1)
        return [{key: value[place.flatten()] for key, value in inputs.items()} for place in places]


class _Shown:
    """In here the model has the weights with which a micro-batch is computed."""

    def __init__(self, trainer, model, named, micro_batch):
        self.named, self.now = named, trainer.history[0]
        case, history = trainer.case, trainer.history
        delays = {name: case.delay(case.stage_of(name), micro_batch) for name in named}
        self.used = {name: history[min(delay, len(history) - 1)][name] for name, delay in delays.items()}
        self.model, self.tied = model, case.model == "tied"
        if self.tied:  # the last stage has a copy of its own
            delay = min(case.delay(case.stages - 1, micro_batch), len(history) - 1)
            self.head = nn.Parameter(history[delay]["model.embed_tokens.weight"].clone())

    def __enter__(self):
        for name, parameter in self.named.items():
            parameter.data.copy_(self.used[name])
        if self.tied:
            self.model.lm_head.weight = self.head

    def __exit__(self, *error):
        for name, parameter in self.named.items():
            parameter.data.copy_(self.now[name])
        if self.tied:
            embedding = self.model.model.embed_tokens.weight
            embedding.grad.add_(self.head.grad)
            self.model.lm_head.weight = embedding


def check(runs, case: StashedCase, others: str = ""):
    """Compare with the rule; without its delay the numbers must be others."""
    tied = {"tie_word_embeddings": True} if case.model == "tied" else {}
    initial = runs.initial("llama", num_hidden_layers=LAYERS, **tied)
    ranks = runs.compare(script, case.spec + others, case, initial, tolerance=case.tolerance)
    evaluations = runs.alone(script, case, initial).more
    assert len(evaluations) == 4  # three, and one at the end
    for rank in ranks:
        assert rank.more == pytest.approx(evaluations, rel=case.tolerance.eval_loss)
    undelayed = runs.alone(script, case, initial, False)
    assert weight_differences(ranks[0].folder, undelayed.folder, case.tolerance.weights)
    return ranks


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4])
def test_as_its_rule(runs, stages, micro_batches):
    check(runs, StashedCase(stages=stages, micro_batches=micro_batches))


def test_stages_are_not_equally_late(runs):
    """The last of four stages has newer weights than the first."""
    case = StashedCase(stages=4)
    (first, *_) = check(runs, case)
    initial = runs.initial("llama", num_hidden_layers=LAYERS)
    wrong = runs.alone(script, dataclasses.replace(case, ignores_stages=True), initial)
    assert weight_differences(first.folder, wrong.folder, case.tolerance.weights)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("others", [",tp=2", ",dp_replicate=2"])
def test_with_other_axes(runs, others, micro_batches):
    data_ranks = 2 if "dp" in others else 1
    check(runs, StashedCase(micro_batches=micro_batches, data_ranks=data_ranks), others)


CASES = {
    "accumulated": {"accumulation": 2},
    "adam": {"arguments": ADAM},
    "checkpointing": {"arguments": (("gradient_checkpointing", True),)},
    "clipped": {"arguments": (("max_grad_norm", 0.1),)},
    "tied": {"model": "tied"},
    "adapters": {"lora": True},
    "bf16": {"arguments": (("bf16", True),)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stages", "others"), [(2, ""), (4, ""), (2, ",tp=2"), (2, ",dp_replicate=2")])
def test_kinds_of_training(runs, stages, others, name):
    data_ranks = 2 if "dp" in others else 1
    check(runs, StashedCase(stages=stages, micro_batches=2, data_ranks=data_ranks, **CASES[name]), others)


@pytest.mark.parametrize("others", ["", ",tp=2"])
def test_resume(runs, others):
    """What is in flight at a save is begun anew, so a resumed run goes on as the one that was not interrupted."""
    case = StashedCase(saves=(4, 8), arguments=ADAM)
    (first, *_) = check(runs, case)
    again = dataclasses.replace(case, resume=str(Path(first.folder).parent / "checkpoint-4"))
    call = partial(script, case.spec + others, runs._folder(), again, runs.initial("llama", num_hidden_layers=LAYERS))
    resumed = run(call, axes(case.spec + others)["world"], init=False)[0]
    none(weight_differences(resumed.folder, first.folder, 1e-5 if others else 0.0))
    assert len(resumed.logs) == 2 * STEPS - 4
    if not others:
        assert resumed.logs == first.logs[4:]
