"""Losses of models that divide by something of their own: data ranks with unlike counts, as in one process."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    YolosConfig,
    YolosForObjectDetection,
)

from hf_parallel.hooks import activation
from tests import models, training
from tests.distributed import run

BATCH = 4


def waves(count: int) -> list[dict]:
    """Sounds with one to four letters."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for n in range(count):
        labels = torch.full((4,), -100)
        labels[: 1 + n % 4] = torch.tensor([5, 7, 6, 8])[: 1 + n % 4]
        rows.append({"input_values": torch.randn(3_000, generator=draw), "labels": labels})
    return rows


def pictures(count: int) -> list[dict]:
    """Images with no box up to three; the first step of a data rank has three boxes, or one."""
    draw = torch.Generator().manual_seed(4)
    rows = []
    for n in range(count):
        boxes = (3, 0, 0, 1)[n % 4]
        corners = torch.cat([0.3 + 0.3 * torch.rand(boxes, 2, generator=draw), torch.full((boxes, 2), 0.2)], 1)
        labels = {"class_labels": torch.arange(boxes) % 3, "boxes": corners}
        rows.append({"pixel_values": torch.randn(3, 32, 32, generator=draw), "labels": labels})
    return rows


def collate(rows: list[dict]) -> dict:
    """Stacked, but for labels that are dicts."""
    lists = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: torch.stack(values) if torch.is_tensor(values[0]) else values for key, values in lists.items()}


def speech_model(reduction: str) -> Wav2Vec2ForCTC:
    """Two layers; none of its random masks."""
    quiet = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "final_dropout"), 0.0)
    config = Wav2Vec2Config(
        **{"vocab_size": 15, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (16, 8), "conv_kernel": (16, 8)},
        **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        **{"apply_spec_augment": False, "layerdrop": 0.0, "feat_proj_dropout": 0.0, "pad_token_id": 0, **quiet},
        **{"ctc_loss_reduction": reduction, "ctc_zero_infinity": True},
    )
    return Wav2Vec2ForCTC(config)


def detector() -> YolosForObjectDetection:
    """Two layers and six boxes."""
    config = YolosConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
        **{"image_size": [32, 32], "patch_size": 16, "num_detection_tokens": 6, "num_labels": 3},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    return YolosForObjectDetection(config)


def script(spec: str | None, out: str, kind: str, rows: int, held: int, **changes) -> training.Outcome:
    """A Trainer over `rows` examples of a kind, and an evaluation over `held`."""
    data_ranks = training.activate(spec)
    torch.manual_seed(models.SEED)
    model = detector() if kind == "detection" else speech_model(kind)
    make = pictures if kind == "detection" else waves
    settings = {
        **{"per_device_train_batch_size": BATCH // data_ranks, "per_device_eval_batch_size": BATCH // data_ranks},
        **{"learning_rate": 0.01, "remove_unused_columns": False, "prediction_loss_only": True, **changes},
        **{"label_names": ["labels"]},
    }
    options = {"train_dataset": make(rows), "eval_dataset": make(held), "data_collator": collate}
    return training.fit(*training.trainer_of(model, out, data_ranks, settings, **options))


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2,dp_shard=2"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_ctc_of_unlike_lengths(runs, reduction, spec):
    """A sum over sequences is that over all data ranks, although the model swallows the count that it is given."""
    runs.compare(script, spec, reduction, 11, 5)


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "tp=2,dp_shard=2"])
def test_boxes_are_those_of_all_data_ranks(runs, spec):
    """A step has four boxes or none on a rank; losses of boxes are divided by them, those of classes by weights."""
    runs.compare(script, spec, "detection", 8, 8)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2,dp_shard=2"])
def test_targets_of_all_ranks_count_whatever_a_script_asks_for(runs, spec):
    """One process has no others to leave out."""
    changes = (("average_tokens_across_devices", False),)
    runs.check(training.Script(uneven_lengths=True, arguments=changes).with_accumulation(2), spec)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2,dp_shard=2"])
def test_batches_split_over_ranks(runs, spec):
    """`per_device_eval_batch_size` is the batch of all data ranks, each of which counts for the examples it has."""
    size = training.GLOBAL_BATCH
    sizes = (("per_device_train_batch_size", size), ("per_device_eval_batch_size", size))
    split = ("accelerator_config", (("split_batches", True),))
    runs.check(training.Script(uneven_lengths=True, arguments=(*sizes, split)), spec)


