"""Local stand-ins for what scripts of pictures and sounds would fetch: tiny models, drawn pictures, chords."""

import io
import json
import random
import shutil
import wave
from pathlib import Path

import numpy
import torch
import transformers
from datasets import Audio, ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from PIL import Image as Pictures

from tests import models
from tests.outside import materials

SIDE = 32  # of a picture
RATE = 16_000
CLASSES = ["disc", "box", "bar"]
COUNTS = {"train": 22, "validation": 11, "full": 32}
LETTERS = "abcdefgh "
SPEECH = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 8],
    "conv_kernel": [10, 8, 8],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 15,
    "num_conv_pos_embedding_groups": 4,
    "num_codevectors_per_group": 18,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "classifier_proj_size": 16,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
    "mask_time_prob": 0.0,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("layerdrop", "final_dropout", "feat_quantizer_dropout"), 0.0),
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def write_all(root: str) -> None:
    """Every model and data set below a folder that materials has written to."""
    for split in ("train", "full"):
        write_pictures(Path(root), split)
        write_sounds(Path(root), split)
    write_texts(Path(root))
    write_speech_models(root)
    write_vision_models(root)
    write_text_models(root)


def of_splits(draw_row, features: Features, train: str) -> DatasetDict:
    """A data set whose training rows are 22, a ragged last batch of 8, or 32; each row is drawn by its number."""
    counts = {"train": COUNTS[train], "validation": COUNTS["validation"], "test": COUNTS["validation"]}
    return DatasetDict(
        {
            split: Dataset.from_list(
                [draw_row(random.Random(97 * index + len(split)), index) for index in range(count)], features=features
            )
            for split, count in counts.items()
        }
    )


def drawing(draw: random.Random) -> tuple[Pictures.Image, list[tuple[int, list[int]]]]:
    """A picture with one to three shapes, and the class and the box of each."""
    pixels = numpy.full((SIDE, SIDE, 3), 20, dtype=numpy.uint8)
    pixels += numpy.random.RandomState(draw.randrange(1 << 30)).randint(0, 30, pixels.shape).astype(numpy.uint8)
    shapes = []
    for _ in range(draw.randint(1, 3)):
        kind, x, y = draw.randrange(len(CLASSES)), draw.randrange(SIDE - 12), draw.randrange(SIDE - 12)
        width, height = draw.randint(5, 11), draw.randint(5, 11)
        pixels[y : y + height, x : x + width, kind] = 150 + draw.randrange(100)
        shapes.append((kind, [x, y, width, height]))
    return Pictures.fromarray(pixels), shapes


