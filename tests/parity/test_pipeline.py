"""Every schedule gives the numbers of one process, whatever a stage holds and whatever a batch looks like."""

import contextlib
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from hf_parallel import parallelize
from hf_parallel.ask.keys.pipeline import SCHEDULES
from hf_parallel.axes.pipeline.engine import PipelineEngine
from hf_parallel.axes.pipeline.script_loss import find_plan, run_plan
from hf_parallel.axes.pipeline.unscheduled import serve_script
from tests import models
from tests.counting import CountCollectives
from tests.distributed import RankFailure, run, run_alone
from tests.training import Script, over

SEVERAL = [name for name in SCHEDULES if name not in ("1f1b", "gpipe")]


@pytest.mark.parametrize("schedule", SEVERAL)
@over("{schedule}", "pp=2", "pp=2,dp_shard=2", "tp=2,pp=2")
def test_several_stages_per_rank(runs, spec, schedule):
    runs.check(Script().with_accumulation(2), f"{spec},pipeline_schedule={schedule}")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
@over("{schedule}", "pp=2")
def test_four_batches_per_step(runs, spec, schedule):
    runs.check(Script().with_accumulation(4), f"{spec},pipeline_schedule={schedule}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@over("{schedule}", "pp=4")
def test_uneven_stages(runs, spec, schedule):
    """Ten layers on four ranks; a batch of eight rows, then six that some schedules cannot cut."""
    runs.check(Script(model="deep"), f"{spec},pipeline_schedule={schedule}")


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "dualpipe_v"])
@over("{schedule}", "tp=2,pp=2,dp_shard=2")
def test_three_axes(runs, spec, schedule):
    runs.check(Script().with_accumulation(2), f"{spec},pipeline_schedule={schedule}")


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
@over("{schedule}", "pp=2")
def test_tied_embedding(runs, spec, schedule):
    """In a loop the two ends hold a copy each; in a V one rank holds the one parameter."""
    runs.check(Script(model="qwen3").with_accumulation(2), f"{spec},pipeline_schedule={schedule}")


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble"])
@over("{schedule}", "pp=2")
def test_a_loss_of_the_script(runs, spec, schedule):
    """The first step on whole outputs, the others micro-batch by micro-batch, through two stages per rank."""
    runs.check(Script(overrides=True).with_accumulation(2), f"{spec},pipeline_schedule={schedule}")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@over("{schedule}", "pp=2")
def test_unequal_split(runs, spec, schedule):
    split = "[1,3]" if schedule == "1f1b" else "[1,1,1,1]"
    runs.check(Script(), f"{spec},pipeline_schedule={schedule},pipeline_split={split}")


@pytest.mark.parametrize("schedule", ["1f1b", "looped_bfs", "zbv_zero_bubble"])
@over("{schedule}", "pp=2")
def test_activation_checkpointing(runs, spec, schedule):
    runs.check(Script(arguments=(("gradient_checkpointing", True),)), f"{spec},pipeline_schedule={schedule}")


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


def most_alive(schedule: str, own_loss: bool = False) -> int:
    """The largest number of micro-batches whose forward, but not backward, has run on this rank."""
    alive, most = 0, 0

    def done(gradient):
        nonlocal alive
        alive -= 1

    run_as_stage = PipelineEngine.run_as_stage

    def counted(self, view, on_call, call):
        nonlocal alive, most
        output = run_as_stage(self, view, on_call, call)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(done)
            alive += 1
            most = max(most, alive)
        return output

    PipelineEngine.run_as_stage = counted
    model = parallelize(models.build("llama").train(), f"pp=4,pipeline_microbatches=8,pipeline_schedule={schedule}")
    tokens = torch.arange(64).view(8, 8)
    if own_loss:
        engine, batch = model._hf_parallel.pipeline, {"input_ids": tokens}

        def loss_of(part):
            return model(part["input_ids"]).logits.pow(2).sum()

        made = serve_script(engine, batch, lambda: {"loss": loss_of(batch)})[1]
        plan = find_plan(engine, batch, made, loss_of, contextlib.nullcontext)
        run_plan(engine, plan, batch, loss_of, loss_of, contextlib.nullcontext).backward()  # tries this kind of loss
        alive = most = 0
        run_plan(engine, plan, batch, loss_of, loss_of, contextlib.nullcontext).backward()
    else:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert alive == 0
    return most


