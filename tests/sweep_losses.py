"""Every training loss of transformers in a Trainer: two steps and an evaluation under a layout, as in one process.

Not part of the test run: it takes hours. Each class is shrunk as in `tests.sweep`. Examples have unlike numbers of
targets, so that data ranks have, too; the last batches of training and of evaluation are ragged.

python -m tests.sweep_losses                      # all; goes on where it stopped
python -m tests.sweep_losses ctc,detection        # some kinds of losses; ctc wav2vec2,hubert: some types, afresh
python -m tests.sweep_losses --one-per-loss       # one class of all those whose forward has the same code and loss
python -m tests.sweep_losses --table              # docs/reference/losses.md from the results
"""

import argparse
import contextlib
import hashlib
import inspect
import io
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DetrConfig, PretrainedConfig, ResNetConfig, RTDetrResNetConfig, SwinConfig
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from tests import sweep, training
from tests.distributed import RankFailure, run, run_alone
from tests.sweep import VOCABULARY

RESULTS = sweep.ROOT / "tests" / "results" / "sweep_losses.jsonl"
PAGE = sweep.ROOT / "docs" / "reference" / "losses.md"
SPECS = ("dp_shard=2", "tp=2")
BATCH, TRAIN_ROWS, EVAL_ROWS = 4, 7, 5  # of all data ranks; both sets end in a batch that is not full
LENGTH, IMAGE, CLASSES, FRAMES, SAMPLES = 17, 64, 3, 64, 8_000
#: Families that many use: of classes with the same loss theirs is tried.
FIRST = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "t5", "bert", "roberta", "deberta-v2", "vit"),
    *("wav2vec2", "whisper", "clip", "gpt2", "mixtral", "bart"),
)
#: A layout sums in another order, ten times over; what is counted wrongly is off by 1e-3 and more.
TOLERANCE = training.Tolerance(loss=3e-5, grad_norm=3e-4, eval_loss=3e-5)
#: What a run says of numbers that are not those of one process.
TOLD = r"not known|compares the rows|balances experts over its own|taken for a mean"
EPSILON, LARGEST_ROUNDING = 1e-7, 1e-3  # of fp32; of what a chaotic model makes of it
LIMIT_S = 240.0  # of work that takes seconds, on a machine that others use, too

# ---- examples -------------------------------------------------------------------------------------------------------

Example = dict[str, Any]


def tokens_of(config: Any, n: int, length: int = LENGTH) -> Example:
    """A sequence of which up to six tokens are padding."""
    draw = torch.Generator().manual_seed(n)
    tokens = torch.randint(5, VOCABULARY - 8, (length,), generator=draw)
    kept = length - 3 * (n % 3)
    mask = torch.ones(length, dtype=torch.long)
    mask[kept:] = 0
    pad, end = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos"))
    tokens[kept:] = pad if isinstance(pad, int) and 0 <= pad < VOCABULARY else 0
    if isinstance(end, int) and 0 <= end < VOCABULARY:
        tokens[kept - 1] = end  # where BART's classifier reads
    return {"input_ids": tokens, "attention_mask": mask}


def image_of(config: Any, n: int) -> torch.Tensor:
    """Channels, height and width as the config says."""
    vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
    side = getattr(config, "image_size", None) or getattr(vision, "image_size", None)
    height, width = side if isinstance(side, (list, tuple)) else (side or IMAGE,) * 2
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(channels, height, width, generator=torch.Generator().manual_seed(100 + n))


def causal(config: Any, n: int) -> Example:
    """Prompts of unlike lengths are not targets."""
    given = tokens_of(config, n)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    labels[: 1 + 5 * (n % 2)] = -100
    return {**given, "labels": labels}


def masked(config: Any, n: int) -> Example:
    """One to five targets."""
    given = tokens_of(config, n)
    labels = torch.full((LENGTH,), -100)
    chosen = torch.arange(1, 2 + 2 * (n % 3) * (1 + n % 2))[:9]
    labels[chosen] = given["input_ids"][chosen]
    return {**given, "labels": labels}


