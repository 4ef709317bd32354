"""Scripts whose numbers a former version got wrong without a word; the first argument says which one.

python strange.py reduced --output_dir out …
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (
    GPT2LMHeadModel,
    GptOssForCausalLM,
    HfArgumentParser,
    LlamaForCausalLM,
    OPTForCausalLM,
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
    Wav2Vec2Model,
    default_data_collator,
)

from tests import models
from tests.rows import Rows, pad


def own_loss(labels, logits, divisor):
    """The sum over predicted tokens, divided."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / divisor


class Reduced(Trainer):
    """Divides by the targets of all ranks, as `accelerate.utils.reduce` counts them; evaluation too."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        from accelerate.utils import reduce

        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        count = reduce((inputs["labels"][:, 1:] != -100).sum().float(), "sum")
        loss = own_loss(inputs["labels"], outputs.logits, count) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Examples(Trainer):
    """The mean over examples of the mean over their tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        targets = inputs["labels"][:, 1:]
        each = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets, reduction="none")
        loss = (each.sum(1) / (targets != -100).sum(1).clamp_min(1)).mean()
        return (loss, outputs) if return_outputs else loss


class Own(Trainer):
    """Computes a loss of the logits itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        count = (inputs["labels"][:, 1:] != -100).sum()
        loss = own_loss(inputs["labels"], outputs.logits, count if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Embedding(Trainer):
    """Adds the size of the embedded tokens to the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss + model.get_input_embeddings()(inputs["input_ids"]).square().mean()
        return (loss, outputs) if return_outputs else loss


class Sums(Trainer):
    """Logs a sum over all weights, as callbacks that watch a training do."""

    def log(self, logs, *args, **kwargs):
        squares = sum((parameter.detach() ** 2).sum().item() for parameter in self.model.parameters())
        super().log({**logs, "squares": squares}, *args, **kwargs)


def packed(rows):
    """A batch without a mask, whose positions begin anew after every seven tokens."""
    batch = pad(rows)
    del batch["attention_mask"]
    length = batch["input_ids"].shape[1]
    return {**batch, "position_ids": (torch.arange(length) % 7).expand(len(rows), length).contiguous()}


def with_hidden_label(rows):
    """A batch in which a label is predicted at a token that the mask hides."""
    batch = pad(rows)
    batch["attention_mask"][:, 2] = 0
    batch["labels"][:, 3] = 7
    return batch


class GoesOn:
    """A collator whose positions count on from one example to the next."""

    def __init__(self):
        self.seen = 0

    def __call__(self, rows):
        batch = pad(rows)
        lengths = batch["attention_mask"].sum(1)
        starts = self.seen + lengths.cumsum(0) - lengths
        self.seen += int(lengths.sum())
        return {**batch, "position_ids": starts[:, None] + torch.arange(batch["input_ids"].shape[1])}


def with_a_hole(rows):
    """A batch whose masks hide a token in the midst of each example."""
    batch = pad(rows)
    batch["attention_mask"][:, 1] = 0
    batch["labels"][:, 1:3] = -100
    return batch


class Waves(Dataset):
    """Sounds of 601 numbers with `labels`: a class, or up to four letters of a text."""

    def __init__(self, size, seed, texts):
        draw = torch.Generator().manual_seed(seed)
        self.waves = torch.randn(size, 601, generator=draw)
        self.labels = torch.randint(1, SPEECH.vocab_size if texts else SPEECH.num_labels, (size, 4), generator=draw)
        lengths = torch.randint(1, 5, (size, 1), generator=draw)
        self.labels[torch.arange(4) >= lengths] = -100
        self.texts = texts

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return {"input_values": self.waves[index], "labels": self.labels[index][slice(None) if self.texts else 0]}


def with_a_new_head():
    """A classifier on the base in the folder BASE, which has weights that weight_norm computes."""
    return Wav2Vec2ForSequenceClassification.from_pretrained(os.environ["BASE"])


def save_base(folder):
    """Save a base without a head."""
    torch.manual_seed(2)
    Wav2Vec2Model(SPEECH).save_pretrained(folder)


#: Nothing in it draws numbers while it trains.
SPEECH = Wav2Vec2Config(
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 5},
    **{"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 31, "initializer_range": 0.1},
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **{"final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False},
)
TRAINERS = {"reduced": Reduced, "examples": Examples, "own": Own, "embedding": Embedding, "sums": Sums}
COLLATORS = {
    **{"hidden": with_hidden_label, "packed": packed},
    **{"positions": GoesOn(), "hole": with_a_hole},
}
MODELS = {
    "opt": lambda: OPTForCausalLM(models.opt()),
    "gpt2": lambda: GPT2LMHeadModel(models.gpt2()),
    "packed": lambda: GptOssForCausalLM(models.gpt_oss()),
    "ctc": lambda: Wav2Vec2ForCTC(SPEECH),
    "head": with_a_new_head,
}

if __name__ == "__main__":
    kind = sys.argv.pop(1)
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(3)
    model = MODELS[kind]() if kind in MODELS else LlamaForCausalLM(models.llama())
    if kind == "hook":  # reads the logits without a graph, before the loss does
        model.lm_head.register_forward_hook(
            lambda _, args, output: torch.no_grad()(torch.Tensor.norm)(output) and None
        )
    speaks = kind in ("ctc", "head")
    trainer = TRAINERS.get(kind, Trainer)(
        model,
        args,
        train_dataset=Waves(101, 11, kind == "ctc") if speaks else Rows(101, 11, uneven_lengths=True),
        eval_dataset=Waves(13, 12, kind == "ctc") if speaks else Rows(13, 12, uneven_lengths=True),
        data_collator=default_data_collator if speaks else COLLATORS.get(kind, pad),
    )
    trainer.train()