def encoded(picture: Pictures.Image) -> dict:
    """A picture as data sets keep it."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_pictures(root: Path, split: str) -> None:
    """Pictures with a class, with boxes, with a class or an instance for each pixel, and with a caption."""

    def classified(draw, index):
        picture, shapes = drawing(draw)
        return {"image": encoded(picture), "label": shapes[0][0]}

    def detected(draw, index):
        picture, shapes = drawing(draw)
        boxes = [[float(value) for value in box] for _, box in shapes]
        return {
            "image_id": index,
            "image": encoded(picture),
            "width": SIDE,
            "height": SIDE,
            "objects": {
                "id": list(range(len(shapes))),
                "area": [box[2] * box[3] for box in boxes],
                "bbox": boxes,
                "category": [kind for kind, _ in shapes],
            },
        }

    def segmented(draw, index, instances=False):
        picture, shapes = drawing(draw)
        marks = numpy.zeros((SIDE, SIDE, 3), dtype=numpy.uint8)
        for number, (kind, (x, y, width, height)) in enumerate(shapes):
            marks[y : y + height, x : x + width] = (kind + 1, number + 1, 0)
        marks = Pictures.fromarray(marks if instances else marks[:, :, 0])
        if instances:
            return {"image": encoded(picture), "annotation": encoded(marks), "semantic_class_to_id": known}
        return {"image": encoded(picture), "label": encoded(marks)}

    known = {name: index for index, name in enumerate(["nothing", *CLASSES])}
    named = {"annotation": Image(), "semantic_class_to_id": {name: Value("int64") for name in known}}
    box = {"id": List(Value("int64")), "area": List(Value("float32")), "bbox": List(List(Value("float32"), length=4))}
    kinds = {
        "classes": (classified, {"image": Image(), "label": ClassLabel(names=CLASSES)}),
        "boxes": (
            detected,
            {
                **{name: Value("int64") for name in ("image_id", "width", "height")},
                "image": Image(),
                "objects": {**box, "category": List(ClassLabel(names=CLASSES))},
            },
        ),
        "segments": (segmented, {"image": Image(), "label": Image()}),
        "instances": (lambda draw, index: segmented(draw, index, True), {"image": Image(), **named}),
    }
    for name, (row, features) in kinds.items():
        of_splits(row, Features(features), split).save_to_disk(root / "media" / f"{name}-{split}")
    names = json.dumps({str(index): name for name, index in known.items()})
    (root / "media" / f"segments-{split}" / "id2label.json").write_text(names)
    folder = root / "captions" / split
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in {"train": COUNTS[split], "validation": COUNTS["validation"]}.items():
        rows = []
        for index in range(count):
            picture, shapes = drawing(random.Random(31 * index + len(part)))
            picture.save(folder / f"{part}-{index}.png")
            words = " and ".join(f"a {CLASSES[kind]} at {box[0]}" for kind, box in shapes)
            rows.append({"image_path": str(folder / f"{part}-{index}.png"), "caption": words})
        materials.write(folder / f"{part}.jsonl", rows)


def chord(draw: random.Random) -> tuple[dict, str]:
    """A third of a second of sound, more or less, and the letters whose tones are in it."""
    letters = "".join(draw.choice(LETTERS) for _ in range(draw.randint(3, 7))).strip() or "a"
    times = numpy.arange(draw.randint(4000, 7000)) / RATE
    sound = sum(numpy.sin(6.28 * times * (200 + 60 * LETTERS.index(letter))) for letter in letters) / len(letters)
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(RATE)
        opened.writeframes((sound * 20000).astype(numpy.int16).tobytes())
    return {"bytes": file.getvalue(), "path": None}, letters


def write_sounds(root: Path, split: str) -> None:
    """Sounds with the text that is heard, and a class."""

    def row(draw, index):
        audio, letters = chord(draw)
        return {"audio": audio, "text": letters, "label": index * 7 // 3 % 3}

    file = {"bytes": Value("binary"), "path": Value("string")}
    features = Features({"audio": file, "text": Value("string"), "label": ClassLabel(names=CLASSES)})
    sounds = of_splits(row, features, split).cast_column("audio", Audio(RATE))  # which encodes nothing
    sounds.save_to_disk(root / "media" / f"sounds-{split}")


def write_texts(root: Path) -> None:
    """Rows of four endings, and of words with a kind each."""
    words = " ".join(materials.topics[name] for name in ("assert", "while", "if", "with")).split()
    draw = random.Random(6)
    for split, count in materials.ROWS.items():
        endings, named = [], []
        for index in range(count):
            start, phrase = materials.some(words, draw, 3, 8), materials.some(words, draw, 1, 2)
            row = {"sent1": start, "sent2": phrase, "startphrase": f"{start} {phrase}", "label": index * 7 // 3 % 4}
            endings.append({**row, **{f"ending{at}": materials.some(words, draw, 1, 5) for at in range(4)}})
            tokens = materials.some(words, draw, 4, 14).split()
            kinds = ["B-LONG" if len(token) > 5 else "B-CAP" if token[0].isupper() else "O" for token in tokens]
            named.append({"tokens": tokens, "ner_tags": kinds})
        materials.write(root / "endings" / f"{split}.jsonl", endings)
        materials.write(root / "names" / f"{split}.jsonl", named)
        questions = [materials.question(words, draw, index) for index in range(count)]
        for row in questions:
            row["answers"] = {"text": [row.pop("answer")], "answer_start": [row.pop("answer_start")]}
            row["title"] = ""
        materials.write(root / "squad" / f"{split}.jsonl", questions)
        (root / "squad" / f"{split}.json").write_text(json.dumps({"data": questions}))
        pairs = [
            {"translation": {"en": materials.some(words, draw, 4, 9), "de": materials.some(words, draw, 1, 4)}}
            for _ in range(count)
        ]
        materials.write(root / "translations" / f"{split}.jsonl", pairs)
        preferences = [
            {"prompt": materials.some(words, draw, 3, 6)}
            | {key: materials.some(words, draw, 1, 6) for key in ("chosen", "rejected", "reference")}
            for _ in range(count)
        ]
        materials.write(root / "preferences" / f"{split}.jsonl", preferences)
        materials.write(root / "prompts" / f"{split}.jsonl", [{"prompt": row["prompt"]} for row in preferences])
        for kind in ("names", "endings", "texts", "pairs", "summaries", "translations"):  # they know no .jsonl
            (root / kind / f"{split}.json").write_text((root / kind / f"{split}.jsonl").read_text())
    for kind in ("preferences", "prompts"):  # whole folders: every file of a known name is a split
        (root / kind / "test.jsonl").write_text((root / kind / "validation.jsonl").read_text())
        for split in ("full", "odd", "validation"):
            (root / kind / f"{split}.jsonl").unlink()
    for split in ("train", "full"):
        folder = root / "captions" / split
        for part in ("train", "validation"):
            (folder / f"{part}.json").write_text((folder / f"{part}.jsonl").read_text())
    write_instructions(root)


def write_instructions(root: Path) -> None:
    """What LLaVA and qlora.py read: conversations about pictures, and inputs with outputs."""
    captions = [json.loads(line) for line in (root / "captions" / "train" / "train.jsonl").read_text().splitlines()]
    talks = [
        {
            "id": str(index),
            "image": Path(row["image_path"]).name,
            "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": row["caption"]}],
        }
        for index, row in enumerate(captions)
    ]
    (root / "captions" / "llava.json").write_text(json.dumps(talks))
    rows = [{"input": row["caption"].partition(" and ")[0], "output": row["caption"]} for row in captions]
    materials.write(root / "instructions.jsonl", [*rows, *rows[:11]])


def saved(model: torch.nn.Module, folder: str, *processors) -> None:
    """A model's folder with what prepares its inputs."""
    for part in (model, *processors):
        part.save_pretrained(folder)