def to_text(config: Any, n: int) -> Example:
    """Answers of unlike lengths."""
    return {**tokens_of(config, n), "labels": _answer(n)}


def _answer(n: int, length: int = 9) -> torch.Tensor:
    labels = torch.randint(5, VOCABULARY - 8, (length,), generator=torch.Generator().manual_seed(200 + n))
    labels[length - 2 * (n % 4) :] = -100
    return labels


def sequence(config: Any, n: int) -> Example:
    return {**tokens_of(config, n), "labels": torch.tensor(n % CLASSES)}


def regression(config: Any, n: int) -> Example:
    return {**tokens_of(config, n), "labels": torch.tensor(n / 3)}


def several_classes(config: Any, n: int) -> Example:
    return {**tokens_of(config, n), "labels": torch.tensor([float(n >> bit & 1) for bit in range(CLASSES)])}


def token(config: Any, n: int) -> Example:
    """A class for each token that is no padding."""
    given = tokens_of(config, n)
    labels = (given["input_ids"] % CLASSES).masked_fill(given["attention_mask"] == 0, -100)
    labels[: 4 * (n % 2)] = -100
    return {**given, "labels": labels}


def answer_span(config: Any, n: int) -> Example:
    """Some answers end outside of the sequence, which is no target."""
    start, end = 1 + n % 5, LENGTH + 3 if n % 4 == 1 else 6 + n % 4
    spans = {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}
    return {**tokens_of(config, n), **spans}


def choice(config: Any, n: int) -> Example:
    both = [tokens_of(config, 2 * n), tokens_of(config, 2 * n + 1)]
    return {key: torch.stack([each[key] for each in both]) for key in both[0]} | {"labels": torch.tensor(n % 2)}


def next_sentence(config: Any, n: int) -> Example:
    return {**tokens_of(config, n), "labels": torch.tensor(n % 2)}


def pretraining(config: Any, n: int) -> Example:
    """Masked tokens, and what some models predict of two sentences; Electra tells tokens that were replaced."""
    given = masked(config, n)
    if config.model_type == "electra":
        given["labels"] = given["input_ids"] % 2
    order = torch.tensor(n % 2)
    return {**given, "next_sentence_label": order, "sentence_order_label": order}


def image(config: Any, n: int) -> Example:
    return {"pixel_values": image_of(config, n), "labels": torch.tensor(n % CLASSES)}


def video(config: Any, n: int) -> Example:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    clip = torch.stack([image_of(config, 10 * n + frame) for frame in range(frames)])
    return {"pixel_values": clip, "pixel_values_videos": clip, "labels": torch.tensor(n % CLASSES)}


def masked_image(config: Any, n: int) -> Example:
    """Unlike numbers of patches are hidden."""
    side = getattr(config, "image_size", IMAGE) // getattr(config, "patch_size", 8)
    hidden = torch.zeros(side * side, dtype=torch.bool)
    hidden[: 2 + 3 * (n % 3)] = True
    return {"pixel_values": image_of(config, n), "bool_masked_pos": hidden}


def pixels(config: Any, n: int) -> Example:
    """A class per pixel, a part of them to be ignored."""
    values = image_of(config, n)
    labels = torch.randint(CLASSES, values.shape[1:], generator=torch.Generator().manual_seed(300 + n))
    labels[: 5 * (n % 4)] = 255
    return {"pixel_values": values, "labels": labels}


def depth(config: Any, n: int) -> Example:
    values = image_of(config, n)
    return {"pixel_values": values, "labels": values[0].abs() + 1.0}


