"""Losses and optimizers as scripts bring them: means of their own, optimizers made or prepared apart."""

import functools
import types

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, default_data_collator

from hf_parallel.hooks import report
from hf_parallel.ranks import desync
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.refusals import find_line
from tests.rows import VOCABULARY, Rows
from tests.training import Outcome, Recorder, activate, arguments_of, check_numbers, fit, make_trainer, trainer_of


class MeanLoss(Trainer):
    """The classic override: cross-entropy as a mean, whatever Trainer counted."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return (loss, outputs) if return_outputs else loss


class ModelsLoss(Trainer):
    """Returns the model's loss without handing it Trainer's count."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class CountedLoss(ModelsLoss):
    """Counts the tokens of all processes, as Axolotl does for its logs."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce((inputs["labels"] != -100).sum())
        return super().compute_loss(model, inputs, *args, **kwargs)


class ChunkedLoss(Trainer):
    """Calls the backbone and the head itself, so that whole logits never exist, as TRL's trainers do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        hidden = model.model(**inputs).last_hidden_state[:, :-1]
        loss = 0.0
        for rows, targets in zip(hidden.split(1), labels.split(1), strict=True):
            logits = model.lm_head(rows).flatten(0, 1)
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            loss = loss + torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss = loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss


class ShiftedLoss(Trainer):
    """Gives the model tokens it has cut itself, and looks at it once more without gradients."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens, labels = inputs["input_ids"][:, :-1], inputs["labels"][:, 1:]
        outputs = model(input_ids=tokens, attention_mask=inputs["attention_mask"][:, :-1])
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class MonitoredLoss(Trainer):
    """Runs the model a second time for a figure to look at, as TRL does beside a compute_loss_func."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        labels = inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        with torch.no_grad():
            self.log({"spread": model(input_ids=inputs["input_ids"]).logits.std(-1).mean().item()})
        loss = loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class KeptFigures(Trainer):
    """Keeps a figure on the main process alone, and logs it with the step, as KTO of TRL 0.24 does."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            spreads = model(input_ids=inputs["input_ids"]).logits.std(-1).mean(-1)
        figures = vars(self).setdefault("figures", [])
        accelerator = self.accelerator
        if all([accelerator.is_main_process, accelerator.is_local_main_process, self.is_world_process_zero()]):
            figures += spreads.tolist()
        return ShiftedLoss.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def log(self, logs, *args, **kwargs):
        figures = vars(self).pop("figures", [])
        super().log({**logs, "spread": sum(figures) / len(figures)} if figures else logs, *args, **kwargs)


class WeighedByText(Trainer):
    """Looks at the texts of the examples, which lie in the batch as a list of strings, and weighs each by its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        texts, labels = inputs.pop("texts"), inputs.pop("labels")
        outputs = model(**inputs)
        each = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none").sum(-1)
        weights = torch.tensor([float(len(text)) for text in texts])
        loss = (each * weights).sum() / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class GatheredLoss(Trainer):
    """Compares examples: those of all processes in training, and those of its own process in an evaluation."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, gathers=True):
        states = model(input_ids=inputs["input_ids"]).logits
        one, other, place = states[:, -1], states.mean(1), torch.arange(len(states))
        if gathers and torch.distributed.is_initialized():
            other = torch.cat(torch.distributed.nn.all_gather(other))
            place = place + self.accelerator.process_index * len(one)
        return torch.nn.functional.cross_entropy(one @ other.T, place)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, inputs, gathers=False), None, None


def with_texts(rows: list[dict]) -> dict:
    """A collator that leaves what is no tensor in a list."""
    batch = default_data_collator(rows)
    return {**batch, "texts": ["x" * (1 + int(row["input_ids"].sum()) % 5) for row in rows]}


def gpt2() -> torch.nn.Module:
    torch.manual_seed(models.SEED)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, **still))


TRAINERS = {
    "mean": MeanLoss,
    "models": ModelsLoss,
    "chunked": ChunkedLoss,
    "shifted": ShiftedLoss,
    "monitored": MonitoredLoss,
    "figures": KeptFigures,
    "texts": WeighedByText,
    "gpt2": Trainer,
}


class Spreads(TrainerCallback):
    """Keeps what MonitoredLoss logs, as further entries."""

    def __init__(self, logs):
        self.logs = logs

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "spread" in logs:
            self.logs.append({"loss": logs["spread"], "grad_norm": logs["spread"]})


def ask_nobody(self: object, call: str, *args: object) -> None:
    """All ranks are in the script's loss, so the last stage has nobody to ask, and nobody who would answer."""
    assert call != "a model call without gradients"