def seeded(kind: type, config) -> torch.nn.Module:
    """A model with the tests' seed."""
    torch.manual_seed(models.SEED)
    return kind(config)


def write_speech_models(root: str) -> None:
    """wav2vec 2.0 for CTC, for classes and for pretraining, and a Whisper."""
    sounds = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True)
    for name, kind in (("wav2vec2", "Wav2Vec2ForCTC"), ("wav2vec2-pretraining", "Wav2Vec2ForPreTraining")):
        masked = {"mask_time_prob": 0.05} if "pretraining" in name else {}
        config = transformers.Wav2Vec2Config(**{**SPEECH, **masked}, vocab_size=13, pad_token_id=0)
        saved(seeded(getattr(transformers, kind), config), f"{root}/{name}", sounds)
    classes = transformers.Wav2Vec2Config(**SPEECH, num_labels=len(CLASSES))
    saved(seeded(transformers.Wav2Vec2ForSequenceClassification, classes), f"{root}/wav2vec2-classes", sounds)
    tokenizer = materials.tokenizer("pairs")
    config = transformers.WhisperConfig(
        vocab_size=materials.VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=50,
        max_target_positions=40,
        decoder_start_token_id=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    frames = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    model = seeded(transformers.WhisperForConditionalGeneration, config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=2, pad_token_id=0, bos_token_id=2, eos_token_id=3, max_length=12
    )
    saved(model, f"{root}/whisper", frames, tokenizer)
    config.decoder_layers = 5  # a teacher of the same encoder
    saved(seeded(transformers.WhisperForConditionalGeneration, config), f"{root}/whisper-teacher", frames, tokenizer)


def write_vision_models(root: str) -> None:
    """Models for classes, boxes, segments, masked pictures, and pictures with captions."""
    sides = {"height": SIDE, "width": SIDE}
    plain = transformers.ViTImageProcessor(size=sides)
    saved(seeded(transformers.ViTModel, transformers.ViTConfig(**VISION)), f"{root}/vit", plain)
    masked = transformers.ViTConfig(**VISION, encoder_stride=8)
    saved(seeded(transformers.ViTForMaskedImageModeling, masked), f"{root}/vit-masked", plain)
    mae = transformers.ViTMAEConfig(
        **VISION,
        initializer_range=0.2,
        decoder_hidden_size=32,
        decoder_intermediate_size=48,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
    )
    saved(seeded(transformers.ViTMAEForPreTraining, mae), f"{root}/mae", plain)
    detector = transformers.YolosConfig(**{**VISION, "image_size": [SIDE, SIDE]}, num_detection_tokens=7)
    boxes = transformers.YolosImageProcessor(size={"shortest_edge": SIDE, "longest_edge": SIDE})
    saved(seeded(transformers.YolosModel, detector), f"{root}/yolos", boxes)
    write_detr(root)
    segments = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 32],
        num_attention_heads=[2, 2, 2, 2],
        sr_ratios=[4, 2, 2, 1],
        decoder_hidden_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    saved(
        seeded(transformers.SegformerModel, segments),
        f"{root}/segformer",
        transformers.SegformerImageProcessor(size=sides),
    )
    write_mask2former(root)
    text = {**materials.SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
    clip = transformers.CLIPConfig(
        text_config={**text, "eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 2},
        vision_config={key: value for key, value in VISION.items() if "prob" not in key},
        projection_dim=16,
    )
    saved(
        seeded(transformers.CLIPModel, clip),
        f"{root}/clip",
        transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=sides),
        materials.tokenizer("pairs"),
    )


def resnet() -> transformers.ResNetConfig:
    """A backbone of four stages."""
    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def write_detr(root: str) -> None:
    """DETR, whose pictures are padded to the largest of a batch."""
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=resnet(),
        num_queries=7,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        dropout=0.0,
    )
    processor = transformers.DetrImageProcessor(size={"shortest_edge": SIDE, "longest_edge": SIDE})
    saved(seeded(transformers.DetrModel, config), f"{root}/detr", processor)