def boxes(config: Any, n: int) -> Example:
    """Up to three boxes, or none."""
    count = (2, 0, 3, 1)[n % 4]
    draw = torch.Generator().manual_seed(400 + n)
    corners = 0.2 + 0.5 * torch.rand(count, 2, generator=draw), 0.1 + 0.2 * torch.rand(count, 2, generator=draw)
    values = image_of(config, n)
    masks = torch.zeros(count, *values.shape[1:])
    for number in range(count):
        masks[number, 4 * number : 4 * number + 9, 3:15] = 1.0
    classes = torch.randint(CLASSES, (count,), generator=draw)
    labels = {"class_labels": classes, "boxes": torch.cat(corners, 1), "masks": masks}
    return {"pixel_values": values, "labels": labels}


def described_boxes(config: Any, n: int) -> Example:
    return {**tokens_of(config, n), **boxes(config, n)}


def masks(config: Any, n: int) -> Example:
    """Up to three masks of classes."""
    found = boxes(config, n if n % 4 != 1 else n + 1)
    labels = found.pop("labels")
    return {**found, "mask_labels": [labels["masks"]], "class_labels": [labels["class_labels"]]}


def sound_of(config: Any, n: int) -> Example:
    """A waveform or its spectrum, whichever the model takes, with unlike lengths."""
    draw = torch.Generator().manual_seed(500 + n)
    bins = getattr(getattr(config, "encoder_config", config), "num_mel_bins", None)
    bins = bins or getattr(config, "input_dim", None) or getattr(config, "feature_projection_input_dim", 80)
    if hasattr(config, "conv_stride") or hasattr(config, "conv_dim"):
        mask = torch.ones(SAMPLES, dtype=torch.long)
        mask[SAMPLES - 500 * (n % 3) :] = 0
        return {"input_values": torch.randn(SAMPLES, generator=draw) * mask, "attention_mask": mask}
    mask = torch.ones(FRAMES, dtype=torch.long)
    mask[FRAMES - 8 * (n % 3) :] = 0
    values = torch.randn(FRAMES, bins, generator=draw)
    return {"input_features": values, "input_values": values, "attention_mask": mask}


def ctc(config: Any, n: int) -> Example:
    """One to four letters."""
    labels = torch.full((4,), -100)
    labels[: 1 + n % 4] = torch.tensor([5, 7, 6, 8])[: 1 + n % 4] + n % 3
    return {**sound_of(config, n), "labels": labels}


def transducer(config: Any, n: int) -> Example:
    found = ctc(config, n)
    return {**found, "labels": found["labels"].masked_fill(found["labels"] < 0, config.pad_token_id or 0)}


def sound(config: Any, n: int) -> Example:
    return {**sound_of(config, n), "labels": torch.tensor(n % CLASSES)}


def speech(config: Any, n: int) -> Example:
    """A spectrum as long as the encoder takes it, and what was said."""
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    frames = 2 * getattr(config, "max_source_positions", 64)
    values = torch.randn(bins, frames, generator=torch.Generator().manual_seed(600 + n))
    wave = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(600 + n))
    turned = config.model_type in ("speech_to_text", "seamless_m4t", "seamless_m4t_v2")
    return {"input_features": values.T if turned else values, "input_values": wave, "labels": _answer(n)}


def spoken(config: Any, n: int) -> Example:
    """Text, and the spectrum to be said."""
    bins = getattr(config, "num_mel_bins", 16)
    labels = torch.randn(12, bins, generator=torch.Generator().manual_seed(700 + n))
    labels[12 - 2 * (n % 3) :] = -100.0
    speaker = torch.randn(getattr(config, "speaker_embedding_dim", 8), generator=torch.Generator().manual_seed(n))
    return {**tokens_of(config, n), "labels": labels, "speaker_embeddings": speaker}


def captioned(config: Any, n: int) -> Example:
    """An image and the text beside it, compared with all others of the batch."""
    return {**tokens_of(config, n), "pixel_values": image_of(config, n), "return_loss": True}


