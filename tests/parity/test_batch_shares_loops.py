"""`batch_shares` in Accelerate loops: the model's loss, losses of the loop's own, and gathers in order."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.rows import Rows, Stream
from tests.training import GLOBAL_BATCH, Outcome, Tolerance, activate, axes, spec_id

SPECS = (
    *("dp_shard=2,batch_shares=3:1", "dp_replicate=2,dp_shard=2,batch_shares=3:1:2:2"),
    *("tp=2,dp_shard=2,batch_shares=1:3", "pp=2,dp_shard=2,batch_shares=3:1"),
)


def of_model(model, batch):
    return 2 * model(**batch).loss


def of_examples(model, batch):
    """The mean over examples of each one's mean over its targets."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return (each.sum(1) / (targets != -100).sum(1)).mean()


def of_both(model, batch):
    outputs = model(**batch)
    return outputs.loss + 0.1 * outputs.logits.square().mean()


def backward_by_accelerate(accelerator, loss):
    accelerator.backward(loss)


def backward_of_torch(accelerator, loss):
    loss.backward()


def loop(spec, out, folder, loss_of, stream=False, prepared=True, backward=backward_by_accelerate) -> Outcome:
    """Four micro-batches in two steps, then an evaluation whose last batch is ragged."""
    ranks = activate(spec)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Stream(32, 11) if stream else Rows(32, 11)
    order = None if stream else torch.Generator().manual_seed(3)
    loader = DataLoader(rows, batch_size=GLOBAL_BATCH // ranks, shuffle=not stream, generator=order)
    held_out = DataLoader(Rows(13, 12), batch_size=GLOBAL_BATCH // ranks)
    model, optimizer, held_out = accelerator.prepare(model, optimizer, held_out)
    loader = accelerator.prepare(loader) if prepared else loader
    logs, sizes = [], set()
    model.train()
    for batch in loader:
        sizes.add(len(batch["input_ids"]))
        with accelerator.accumulate(model):
            backward(accelerator, loss_of(model, batch))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                logs.append({"loss": 1.0, "grad_norm": float(norm)})
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    found = []
    for batch in held_out:
        with torch.no_grad():
            outputs = model(**batch)
        found.append(accelerator.gather_for_metrics((outputs.logits[:, -1].contiguous(), batch["input_ids"])))
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    logits, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Outcome(logs, [], out, predictions=logits, label_ids=tokens, more=sizes)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
@pytest.mark.parametrize("loss_of", [of_model, of_examples])
def test_same_numbers_as_one_process(runs, loss_of, spec):
    runs.compare(loop, spec, runs.initial("llama"), loss_of, tolerance=Tolerance(predictions=1e-3))


@pytest.mark.parametrize("loss_of", [of_model, of_examples])
@pytest.mark.parametrize("stream", [False, True])
def test_each_rank_has_its_part(runs, loss_of, stream):
    given = loop, SPECS[0], runs.initial("llama"), loss_of, stream
    assert [rank.more for rank in runs.compare(*given, tolerance=Tolerance(predictions=1e-3))] == [{6}, {2}]


REFUSED = [
    ((of_both,), "adds a term of its own to the model's loss"),
    ((of_examples, False, False), r"accelerator.prepare\(loader\) works"),
    ((of_examples, False, True, backward_of_torch), r"accelerator.backward\(loss\) works"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=["two losses", "a loader of its own", "torch's backward"])
def test_refused(runs, tmp_path, given, words):
    with pytest.raises(RankFailure, match=f"batch_shares=3:1: .*{words}"):
        run(loop, axes(SPECS[0])["world"], SPECS[0], str(tmp_path), runs.initial("llama"), *given, init=False)


def test_custom_batches_of_no_fixed_size(runs):
    with pytest.raises(RankFailure, match=pattern_of_refusal("batch_shares=3:1", "Unlike", works=" works")):
        run(prepare_unlike, 2, SPECS[0], init=False)


class Unlike(torch.utils.data.Sampler):
    batch_size, drop_last = None, False

    def __iter__(self):
        yield from ([0, 1], [2], [3, 4, 5])

    def __len__(self):
        return 3


def prepare_unlike(spec: str) -> None:
    activate(spec)
    Accelerator(cpu=True).prepare(DataLoader(Rows(6, 1), batch_sampler=Unlike()))
