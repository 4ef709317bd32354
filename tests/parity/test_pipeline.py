"""Every schedule gives the numbers of one process, whatever a stage holds and whatever a batch looks like."""

import pytest
import torch

from hf_parallel import parallelize
from hf_parallel.config import SCHEDULES
from hf_parallel.pipeline.engine import PipelineEngine
from tests import models
from tests.distributed import run, run_alone
from tests.training import Script, layouts

SEVERAL = [name for name in SCHEDULES if name not in ("1f1b", "gpipe")]


def on(schedules, *specs):
    """Every schedule on every spec, each with its cell of the support matrix."""
    cells = [layouts(name, f"{spec},pipeline_schedule={name}") for name in schedules for spec in specs]
    return pytest.mark.parametrize("spec", [case for cell in cells for case in cell])


@on(SEVERAL, "pp=2", "pp=2,dp_shard=2", "tp=2,pp=2")
def test_several_stages_per_rank(runs, spec):
    runs.check(Script().with_accumulation(2), spec)


@on(SCHEDULES, "pp=4")
def test_uneven_stages(runs, spec):
    """Ten layers on four ranks; a batch of eight rows, then six that some schedules cannot cut."""
    runs.check(Script(model="deep"), spec)


@on(["interleaved_zero_bubble", "dualpipe_v"], "tp=2,pp=2,dp_shard=2")
def test_three_axes(runs, spec):
    runs.check(Script().with_accumulation(2), spec)


@on(["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"], "pp=2")
def test_tied_embedding(runs, spec):
    """In a loop the two ends hold a copy each; in a V one rank holds the one parameter."""
    runs.check(Script(model="qwen3").with_accumulation(2), spec)


@on(["interleaved_1f1b", "zbv_zero_bubble"], "pp=2")
def test_a_loss_from_whole_outputs(runs, spec):
    """All forwards, then all backwards, through two stages per rank."""
    runs.check(Script(overrides=True), spec)


@on(["1f1b", "interleaved_1f1b"], "pp=2")
def test_unequal_split(runs, spec):
    split = "[1,3]" if spec.endswith("=1f1b") else "[1,1,1,1]"
    runs.check(Script(), f"{spec},pipeline_split={split}")


@on(["1f1b", "looped_bfs", "zbv_zero_bubble"], "pp=2")
def test_activation_checkpointing(runs, spec):
    runs.check(Script(arguments=(("gradient_checkpointing", True),)), spec)


def gradients(spec: str | None, frozen: int, lengths: tuple[int, ...] = (8,)) -> dict[str, torch.Tensor]:
    """Gradients of `deep` after one backward for each length; the first `frozen` layers and the embedding fixed."""
    model = models.build("deep").train()
    for module in (model.model.embed_tokens, *model.model.layers[:frozen]) if frozen else ():
        module.requires_grad_(False)
    if spec:
        parallelize(model, spec)
    generator = torch.Generator().manual_seed(3)
    for length in lengths:
        tokens = torch.randint(0, models.VOCABULARY, (8, length), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(spec: str, **arguments) -> None:
    expected = run_alone(gradients, None, **arguments)
    found = {name: gradient for part in run(gradients, 2, spec, **arguments) for name, gradient in part.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # Sums over other micro-batches; relative to the largest entry.
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_first_stage(schedule):
    """As with adapters in late layers only: no gradient may get lost on the way to nowhere."""
    check_gradients(f"pp=2,pipeline_schedule={schedule}", frozen=6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lengths_change_from_step_to_step(schedule):
    check_gradients(f"pp=2,pipeline_schedule={schedule}", frozen=0, lengths=(7, 13, 5))


def most_alive(schedule: str, monkeypatch=None) -> int:
    """The largest number of micro-batches whose forward, but not backward, has run on this rank."""
    alive, most = 0, 0

    def done(gradient):
        nonlocal alive
        alive -= 1

    enter = PipelineEngine._enter

    def counted(self, view, arriving, batch):
        nonlocal alive, most
        output = enter(self, view, arriving, batch)
        (output["loss"] if isinstance(output, dict) else output).register_hook(done)
        alive += 1
        most = max(most, alive)
        return output

    PipelineEngine._enter = counted
    model = parallelize(models.build("llama").train(), f"pp=4,pipeline_microbatches=8,pipeline_schedule={schedule}")
    tokens = torch.arange(64).view(8, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert alive == 0
    return most


def test_micro_batches_alive():
    """1F1B: stage s keeps p - s of them (Narayanan et al., 2019); GPipe keeps all."""
    assert run(most_alive, 4, "1f1b") == [4, 3, 2, 1]
    assert run(most_alive, 4, "gpipe") == [8, 8, 8, 8]