def asked_image(config: Any, n: int) -> Example:
    answers = torch.rand(CLASSES, generator=torch.Generator().manual_seed(n))
    return {**tokens_of(config, n), "pixel_values": image_of(config, n), "labels": answers}


def series(config: Any, n: int) -> Example:
    """Numbers over time: what is known and what is to come."""
    draw = torch.Generator().manual_seed(800 + n)
    past = getattr(config, "context_length", 24) + max(getattr(config, "lags_sequence", None) or [0])
    ahead = getattr(config, "prediction_length", None) or getattr(config, "horizon_length", None) or 8
    channels = getattr(config, "num_input_channels", None)
    shape = (channels,) if channels else ()
    seen = torch.rand(past, *shape, generator=draw) > 0.1 * (n % 3)
    known = {"past_values": torch.randn(past, *shape, generator=draw), "past_observed_mask": seen}
    known |= {"future_values": torch.randn(ahead, *shape, generator=draw)}
    features = getattr(config, "num_time_features", 0)
    times = {"past_time_features": torch.zeros(past, features), "future_time_features": torch.zeros(ahead, features)}
    targets = torch.randn(getattr(config, "num_targets", 1), generator=draw)
    return {**known, **times, "target_values": targets}


def labelled_series(config: Any, n: int) -> Example:
    return {**series(config, n), "target_values": torch.tensor(n % CLASSES)}


