"""Trainers with a loss of their own by any arithmetic: over labels, masks, examples, with a count or without one.

A script writes its mean in one of many ways, adds terms, weighs tokens, logs figures, and may be one of TRL's SFT.
Compared is what `trainers` compares. Where data ranks have another loss than one process, a line must tell so.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback

from hf_parallel.hooks import report
from tests.drawn import trainers
from tests.drawn.bench import Choices, Kind, summarise
from tests.drawn.trainers import ARGUMENTS, Keeper
from tests.rows import PADDING, VOCABULARY, Rows
from tests.training import activate

#: Means over what a script's own columns or its tokens tell.
OF_MORE = ("token_weights", "row_weights", "ids", "rows_of_a_kind")
#: The column that such a mean needs, where it is none of the batch and not `loss_mask`.
COLUMNS = {"token_weights": "token_weights", "row_weights": "row_weights", "rows_of_a_kind": "kind"}
#: How the loss is written, and what its mean runs over.
OF_LOSS: dict[str, tuple] = {
    "form": (
        *("sums", "indexed", "torch", "clamped", "epsilon", "items", "items_or_mean", "flattened"),
        *(
            "by_example",
            "of_examples",
            "sum",
            "focal",
            "double",
            "classes",
            "torch_classes",
            "loop",
            "weighted",
            "super",
        ),
    ),
    "over": ("labels", "attention_mask", "loss_mask", "both", *OF_MORE),
    "labels": ("kept", "popped", "copied"),
    "reads": ("attribute", "key", "place"),
    "second": ("none", "model", "z", "examples", "scaled", "entropy", "first_token", "hidden", "last_hidden"),
    "returns": ("outputs", "dict"),
    "logs": ("nothing", "figure", "collected"),
    "given": ("override", "function", "assigned"),
    "names_count": (True, False),
    "trainer": ("plain", "sft"),
    "watches": ("nothing", "model", "optimizer", "weights"),
    "more_columns": (False, True),
    "empty_rows": (False, True),
}
WAYS = {name: trainers.WAYS[name] for name in ("rows", "eval_rows", "batch", "metrics", "callbacks", "twice")}
WAYS |= {name: trainers.WAYS[name] for name in ("resumes", "resumes_on", "lora", "frozen", "optimizers")}
LEFT_OUT = (
    *("label_smoothing_factor", "include_num_input_tokens_seen", "bf16", "bf16_full_eval", "full_determinism"),
    *("restore_callback_states_from_checkpoint", "eval_do_concat_batches", "include_for_metrics"),
)
CHOICES: dict[str, tuple] = {
    "model": ("llama", "llama", "gpt2", "gemma2", "qwen3", "odd", "phi3", "falcon"),
    "uneven_lengths": (True, False),
    **OF_LOSS,
    **WAYS,
    **{name: values for name, values in ARGUMENTS.items() if name not in LEFT_OUT},
}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    plain: set[str] = set()
    fitted = trainers.fit({**trainers.PLAIN, **chosen, "uneven_lengths": False})
    chosen = {**chosen, **{name: fitted[name] for name in chosen if name != "uneven_lengths" and name in fitted}}
    if chosen["form"] in ("torch", "torch_classes", "classes"):
        plain |= {"over"}
    if chosen["given"] == "function" or chosen["second"] == "model":
        plain |= {"labels"}
    if chosen["given"] == "function":
        plain |= {"returns"}
        if chosen["over"] != "labels":
            plain |= {"over"}
        if chosen["second"] == "model" or "hidden" in chosen["second"]:
            plain |= {"second"}
    if chosen["given"] == "function" or chosen["trainer"] == "sft":
        plain |= {"more_columns"}
        if chosen["over"] in ("loss_mask", "both", *OF_MORE):
            plain |= {"over"}
    if chosen["over"] in ("loss_mask", "both", *OF_MORE):
        chosen |= {"more_columns": True}
    if chosen["more_columns"]:
        chosen |= {"remove_unused_columns": False}
    if chosen["trainer"] == "sft":
        chosen |= {"remove_unused_columns": False}
        plain |= {"returns", "metrics", "batch_eval_metrics", "metric_for_best_model", "greater_is_better", "lora"}
        plain |= {"train_sampling_strategy", "load_best_model_at_end", "callbacks", "lr_scheduler_type"}
        chosen |= {"save_strategy": chosen["save_strategy"].replace("best", "epoch")}
    if chosen["uneven_lengths"]:  # predictions at padding depend on who padded
        plain |= {"metrics", "metric_for_best_model", "greater_is_better", "batch_eval_metrics"}
    if chosen["empty_rows"]:  # no batch of one process may be without targets
        chosen |= {"rows": 31, "batch": 8}
    if chosen["form"] == "super" and "hidden" in chosen["second"]:
        plain |= {"second"}
    if chosen["form"] == "super":
        plain |= {"labels", "over", "more_columns", "names_count", "given"}
    if chosen["form"] == "items":
        plain |= {"names_count"}
    chosen = {**chosen, **{name: PLAIN[name] for name in plain}}
    return chosen | {"uneven_lengths": False} if chosen["second"] == "last_hidden" else chosen


# ---- data ----------------------------------------------------------------------------------------------------------


class MaskedRows(Dataset):
    """Rows of unlike lengths with a mask of the script's own, which is not where labels are."""

    def __init__(self, rows: int, seed: int, chosen: Choices) -> None:
        self.rows, self.more = Rows(rows, seed, uneven_lengths=chosen["uneven_lengths"]), chosen["more_columns"]
        self.empty, self.column = chosen["empty_rows"], COLUMNS.get(chosen["over"], "loss_mask")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        if self.empty and index % 2:
            row["labels"][:] = -100
        tokens = torch.arange(len(row["labels"]))
        columns = {
            "loss_mask": ((tokens + index) % (index % 3 + 2) == 0).long(),
            "token_weights": 1 + (tokens * 7 + index * 5) % 4 / 3,
            "row_weights": torch.tensor(1 + index % 4 / 2),
            "kind": torch.tensor(index % 5 % 3),
        }
        return {**row, self.column: columns[self.column]} if self.more else row


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest row."""
    stack, padding = torch.nn.utils.rnn.pad_sequence, {**PADDING, "loss_mask": 0, "token_weights": 0}
    by_row = {
        key: torch.stack([row[key] for row in rows])
        for key in rows[0]
        if key in COLUMNS.values() and key not in padding
    }
    rows = [{key: torch.as_tensor(row[key]) for key in padding if key in row} for row in rows]
    return {**{key: stack([row[key] for row in rows], True, padding[key]) for key in rows[0]}, **by_row}


def build_data(chosen: Choices, rows: int, seed: int, training: bool = False) -> Any:
    """Make the data set; SFT wants a table."""
    ours = MaskedRows(rows, seed, chosen)
    if chosen["trainer"] == "plain":
        return ours
    from datasets import Dataset as Table

    return Table.from_list([{key: value.tolist() for key, value in ours[index].items()} for index in range(rows)])


# ---- the loss ------------------------------------------------------------------------------------------------------


def take_mean(chosen: Choices, logits: torch.Tensor, labels: torch.Tensor, held: torch.Tensor, items: Any) -> Any:
    """The mean in the script's own words, over the tokens that are held."""
    form, targets = chosen["form"], labels.clamp(min=0)
    if form == "torch":
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    weights = torch.linspace(0.5, 2, VOCABULARY, device=logits.device)[: logits.shape[-1]]
    if form == "torch_classes":
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weights)
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    if form == "double":
        losses = losses.double()
    if form == "focal":
        losses = (1 - (-losses).exp()) ** 2 * losses
    if form == "classes":
        return (losses * weights[targets] * held).sum() / (weights[targets] * held).sum()
    if form == "weighted":
        far = 0.5 + torch.arange(held.shape[1], device=held.device) / 20
        return (losses * held * far).sum() / held.sum()
    if held.is_floating_point() and form in ("indexed", "flattened", "items_or_mean", "loop"):
        return (losses * held).sum() / held.sum()
    summed, count = (losses * held).sum(), held.sum()
    by_example = (losses * held).sum(1) / held.sum(1).clamp(min=1)
    ways = {
        "indexed": lambda: losses[held].mean(),
        "clamped": lambda: summed / count.clamp(min=1),
        "epsilon": lambda: summed / (count + 1e-8),
        "items": lambda: summed / (count if items is None else items),
        "items_or_mean": lambda: summed / items if items is not None else losses[held].mean(),
        "flattened": lambda: losses.flatten()[held.flatten().nonzero()[:, 0]].mean(),
        "by_example": lambda: by_example.mean(),
        "of_examples": lambda: sum(by_example.unbind()) / len(by_example),
        "sum": lambda: summed,
        "loop": lambda: sum(one[kept].sum() for one, kept in zip(losses, held, strict=True)) / count,
    }
    return ways.get(form, lambda: summed / count)()


