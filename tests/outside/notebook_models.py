"""Local stand-ins for the models that notebooks ask for, and for their tables of proteins and of series."""

import random
from pathlib import Path

import numpy
import transformers
from datasets import Dataset, DatasetDict, Features, Image, Value
from tokenizers import Tokenizer, processors
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from tests.outside import materials, media
from tests.outside.media import CLASSES, RATE, SIDE, VISION, saved, seeded

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {**WIDTHS, "num_hidden_layers": 3, "vocab_size": materials.VOCABULARY, "max_position_embeddings": 66}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
AMINO = "LAGVSERTIDPKQNFYMHWCXBUZO.-"


def write_all(root: str) -> None:
    """Write every model and table below a folder that materials and media have written to."""
    write_text_models(root)
    write_picture_models(root)
    write_speech(root)
    write_captions(Path(root))
    write_proteins(Path(root))
    write_hourly(Path(root))


def write_text_models(root: str) -> None:
    """DistilBERT, RoBERTa, and ESM with a tokenizer of amino acids."""
    pairs = materials.tokenizer("pairs")
    pairs.model_input_names = ["input_ids", "attention_mask"]
    distil = transformers.DistilBertConfig(
        vocab_size=materials.VOCABULARY, dim=32, hidden_dim=48, n_heads=4, n_layers=3, max_position_embeddings=66,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, qa_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    saved(seeded(transformers.DistilBertForMaskedLM, distil), f"{root}/distilbert", pairs)
    roberta = transformers.RobertaConfig(**TEXT, **QUIET, **ENDS)
    saved(seeded(transformers.RobertaForMaskedLM, roberta), f"{root}/roberta", pairs)
    names = ["<cls>", "<pad>", "<eos>", "<unk>", *AMINO, "<mask>"]
    bare = Tokenizer(tokenizer_models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    from tokenizers import Regex, pre_tokenizers

    bare.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    bare.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>", special_tokens=[("<cls>", 0), ("<eos>", 2)]
    )
    letters = PreTrainedTokenizerFast(
        tokenizer_object=bare, cls_token="<cls>", pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        mask_token="<mask>", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    esm = transformers.EsmConfig(
        **{**TEXT, "vocab_size": len(names)}, **QUIET, pad_token_id=1, mask_token_id=len(names) - 1,
        position_embedding_type="rotary", token_dropout=True, emb_layer_norm_before=False,
    )  # fmt: skip
    saved(seeded(transformers.EsmForMaskedLM, esm), f"{root}/esm", letters)


def write_picture_models(root: str) -> None:
    """BLIP, GIT, ViLT, Pix2Struct and MobileNetV2, each with what prepares its inputs."""
    sides, words = {"height": SIDE, "width": SIDE}, materials.tokenizer("pairs")
    words.model_input_names, words.model_max_length = ["input_ids", "attention_mask"], 48
    vision = {key: value for key, value in VISION.items() if "prob" not in key}
    text = {**TEXT, **QUIET, **ENDS}
    blip = transformers.BlipConfig(
        text_config={**text, "encoder_hidden_size": 32, "sep_token_id": 3, "is_decoder": True},
        vision_config=vision, projection_dim=16,
    )  # fmt: skip
    processor = transformers.BlipProcessor(transformers.BlipImageProcessor(size=sides), words)
    saved(seeded(transformers.BlipForConditionalGeneration, blip), f"{root}/blip", processor)
    git = transformers.GitConfig(vision_config=vision, **text)
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=sides)
    saved(seeded(transformers.GitForCausalLM, git), f"{root}/git", transformers.GitProcessor(pictures, words))
    vilt = transformers.ViltConfig(**{**VISION, **TEXT, **QUIET})
    asked = transformers.ViltProcessor(
        transformers.ViltImageProcessor(size={"shortest_edge": SIDE}, size_divisor=8), words
    )
    saved(seeded(transformers.ViltModel, vilt), f"{root}/vilt", asked)
    mobile = transformers.MobileNetV2Config(
        image_size=SIDE,
        depth_multiplier=0.25,
        min_depth=8,
        classifier_dropout_prob=0.0,
        num_labels=len(CLASSES),
        initializer_range=0.3,
    )
    saved(seeded(transformers.MobileNetV2ForImageClassification, mobile), f"{root}/mobilenet")
    teacher = transformers.ViTConfig(**VISION, num_labels=len(CLASSES))
    plain = transformers.ViTImageProcessor(size=sides)
    saved(seeded(transformers.ViTForImageClassification, teacher), f"{root}/vit-classes", plain)
    read = transformers.Pix2StructConfig(
        text_config={"vocab_size": materials.VOCABULARY, "hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
                     "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, **ENDS},
        vision_config={"hidden_size": 32, "patch_embed_hidden_size": 768, "d_ff": 48, "d_kv": 8,
                       "num_hidden_layers": 2, "num_attention_heads": 4, "dropout_rate": 0.0, "seq_len": 64},
    )  # fmt: skip
    cut = transformers.Pix2StructProcessor(transformers.Pix2StructImageProcessor(is_vqa=False), words)
    saved(seeded(transformers.Pix2StructForConditionalGeneration, read), f"{root}/pix2struct", cut)


def write_speech(root: str) -> None:
    """SpeechT5, with frames of 40 samples; its tokenizer is another's, whose words it reads all the same."""
    config = transformers.SpeechT5Config(
        vocab_size=materials.VOCABULARY, hidden_size=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        num_mel_bins=8, speech_decoder_prenet_units=16, speech_decoder_postnet_units=16, speaker_embedding_dim=12,
        speech_decoder_prenet_layers=2, speech_decoder_postnet_layers=3, max_speech_positions=400,
        max_text_positions=64, **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout",
        "positional_dropout", "speech_decoder_prenet_dropout", "speech_decoder_postnet_dropout", "encoder_layerdrop",
        "decoder_layerdrop"), 0.0), pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    frames = transformers.SpeechT5FeatureExtractor(num_mel_bins=8, sampling_rate=RATE)
    saved(
        seeded(transformers.SpeechT5ForTextToSpeech, config), f"{root}/speecht5", frames, materials.tokenizer("ended")
    )


def write_proteins(root: Path) -> None:
    """A table as UniProt gives it: 44 sequences, where each is found, and its helices and strands."""
    draw, lines = random.Random(12), ["Entry\tSequence\tSubcellular location [CC]\tBeta strand\tHelix"]
    for index in range(44):
        sequence = "".join(draw.choice(AMINO[:20]) for _ in range(draw.randint(9, 40)))
        place = "Cytoplasm" if index * 7 // 3 % 2 else "Membrane"
        lines.append(f"P{index}\t{sequence}\t{place}\tSTRAND 2..{draw.randint(3, 4)};\tHELIX 5..{draw.randint(6, 9)};")
    (root / "proteins.tsv").write_text("\n".join(lines) + "\n")
    draw = random.Random(13)
    rows = [{"sequence": "".join(draw.choice("ACGT") for _ in range(draw.randint(9, 40))), "label": i * 7 // 3 % 3}
            for i in range(40)]  # fmt: skip
    materials.write(root / "genes.jsonl", rows)


def write_hourly(root: Path) -> None:
    """Seven columns of numbers by the hour."""
    times = numpy.arange(400)
    names = ["HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"]
    noise = numpy.random.RandomState(3).randn(len(times), len(names))
    rows = ["date," + ",".join(names)]
    for at in times:
        values = numpy.sin(at / (3 + numpy.arange(len(names)))) + 0.3 * noise[at]
        rows.append(f"{numpy.datetime64('2020-01-01T00') + at}:00:00," + ",".join(f"{value:.4f}" for value in values))
    (root / "hourly.csv").write_text("\n".join(rows) + "\n")
    draw, splits = random.Random(14), {}
    waves = [[draw.random() + 3 + numpy.sin(at / (2 + index)) for at in range(70)] for index in range(16)]
    for split, length in {"train": 58, "validation": 64, "test": 70}.items():
        columns = {"start": numpy.datetime64("2020-01-01", "s").item(), "feat_dynamic_real": None}
        lists = [{**columns, "target": wave[:length], "feat_static_cat": [at]} for at, wave in enumerate(waves)]
        splits[split] = Dataset.from_list([{**row, "item_id": f"T{at}"} for at, row in enumerate(lists)])
    DatasetDict(splits).save_to_disk(root / "media" / "series")


def write_captions(root: Path) -> None:
    """Pictures with a text, and pictures by their file with a question and answers that have weights."""
    captions, asked = [], []
    words = " ".join(materials.topics[name] for name in ("assert", "while")).split()
    for index in range(32):
        draw = random.Random(61 * index)
        picture, shapes = media.drawing(draw)
        text = " and ".join(f"a {CLASSES[kind]} at {box[0]}" for kind, box in shapes)
        pet = root / "media" / "pets" / f"{CLASSES[shapes[0][0]]}_{index}.jpg"
        pet.parent.mkdir(exist_ok=True)
        picture.save(pet)
        captions.append({"image": media.encoded(picture), "text": text})
        file = root / "captions" / "full" / f"train-{index}.png"
        ids = sorted({CLASSES[kind] for kind, _ in shapes})
        label = {"ids": ids, "weights": [1.0 - 0.3 * at for at in range(len(ids))]}
        row = {"question": materials.some(words, draw, 2, 5), "image_id": str(file), "label": label}
        asked.append({**row, "question_type": "", "question_id": index, "answer_type": ""})
    sounds = DatasetDict.load_from_disk(str(root / "media" / "sounds-full")).remove_columns("label")
    sounds = sounds.map(lambda row, index: {"speaker_id": str(index % 3)}, with_indices=True)
    sounds.save_to_disk(root / "media" / "spoken")
    features = Features({"image": Image(), "text": Value("string")})
    for name, rows, kinds in (("captioned", captions, features), ("asked", asked, None)):
        DatasetDict({"train": Dataset.from_list(rows, features=kinds)}).save_to_disk(root / "media" / name)