#: Kind of loss -> how an example is made, and the mappings of transformers (or names of classes) that have it.
KINDS: dict[str, tuple[Callable[[Any, int], Example], tuple[str, ...]]] = {
    "ctc": (ctc, ("CTC",)),
    "transducer": (transducer, ("RNNT", "TDT")),
    "detection": (boxes, ("OBJECT_DETECTION", "IMAGE_SEGMENTATION")),
    "described detection": (described_boxes, ("ZERO_SHOT_OBJECT_DETECTION",)),
    "segments": (masks, ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION")),
    "semantic": (pixels, ("SEMANTIC_SEGMENTATION",)),
    "depth": (depth, ("DEPTH_ESTIMATION",)),
    "speech": (speech, ("SPEECH_SEQ_2_SEQ",)),
    "sound": (sound, ("AUDIO_CLASSIFICATION", "AUDIO_XVECTOR")),
    "spoken": (spoken, ("TEXT_TO_SPECTROGRAM",)),
    "pretraining": (pretraining, ("PRETRAINING",)),
    "masked image": (masked_image, ("MASKED_IMAGE_MODELING",)),
    "image": (image, ("IMAGE_CLASSIFICATION",)),
    "video": (video, ("VIDEO_CLASSIFICATION",)),
    "pairs": (captioned, ("ZERO_SHOT_IMAGE_CLASSIFICATION",)),
    "asked image": (asked_image, ("VISUAL_QUESTION_ANSWERING",)),
    "series": (series, ("TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION")),
    "labelled series": (labelled_series, ("TIME_SERIES_CLASSIFICATION",)),
    "choice": (choice, ("MULTIPLE_CHOICE",)),
    "next sentence": (next_sentence, ("NEXT_SENTENCE_PREDICTION",)),
    "answer": (answer_span, ("QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING")),
    "token": (token, ("TOKEN_CLASSIFICATION",)),
    "sequence": (sequence, ("SEQUENCE_CLASSIFICATION",)),
    "regression": (regression, ("SEQUENCE_CLASSIFICATION",)),
    "several classes": (several_classes, ("SEQUENCE_CLASSIFICATION",)),
    "seq2seq": (to_text, ("SEQ_TO_SEQ_CAUSAL_LM",)),
    "masked": (masked, ("MASKED_LM",)),
    "causal": (causal, ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")),
}
#: In the words of `tests.sweep`, whose rules shrink a config for a head.
HEADS = {"causal": "causal", "seq2seq": "seq2seq", "speech": "speech", "ctc": "ctc", "transducer": "ctc"}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_DETR = {"use_timm_backbone": False, "backbone": None, "num_queries": 7} | {
    "backbone_config": ResNetConfig(**_RESNET, out_features=_STAGES[1:])
}
_SWIN = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "image_size": 64, "window_size": 2}
_SWIN |= {"drop_path_rate": 0.0}
_RT_DETR = {
    **{"backbone_config": RTDetrResNetConfig(**_RESNET, out_features=_STAGES[1:]), "num_queries": 7},
    **{"encoder_in_channels": [16, 16, 16], "decoder_in_channels": [64, 64, 64], "encoder_hidden_dim": 64},
}
#: What no rule can know, by model type; what draws random numbers in training is off.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer"), _DETR),
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), _RT_DETR),
    "yolos": {"num_detection_tokens": 7},
    "rf_detr": {"num_queries": 4, "group_detr": 1},
    "eomt": {"num_queries": 7},
    "maskformer": {
        **{
            "backbone_config": SwinConfig(**_SWIN, out_features=_STAGES),
            "mask_feature_size": 32,
            "fpn_feature_size": 32,
        },
        **{"decoder_config": DetrConfig(d_model=32, encoder_layers=1, decoder_layers=2, num_queries=7, dropout=0.0)},
    },
    "mask2former": {
        **{"backbone_config": SwinConfig(**_SWIN, out_features=_STAGES), "num_queries": 7, "mask_feature_size": 32},
        **{"feature_size": 32, "hidden_dim": 32, "decoder_layers": 2, "encoder_layers": 1, "train_num_points": 64},
    },
    "beit": {"out_indices": [0, 1, 2, 3]},
    "data2vec-vision": {"out_indices": [0, 1, 2, 3]},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3]},
    "upernet": {"backbone_config": ResNetConfig(**_RESNET, out_features=_STAGES)},
    "audio-spectrogram-transformer": {"max_length": FRAMES},
    "patchtst": {"num_targets": CLASSES},
}
QUIET = {
    **{"apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "layerdrop": 0.0},
    **{"num_denoising": 0},
}


def small_config(kind: str, cls: Any, config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """The sweep's, with as many labels as examples have classes."""
    config = sweep.small_config((getattr(cls, "config_class", None) or config_class)(), HEADS.get(kind, "sequence"))
    labels = {"regression": 1, "answer": 2, "next sentence": 2, "pretraining": 2}.get(kind, CLASSES)
    config.num_labels = labels
    config.classifier_dropout = 0.0  # heads for any decoder draw a tenth where nothing is said
    if kind == "several classes":
        config.problem_type = "multi_label_classification"
    parts = (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig)))
    for part in parts:
        for key, value in {**QUIET, **OWN.get(part.model_type, {})}.items():
            if hasattr(part, key):
                setattr(part, key, value)
        if isinstance(getattr(part, "image_size", None), (list, tuple)):
            part.image_size = [IMAGE, IMAGE]
        elif isinstance(getattr(part, "image_size", None), int):
            part.image_size = IMAGE
        if hasattr(part, "encoder_stride"):
            part.encoder_stride = part.patch_size
    return config


def examples(kind: str, cls: Any, config: PretrainedConfig, first: int, count: int) -> list[Example]:
    """What the model's forward takes of them."""
    make, _ = KINDS[kind]
    known = inspect.signature(cls.forward).parameters
    made = [make(config, first + number) for number in range(count)]
    return [{key: value for key, value in each.items() if key in known} for each in made]


def collate(rows: list[Example]) -> Example:
    """Tensors of one shape are stacked; lists are joined, and what is none of these is one for all."""
    batch: Example = {}
    for key, value in rows[0].items():
        values = [row[key] for row in rows]
        if torch.is_tensor(value):
            batch[key] = torch.stack(values)
        elif isinstance(value, list):
            batch[key] = [item for items in values for item in items]
        else:
            batch[key] = values if isinstance(value, dict) else value
    return batch