def add_second(chosen: Choices, loss: Any, logits: torch.Tensor, held: torch.Tensor, outputs: Any) -> Any:
    """A second term, or none."""
    kind = chosen["second"]
    if kind == "model":
        return loss + 0.3 * outputs.loss
    if kind == "z":
        return loss + 0.1 * (logits[..., :3].square().mean(-1) * held).sum() / held.sum()
    if kind == "entropy":
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return loss - 0.1 * (entropy[held].mean() if held.dtype == torch.bool else (entropy * held).sum() / held.sum())
    if kind == "hidden":
        return loss + 0.1 * (outputs.hidden_states[2][:, :-1].square().mean(-1) * held).sum() / held.sum()
    if kind == "last_hidden":  # of each example, as a head for rewards reads it
        return loss + 0.1 * outputs.hidden_states[-1][:, -1].square().mean()
    if kind == "examples":
        return loss + 0.1 * logits[:, 0].square().mean()
    if kind == "first_token":
        return loss + 0.1 * logits[:, 0].square().mean(-1).mean()
    return 1.5 * loss if kind == "scaled" else loss


def read_logits(chosen: Choices, outputs: Any) -> torch.Tensor:
    if chosen["reads"] == "place":
        return outputs[1] if outputs.get("loss") is not None else outputs[0]
    return outputs["logits"] if chosen["reads"] == "key" else outputs.logits