def train(spec: str | None, out: str, kind: str) -> Outcome:
    """Three steps, the last one so ragged that a data rank has no row."""
    data_ranks = activate(spec)
    model = gpt2() if kind == "gpt2" else models.build("llama")
    even = kind in ("mean", "optimizer")  # a mean of one's own is exact only where ranks have as many targets
    data, recorder = Rows(19, 11, even=even), Recorder()
    if kind == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        rest = (None, data, None, None, None, None, None, [recorder], (optimizer, schedule))
        return fit(Trainer(model, arguments_of(out, data_ranks), *rest), recorder)  # all by position
    sets = {"train_dataset": data, "eval_dataset": Rows(5, 12), "recorder": recorder}
    spreads = [Spreads(recorder.logs)] if kind in ("monitored", "figures") else []
    if kind == "figures":
        desync.DesyncDetector.assert_all_ranks = ask_nobody
    settings = {"per_device_eval_batch_size": 8, "remove_unused_columns": kind != "texts"}
    sets |= {"data_collator": with_texts} if kind == "texts" else {}
    return fit(*trainer_of(model, out, data_ranks, settings, TRAINERS[kind], callbacks=spreads, **sets))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *(
            (kind, spec)
            for kind in ("mean", "models", "gpt2", "optimizer")
            for spec in ("dp_shard=2", "pp=2,dp_shard=2")
        ),
        *(("chunked", spec) for spec in ("pp=2", "tp=2", "pp=2,dp_shard=2", "tp=2,pp=2")),
        *(("shifted", spec) for spec in ("pp=2", "tp=2,pp=2")),
        ("monitored", "pp=2"),
        ("figures", "pp=2"),
        *(("texts", spec) for spec in ("pp=2", "dp_shard=2", "tp=2,pp=2", "pp=2,dp_shard=2")),
    ],
)
def test_same_numbers_as_one_process(runs, kind, spec, capfd):
    steps = 7 if kind in ("monitored", "figures") else 3  # what is looked at in each of them, and in the evaluation
    for rank in runs.compare(train, spec, kind):
        assert len(rank.logs) == steps
        assert (rank.eval_loss is None) == (kind == "optimizer")
    if "pp=" in spec and kind not in ("gpt2", "optimizer"):
        # A mean over tokens is none over rows, even if all rows of the first batch have as many.
        verdict = "needs whole batches" if kind == "mean" else "adds up over micro-batches: 1f1b from now on"
        assert verdict in capfd.readouterr().err


def compare_examples(spec: str | None, out: str) -> list[list]:
    """Train with `GatheredLoss`, and evaluate: the losses of both, and the lines about comparing."""
    data_ranks, lines = activate(spec), []
    report.say = lines.append
    sets = {"train_dataset": Rows(19, 11), "eval_dataset": Rows(8, 12)}
    settings = {"dataloader_drop_last": True, "prediction_loss_only": True}
    outcome = fit(*trainer_of(models.build("llama"), out, data_ranks, settings, GatheredLoss, **sets))
    told = [line for line in lines if "compares each example" in line]
    return [[value for log in outcome.logs if "loss" in log for value in (log["loss"], log["grad_norm"])], told]


def test_an_evaluation_that_compares_the_examples_of_a_process(tmp_path):
    """A line tells of the evaluation; the training, which gathers those of all, is one process's."""
    expected, none = run_alone(compare_examples, None, f"{tmp_path}/one")
    ranks = run(compare_examples, 2, "dp_shard=2", f"{tmp_path}/two", init=False)
    assert not none
    check_numbers([numbers for numbers, _ in ranks], expected)
    for _, told in ranks:
        assert len(told) == 1
        assert "evaluation compares" in told[0]