def write_mask2former(root: str) -> None:
    """Mask2Former for instances."""
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(
            image_size=SIDE,
            patch_size=2,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=4,
            drop_path_rate=0.0,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=24,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=24,
        num_queries=5,
        train_num_points=64,
        dropout=0.0,
    )
    processor = transformers.Mask2FormerImageProcessor(
        size={"height": SIDE, "width": SIDE}, num_labels=4, ignore_index=255
    )
    saved(seeded(transformers.Mask2FormerForUniversalSegmentation, config), f"{root}/mask2former", processor)


def write_text_models(root: str) -> None:
    """An XLNet, a Llama that knows the tokens of filling in the middle, and one that has been saved with classes."""
    tokenizer = materials.tokenizer("pairs")
    xlnet = transformers.XLNetConfig(
        vocab_size=materials.VOCABULARY, d_model=32, n_layer=3, n_head=4, d_inner=48, dropout=0.0
    )
    saved(seeded(transformers.XLNetLMHeadModel, xlnet), f"{root}/xlnet", tokenizer)
    shutil.copytree(f"{root}/llama", f"{root}/tagger", dirs_exist_ok=True)
    tagger = Path(root, "tagger", "config.json")  # a mask drawn for part of a sequence is another one
    tagger.write_text(json.dumps({**json.loads(tagger.read_text()), "classifier_dropout": 0.0}))
    filling = materials.tokenizer("plain")
    filling.add_tokens(["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"], special_tokens=True)
    small = {**materials.SMALL, "num_hidden_layers": 3}
    saved(materials.model("llama", {**small, "vocab_size": len(filling)}), f"{root}/filling", filling)
