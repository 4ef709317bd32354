"""What a loop does under `if accelerator.is_main_process:` with a model that all ranks hold: as in one process."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests import models
from tests.distributed import run, run_alone
from tests.loops import prepare_loop, rows, take_step
from tests.rows import data
from tests.training import activate, axes, fit, none, trainer_of, weight_differences

SAME = {"rtol": 1e-5, "atol": 0.0}  # sums of fp32 terms in another order
#: A pipeline draws for the last stage's logits, and so other numbers than one process.
SPECS = ["dp_shard=2", "dp_replicate=2", "zero_stage=1,dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_shard=2,tp=2"]


def show_and_save(accelerator, model, batch: torch.Tensor, out: str, draws: bool) -> list:
    """Evaluate, generate and save, as the main process does alone."""
    inner = accelerator.unwrap_model(model)
    inner.eval()
    with torch.no_grad():
        outputs = inner(input_ids=batch, labels=batch)
        found = [outputs.loss.item(), outputs.logits.double().norm().item(), inner(batch).logits.shape]
    found.append(inner.generate(batch[:, :7], max_new_tokens=5, do_sample=False).tolist())
    if draws:
        torch.manual_seed(5)
        found.append(inner.generate(batch[:, :7], max_new_tokens=5, do_sample=True, top_k=0).tolist())
    inner.save_pretrained(out)
    inner.train()
    return found


def loop(spec: str | None, folder: str, out: str, draws: bool) -> dict:
    """Two steps with a barrier after what rank 0 does alone, which it does once more when the others have ended."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    seen: dict = {"steps": [], "alone": []}
    for step, batch in enumerate(rows(2, 3, 32).to(accelerator.device)):
        seen["steps"].append(take_step(accelerator, model, optimizer, model(input_ids=batch, labels=batch).loss))
        accelerator.wait_for_everyone()
        before = torch.get_rng_state()
        if accelerator.is_main_process:
            seen["alone"].append(show_and_save(accelerator, model, batch, f"{out}/{step}", draws))
        if step == 0:
            accelerator.wait_for_everyone()
            assert accelerator.is_main_process or torch.equal(before, torch.get_rng_state())
        assert all(module.training for module in model.modules())
        if step == 0:
            with torch.no_grad():
                seen["together"] = model(input_ids=batch, labels=batch).loss.item()
    accelerator.end_training()
    return seen


def compare(first: dict, others: list[dict], wanted: dict, also: str) -> None:
    """Compare what rank 0 went through, and what it saw alone, with one process; the others saw nothing alone."""
    for key in ("steps", also):
        torch.testing.assert_close(first[key], wanted[key], **SAME)
    for found, expected in zip(first["alone"], wanted["alone"], strict=True):
        torch.testing.assert_close(found[:2], expected[:2], **SAME)
        assert found[2:] == expected[2:]
    assert not any(other["alone"] for other in others)


@pytest.mark.parametrize("spec", SPECS)
def test_main_process_alone(runs, tmp_path, spec):
    draws, folder = "pp" not in spec, runs.initial("llama")
    wanted = run_alone(loop, None, folder, str(tmp_path / "one"), draws)
    first, *others = run(loop, axes(spec)["world"], spec, folder, str(tmp_path / "several"), draws)
    compare(first, others, wanted, "together")
    for step in range(2):
        none(weight_differences(str(tmp_path / "several" / str(step)), str(tmp_path / "one" / str(step)), 1e-6))


def is_main(accelerator, question: str) -> bool:
    """Ask what scripts ask before they do something on rank 0 alone."""
    found = dist.get_rank() if question == "get_rank" else getattr(accelerator, question)
    return found if isinstance(found, bool) else found == 0