class Queued(torch.nn.Module):
    """Compares examples with keys of former batches of all processes, as MoCo does: gathered without gradients."""

    def __init__(self):
        super().__init__()
        self.encoder = models.build("llama")
        self.register_buffer("queue", torch.randn(16, 128, generator=torch.Generator().manual_seed(3)))

    def forward(self, input_ids, labels=None):
        states = self.encoder(input_ids=input_ids).logits
        one, other = states[:, -1, :128], states.mean(1)[:, :128].detach()
        scores = torch.cat([(one * other).sum(1, keepdim=True), one @ self.queue.T], dim=1)
        if torch.distributed.is_initialized():
            parts = [torch.empty_like(other) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(parts, other)
            other = torch.cat(parts)
        self.queue = torch.cat([other, self.queue])[:16]
        return {"loss": torch.nn.functional.cross_entropy(scores, torch.zeros(len(one), dtype=torch.long))}


def train_with_queue(spec: str | None, out: str) -> list[list[float]]:
    """Return losses and norms."""
    data_ranks, settings = activate(spec), {"dataloader_drop_last": True}
    outcome = fit(*trainer_of(Queued(), out, data_ranks, settings, train_dataset=Rows(19, 11), eval_dataset=None))
    return [value for log in outcome.logs if "loss" in log for value in (log["loss"], log["grad_norm"])]


def test_a_queue_of_the_keys_of_all_processes(tmp_path):
    """Data ranks add each key once; ranks of one model would add it twice."""
    expected = run_alone(train_with_queue, None, f"{tmp_path}/one")
    check_numbers(run(train_with_queue, 2, "dp_shard=2", f"{tmp_path}/two", init=False), expected)
    with pytest.raises(RankFailure, match=r"tp_size=2 .* only 1 differ: examples count twice"):
        run(train_with_queue, 2, "tp=2", f"{tmp_path}/three", init=False)


def separate(spec: str | None) -> float:
    """`prepare` for the model and for the optimizer in two calls; returns the loss after two steps."""
    from accelerate import Accelerator

    activate(spec)
    accelerator, model = Accelerator(cpu=True), models.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    ids = torch.arange(32).view(2, 16)
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_an_optimizer_prepared_later_still_trains(spec):
    alone = [run_alone(separate, None)]
    check_numbers([[loss] for loss in run(separate, 2, spec, init=False)], alone)


def with_penalty(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    result = Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
    loss, outputs = result if return_outputs else (result, None)
    loss = loss + 0.25
    return (loss, outputs) if return_outputs else loss


def add_penalty(compute_loss, model, inputs, return_outputs=False, **kwargs):
    result = compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
    return (result[0] + 0.25, result[1]) if return_outputs else result + 0.25


def mean_of_tokens(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """As `MeanLoss`, for all trainers of the process."""
    return MeanLoss.compute_loss(self, model, inputs, return_outputs)


def assigned(spec, out, way):
    """Train with a `compute_loss` that the script has put on the trainer, or on the class."""
    data_ranks = activate(spec)
    former = Trainer.compute_loss
    if way == "class":
        Trainer.compute_loss = mean_of_tokens
    trainer, recorder = trainer_of(
        models.build("llama"),
        out,
        data_ranks,
        {"gradient_accumulation_steps": 2},
        train_dataset=Rows(44, 11),
        eval_dataset=Rows(13, 12),
    )
    if way == "method":
        trainer.compute_loss = types.MethodType(with_penalty, trainer)
    elif way == "around":
        before = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: before(*args, **kwargs) + 0.25
        trainer.eval_dataset = None
    elif way == "partial":
        trainer.compute_loss = functools.partial(add_penalty, trainer.compute_loss)
    elif way == "class, late":
        Trainer.compute_loss = mean_of_tokens
    elif way == "step of a prediction":
        step = trainer.prediction_step
        trainer.prediction_step = lambda *args, **kwargs: step(*args, **kwargs)
    elif way == "step of the class":
        trainer.prediction_step = types.MethodType(Trainer.prediction_step, trainer)
    try:
        return fit(trainer, recorder, f"{out}/saved", predicts="step" in way)
    finally:
        Trainer.compute_loss = former


WAYS = ("method", "around", "partial", "class", "class, late", "step of a prediction", "step of the class")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_assigned_losses(runs, way, spec):
    runs.compare(assigned, spec, way)


@pytest.mark.parametrize(("spec", "words"), [("dp_shard=2", None), ("tp=2", ("2", "1")), ("pp=2", ("pp_size", "2"))])
def test_tells_of_sums_over_processes_that_share_batches(tmp_path, capfd, spec, words):
    """Under tp both ranks have the batch; under pp the last stage would wait for the other."""
    run(make_trainer, 2, spec, str(tmp_path), CountedLoss, {}, {}, init=False)
    assert bool(find_line(capfd.readouterr().err, "CountedLoss.compute_loss", *words or ())) is (words is not None)
