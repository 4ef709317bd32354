"""Scripts whose losses are means over unlike numbers of things: what `tests/parity/test_counts.py` runs.

Odd sizes throughout: 515 tokens, rows of at most 33, 19 or 20 rows in batches of 8, so that the last batch is ragged
and, of four data ranks, leaves some without a row.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import transformers
from torch.nn import functional as F
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from tests import models
from tests.training import arguments_of, trainer_of

VOCABULARY, LENGTH = 515, 33


def tokens(size: int, seed: int) -> list[list[int]]:
    """Rows of unequal lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [LENGTH - 7 * (i % 4) for i in range(size)]
    return [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """All to LENGTH, so that ranks agree in shape; numbers of a row stay one per row."""
    batch: dict[str, torch.Tensor] = {}
    for key in rows[0]:
        if not isinstance(rows[0][key], list):
            batch[key] = torch.tensor([row[key] for row in rows])
            continue
        fill = {"labels": -100}.get(key, 0)
        batch[key] = torch.tensor([row[key] + [fill] * (LENGTH - len(row[key])) for row in rows])
    return batch


# ---- data ----------------------------------------------------------------------------------------------------------


def causal(size: int, seed: int) -> list[dict]:
    """The first tokens of a row, of some rows most, are no targets."""
    rows = tokens(size, seed)
    return [
        {"input_ids": r, "attention_mask": [1] * len(r), "labels": [-100] * (5 * (i % 4)) + r[5 * (i % 4) :]}
        for i, r in enumerate(rows)
    ]


def masked(size: int, seed: int) -> list[dict]:
    """Every so manyth token is a target, not in the first rows."""
    rows = tokens(size, seed)
    return [
        {
            "input_ids": r,
            "attention_mask": [1] * len(r),
            "labels": [t if n % (2 + i % 5) == 0 else -100 for n, t in enumerate(r)],
        }
        for i, r in enumerate(rows)
    ]


def tagged(size: int, seed: int) -> list[dict]:
    """A class of three for the targets."""
    return [{**row, "labels": [t if t == -100 else t % 3 for t in row["labels"]]} for row in masked(size, seed)]


def answered(size: int, seed: int) -> list[dict]:
    """Of some rows the start or the end of the answer is cut away."""
    return [
        {
            "input_ids": r,
            "attention_mask": [1] * len(r),
            "start_positions": 99 if i % 5 == 0 else i % 7,
            "end_positions": 99 if i % 3 == 0 else i % 7 + 4,
        }
        for i, r in enumerate(tokens(size, seed))
    ]


def classed(size: int, seed: int) -> list[dict]:
    """Class of a row."""
    return [{"input_ids": r, "attention_mask": [1] * len(r), "labels": r[0] % 3} for r in tokens(size, seed)]


def rated(size: int, seed: int) -> list[dict]:
    """A number for a row."""
    return [{**row, "labels": row["labels"] - 0.7} for row in classed(size, seed)]


def translated(size: int, seed: int) -> list[dict]:
    """Targets of other lengths than the rows."""
    return [
        {"input_ids": r, "attention_mask": [1] * len(r), "labels": r[: 3 + 5 * (i % 4)]}
        for i, r in enumerate(tokens(size, seed))
    ]


def bare(size: int, seed: int) -> list[dict]:
    """What is joined without padding."""
    return [{"input_ids": r} for r in tokens(size, seed)]


# ---- trainers ------------------------------------------------------------------------------------------------------


def targets_of(inputs: dict) -> torch.Tensor:
    """How many targets a causal model has here."""
    return (inputs["labels"][:, 1:] != -100).sum()


def own_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean over targets, whatever Trainer counted."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Returns(Trainer):
    """The model's loss without the count."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Weights(Trainer):
    """Weights the model's mean by the count itself, as ms-swift does."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss
        if num_items_in_batch is not None:
            loss = loss * targets_of(inputs) / num_items_in_batch
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Divides(Trainer):
    """Divides a sum by the count, and never heard of processes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:].flatten()
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum")
        loss = loss / (num_items_in_batch if num_items_in_batch is not None else targets_of(inputs))
        return (loss, outputs) if return_outputs else loss


class Multiplies(Divides):
    """Multiplies by the number of processes, as DDP needs it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class PassesOn(Trainer):
    """Trainer's own loss, and a mean over rows beside it."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 0.1 * outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class Looks(Trainer):
    """Looks at the count but returns the model's mean."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen = None if num_items_in_batch is None else float(num_items_in_batch)
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Twice(Trainer):
    """As R-drop: the mean of two passes, and how far they are apart, a mean over rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, others = model(**inputs), model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)})
        apart = F.kl_div(others.logits.log_softmax(-1), outputs.logits.softmax(-1), reduction="none").sum(-1)
        loss = 0.5 * (outputs.loss + others.loss) + 0.2 * apart.mean()
        return (loss, outputs) if return_outputs else loss


class Mean(Trainer):
    """A mean of its own over targets."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = own_mean(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class ByHand(Trainer):
    """A mean over rows of sums over their tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        scores = outputs.logits.log_softmax(-1).gather(2, inputs["input_ids"][..., None])
        loss = -(scores[..., 0] * inputs["attention_mask"]).sum(1).mean()
        return (loss, outputs) if return_outputs else loss


class ReadsAhead(ByHand):
    """That, and reads the batches of a step while the former one is computed, and hands on copies."""

    ahead: tuple = ([], None)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        now = self.ahead if self.ahead[0] else super().get_batch_samples(epoch_iterator, num_batches, device)
        self.ahead = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [copy.copy(batch) for batch in now[0]], now[1]


class ClassWeights(Trainer):
    """The override of Trainer's documentation: classes weigh unlike."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.5, 0.3]))(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class Predicts(Trainer):
    """Evaluates by itself."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss.detach(), outputs.logits, inputs["labels"]


# ---- scripts -------------------------------------------------------------------------------------------------------


def encoder(kind: str, **changes: Any) -> Any:
    """A BERT of this kind of head."""
    torch.manual_seed(models.SEED)
    return getattr(transformers, f"BertFor{kind}")(models.bert(vocab_size=VOCABULARY, **changes))


class Unheard(transformers.BertForSequenceClassification):
    """A head whose loss is a mean that torch does not take."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        output = super().forward(input_ids, attention_mask=attention_mask)
        output.loss = (output.logits - labels[:, None]).pow(2).sum(1).mean()
        return output


def unheard() -> Any:
    """A BERT with that head."""
    torch.manual_seed(models.SEED)
    return Unheard(models.bert(vocab_size=VOCABULARY))


def decoder(kind: str) -> Any:
    """A Llama of this kind of head."""
    torch.manual_seed(models.SEED)
    config = models.llama(vocab_size=VOCABULARY, num_labels=3, pad_token_id=0, classifier_dropout=0.0)
    return getattr(transformers, f"LlamaFor{kind}")(config)


@dataclass(frozen=True)
class Counted:
    """A model, its data and what the script does."""

    model: Callable[[], Any]
    data: Callable[[int, int], list]
    trainer: type[Trainer] = Trainer
    rows: int = 19
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer
    predicts: bool = False


def llama(**changes: Any) -> Any:
    """Llama with a vocabulary that no number of ranks divides."""
    return models.build("llama", vocab_size=VOCABULARY, **changes)


def t5() -> Any:
    """T5 that generates rows of six tokens, no end among them."""
    model = models.build("t5", vocab_size=VOCABULARY)
    model.generation_config.update(max_new_tokens=6, min_new_tokens=6, decoder_start_token_id=0, pad_token_id=0)
    return model


def trained(script: Counted, data_ranks: int) -> list[float]:
    """Loss and gradient norm of each step, the evaluation's loss, and its metrics and predictions if they matter."""
    generates = "predict_with_generate" in script.arguments
    names = ["start_positions", "end_positions"] if script.data is answered else None
    kind = Seq2SeqTrainingArguments if generates else TrainingArguments
    settings = arguments_of(
        tempfile.mkdtemp(), data_ranks, kind, **{"seed": 42, "label_names": names, **script.arguments}
    )
    sets = {"train_dataset": script.data(script.rows, 1), "eval_dataset": script.data(11, 2)}
    options = {**sets, "data_collator": padded, **script.options}
    kind = Seq2SeqTrainer if generates else script.trainer
    trainer, _ = trainer_of(script.model(), settings.output_dir, settings=settings, kind=kind, **options)
    trainer.train()
    logs = [log[key] for log in trainer.state.log_history if "loss" in log for key in ("loss", "grad_norm")]
    if not script.predicts:
        return [*logs, trainer.evaluate()["eval_loss"]]
    output = trainer.predict(trainer.eval_dataset)
    numbers = [value for key, value in sorted(output.metrics.items()) if key in ("test_loss", "test_rows", "test_sum")]
    return [*logs, *numbers, *described(output.predictions), *described(output.label_ids)]


def described(part: Any) -> list[float]:
    """Shape, and a number per row."""
    if isinstance(part, tuple):
        return [number for item in part for number in described(item)]
    values = numpy.abs(numpy.asarray(part, dtype=float))
    return [*values.shape, *values.reshape(len(values), -1).sum(1).tolist()]


class Sums:
    """compute_metrics, at once or batch by batch: rows and sums of all that it is given."""

    def __init__(self) -> None:
        self.rows, self.sum = 0, 0.0

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        inputs, losses = prediction.inputs, prediction.losses
        inputs = inputs["input_ids"] if hasattr(inputs, "keys") else inputs
        self.rows += len(prediction.predictions) + len(prediction.label_ids) + len(inputs)
        self.sum += float(numpy.asarray(inputs).sum()) + 1000 * float(numpy.asarray(losses).sum())
        return {"rows": self.rows, "sum": self.sum} if compute_result else {}
