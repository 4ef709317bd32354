"""Seq2SeqTrainer scripts: T5, BART and decoders that generate in each evaluation, beside all that Trainer's do.

Compared is what `trainers` compares; of generated tokens every one, without padding: how much of it there is depends
on the other rows of a batch.
"""

from functools import partial
from typing import Any

import torch
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from tests.drawn import trainers
from tests.drawn.bench import Choices, Kind
from tests.drawn.trainers import Keeper
from tests.rows import PADDING, Pairs, Rows
from tests.training import activate
from tests.trl_scripts import make_tokenizer

ENCODERS = ("t5", "bart", "t5_gated", "mbart")
DECODERS = ("llama", "qwen3", "gpt2", "gemma2", "opt", "falcon", "bloom", "mistral", "odd", "gpt_neox", "mamba")

#: What a script asks of generation in one way or another.
WAYS: dict[str, tuple] = {
    "predict_with_generate": (True, False),
    "generation_max_length": (None, 12, 5, 27),
    "generation_num_beams": (None, 3, 2),
    "generation": (
        {},
        {"max_new_tokens": 6},
        {"min_new_tokens": 4, "max_new_tokens": 9},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3},
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
        {"num_beams": 3, "num_return_sequences": 2},
        {"bad_words_ids": [[3], [7, 9]], "suppress_tokens": [11, 300]},
        {"cache_implementation": "static"},
        {"encoder_no_repeat_ngram_size": 2, "exponential_decay_length_penalty": (3, 1.2)},
    ),
    "generation_from": ("model", "arguments", "folder", "call"),
    "ends": (True, False),  # does a row end at one token in five, or hardly ever?
    "cache": (False, True),
    "collator": ("default", "seq2seq", "own"),
    "tokenizer": (False, True),
    "smoothing": (0.0, 0.1),
    "uneven": (False, True),
    "form": ("rows", "table"),
}
CHOICES = {
    **trainers.CHOICES,
    "model": ("t5", *ENCODERS, *ENCODERS, *ENCODERS, *DECODERS),
    "metrics": ("share", "none"),
    **WAYS,
}
for name in ("generates", "data", "uneven_lengths", "masked", "config", "label_smoothing_factor"):
    CHOICES[name] = trainers.CHOICES[name][:1]  # here by another name, or of no matter
CHOICES["optimizers"] = ("of_arguments", "own", "own_with_schedule")
CHOICES["eval_do_concat_batches"] = (True,)
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    chosen = trainers.fit(chosen)
    if chosen["save_strategy"] == "best":
        chosen |= {"metric_for_best_model": "loss"}
    if chosen["metric_for_best_model"] == "eval_share" and not chosen["prediction_loss_only"]:
        chosen |= {"metrics": "share"}
    if chosen["model"] in DECODERS:
        # Rows of 16 tokens begin what is generated; their padding would count in the length of a whole.
        chosen |= {"generation_max_length": None if chosen["uneven"] else 24}
        if chosen["uneven"] and "max_new_tokens" not in chosen["generation"]:
            chosen |= {"generation": {"max_new_tokens": 6}}
        chosen |= {"uneven": chosen["uneven"] and chosen["model"] != "mamba"}
    if "num_beams" in chosen["generation"]:
        chosen |= {"generation_num_beams": None}
    if chosen["uneven"] and chosen["collator"] == "default":
        chosen |= {"collator": "own"}
    if chosen["loss"] != "model":
        chosen |= {"smoothing": 0.0}
    if chosen["smoothing"] or chosen["uneven"] and chosen["model"] in ENCODERS:
        chosen |= {"collator": "seq2seq"}  # which shifts labels for the decoder
    if chosen["collator"] == "seq2seq" and chosen["model"] in DECODERS:
        chosen |= {"collator": "own"}
    if chosen["uneven"]:
        chosen |= {"include_for_metrics": ()}
    if chosen["metrics"] == "none" or chosen["prediction_loss_only"]:
        chosen |= {name: PLAIN[name] for name in ("batch_eval_metrics", "include_for_metrics")}
    return chosen


