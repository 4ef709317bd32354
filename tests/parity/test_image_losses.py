"""Losses of images: means over hidden patches, of which data ranks have unlike numbers, and standardised weights."""

import pytest
import torch
from transformers import (
    BitConfig,
    BitForImageClassification,
    SwinConfig,
    SwinForMaskedImageModeling,
    Trainer,
    ViTConfig,
    ViTForMaskedImageModeling,
)

from tests import models
from tests.rows import CLASSES, IMAGE_SIZE, Images
from tests.training import Outcome, Tolerance, activate, fit, trainer_of

PATCH = 4
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vit() -> ViTForMaskedImageModeling:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    images = {"image_size": IMAGE_SIZE, "patch_size": PATCH, "encoder_stride": PATCH, "initializer_range": 0.1}
    return ViTForMaskedImageModeling(ViTConfig(**sizes, **images, **STILL))


def swin() -> SwinForMaskedImageModeling:
    sizes = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "drop_path_rate": 0.0}
    images = {"image_size": IMAGE_SIZE, "patch_size": PATCH, "encoder_stride": 2 * PATCH}
    return SwinForMaskedImageModeling(SwinConfig(**sizes, **images, **STILL))


class Hidden(Images):
    """Images of which 1 to 13 patches of 16 are hidden."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "bool_masked_pos": torch.arange(16) < 1 + 4 * (index % 4)}


class OwnLoss(Trainer):
    """Calls the model, and adds to its loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = 3 * outputs.loss
        return (loss, outputs) if return_outputs else loss


def hide(spec: str | None, out: str, name: str, rows: int, own: bool = False) -> Outcome:
    """Steps of eight images; of the last 3 or 6 two data ranks have 3 and 0, or 4 and 2."""
    data_ranks = activate(spec)
    torch.manual_seed(models.SEED)
    sets = {"train_dataset": Hidden(rows, 11), "eval_dataset": Hidden(13, 12)}
    settings = {"num_train_epochs": 2, "remove_unused_columns": False, "label_names": ["bool_masked_pos"]}
    model = {"vit": vit, "swin": swin}[name]()
    return fit(*trainer_of(model, out, data_ranks, settings, OwnLoss if own else Trainer, **sets))


@pytest.mark.parametrize(
    ("name", "spec", "rows", "own"),
    [
        ("vit", "dp_shard=2", 19, False),
        ("vit", "dp_replicate=2", 22, True),
        ("vit", "dp_shard=2,tp=2", 22, False),
        ("vit", "dp_shard=2,batch_shares=3:1", 22, False),
        ("swin", "dp_shard=2", 22, False),
    ],
)
def test_a_mean_over_hidden_patches(runs, name, spec, rows, own):
    for rank in runs.compare(hide, spec, name, rows, own):
        assert len(rank.logs) == 6


class InDouble(Images):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index].double(), "labels": self.tokens[index, 0] % CLASSES}


def standardised(spec: str | None, out: str) -> Outcome:
    """BiT, whose convolutions divide weights by their deviation, in fp64."""
    data_ranks = activate(spec)
    torch.manual_seed(models.SEED)
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16], "depths": [1, 1], "num_groups": 4, "num_labels": CLASSES}
    model = BitForImageClassification(BitConfig(layer_type="preactivation", **sizes)).double()
    sets = {"train_dataset": InDouble(19, 11), "eval_dataset": InDouble(13, 12)}
    return fit(*trainer_of(model, out, data_ranks, {"num_train_epochs": 2, "learning_rate": 0.02}, **sets))


#: fp64 keeps 16 digits, of which standardising weights takes some. A layout tells losses and norms in fp32.
DOUBLE = Tolerance(loss=1e-6, grad_norm=1e-7, eval_loss=1e-6, weights=1e-12)


def test_standardised_weights_differ_by_rounding_alone(runs):
    """In fp32 they are 1e-4 off: a weight 1e-7 apart moves one process's loss as far."""
    runs.compare(standardised, "dp_shard=2", tolerance=DOUBLE)