def test_micro_batches_alive():
    """1F1B: stage s keeps p - s of them (Narayanan et al., 2019); GPipe keeps all."""
    assert run(most_alive, 4, "1f1b") == [4, 3, 2, 1]
    assert run(most_alive, 4, "1f1b", own_loss=True) == [4, 3, 2, 1]
    assert run(most_alive, 4, "gpipe") == [8, 8, 8, 8]


def test_auto_takes_the_smallest_bubble_with_the_memory_of_1f1b(runs, capfd):
    runs.check(Script().with_accumulation(2), "pp=2,pipeline_schedule=auto")
    assert "pipeline_schedule=interleaved_zero_bubble" in capfd.readouterr().err


def test_profiled_step_is_drawn(runs):
    """Forwards and backwards of both ranks, in the step that was asked for."""
    folder = Path(runs.parallel(Script(), "pp=2,profile_steps=[2]")[0].folder)
    (drawn,) = [*folder.glob("timeline*.svg"), *folder.parent.glob("timeline*.svg")]
    assert drawn.name == "timeline_step_2.svg"
    picture = drawn.read_text()
    assert "1f1b" in picture
    assert "measured" in picture
    for kind in ("forward", "backward", "communication"):
        assert f'class="box {kind}"' in picture


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Script(overrides=True), "adds up over micro-batches: 1f1b from now on"),
        (Script(own_loss=True), "adds up over micro-batches: 1f1b from now on"),
        (Script(arguments=(("label_smoothing_factor", 0.1),)), "adds up over micro-batches: 1f1b from now on"),
    ],
    ids=["overridden", "compute_loss_func", "label smoothing"],
)
def test_what_is_said_of_a_loss(runs, capfd, script, said):
    runs.check(script, "pp=2")
    assert said in capfd.readouterr().err


def collectives_of_a_stage(schedule: str, accumulation: int) -> dict[str, int]:
    """What FSDP2 communicates in one step of a stage of two layers, and a root of embedding or head."""
    model = parallelize(models.build("llama").train(), f"pp=2,dp_shard=2,pipeline_schedule={schedule}")
    tokens = torch.arange(64).view(8, 8)
    for _ in range(4):  # in the first steps the batches of ranks are compared
        model(input_ids=tokens, labels=tokens).loss.backward()
    with CountCollectives() as counted:
        for _ in range(accumulation):
            model(input_ids=tokens, labels=tokens).loss.backward()
    return {kind: counted.counts[kind] for kind in ("gather", "scatter")}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zbv_zero_bubble"])
def test_weights_are_gathered_and_gradients_reduced_once_a_step(schedule):
    """Three groups in a stage (its two layers, and its end of the model), whatever the number of micro-batches."""
    for counts in run(collectives_of_a_stage, 4, schedule, 1):
        assert counts["scatter"] <= 3 + (schedule not in ("1f1b", "gpipe"))
        assert counts["gather"] <= 3 + (schedule not in ("1f1b", "gpipe"))


def generate(spec: str | None, **how) -> list[list[int]]:
    """Tokens after two prompts, one padded on the left."""
    model = models.build("llama").eval()
    if spec:
        parallelize(model, spec)
    prompt, mask = torch.arange(3, 13).view(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    torch.manual_seed(5)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **how).tolist()


@pytest.mark.parametrize("spec", ["pp=2", "tp=2,pp=2", "pp=2,dp_shard=2", "pp=2,pipeline_schedule=zbv_zero_bubble"])
def test_generation(spec):
    """Also of a script that asks for a cache, which changes no token."""
    expected = run_alone(generate, None, do_sample=False)
    ranks = 2 * (1 + ("," in spec and "schedule" not in spec))
    for tokens in run(generate, ranks, spec, do_sample=False, use_cache=spec != "pp=2"):
        assert tokens == expected


@pytest.mark.parametrize("asked", ["prompt_lookup_num_tokens", "prefill_chunk_size"])
@pytest.mark.parametrize("in_config", [False, True])
def test_what_needs_a_cache_is_refused(asked, in_config):
    how = {"generation_config": GenerationConfig(**{asked: 2})} if in_config else {asked: 2}
    with pytest.raises(RankFailure, match=f"{asked} needs a key/value cache.*leave it out"):
        run(generate, 2, "pp=2", **how)


def test_sampled_tokens_agree_on_all_stages():
    first, second = run(generate, 2, "pp=2", do_sample=True)
    assert first == second
