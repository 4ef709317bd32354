"""Models that read a picture and words together: a decoder tied to its words, and patches behind the words."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import BlipConfig, BlipForConditionalGeneration, ViltConfig, ViltForQuestionAnswering

from tests import models
from tests.rows import VOCABULARY
from tests.training import Outcome, activate, fit, trainer_of

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1},
}
WORDS = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 40}
SEES = {"image_size": 32, "patch_size": 8}
TEXT = {
    **WORDS,
    "encoder_hidden_size": 32,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "sep_token_id": 2,
}
MODELS = {
    "blip": (BlipForConditionalGeneration, BlipConfig(text_config=TEXT, vision_config={**SIZES, **SEES})),
    "vilt": (ViltForQuestionAnswering, ViltConfig(**WORDS, **SEES, num_labels=3)),
}


class Seen(Dataset):
    """Pictures with as many words each; ViLT reads 17 patches behind them."""

    def __init__(self, name: str, size: int):
        draw = torch.Generator().manual_seed(5)
        words = torch.randint(5, VOCABULARY, (size, 12), generator=draw)
        answers = words if name == "blip" else torch.rand(size, 3, generator=draw)
        self.columns = {"input_ids": words, "pixel_values": torch.randn(size, 3, 32, 32, generator=draw)}
        self.columns["labels"] = answers

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict:
        return {name: column[index] for name, column in self.columns.items()}


def train(spec: str | None, out: str, name: str) -> Outcome:
    data_ranks = activate(spec)
    kind, config = MODELS[name]
    torch.manual_seed(models.SEED)
    sets = {"train_dataset": Seen(name, 22), "eval_dataset": Seen(name, 5)}
    return fit(*trainer_of(kind(config), out, data_ranks, **sets), f"{out}/saved")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2,tp=2"])
def test_numbers_of_one_process(runs, spec, name):
    """BLIP calls no module its head; under `tp` ViLT's rows of 29 cannot be made even by more words."""
    runs.compare(train, spec, name)
