"""`accelerator.save_state` and `load_state` in a loop without a word of hf_parallel: any layout to any other."""

import math
import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

from tests.distributed import run, run_alone
from tests.loops import rows, take_step
from tests.resuming import ONE
from tests.rows import Rows
from tests.training import activate, axes, check_numbers, spec_id

GLOBAL_BATCH, STEPS, STOP = 8, 4, 2
TOLERANCE = 2e-5  # relative, as in test_resume
LAYOUTS = ["tp=2", "pp=2,dp_shard=2", ONE]


class Counter:
    """Something of the script's own that it registers."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def loop(spec: str, folder: str, project: str, resume: bool = False) -> dict:
    """Four steps of AdamW under a falling rate, saved after two; or the last two, from there."""
    from hf_parallel.hooks import activation

    activation.activate(spec or "dp_shard=-1", source="test")  # in one process nothing but reading is changed
    naming = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    batch_size = GLOBAL_BATCH // axes(spec)["data_ranks"]
    loader = DataLoader(Rows(GLOBAL_BATCH * STEPS, seed=11, even=True), batch_size=batch_size)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(counter := Counter())
    if resume:
        accelerator.load_state()
        loader = accelerator.skip_first_batches(loader, counter.steps)
    losses = {}
    for batch in loader:
        loss = model(**batch).loss
        take_step(accelerator, model, optimizer, loss)
        scheduler.step()
        counter.steps += 1
        losses[counter.steps] = [accelerator.gather(loss.detach()).mean().item(), scheduler.get_last_lr()[0]]
        if counter.steps == STOP and not resume:
            accelerator.save_state()
    return losses


def looped(spec: str, *args) -> dict:
    return run(loop, axes(spec)["world"], spec, *args, init=False)[0] if spec else run_alone(loop, spec, *args)


@pytest.fixture(scope="module")
def saved(runs, tmp_path_factory):
    """Runs that save on the way, one per layout."""
    root, made = tmp_path_factory.mktemp("states"), {}

    def make(spec: str) -> tuple[str, dict]:
        if spec not in made:
            project = str(root / (spec_id(spec) or "one"))
            made[spec] = project, looped(spec, runs.initial("qwen3"), project)
        return made[spec]

    return make


@pytest.mark.parametrize(
    ("source", "spec"),
    [("tp=2", "tp=2"), ("tp=2", "pp=2,dp_shard=2"), ("pp=2,dp_shard=2", ONE), (ONE, "pp=2,dp_shard=2")],
    ids=lambda spec: spec_id(spec) or "one",
)
def test_from_layout_to_layout(runs, saved, source, spec):
    """The same one bit for bit; plain accelerate's own folders too, and ours in one process."""
    project, former = saved(source)
    expected = former if source == spec else saved(ONE)[1]
    found = looped(spec, runs.initial("qwen3"), project, True)
    assert set(found) == set(range(STOP + 1, STEPS + 1))
    for step, loss_and_rate in found.items():
        assert loss_and_rate == pytest.approx(expected[step], rel=0 if source == spec else TOLERANCE, abs=0)


EPOCHS, ROWS = 3, 22  # three steps in an epoch, the last one ragged
#: Saved after an epoch and the look, in the middle of one, and right after its last step.
END, MIDDLE, LAST = 3, 5, 6
HALF = 4  # between two batches of one step