# ---- one case -------------------------------------------------------------------------------------------------------


def script(
    spec: str | None, kind: str, cls: Any, config: PretrainedConfig, seed: int = 0, moved: float = 0.0
) -> training.Outcome:
    """Two steps and an evaluation; what was said about numbers is kept.

    Args:
        seed: of what is drawn in training.
        moved: how far weights are from those of other runs, by their own size.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said), tempfile.TemporaryDirectory() as out:
        data_ranks = training.activate(spec)
        model = sweep.build_random(cls, config).train()
        if moved:
            _move(model, moved)
        rows, held = (examples(kind, cls, config, *part) for part in ((0, TRAIN_ROWS), (48, EVAL_ROWS)))
        names = [key for key in rows[0] if "label" in key or "positions" in key or "values" in key]
        settings = {
            **{"per_device_train_batch_size": BATCH // data_ranks, "per_device_eval_batch_size": BATCH // data_ranks},
            # Normalisations of four rows, one after another, make chaos of greater steps.
            **{"learning_rate": 1e-4, "remove_unused_columns": False, "prediction_loss_only": True},
            **{"label_names": names or None, "seed": seed, "data_seed": 0},
        }
        options = {"train_dataset": rows, "eval_dataset": held, "data_collator": collate}
        outcome = training.fit(*training.trainer_of(model, out, data_ranks, settings, **options))
    outcome.more = [line for line in said.getvalue().splitlines() if re.search(TOLD, line)]
    return outcome


@torch.no_grad()
def _move(model: Any, moved: float) -> None:
    draw = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        parameter.mul_(1.0 + moved * torch.randn(parameter.shape, generator=draw))


def compared(spec: str, alone: training.Outcome, call: Callable[..., training.Outcome]) -> dict[str, Any]:
    """The outcome of one layout: ok, told (other numbers, and a line about them), wrong, refused or crash."""
    try:
        ranks = run(partial(call, spec), training.axes(spec)["world"], timeout=LIMIT_S, init=False)
    except RankFailure as failure:
        message = next((line for line in failure.message.splitlines() if line.strip()), "")
        if failure.kind == "SpecError" or "hf_parallel" in message:
            return {"class": "refused", "text": message[:300]}
        place = [line.strip() for line in str(failure).splitlines() if line.strip().startswith("File ")]
        return {"class": "crash", "text": f"{failure.kind}: {message[:300]}", "at": place[-3:]}
    found = training.differences(ranks, alone, TOLERANCE)
    if not found:
        return {"class": "ok", "text": ""}
    told = ranks[0].more
    return {"class": "told" if told else "wrong", "text": "; ".join(found), "said": told[:2]}


def outcome_of(kind: str, cls: Any, config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Both layouts of one class."""
    try:
        config = small_config(kind, cls, config_class)
        size = run_alone(sweep.count, cls, config, timeout=LIMIT_S)
        if size > sweep.LARGEST:
            return {"skipped": f"{size} parameters"}
        call = partial(script, kind=kind, cls=cls, config=config)
        alone = run_alone(call, None, timeout=LIMIT_S)
        if not all(math.isfinite(entry[key]) for entry in alone.logs for key in ("loss", "grad_norm")):
            return {"skipped": "the loss is not a number"}
        if alone.eval_loss is None:
            return {"skipped": "no loss in evaluation"}
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip().startswith("File ")]
        return {"skipped": f"{failure.kind}: {failure.message[:300]}", "at": lines[-3:]}
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {str(error)[:300]}"}
    cases = {spec: compared(spec, alone, call) for spec in SPECS}
    if any(case["class"] == "wrong" for case in cases.values()):
        again = run_alone(call, None, timeout=LIMIT_S, seed=1)
        if training.differences([again], alone, TOLERANCE):
            return {"skipped": "draws random numbers in training", "cases_of_one_seed": cases}
        near = run_alone(call, None, timeout=LIMIT_S, moved=EPSILON)
        for case in (case for case in cases.values() if case["class"] == "wrong"):
            _tell_rounding(case, alone, near)
    return {"cases": cases}