def reduced_by_every_name(spec: str) -> list[float]:
    """What each data rank's number becomes by `accelerate.utils.reduce`, under the names it has."""
    import accelerate.utils
    from accelerate import Accelerator
    from accelerate.utils import operations

    activation.activate(spec)
    own = torch.tensor(1.0 + PartialState().process_index)
    names = (accelerate.utils.reduce, operations.reduce, _early_reduce, Accelerator().reduce)
    return [float(reduce(own, reduction="sum")) for reduce in names]


from accelerate.utils import reduce as _early_reduce  # noqa: E402 - as a script does, before a layout begins


def test_a_reduction_is_over_data_ranks_by_every_name():
    """Under `tp` all ranks of a model have the same number, which counts once."""
    for spec, expected in {"tp=2": 1.0, "tp=2,dp_shard=2": 3.0}.items():
        found = run(partial(reduced_by_every_name, spec), training.axes(spec)["world"], init=False)
        assert all(numbers == [expected] * 4 for numbers in found), (spec, found)


def seen(count: int, dtype: torch.dtype = torch.float32) -> list[dict]:
    """Images of three classes."""
    draw = torch.Generator().manual_seed(5)
    images = [torch.randn(3, 32, 32, generator=draw).to(dtype) for _ in range(count)]
    return [{"pixel_values": image, "labels": number % 3} for number, image in enumerate(images)]


def normalised(spec: str | None, out: str) -> training.Outcome:
    """MobileNet, of which the last step has three images: none is left for the second data rank but one.

    At this learning rate it is no chaos: at 1e-2 weights that are 1e-7 apart give losses 5e-3 apart two steps later.
    """
    data_ranks = training.activate(spec)
    torch.manual_seed(models.SEED)
    config = MobileNetV2Config(depth_multiplier=0.25, num_labels=3, classifier_dropout_prob=0.0, image_size=32)
    options = {"train_dataset": seen(11), "eval_dataset": seen(5)}
    settings = {
        **{"per_device_train_batch_size": BATCH // data_ranks, "per_device_eval_batch_size": BATCH // data_ranks},
        **{"learning_rate": 1e-5, "num_train_epochs": 2},
    }
    model = MobileNetV2ForImageClassification(config)
    return training.fit(*training.trainer_of(model, out, data_ranks, settings, **options), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_batch_norm_takes_the_mean_over_all_data_ranks(runs, spec):
    """Its running mean and variance are saved; evaluation reads them."""
    # Fifty normalisations, one after another, of four rows: what is summed in another order grows, on some processors
    # to 1.3e-5.
    runs.compare(normalised, spec, tolerance=training.Tolerance(1e-4, 1e-3, 1e-4, weights=4e-5))


class NormAndStep(nn.BatchNorm2d):
    """A norm with an activation behind it, as timm's, which calls torch's function itself."""

    def forward(self, input):
        means = (self.running_mean, self.running_var)
        found = torch.nn.functional.batch_norm(input, *means, self.weight, self.bias, self.training, 0.1, self.eps)
        return torch.nn.functional.relu6(found)


def normalised_by_its_own(spec: str | None, dtype: torch.dtype = torch.float32) -> list[float]:
    """The norms of three steps of a loop, in fp32, and what a norm with a forward of its own has collected."""
    training.activate(spec)
    torch.manual_seed(models.SEED)
    inner = nn.Sequential(nn.Conv2d(3, 5, 3, 2), NormAndStep(5), nn.Flatten(), nn.Linear(1125, 3)).to(dtype)
    accelerator = Accelerator(cpu=True)
    rows = DataLoader(seen(24, dtype), BATCH // accelerator.num_processes)
    model, optimizer, rows = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1), rows)
    found = []
    for batch in rows:
        loss = torch.nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
        found.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model[1].running_mean.tolist(), *model[1].running_var.tolist()]


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_batch_norm_with_a_forward_of_its_own(spec):
    """It took the mean and variance of a data rank's rows, in silence (losses 9e-2)."""
    training.check_alone(normalised_by_its_own, spec, init=False)


def test_batch_norm_keeps_double_precision():
    """Single precision inside moved the means by 1e-8, and the losses of MobileNet's fifty norms by 3e-5."""
    training.check_alone(normalised_by_its_own, "dp_shard=2", torch.float64, tolerance=1e-13, init=False)
