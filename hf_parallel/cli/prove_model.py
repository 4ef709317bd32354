"""The script that `hf-parallel prove MODEL` runs where the user has none: Trainer on generated examples.

    python -m hf_parallel.cli.prove_model MODEL --output_dir out
    python -m hf_parallel.cli.prove_model MODEL --lora 4          # adapters of all linear layers are trained
    python -m hf_parallel.cli.prove_model MODEL --packed          # rows of several documents, without padding
    python -m hf_parallel.cli.prove_model MODEL --bf16            # in mixed precision; prove wants --dtype own for it

Examples have odd and unequal lengths, padding left and right, holes in the mask, ignored labels, and some have no
label that counts. The model is made from its config, with random weights.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import random
from collections.abc import Callable
from typing import Literal, TypedDict, cast

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_parallel.ask.spec import refuse

COUNT, LONGEST, SEED = 301, 33, 7
#: Tokens of a row of several documents.
PACKED = 49


class Example(TypedDict):
    """Token ids and what goes with them, before padding; `left` is the side that is filled."""

    input_ids: list[int]
    attention_mask: list[int]
    labels: int | list[int]
    left: bool
    padding: int


Collate = Callable[[list], dict[str, torch.Tensor]]

#: The end of a class's name -> what its labels are made of.
KINDS = {
    "ForCausalLM": "tokens",
    "LMHeadModel": "tokens",
    "ForConditionalGeneration": "tokens",
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "classes of tokens",
    "ForSequenceClassification": "class",
}


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with a config.json, that file, or a Hub id")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="train adapters of this rank")
    parser.add_argument("--packed", action="store_true", help="rows hold several documents")
    parser.add_argument("--bf16", action="store_true", help="train in mixed precision")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model)
    cls = getattr(transformers, (config.architectures or [""])[0], None) or AutoModelForCausalLM
    kind = next((made for end, made in KINDS.items() if cls.__name__.endswith(end)), None)
    kind = "tokens" if cls is AutoModelForCausalLM else kind
    words = config.get_text_config()
    if kind is None or not isinstance(getattr(words, "vocab_size", None), int):
        refuse(cls.__name__, "needs batches that prove does not know how to make", do="give a training script")
    settings = TrainingArguments(
        args.output_dir,
        per_device_train_batch_size=32,  # of which a proof takes 4, or a pipeline's micro-batches
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        adam_epsilon=1e-3,  # else the sign of a gradient that rounding makes moves a weight as far as any other
        eval_strategy="steps",
        remove_unused_columns=False,
        bf16=args.bf16,
        seed=SEED,
    )
    torch.manual_seed(SEED)
    model = cls.from_config(config) if cls is AutoModelForCausalLM else cls._from_config(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        alpha, layers = 2 * args.lora, "all-linear"
        adapters = LoraConfig(r=args.lora, lora_alpha=alpha, target_modules=layers, init_lora_weights=False)
        model = get_peft_model(model, adapters)
    if args.packed and kind != "tokens":
        refuse(f"--packed {cls.__name__}", "joins documents of a language model", do="leave --packed out")
    make = make_packed_row if args.packed else functools.partial(make_example, kind=kind)
    join: Collate = default_data_collator if args.packed else collate_examples
    if words is not config and "token_type_ids" in inspect.signature(cls.forward).parameters:
        join = functools.partial(_join_with_types, join)
    examples = [make(number, words) for number in range(COUNT)]
    trainer = Trainer(model, settings, train_dataset=examples, eval_dataset=examples[:13], data_collator=join)
    trainer.train()
    trainer.save_model()


def make_example(number: int, config: PretrainedConfig, kind: str) -> Example:
    """Make an example: token ids, mask, labels, and on which side it is padded."""
    draw = random.Random(number)
    length = draw.randint(5, LONGEST)
    padding = getattr(config, "pad_token_id", None) or 0
    tokens = [
        draw.choice([t for t in (draw.randrange(3, config.vocab_size), 5) if t != padding]) for _ in range(length)
    ]
    mask = [int(not (number % 5 == 3 and place == length // 2)) for place in range(length)]
    if kind == "class":
        labels: int | list[int] = tokens[0] % config.num_labels
    elif kind == "classes of tokens":
        labels = [token % config.num_labels for token in tokens]
    else:
        before = [1, *mask]  # attention kernels differ in what they predict at a token that is masked
        labels = [t if seen and predicts else -100 for t, seen, predicts in zip(tokens, mask, before, strict=False)]
    if isinstance(labels, list):
        labels[0] = -100  # padding on the left decides whether a first label is predicted: it depends on the batch
        labels = [-100] * length if number % 11 == 4 else labels
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "left": number % 3 == 1, "padding": padding}


def collate_examples(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Make a batch of tensors [examples, longest]; labels may be [examples]."""
    longest = max(len(one["input_ids"]) for one in examples)
    if any(one["left"] for one in examples):  # some models count positions from the padding: as much in any batch
        longest = LONGEST

    def padded(name: Literal["input_ids", "attention_mask", "labels"], filler: int) -> torch.Tensor:
        values = []
        for one in examples:
            own = cast("list[int]", one[name])
            filling = [filler] * (longest - len(own))
            values.append(filling + own if one["left"] else own + filling)
        return torch.tensor(values)

    flat = isinstance(examples[0]["labels"], int)
    labels = torch.tensor([one["labels"] for one in examples]) if flat else padded("labels", -100)
    tokens = padded("input_ids", examples[0]["padding"])
    return {"input_ids": tokens, "attention_mask": padded("attention_mask", 0), "labels": labels}


def _join_with_types(join: Collate, examples: list) -> dict[str, torch.Tensor]:
    """Collate for models of pictures and text, which want to know which tokens are text: all."""
    batch = join(examples)
    return {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}


def make_packed_row(number: int, config: PretrainedConfig) -> dict[str, list[int]]:
    """Make a row of documents of unequal lengths, whose positions start again; their first tokens are no labels."""
    draw = random.Random(number)
    row: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "labels": []}
    while (left := PACKED - len(row["input_ids"])) > 0:
        length = min(left, draw.randint(5, LONGEST))
        tokens = [draw.randrange(3, config.vocab_size) for _ in range(length)]
        row["input_ids"] += tokens
        row["position_ids"] += range(length)
        row["labels"] += [-100, *(token if draw.random() < 0.8 else -100 for token in tokens[1:])]
    return row


if __name__ == "__main__":
    main()