class UnevenPairs(Pairs):
    """Rows for an encoder and a decoder, of unlike lengths and without padding."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = self.tokens[index], self.tokens[index].flip(0)
        return {"input_ids": tokens[: 16 - index % 5], "labels": labels[: 12 - index % 7]}


def build_data(chosen: Choices, rows: int, seed: int, training: bool) -> Any:
    """Make the data set in the form that the script has it."""
    if chosen["model"] in DECODERS:
        data: Any = Rows(rows, seed, uneven_lengths=chosen["uneven"])
    else:
        data = UnevenPairs(rows, seed) if chosen["uneven"] else Pairs(rows, seed)
    data.tokens.clamp_(min=5)  # below are the ends and the padding
    if chosen["form"] == "rows":
        return data
    from datasets import Dataset

    listed = [{key: value.tolist() for key, value in data[index].items()} for index in range(rows)]
    return Dataset.from_list([{**row, "note": f"row {index}"} for index, row in enumerate(listed)])


def pad_left(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A user's collator, for decoders: tokens that are generated follow a row's last one."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for key in ("input_ids", "attention_mask", "labels"):
        tensors = [torch.as_tensor(row[key]) for row in rows if key in row]
        if key == "labels":  # which padding would predict, if there is any
            tensors = [row.index_fill(0, torch.tensor([0]), -100) for row in tensors]
        width = longest if key != "labels" else max(map(len, tensors))
        shown = [torch.nn.functional.pad(row, (width - len(row), 0), value=PADDING[key]) for row in tensors]
        batch |= {key: torch.stack(shown)} if shown else {}
    return batch


def generation_of(chosen: Choices) -> dict[str, Any]:
    """What the script asks of generation, apart from its trainer's own two arguments."""
    ends = [2, *range(6, 515, 5)] if chosen["ends"] else 2
    return {"eos_token_id": ends, "pad_token_id": 0, "use_cache": chosen["cache"], **chosen["generation"]}


def load(chosen: Choices, folder: str) -> Any:
    """The script's model, which knows how to generate if nothing else does."""
    model = trainers.load(chosen, folder)
    model.config.pad_token_id = 0
    if chosen["generation_from"] == "model":
        model.generation_config.update(**generation_of(chosen))
    else:
        model.generation_config.pad_token_id = 0
    return model


def make(chosen: Choices, model: Any, out: str, data_ranks: int, keeper: Keeper, stop: int | None) -> Seq2SeqTrainer:
    """The script's trainer."""
    names = ("predict_with_generate", "generation_max_length", "generation_num_beams")
    more = {name: chosen[name] for name in names} | {"label_smoothing_factor": chosen["smoothing"]}
    if chosen["generation_from"] in ("arguments", "folder"):
        given = {"decoder_start_token_id": model.generation_config.decoder_start_token_id, **generation_of(chosen)}
        more["generation_config"] = GenerationConfig(**given)
    if chosen["generation_from"] == "folder":
        more["generation_config"].save_pretrained(f"{out}-generation")
        more["generation_config"] = f"{out}-generation"
    arguments = trainers.read_arguments(chosen, out, data_ranks, Seq2SeqTrainingArguments, **more)
    options = trainers.options_of(chosen, model, build_data)
    if chosen["collator"] == "seq2seq":
        tokenizer = make_tokenizer()
        tokenizer.pad_token_id = 0
        options["data_collator"] = DataCollatorForSeq2Seq(tokenizer, model, label_pad_token_id=-100)
    elif chosen["collator"] == "own":
        options["data_collator"] = pad_left
    if chosen["tokenizer"]:
        options["processing_class"] = make_tokenizer()
    if chosen["metrics"] != "none":
        options["compute_metrics"] = Share()
    own = trainers.KINDS.get(chosen["loss"])
    kind = Seq2SeqTrainer if own is None else type("OwnSeq2SeqTrainer", (own, Seq2SeqTrainer), {})
    callbacks = trainers.callbacks_of(chosen, keeper, stop)
    trainer = kind(model=model, args=arguments, callbacks=callbacks, **options)
    trainer.remove_callback(PrinterCallback)
    if chosen["generation_from"] == "call":
        trainer.evaluate = partial(trainer.evaluate, **generation_of(chosen))
        trainer.predict = partial(trainer.predict, **generation_of(chosen))
    return trainer