def _tell_rounding(case: dict[str, Any], alone: training.Outcome, near: training.Outcome) -> None:
    """Other numbers that are no farther off than those of one process with weights one rounding away are no error."""
    found, own = case["text"].split("; "), training.differences([near], alone, training.Tolerance(0.0, 0.0, 0.0))
    off, spread = (
        max((float(match[1]) if (match := re.search(r"relative ([\d.e+-]+)\)", text)) else math.inf) for text in texts)
        for texts in (found, own or ["relative 0)"])
    )
    if off <= min(2 * spread, LARGEST_ROUNDING):
        case |= {"class": "rounding", "text": f"{off:.1g} off, and one process {spread:.1g} from weights 1e-7 apart"}


# ---- what there is --------------------------------------------------------------------------------------------------


def classes(kinds: list[str], types: list[str]) -> Iterator[tuple[str, str, Any, Any]]:
    """Kind, model type, model class and config class."""
    for kind, (_, mappings) in KINDS.items():
        seen = set()
        for name in mappings if not kinds or kind in kinds else ():
            mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING")
            for config_class in sorted(mapping.keys(), key=lambda each: each.model_type not in FIRST):
                if types and config_class.model_type not in types:
                    continue
                with contextlib.suppress(Exception):  # needs a package that is not here
                    found = mapping[config_class]
                    for cls in found if isinstance(found, (tuple, list)) else (found,):
                        if (cls, config_class) not in seen:
                            seen.add((cls, config_class))
                            yield kind, config_class.model_type, cls, config_class


def code_of_loss(cls: Any) -> str:
    """Equal for classes whose forward is the same but for names, and whose loss has the same name."""
    source = re.sub(r"\s+|\"\"\".*?\"\"\"", "", inspect.getsource(inspect.unwrap(cls.forward)), flags=re.DOTALL)
    start = source.find("loss")
    source = re.sub(r"[A-Z]\w+|self\.\w+", "", source[start:])
    names = [name for name in LOSS_MAPPING if name in cls.__name__]
    loss = LOSS_MAPPING[max(names, key=len)].__name__ if names else ""
    return hashlib.sha1(f"{source} {loss}".encode()).hexdigest()[:12]


# ---- docs/reference/losses.md ---------------------------------------------------------------------------------------

HEADER = """# Losses of models

What `python -m tests.sweep_losses` finds for the training losses of transformers {version}: a Trainer takes two steps
and evaluates, on two data ranks (`dp_shard=2`) and on two tensor-parallel ranks (`tp=2`), and losses, gradient norms,
sets of gradients and the evaluation's loss are compared with one process in fp32. Examples have unlike numbers of
targets, so that data ranks have, too, and the last batches of training and of evaluation are ragged.

{tried} classes of {kinds} of {all} kinds were tried, last on {date}; one stands for others whose forward pass has the
same code and loss (`--one-per-loss`). Of {losses} such losses {left} are left. {counts}.

✓ the numbers of one process; ≈ these but for rounding, as one process differs as much when its weights are moved by
1e-7 of themselves; – refused at the start, in words; ~ other numbers, and a line that says so; ✗ neither; empty: not
tried.

| kind of loss | `dp_shard=2` | `tp=2` | classes |
| --- | --- | --- | --- |
"""
SIGNS = {"ok": "✓", "rounding": "≈", "refused": "–", "told": "~", "wrong": "✗", "crash": "✗"}


