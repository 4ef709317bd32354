"""Tiny data sets, drawn under a seed; `data` knows which one goes with a model of `tests/models.py`."""

import torch
from torch.utils.data import Dataset, IterableDataset

VOCABULARY = 515  # odd: no number of ranks divides it
LENGTH = 16
CLASSES = 3
IMAGE_SIZE = 16
IMAGE_TOKEN = VOCABULARY - 1
PATCHES = 4  # image tokens of a row


class Rows(Dataset):
    """`size` rows of LENGTH random tokens; row i has its first i % 7 labels ignored, so label counts are uneven.

    With `even=True` no label is ignored, for loops that average means over ranks. With `uneven_lengths=True` row i
    has LENGTH - i % 5 tokens and needs a collator that pads.
    """

    def __init__(self, size: int, seed: int, even: bool = False, uneven_lengths: bool = False, length: int = LENGTH):
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (size, length), generator=self.generator)
        self.even, self.uneven_lengths, self.length = even, uneven_lengths, length

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index, : self.length - index % 5] if self.uneven_lengths else self.tokens[index]
        labels = tokens.clone()
        if not self.even:
            labels[: index % 7] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(labels), "labels": labels}


class Stream(IterableDataset):
    """The same rows without a length and without random access."""

    def __init__(self, size: int, seed: int):
        self.rows = Rows(size, seed)

    def __iter__(self):
        for index in range(len(self.rows)):
            yield self.rows[index]


class Sentences(Rows):
    """Rows for classification: a class per row, and padding at the end of every third one."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": self.mask(index), "labels": tokens[0] % CLASSES}

    def mask(self, index: int) -> torch.Tensor:
        """Which tokens are no padding."""
        return (torch.arange(self.length) < self.length - 5 * (index % 3 == 0)).long()


class Pairs(Sentences):
    """Rows for an encoder and a decoder: padded as sentences are, and four targets fewer than tokens.

    Row i has its last i % 7 targets ignored, as a collator that pads leaves them.
    """

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens.flip(0)[4:].clone()
        labels[len(labels) - index % 7 :] = -100
        return {"input_ids": tokens, "attention_mask": self.mask(index), "labels": labels}


class Images(Rows):
    """Random images, each with a class."""

    def __init__(self, size: int, seed: int, length: int = LENGTH):
        super().__init__(size, seed, length=length)
        self.images = torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=self.generator)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.tokens[index, 0] % CLASSES}


class Captions(Images):
    """Rows of tokens with an image: one token per patch stands for it, from the second one on, and is no target."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super(Images, self).__getitem__(index)
        row["input_ids"] = row["input_ids"].clamp(max=IMAGE_TOKEN - 1)
        row["labels"] = row["labels"].clamp(max=IMAGE_TOKEN - 1)
        row["input_ids"][1 : 1 + PATCHES] = IMAGE_TOKEN
        row["labels"][1 : 1 + PATCHES] = -100
        return {**row, "pixel_values": self.images[index]}


class Unmasked(Dataset):
    """Rows without an attention mask: every token is attended to."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value for key, value in self.rows[index].items() if key != "attention_mask"}


PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest row of the batch, so that data ranks and steps see unequal lengths."""
    stack = torch.nn.utils.rnn.pad_sequence
    return {key: stack([row[key] for row in rows], True, PADDING[key]) for key in rows[0]}


KINDS = {
    **dict.fromkeys(("bert", "roberta", "deberta", "deberta_v3", "deberta_xlarge"), Sentences),
    **dict.fromkeys(("t5", "t5_gated", "bart"), Pairs),
    **dict.fromkeys(("vit", "clip"), Images),
    "llava": Captions,
}


def data(
    model: str,
    size: int,
    seed: int,
    stream: bool = False,
    uneven_lengths: bool = False,
    length: int | None = None,
    masked: bool = True,
) -> Dataset:
    """The data set that goes with a model, in rows of `length` tokens."""
    if length is None:
        length = LENGTH - 1 if model == "odd" else LENGTH
    if model in KINDS:
        rows = KINDS[model](size, seed, length=length)
    elif stream:
        return Stream(size, seed)
    else:
        rows = Rows(size, seed, uneven_lengths=uneven_lengths, length=length)
    return rows if masked else Unmasked(rows)