def in_any_order(
    spec: str, folder: str, project: str, seedable: bool, start: int = 0, draws: bool = False, alone: bool = False
) -> dict[int, float]:
    """Epochs of shuffled rows under dropout, each followed by a look at held-out rows; saved twice on the way.

    Args:
        draws: the loop hides targets at random, and a step has two batches.
        alone: rank 0 saves, and the others have drawn for their next batch when they hear of it.
    """
    from hf_parallel.hooks import activation

    activation.activate(spec, source="test")
    settings = DataLoaderConfiguration(use_seedable_sampler=seedable)
    torch.manual_seed(start)  # what a resumed process draws before it has loaded is its own affair
    accelerator = Accelerator(cpu=True, dataloader_config=settings, gradient_accumulation_steps=1 + draws)
    model = AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.1).train()
    batch_size = GLOBAL_BATCH // axes(spec)["data_ranks"]
    loader = DataLoader(Rows(ROWS, seed=11, even=True), batch_size=batch_size, shuffle=True)
    held_out = DataLoader(Rows(ROWS, seed=12, even=True), batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    if start:
        accelerator.load_state(f"{project}/{start}")
    losses, step = {}, start
    for epoch in range(start // len(loader) - (start == LAST), EPOCHS):
        done = step - epoch * len(loader)
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            if draws:
                labels = batch["labels"]
                batch["labels"] = labels.masked_fill(torch.rand(labels.shape, device=labels.device) < 0.3, -100)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                take_step(accelerator, model, optimizer, loss, math.inf)
            losses[step := step + 1] = accelerator.gather(loss.detach()).mean().item()
            if (not alone or accelerator.is_main_process) and step in (HALF, MIDDLE, LAST) and not start:
                accelerator.save_state(f"{project}/{step}")
        for batch in held_out:
            with torch.no_grad():
                model(**batch)
        if (not alone or accelerator.is_main_process) and step == END and not start:
            accelerator.save_state(f"{project}/{step}")
    accelerator.end_training()
    return losses


@pytest.mark.parametrize(
    ("spec", "seedable", "starts"),
    [("tp=2", False, (END, MIDDLE, LAST)), ("dp_shard=2", False, (END, MIDDLE)), ("pp=2", True, (MIDDLE, LAST))],
)
def test_the_order_of_rows(runs, tmp_path, spec, seedable, starts):
    """In the middle of an epoch and at the end of one, bit for bit; an epoch is neither replayed nor drawn anew."""
    arguments = spec, runs.initial("llama"), str(tmp_path), seedable
    expected = run(in_any_order, 2, *arguments, init=False)[0]
    assert len(expected) == EPOCHS * 3
    for start in starts:
        found = run(in_any_order, 2, *arguments, start, init=False)
        assert found == [{step: loss for step, loss in expected.items() if step > start}] * 2


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2"])
def test_rank_0_alone_saves(runs, tmp_path, spec):
    """Random numbers and counts of the other ranks are those of the moment of the save, bit for bit."""
    found = {}
    for alone in (False, True):
        arguments = spec, runs.initial("llama"), str(tmp_path / str(alone)), False
        found[alone] = [run(in_any_order, 2, *arguments, start, True, alone, init=False) for start in (0, HALF)]
    assert found[True] == found[False]


def damaged(spec: str, folder: str, project: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        loop(spec, folder, project, True)
    return str(caught.value)


def test_damage_is_named(runs, saved, tmp_path):
    """On every rank; by its name if the folder is given, and it is not chosen if it is not."""
    import shutil

    from hf_parallel.checkpoint import CheckpointError  # noqa: F401 - a RuntimeError

    project = shutil.copytree(saved("tp=2")[0], tmp_path / "project")
    file = project / "checkpoints" / "checkpoint_0" / "optimizer" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    texts = set(run(damaged, 2, "tp=2", runs.initial("qwen3"), str(project), init=False))
    assert len(texts) == 1
    assert "optimizer/state.safetensors differs from its checksum" in texts.pop()


def loop_with_hooks(spec: str, folder: str, project: str, resume: bool = False) -> list[float]:
    """Three steps, saved after two by a hook that saves the model in a way of its own; or the last one, from there."""
    from hf_parallel.hooks import activation

    activation.activate(spec or "dp_shard=-1", source="test")
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = os.path.join(project, "state")

    def save(models, weights, out):
        if accelerator.is_main_process:
            models[0].save_pretrained(os.path.join(out, "own"))
            weights.pop()

    def load(models, out):
        model = models.pop()
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(os.path.join(out, "own")).state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    if resume:
        accelerator.load_state(state)
    losses = []
    for step, batch in enumerate(rows(3, 3, 32)):
        if resume and step < STOP:
            continue
        loss = model(input_ids=batch, labels=batch).loss
        take_step(accelerator, model, optimizer, loss)
        losses.append(loss.item())
        if step + 1 == STOP and not resume:
            accelerator.save_state(state)
    return losses


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_hooks_that_save_and_load_the_model(runs, tmp_path, spec):
    folder, project = runs.initial("qwen3"), str(tmp_path)
    expected = run_alone(loop_with_hooks, ONE, folder, str(tmp_path / "one"))
    first = run(loop_with_hooks, 2, spec, folder, project, init=False)[0]
    assert first == pytest.approx(expected, rel=TOLERANCE, abs=0)
    assert sorted(os.listdir(tmp_path / "state" / "own"))[-1] == "model.safetensors"
    assert not (tmp_path / "state" / "model.safetensors").exists()
    second = run(loop_with_hooks, 2, spec, folder, project, True, init=False)[0]
    assert second == pytest.approx(expected[STOP:], rel=TOLERANCE, abs=0)


class Tied(torch.nn.Module):
    """A model of a script's own: the head is the embedding, and two layers are one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(515, 6), torch.nn.Linear(6, 515, bias=False)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.head.weight = self.embedding.weight
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, tokens):
        hidden = self.second(self.first(self.embedding(tokens)).relu())
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def go_on_with_ties(spec, out, resume=None):
    """Losses of two steps, after which the state is saved or that of another start is read, and of two more."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7 if resume is None else 8)
    model = Tied()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    losses = []
    for step in range(4):
        if step == 2 and resume is None:
            accelerator.save_state(out)
        elif step == 2:
            accelerator.load_state(resume)
        loss = model(torch.arange(33).reshape(3, 11) * 7)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_tied_weights_of_a_scripts_own_model(spec, tmp_path):
    """The file has each tied weight once, and another layout goes on from it."""
    losses = run_alone(go_on_with_ties, None, str(tmp_path / "one"))
    check_numbers(run(go_on_with_ties, 2, spec, str(tmp_path / "saved"), init=False), losses)
    assert set(load_file(tmp_path / "saved/model.safetensors")) == {"embedding.weight", "first.weight", "first.bias"}
    for other in ("dp_replicate=2", "dp_shard=2"):
        ranks = run(go_on_with_ties, 2, other, None, str(tmp_path / "saved"), init=False)
        check_numbers([rank[2:] for rank in ranks], losses[2:])
        assert abs(ranks[0][0] - losses[0]) > 1e-2