def described(predictions: Any) -> list[list[int]]:
    """Tokens of each row without padding (0 and 1, and 2 behind beams): those generated, or the likeliest ones."""
    found = torch.as_tensor(predictions[0] if isinstance(predictions, tuple) else predictions)
    found = found.argmax(-1) if found.is_floating_point() else found
    return [[int(token) for token in row if token > 2] for row in found]


def weigh(rows: list[list[int]]) -> float:
    """A number that changes with each token, its place in its row and its row."""
    return float(
        sum(
            (place + 1) * (1 + token % 97) * (1 + number % 7)
            for number, row in enumerate(rows)
            for place, token in enumerate(row)
        )
    )


class Share:
    """A user's `compute_metrics`, at once or batch by batch."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []
        self.labels: list[list[int]] = []
        self.more: dict[str, float] = {}

    def __call__(self, evaluated: Any, compute_result: bool = True) -> dict[str, float]:
        self.found += described(evaluated.predictions)
        self.labels += described(evaluated.label_ids)
        for name in ("inputs", "losses"):
            value = getattr(evaluated, name)
            if value is not None:
                total = float(torch.as_tensor(value).double().sum()) / (len(value) if name == "losses" else 1)
                self.more[name] = self.more.get(name, 0.0) + total
        if not compute_result:
            return {}
        hits = sum(token in row for row, labels in zip(self.found, self.labels, strict=False) for token in labels)
        result = {"share": hits / sum(map(len, self.labels)), "rows": len(self.labels), "checksum": weigh(self.found)}
        result |= {"generated": sum(map(len, self.found)), "of_labels": weigh(self.labels), **self.more}
        self.__init__()
        return result


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks = activate(spec)
    torch.manual_seed(5)
    keeper = Keeper()
    trainer = make(chosen, load(chosen, folder), out, data_ranks, keeper, 3 if part == "before" else None)
    found = trainers.train_as_chosen(trainer, chosen, part)
    if chosen["twice"] == "new_trainer":
        trainer = make(chosen, trainer.model, out, data_ranks, keeper, None)
        found["new trainer"] = trainer.train().metrics
    found["evaluate"] = trainer.evaluate()
    predicted = trainer.predict(build_data(chosen, 9, 21, False), num_beams=2)
    found["predict"] = predicted.metrics
    if predicted.predictions is not None and chosen["predict_with_generate"]:
        for row, tokens in enumerate(described(predicted.predictions)):
            found[f"predicted {row}"] = {str(place): token for place, token in enumerate(tokens)}
    found |= trainers.read_state(trainer)
    trainer.save_model(f"{out}/saved")
    return {"found": found, "gradient_keys": keeper.gradient_keys, "folder": f"{out}/saved"}


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    low, resumed = trainers.is_low(chosen), chosen["resumes"] and not name.startswith("predicted ")
    low |= chosen["uneven"] and not chosen["predict_with_generate"]  # what is predicted at padding goes by who padded
    if low and (name.startswith("predicted ") or key.endswith(("generated", "share", "checksum")) or "best" in key):
        return True
    return trainers.leaves_out({**chosen, "resumes": resumed, "uneven_lengths": chosen["uneven"]}, name, key) and not (
        chosen["uneven"] and key.endswith("checksum")
    )


KIND = Kind(CHOICES, fit, script, trainers.tolerances, leaves_out)