def find_held(chosen: Choices, batch: dict, labels: torch.Tensor) -> torch.Tensor:
    over = chosen["over"]
    if over == "labels":
        return labels != -100
    targets = labels != -100
    if over == "both":
        return targets & (batch["loss_mask"][:, 1:] > 0)
    if over == "token_weights":
        return targets * batch["token_weights"][:, 1:]
    if over == "row_weights":
        return targets * batch["row_weights"][:, None]
    if over == "ids":
        return targets & (batch["input_ids"][:, 1:] < VOCABULARY // 2)
    if over == "rows_of_a_kind":
        return targets * (0.1 + (batch["kind"] > 0))[:, None]
    return batch[over][:, 1:] > 0


def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """A user's `compute_loss`."""
    chosen = self.chosen
    more_columns = {name: inputs.pop(name, None) for name in ("loss_mask", *COLUMNS.values())}
    if chosen["form"] == "super":
        loss, outputs = self.base.compute_loss(self, model, inputs, True, num_items_in_batch)
        labels = inputs["labels"][:, 1:]
        loss = add_second(chosen, loss, outputs.logits[:, :-1].float(), labels != -100, outputs)
        return (loss, outputs) if return_outputs else loss
    batch = dict(inputs)
    given = inputs
    if chosen["labels"] == "popped":
        labels = inputs.pop("labels")
    else:
        labels = inputs["labels"]
        if chosen["labels"] == "copied":
            given = {key: value for key, value in inputs.items() if key != "labels"}
    more = {"output_hidden_states": True} if "hidden" in chosen["second"] else {}
    outputs = model(**given, **more)
    logits, labels = read_logits(chosen, outputs)[:, :-1].float(), labels[:, 1:]
    held = find_held(chosen, {**batch, **more_columns}, labels)
    loss = take_mean(chosen, logits, labels, held, num_items_in_batch)
    loss = add_second(chosen, loss, logits, held, outputs)
    if chosen["logs"] == "figure" and model.training:
        self.log({"figure": 1.0})
    if chosen["logs"] == "collected":
        self.collected.append(float(loss))
    returned = {"logits": outputs.logits} if chosen["returns"] == "dict" else outputs
    return (loss, returned) if return_outputs else loss


def compute_without_count(self, model, inputs, return_outputs=False, **kwargs):
    """A user's `compute_loss` that does not name the count."""
    return compute_loss(self, model, inputs, return_outputs, None)


def make_function(chosen: Choices) -> Any:
    """A user's `compute_loss_func`."""

    def loss_of(outputs, labels, num_items_in_batch=None):
        items = num_items_in_batch if chosen["names_count"] else None
        logits, targets = read_logits(chosen, outputs)[:, :-1].float(), labels[:, 1:]
        loss = take_mean(chosen, logits, targets, targets != -100, items)
        return add_second(chosen, loss, logits, targets != -100, outputs)

    return loss_of


# ---- the script ----------------------------------------------------------------------------------------------------


class Watcher(TrainerCallback):
    """A user's callback that reads the model, the optimizer or the schedule, and what was logged."""

    def __init__(self, what: str) -> None:
        self.what, self.seen = what, {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        if self.what == "model":
            tokens = Rows(2, 5).tokens.to(model.device)
            with torch.no_grad():
                self.seen[f"logits {state.global_step}"] = float(model(input_ids=tokens).logits.abs().sum())
        if self.what == "optimizer":
            self.seen[f"rate {state.global_step}"] = optimizer.param_groups[0]["lr"]
            self.seen[f"last rate {state.global_step}"] = lr_scheduler.get_last_lr()[0]
        if self.what == "weights":
            total = sum(float(value.double().abs().sum()) for value in model.state_dict().values())
            self.seen[f"weights {state.global_step}"] = total

    def on_log(self, args, state, control, logs=None, **kwargs):
        entry = state.log_history[-1]
        self.seen[f"logged {len(state.log_history)}"] = entry.get("loss", entry.get("eval_loss", 0.0))


def make(chosen: Choices, model: Any, out: str, data_ranks: int, keepers: list, stop: int | None) -> Trainer:
    """The script's trainer."""
    base: Any = Trainer
    options: dict[str, Any] = {"data_collator": collate}
    if chosen["trainer"] == "sft":
        import trl

        base, kind = trl.SFTTrainer, trl.SFTConfig
        more = {"bf16": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        arguments = trainers.read_arguments({**trainers.PLAIN, **chosen}, out, data_ranks, kind, **more)
        from tests.trl_scripts import make_tokenizer

        options["processing_class"] = make_tokenizer()
    else:
        arguments = trainers.read_arguments({**trainers.PLAIN, **chosen}, out, data_ranks)
    options |= trainers.options_of(
        {**trainers.PLAIN, **chosen, "loss": "model"}, model, lambda c, *a: build_data(chosen, *a)
    )
    options["data_collator"] = collate
    own = compute_loss if chosen["names_count"] else compute_without_count

    def log(self: Any, logs: dict, *args: Any, **kwargs: Any) -> None:
        """A user's `log`, which adds what its loss has collected."""
        if self.collected:
            logs["collected"] = min(1, len(self.collected))
            self.collected.clear()
        base.log(self, logs, *args, **kwargs)

    given = {"compute_loss": own} if chosen["given"] == "override" else {}
    kind = type("OwnLoss", (base,), {"chosen": chosen, "base": base, "collected": [], "log": log, **given})
    if chosen["given"] == "function":
        options["compute_loss_func"] = make_function(chosen)
    callbacks = [*trainers.callbacks_of({**trainers.PLAIN, **chosen}, keepers[0], stop), *keepers[1:]]
    trainer = kind(model=model, args=arguments, callbacks=callbacks, **options)
    if chosen["given"] == "assigned":
        trainer.compute_loss = own.__get__(trainer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks, told = activate(spec), []
    say = report.say
    report.say = lambda line: (told.append(line), say(line))[1]
    torch.manual_seed(5)
    keepers = [Keeper(), Watcher(chosen["watches"])]
    model = trainers.load({**trainers.PLAIN, **chosen}, folder)
    trainer = make(chosen, model, out, data_ranks, keepers, 3 if part == "before" else None)
    found = trainers.train_as_chosen(trainer, chosen, part)
    if chosen["twice"] == "new_trainer":
        trainer = make(chosen, trainer.model, out, data_ranks, keepers, None)
        found["new trainer"] = trainer.train().metrics
    found["evaluate"] = trainer.evaluate()
    if not chosen["uneven_lengths"]:
        predicted = trainer.predict(build_data(chosen, 9, 21))
        found["predict"] = predicted.metrics
        if predicted.predictions is not None:
            found["predictions"] = summarise(predicted.predictions)
    found |= trainers.read_state(trainer)
    found["watched"] = keepers[1].seen
    trainer.save_model(f"{out}/saved")
    return {"found": found, "gradient_keys": keepers[0].gradient_keys, "folder": f"{out}/saved", "told": told}


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    begins_anew = chosen["resumes"] and "num_tokens" in key
    return begins_anew or trainers.leaves_out({**trainers.PLAIN, **chosen}, name, key)


def tolerances(chosen: Choices) -> tuple[float, float]:
    return trainers.tolerances({**trainers.PLAIN, **chosen})


KIND = Kind(CHOICES, fit, script, tolerances, leaves_out)
