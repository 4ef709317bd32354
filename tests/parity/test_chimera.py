"""`pipeline_schedule=chimera`: two pipelines in opposite directions, with the numbers of one process."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_parallel import parallelize
from hf_parallel.axes.pipeline import chimera
from tests import models
from tests.distributed import run, run_alone
from tests.parity.test_delayed_updates import ADAM, Case, script
from tests.rows import Rows
from tests.training import BF16, Script, Tolerance, activate, axes, none, train, weight_differences

CHIMERA = ",pipeline_schedule=chimera"
SPECS = ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2"]
UNEVEN = Script(uneven_lengths=True)


def train_counting(spec: str | None, out: str, case: Script, initial: str):
    """The script; `more` has the micro-batches of each run, and how many of them this rank ran on its mirror."""
    counted = []
    run_events = chimera.Mirror._run_events

    def counting(self, parts, ways, scale):
        stage, before = ways[1][1], []
        handle = stage.register_forward_hook(lambda *_: before.append(1))
        losses = run_events(self, parts, ways, scale)
        handle.remove()
        counted.append((len(parts), len(before)))
        return losses

    chimera.Mirror._run_events = counting
    outcome = train(case, initial, out, activate(spec), int(os.environ.get("RANK", 0)))
    outcome.more = counted
    return outcome


def check(runs, case: Script, spec: str, tolerance: Tolerance | None = None, **changes) -> list[tuple[int, int]]:
    """Compare with one process. Return the micro-batches of each run; half of them must go up."""
    initial = runs.initial(case.model, **changes)
    ranks = runs.compare(train_counting, spec + CHIMERA, case, initial, tolerance=tolerance)
    for rank in ranks:
        assert rank.more
        assert all(count == 2 * up for count, up in rank.more)
    return ranks[0].more


@pytest.mark.parametrize("spec", SPECS)
def test_as_one_process(runs, spec):
    """The last batch has 5 rows, of which not half can go up: these go down the ranks alone. Data ranks fill it up."""
    counts = check(runs, dataclasses.replace(UNEVEN, rows=21), spec)
    assert len(counts) == (3 if "dp_replicate" in spec else 2)


@pytest.mark.parametrize("spec", SPECS)
def test_accumulated(runs, spec):
    """The batches of a step are one run."""
    counts = check(runs, UNEVEN.with_accumulation(3), spec)
    assert counts[0] == counts[1] == (counts[0][0], counts[0][0] // 2)
    assert counts[0][0] == (12 if "dp_replicate" in spec else 24)


CASES = {
    "clipping": ({"arguments": (("max_grad_norm", 0.1),)}, {}),
    "adam": ({"arguments": ADAM}, {}),
    "tied": ({}, {"tie_word_embeddings": True}),
    "seven_layers": ({"length": 33}, {"num_hidden_layers": 7, "max_position_embeddings": 64}),
    "checkpointing": ({"arguments": (("gradient_checkpointing", True),)}, {}),
    "adapters": ({"lora": (("r", 4), ("target_modules", ("q_proj", "v_proj", "lm_head")))}, {}),
    "from_config": ({"route": "from_config"}, {}),
    "gpt2": ({"model": "gpt2"}, {}),
    "bf16": ({"arguments": (("bf16", True),)}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2"])
def test_kinds_of_training(runs, spec, name):
    case, changes = CASES[name]
    tolerance = {"bf16": BF16, "adam": Tolerance(weights=1e-5)}.get(name)  # AdamW divides by gradients
    check(runs, dataclasses.replace(UNEVEN, **case), spec, tolerance, **changes)


class Plain(Case):
    """A script whose rule in one process is Trainer's own."""

    @property
    def rule(self):
        from transformers import Trainer

        return Trainer


@pytest.mark.parametrize("other", [None, "pp=4" + CHIMERA, "pp=2"])
@pytest.mark.parametrize("spec", ["pp=2", "pp=2,dp_replicate=2"])
def test_resume(runs, spec, other):
    """Two epochs with evaluations on the way. A run goes on from a save, under the same and under other layouts."""
    case, initial = Plain(saves=(4,), arguments=ADAM), runs.initial("llama")
    first, *_ = runs.compare(script, spec + CHIMERA, case, initial, tolerance=case.tolerance)
    assert first.more == pytest.approx(runs.alone(script, case, initial).more, rel=case.tolerance.eval_loss)
    again = dataclasses.replace(case, resume=str(Path(first.folder).parent / "checkpoint-4"))
    layout = other or spec + CHIMERA
    resumed = run(partial(script, layout, runs._folder(), again, initial), axes(layout)["world"], init=False)[0]
    none(weight_differences(resumed.folder, first.folder, 1e-5 if other else 0.0))
    if other is None:
        assert resumed.logs == first.logs[4:]


def loop(spec: str | None) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """A loop by hand that freezes a weight after the first step, and changes it after the second."""
    model, tokens = models.build("llama"), Rows(8, 3).tokens
    model = parallelize(model, spec) if spec else model
    found = []
    for step in range(3):
        model.train()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        named = dict(model.named_parameters())
        found.append((float(loss), {name: p.grad.clone() for name, p in named.items() if p.grad is not None}))
        with torch.no_grad():
            for parameter in named.values():
                parameter.sub_(parameter.grad) if parameter.grad is not None else parameter.mul_(1 + step)
        model.zero_grad()
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_weights_frozen_and_changed_between_steps(size):
    """Copies follow what the script does to the weights of their owner."""
    reference = run_alone(loop, None)
    ranks = run(loop, size, f"pp={size}" + CHIMERA)
    for step, (loss, gradients) in enumerate(reference):
        whole = {name: gradient for rank in ranks for name, gradient in rank[step][1].items()}
        assert ("model.layers.0.mlp.up_proj.weight" in gradients) == (step == 0)
        assert whole.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(whole[name], gradient, rtol=1e-4, atol=1e-6)
        assert [rank[step][0] for rank in ranks] == pytest.approx([loss] * size, rel=1e-5)