def page(results: dict[str, dict[str, Any]], losses: dict[str, tuple[str, str]]) -> str:
    """The table: classes of a kind that have the same outcome in one row.

    Args:
        losses: what tells them apart, by the keys of results.
    """
    from importlib.metadata import version

    rows: dict[tuple[str, ...], list[str]] = {}
    skipped, unlike = [], []
    for each in results.values():
        if "cases" not in each:
            skipped.append(each["class"])
            continue
        signs = tuple(SIGNS[each["cases"][spec]["class"]] if spec in each["cases"] else "" for spec in SPECS)
        rows.setdefault((each["kind"], *signs), []).append(each["class"])
        for spec, case in each["cases"].items():
            if case["class"] in ("told", "wrong", "crash", "rounding"):
                text = next(iter(case.get("said") or ()), case["text"]).removeprefix("hf_parallel: ")
                unlike.append(f"- `{each['class']}`, `{spec}`: {text[:200]}")
    tried = [each for each in results.values() if "cases" in each]
    kinds = {each["kind"] for each in tried}
    known = {losses[key] for key, each in results.items() if key in losses and "cases" in each}
    counts = [
        f"`{spec}`: {sum(found)} as in one process, {refused} refused, {len(cases) - sum(found) - refused} not right"
        for spec in SPECS
        for cases in [[each["cases"][spec]["class"] for each in tried if spec in each["cases"]]]
        for found, refused in [([case in ("ok", "rounding") for case in cases], cases.count("refused"))]
    ]
    facts = {"version": version("transformers"), "tried": len(tried), "kinds": len(kinds), "all": len(KINDS)}
    facts |= {"losses": len(set(losses.values())), "left": len(set(losses.values()) - known)}
    facts["counts"] = "; ".join(counts)
    lines = [f"| {' | '.join(key)} | {', '.join(sorted(names))} |" for key, names in rows.items()]
    text = HEADER.format(**facts, date=max(each.get("date", "") for each in tried)) + "\n".join(lines) + "\n"
    if unlike:
        text += "\n## Other numbers, or an error\n\n" + "\n".join(unlike) + "\n"
    return text + (
        "\n## Not tried\n\nNot made small by the rules, in need of other inputs or packages, or with random numbers "
        f"in training: {', '.join(sorted(set(skipped)))}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="?", default="", help="kinds of losses, by commas")
    parser.add_argument("types", nargs="?", default="", help="model types, by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one-per-loss", action="store_true")
    parser.add_argument("--again", default="", help="also those whose outcome contains this")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    results = read_results(options.results)
    if options.table:
        PAGE.parent.mkdir(exist_ok=True)
        losses = {f"{kind}: {cls.__name__}": (kind, code_of_loss(cls)) for kind, _, cls, _ in classes([], [])}
        PAGE.write_text(page(results, losses))
        return
    types = [word for word in options.types.split(",") if word]
    done = set()
    for kind, model_type, cls, config_class in classes([w for w in options.kinds.split(",") if w], types):
        key, code = f"{kind}: {cls.__name__}", (kind, code_of_loss(cls))
        if options.one_per_loss and code in done:
            continue
        done.add(code)
        again = options.again and options.again in json.dumps(results.get(key, {}))
        if key in results and not types and not again:
            continue
        start = time.monotonic()
        named = {"kind": kind, "type": model_type, "class": cls.__name__, "date": f"{date.today():%Y-%m-%d}"}
        found = {**named, **outcome_of(kind, cls, config_class)}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(
            f"{key} ({time.monotonic() - start:.1f} s)", found.get("skipped", "").replace("\n", " ")[:160], flush=True
        )
        for spec, case in found.get("cases", {}).items():
            print(f"    {spec}: {case['class']} {case['text'][:230]}", *case.get("said", ())[:1], flush=True)
        if "at" in found:
            print("   ", *found["at"][-1:])


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last outcome of each class, in the order of the kinds."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {f"{each['kind']}: {each['class']}": each for each in map(json.loads, lines)}
    return dict(sorted(found.items(), key=lambda item: (list(KINDS).index(item[1]["kind"]), item[0])))


if __name__ == "__main__":
    main()