def loop_without_barriers(spec: str | None, folder: str, out: str, question: str) -> dict:
    """Rank 0 does things alone after steps, before a gather and before a loader starts; no barrier follows."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    if question == "get_rank" and spec is None:
        question = "process_index"  # one process has no group
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(11), batch_size=3, shuffle=True))
    seen: dict = {"steps": [], "alone": [], "losses": []}
    batches = rows(3, 3, 32).to(accelerator.device)

    def do_alone(name: str) -> None:
        if is_main(accelerator, question):
            seen["alone"].append(show_and_save(accelerator, model, batches[0], f"{out}/{name}", draws=False))

    for epoch in range(2):
        for step, _ in zip(range(2), loader, strict=False):
            batch = batches[epoch + step]
            loss = model(input_ids=batch, labels=batch).loss
            seen["steps"].append(take_step(accelerator, model, optimizer, loss))
            do_alone(f"{epoch}-{step}")
        seen["losses"].append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        do_alone(f"{epoch}")
    accelerator.end_training()
    return seen


@pytest.mark.parametrize(
    ("spec", "question"),
    [
        ("dp_replicate=2", "is_main_process"),
        ("zero_stage=1,dp_shard=2", "is_local_main_process"),
        ("pp=2", "is_main_process"),
        ("dp_shard=2,tp=2", "is_main_process"),
        ("dp_shard=2", "process_index"),  # ranks of one model have the same, and come to the call together
        ("dp_shard=2", "get_rank"),
    ],
)
def test_main_process_alone_without_a_barrier(runs, tmp_path, spec, question):
    folder = runs.initial("llama")
    wanted = run_alone(loop_without_barriers, None, folder, str(tmp_path / "one"), question)
    first, *others = run(loop_without_barriers, axes(spec)["world"], spec, folder, str(tmp_path / "several"), question)
    compare(first, others, wanted, "losses")
    for name in ("0-0", "0-1", "0", "1-0", "1-1", "1"):
        none(weight_differences(str(tmp_path / "several" / name), str(tmp_path / "one" / name), 1e-6))


def ask_on_one_rank(folder: str, asks: int, trains: bool) -> list:
    """One rank asks who is the main process; then all call the model, or train it."""
    from hf_parallel.ranks import desync

    if not trains:  # else before the watch over ranks that wait for each other ends the run, as it is set for users
        desync.PATIENCE_S, desync.LOOK_S, desync.STILL_S = 0.3, 0.2, 0.5
    accelerator, model, optimizer = prepare_loop("dp_shard=2", folder)
    batch = rows(3, 32)
    if dist.group.WORLD.rank() == asks:
        assert accelerator.is_main_process == (asks == 0)
    found = []
    if not trains:
        with torch.no_grad():
            found = [model(input_ids=batch, labels=batch).loss.item() for _ in range(2)]
    found += take_step(accelerator, model, optimizer, model(input_ids=batch, labels=batch).loss)
    model.save_pretrained(folder + f"-{asks}")
    return found


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("asks", [0, 1])
def test_a_question_of_one_rank(runs, tmp_path, asks, trains):
    folder = str(tmp_path / "initial")
    run_alone(save_initial, folder)
    first, second = run(ask_on_one_rank, 2, folder, asks, trains)
    assert first == second


def save_initial(folder: str) -> None:
    models.build("llama").save_pretrained(folder)


def call_with_cache(folder: str) -> None:
    accelerator, model, _ = prepare_loop("dp_shard=2", folder)
    batch = rows(3, 32)
    if accelerator.is_main_process:
        with torch.no_grad():
            cache = model(input_ids=batch, use_cache=True).past_key_values
            with pytest.raises(NotImplementedError, match="use_cache=False"):
                model(input_ids=batch, past_key_values=cache)
    accelerator.wait_for_everyone()


def test_a_cache_of_rank_0(runs):
    run(call_with_cache, 2, runs.initial("llama"))


def swap_alone(folder: str, out: str, how: str) -> None:
    """Rank 0 puts an average in the place of its parts of the weights, and saves."""
    accelerator, model, optimizer = prepare_loop("dp_shard=2", folder)
    average = [p.detach().clone() for p in model.parameters()]
    batch = rows(3, 32)
    take_step(accelerator, model, optimizer, model(input_ids=batch, labels=batch).loss)
    model.save_pretrained(f"{out}/all")
    if accelerator.is_main_process:
        print(model.lm_head.weight.data.shape)
        model.save_pretrained(f"{out}/alone")
        with torch.no_grad():
            for weight, mean in zip(model.parameters(), average, strict=True):
                (weight.data if how == "data" else weight).copy_(mean)
        call = model if how == "call" else lambda _: model.save_pretrained(f"{out}/mixed")
        with torch.no_grad(), pytest.raises(NotImplementedError, match="rank 0 alone has written to weights"):
            call(batch)
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("how", ["data", "weight", "call"])
def test_weights_that_rank_0_has_changed_alone(runs, tmp_path, how):
    run(swap_alone, 2, runs.initial("llama"), str(tmp_path), how)
    none(weight_differences(str(tmp_path / "alone"), str(tmp_path / "all"), 0.0))


def loop_with_samples(spec: str | None, folder: str, own_generator: bool, data_ranks: int) -> list:
    """The main process alone reads a batch, or all of them, of a loader that all read; twice, before each epoch."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    generator = torch.Generator().manual_seed(5) if own_generator else None
    examples = torch.utils.data.DataLoader(
        torch.arange(24), batch_size=8 // data_ranks, shuffle=True, generator=generator
    )
    loader, seen = accelerator.prepare(examples), []
    for epoch in range(2):
        if accelerator.is_main_process:
            shown = [batch.tolist() for batch in loader] if epoch else next(iter(loader)).tolist()
            assert len(shown) == (3 if epoch else 8 // data_ranks)
        for batch in loader:
            tokens = batch[:, None] + torch.arange(17)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss, norm = take_step(accelerator, model, optimizer, loss)
            mean = accelerator.gather(torch.tensor([loss])).mean().item()
            seen.append([sorted(accelerator.gather(batch).tolist()), mean, norm, torch.rand(1).item()])
    return seen


@pytest.mark.parametrize(
    ("spec", "own_generator"), [("dp_shard=2", False), ("tp=2", False), ("dp_shard=2", True), ("pp=2", True)]
)
def test_batches_that_rank_0_reads_alone(runs, spec, own_generator):
    """It draws an order: without it the other ranks would read examples that rank 0 has, and leave out others."""
    folder = runs.initial("llama")
    wanted = run_alone(loop_with_samples, None, folder, own_generator, 1)
    data_ranks = axes(spec)["data_ranks"]
    first, other = run(loop_with_samples, 2, spec, folder, own_generator, data_ranks)
    assert data_ranks > 1 or [one[3] for one in first] == [one[3] for one in other]
    for found in (first, other):
        assert [one[0] for one in found] == [one[0] for one in wanted]
        torch.testing.assert_close([one[1:3] for one in found], [one[1:3] for one in wanted], **SAME)


def train_after_sample(spec: str | None, out: str, initial: str):
    """The main process alone shows a batch of the loader that the trainer is about to make, as MedicalGPT does."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(initial)
    examples = [dict(row) for row in data("llama", 22, 1)]
    trainer, *more = trainer_of(model, out, data_ranks, {"max_steps": 3}, train_dataset=examples)
    if trainer.is_world_process_zero():
        assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == trainer._train_batch_size
    return fit(trainer, *more)


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2"])
def test_a_loader_that_rank_0_makes_alone(runs, spec):
    runs.compare(train_after_sample, spec, runs.initial("llama"))
