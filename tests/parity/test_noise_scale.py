"""`monitor=noise`: the gradient noise scale of real trainings is that of McCandlish et al., on every layout."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, SequentialSampler
from transformers import AutoModelForCausalLM, Trainer

import hf_parallel
from examples import tiny_text
from hf_parallel.ask.config import SpecError
from tests.distributed import run, run_alone, run_alone_once
from tests.rows import Rows
from tests.training import activate, axes, trainer_of

STEPS, SMALL = 2, 4  # of each step's 8 rows small batches have 2
ROWS = 8 * STEPS


class Alike(Rows):
    """Rows of few tokens, whose gradients have something in common."""

    def __init__(self, size, seed, even=False):
        super().__init__(size, seed, even)
        self.tokens %= 5


class InOrder(Trainer):
    """Trains on the rows in their order."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def by_hand(initial, even=False):
    """The noise scale in sequences after each step, from gradients of small batches in one plain process."""
    model, rows = AutoModelForCausalLM.from_pretrained(initial), Alike(ROWS, seed=11, even=even)
    noise, signal, targets, found = 0.0, 0.0, 0.0, []
    for step in range(STEPS):
        gradients, counts = [], []
        for small in range(SMALL):
            first = 8 * step + 2 * small
            batch = [rows[i] for i in (first, first + 1)]
            model.zero_grad()
            model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}).loss.backward()
            gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
            counts.append(sum((row["labels"][1:] != -100).sum().item() for row in batch))
        total = sum(counts)
        whole = sum(count / total * gradient for count, gradient in zip(counts, gradients, strict=True))
        scatter = sum(
            count / total * (gradient - whole).square().sum()
            for count, gradient in zip(counts, gradients, strict=True)
        )
        own = float(total / (SMALL - 1) * scatter)
        noise, targets = 0.99 * noise + own, 0.99 * targets + total
        signal = 0.99 * signal + float(whole.square().sum()) - own / total
        found.append(noise / signal / targets * sum(8 * 0.99**i for i in range(step + 1)))
    return found


def measured(spec, accumulation, initial, out, **settings):
    """What a Trainer logs, whose learning rate leaves the weights as they are."""
    ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(initial)
    arguments = {
        "learning_rate": 0.0,
        "max_steps": STEPS,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 8 // ranks // accumulation,
        **settings,
    }
    trainer, _ = trainer_of(model, out, ranks, arguments, InOrder, train_dataset=Alike(ROWS, seed=11))
    trainer.train()
    return [logs["noise_scale"] for logs in trainer.state.log_history if "noise_scale" in logs]


@pytest.fixture(scope="module")
def expected(runs):
    """The noise scale after each step."""
    return run_alone(by_hand, runs.initial("llama"))


LAYOUTS = [
    ("dp_shard=1", 4),
    ("dp_shard=4", 1),
    ("dp_shard=2", 2),
    ("dp_replicate=2", 2),
    ("dp_replicate=2,dp_shard=2", 1),
    ("dp_shard=2,zero_stage=1", 2),
    ("tp=2", 4),
    ("tp=2,dp_shard=2", 2),
    ("pp=2,pipeline_microbatches=4", 1),
    ("pp=2,pipeline_microbatches=2", 2),
    ("pp=2,dp_shard=2,pipeline_microbatches=2", 1),
    ("pp=2,pipeline_schedule=interleaved_zero_bubble,pipeline_microbatches=4", 1),
    ("tp=2,pp=2,pipeline_microbatches=2", 2),
    ("cp=2,gradient_reduction=micro_step", 4),
    ("cp=2,dp_shard=2", 2),
    ("cp=2,dp_replicate=2,gradient_reduction=micro_step", 2),
]


@pytest.mark.parametrize(("spec", "accumulation"), LAYOUTS)
def test_noise_scale(runs, expected, spec, accumulation, tmp_path):
    initial = runs.initial("llama")
    ranks = run(
        measured, axes(spec)["world"], f"{spec},monitor=noise", accumulation, initial, str(tmp_path), init=False
    )
    for found in ranks:
        assert found == pytest.approx(expected, rel=1e-3)


def text_blocks(count):
    """The demo's text as rows of 33 tokens of a small vocabulary."""
    documents = tiny_text.read_documents()[:40]
    tokenizer = tiny_text.train_tokenizer(documents, 515)
    blocks, _ = tiny_text.train_and_eval_blocks(tokenizer, documents, 33)
    return tiny_text.TextBlocks(blocks.blocks[:count])


def of_batch(initial, out, rows, accumulation, blocks):
    """The noise scale over all blocks, in steps of 2 x `rows` x `accumulation` of them."""
    ranks = activate("dp_shard=2,monitor=noise")
    model = AutoModelForCausalLM.from_pretrained(initial)
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "learning_rate": 0.0}
    trainer, _ = trainer_of(model, out, ranks, settings, InOrder, train_dataset=blocks)
    trainer.train()
    return trainer.state.log_history[-2]["noise_scale"]


def test_three_batch_sizes(runs, tmp_path):
    """The scale is the data's and the model's, not the batch's."""
    blocks = text_blocks(192)
    found = [
        run(of_batch, 2, runs.initial("llama"), str(tmp_path), rows, accumulation, blocks, init=False)[0]
        for rows, accumulation in ((2, 2), (4, 2), (4, 4))
    ]
    assert max(found) < 1.25 * min(found), found


def loop(spec, initial, batch_size):
    """The scale that a hand-written Accelerate loop gets from `metrics`."""
    activate(spec)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_pretrained(initial)
    loader = DataLoader(Alike(ROWS, seed=11, even=True), batch_size=batch_size)
    model.train()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append(hf_parallel.metrics()["noise_scale"])
    return found


@pytest.mark.parametrize(("spec", "rows"), [("dp_shard=2", 2), ("pp=2,pipeline_microbatches=2", 4)])
def test_in_a_loop(runs, spec, rows):
    """A loop takes the mean of its accumulation steps' means: rows have as many targets here."""
    initial = runs.initial("llama")
    expected = run_alone_once(by_hand, initial, True)
    for found in run(loop, 2, f"{spec},monitor=noise", initial, rows, init=False):
        assert found == pytest.approx(expected, rel=1e-3)


def one_small_batch(spec, initial, out):
    with pytest.raises(SpecError) as refused:
        measured(spec, 1, initial, out, per_device_train_batch_size=8)
    return str(refused.value)


@pytest.mark.parametrize(
    ("spec", "works"),
    [("tp=2", "gradient_accumulation_steps 2"), ("cp=2", "gradient_reduction=micro_step")],
)
def test_refused(runs, spec, works, tmp_path):
    """One small batch shows no noise."""
    found = run(one_small_batch, 2, f"{spec},monitor=noise", runs.initial("llama"), str(tmp_path), init=False)
    assert all("monitor=noise" in text and works in text for text in found), found
