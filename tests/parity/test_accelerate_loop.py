"""An ordinary Accelerate loop, without Trainer and without a word of hf_parallel, against one process."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler
from transformers import AutoModelForCausalLM, get_scheduler

from tests.distributed import run, run_alone
from tests.loops import rows
from tests.rows import Rows
from tests.training import Tolerance, activate, axes, check_alone, none, number_differences, over, weight_differences

GLOBAL_BATCH = 8


def accelerate_loop(spec: str | None, out: str, folder: str, even: bool) -> dict:
    """Three steps of two micro-batches, then evaluation and saving, as the Accelerate guides write them."""
    data_ranks = activate(spec)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(3)
    batch_size = GLOBAL_BATCH // data_ranks
    loader = DataLoader(Rows(48, seed=11, even=even), batch_size=batch_size, shuffle=True, generator=order)
    held_out = DataLoader(Rows(13, seed=12), batch_size=batch_size)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(loader) // 2)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    seen: dict = {"losses": [], "norms": [], "rates": []}
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                seen["rates"].append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen["losses"].append(accelerator.gather(loss.detach()).mean().item())

    model.eval()
    rows = []
    for batch in held_out:
        with torch.no_grad():
            outputs = model(**batch)
        rows.append(accelerator.gather_for_metrics((outputs.logits[:, -1].contiguous(), batch["input_ids"])))
    seen["logits"], seen["tokens"] = (torch.cat(parts) for parts in zip(*rows, strict=True))
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    return seen


@pytest.fixture(scope="module", params=[True, False], ids=["even", "uneven label counts"])
def reference(request, runs, tmp_path_factory):
    """What one process does, and which labels it did it with."""
    out = str(tmp_path_factory.mktemp("alone"))
    return run_alone(accelerate_loop, None, out, runs.initial("llama"), request.param), out, request.param


@over("Accelerate loop", "dp_shard=2", "dp_replicate=2", "tp=2", "pp=2", "tp=2,pp=2", "pp=2,dp_shard=2")
def test_same_numbers_as_one_process(runs, reference, spec, tmp_path):
    expected, saved, even = reference
    given = spec, str(tmp_path / "saved"), runs.initial("llama"), even
    ranks = run(accelerate_loop, axes(spec)["world"], *given, init=False)
    found = [f"rank {rank}: {text}" for rank, seen in enumerate(ranks) for text in _differences(seen, expected)]
    none(found + weight_differences(given[1], saved, Tolerance.weights))


def _differences(seen: dict, expected: dict) -> list[str]:
    found = []
    for key in ("losses", "norms", "rates"):
        found += [f"{key}: {line}" for line in number_differences(seen[key], expected[key])]
    if not torch.equal(seen["tokens"], expected["tokens"]):
        return [*found, f"gathered {len(seen['tokens'])} rows, not the {len(expected['tokens'])} of the set in order"]
    gap = (seen["logits"] - expected["logits"]).abs().max().item()
    return found if gap <= Tolerance.predictions else [*found, f"logits off by {gap:.2e}"]


def orders(spec: str | None) -> list[list[list[int]]]:
    """The rows of loaders in the order in which they are read: two after one seed, then two after the same again."""
    activate(spec)
    accelerator, found = Accelerator(cpu=True), []
    for seeded, shuffle in ((True, RandomSampler), (False, SubsetRandomSampler), (True, RandomSampler)):
        if seeded:
            torch.manual_seed(5)
        batch_size = 4 // accelerator.num_processes
        loader = DataLoader(range(16), batch_size=batch_size, sampler=shuffle(range(16)))
        loader = accelerator.prepare(loader)
        for epoch in (loader, accelerator.skip_first_batches(loader, 1)):
            found.append([accelerator.gather(batch).tolist() for batch in epoch])
        torch.rand(accelerator.process_index)  # a rank's own draws, as of dropout
    return found


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2"])
def test_seeds_order_rows_as_in_one_process(spec):
    """Without a seed between them loaders go on from one another; the same seed brings back the same order."""
    first, _, second, *_, third, _ = expected = run_alone(orders, None)
    assert first == third != second
    for found in run(orders, 2, spec, init=False):
        assert found == expected


def stops(spec: str) -> list[bool]:
    """What `check_trigger` says where only the last rank sets it, once."""
    activate(spec)
    accelerator, found = Accelerator(cpu=True), []
    for step in range(3):
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            accelerator.set_trigger()
        found.append(accelerator.check_trigger())
    return found


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2"])
def test_any_ranks_trigger_stops_all(spec):
    assert run(stops, 2, spec, init=False) == [[False, True, False]] * 2


def read_copies(spec: str | None) -> list[float]:
    """The first tokens of a shuffled loader and of a copy of it, read in turns; those of a pickled one, in order."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    loader = DataLoader(rows(11, 33), batch_size=4 // accelerator.num_processes, shuffle=True)
    loader = accelerator.prepare(loader)
    other = copy.deepcopy(loader)

    def read(one) -> list[float]:
        return [float(token) for batch in one for token in accelerator.gather_for_metrics(batch[:, 0])]

    found = [token for one in (loader, other, loader, other) for token in read(one)]
    return found + sorted(read(pickle.loads(pickle.dumps(loader))))


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_copies_of_loaders(spec):
    """A copy had the order of its original, and repeated rows of the last batch; pickle stopped."""
    check_alone(read_copies, spec, init=False)
