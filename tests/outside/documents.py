"""Pages with a question each, and models that read both, for scripts that train retrieval of documents."""

import contextlib
import math
import random
from pathlib import Path

import torch
import transformers
from datasets import Dataset, DatasetDict, Features, Image, List, Value

from tests.outside import materials, media

#: Rows per split. 22 and 11 leave ragged last batches of 8.
COUNTS = {"train": 22, "test": 11}
MARKS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>", "<image>"]
#: Turns whose content is text, or a list of texts and pictures.
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_all(root: str) -> None:
    """Write the pages and every model below a folder that materials has written to."""
    write_pages(Path(root))
    write_looks(Path(root))
    with contextlib.suppress(ImportError):  # its processor needs torchvision
        write_qwen2_vl(root)
    write_spans(Path(root))
    write_series(Path(root))
    write_token_summaries(Path(root))
    write_judged_answers(Path(root))


def write_pages(root: Path) -> None:
    """Save pages of unlike sizes, each with a question, and with the numbers of two other pages."""
    words = " ".join(materials.topics[name] for name in ("assert", "while", "if", "with")).split()
    splits = {}
    for split, count in COUNTS.items():
        draw, rows = random.Random(len(split)), []
        for index in range(count):
            picture, _ = media.drawing(draw)
            size = (draw.choice([32, 48]), draw.choice([32, 48]))
            question, text = materials.some(words, draw, 2, 5), materials.some(words, draw, 3, 8)
            others = [(index + step) % count for step in (3, 5)]
            row = {"query": question, "image": media.encoded(picture.resize(size)), "text": text, "number": index}
            rows.append({**row, "others": others})
        columns = {"query": Value("string"), "image": Image(), "text": Value("string"), "number": Value("int64")}
        splits[split] = Dataset.from_list(rows, features=Features({**columns, "others": List(Value("int64"))}))
    DatasetDict(splits).save_to_disk(root / "pages")


def write_looks(root: Path) -> None:
    """Save turns of a talk with none, one or two pictures, and questions with two answers of unlike worth."""
    words = " ".join(materials.topics[name] for name in ("assert", "while", "if", "with")).split()
    turns = List({"role": Value("string"), "content": Value("string")})
    for name, columns in (("looks", ["messages"]), ("looked", ["prompt", "chosen", "rejected"])):
        splits = {}
        for split, count in COUNTS.items():
            draw, rows = random.Random(f"{name} {split}"), []
            for _ in range(count):
                sizes = [(draw.choice([32, 48]), draw.choice([32, 48])) for _ in range(draw.choice([0, 1, 1, 2]))]
                question = {"role": "user", "content": materials.some(words, draw, 2, 5)}
                answers = [{"role": "assistant", "content": materials.some(words, draw, 1, 6)} for _ in range(2)]
                talks = [[question, answers[0]]] if name == "looks" else [[question], *([one] for one in answers)]
                pictures = [media.encoded(media.drawing(draw)[0].resize(size)) for size in sizes]
                rows.append({"images": pictures, **dict(zip(columns, talks, strict=True))})
            features = Features({"images": List(Image()), **dict.fromkeys(columns, turns)})
            splits[split] = Dataset.from_list(rows, features=features)
        DatasetDict(splits).save_to_disk(root / name)


def write_spans(root: Path) -> None:
    """Write words with spans that have a kind, and two kinds that none of them has."""
    words = " ".join(materials.topics[name] for name in ("assert", "while", "if", "with")).split()
    draw, rows = random.Random(8), []
    for _ in range(33):
        tokens = materials.some(words, draw, 3, 6).split()
        starts = sorted(draw.sample(range(len(tokens)), 2))
        spans = [
            [start, min(start + draw.randint(0, 2), len(tokens) - 1), kind]
            for start, kind in zip(starts, "ab", strict=True)
        ]
        labels = sorted({kind for *_, kind in spans} | set(draw.sample("cdef", 2)))
        rows.append({"tokenized_text": tokens, "ner": spans, "ner_labels": labels})
    materials.write(root / "spans.jsonl", rows)


def write_series(root: Path) -> None:
    """Write waves of unlike lengths, and a Chronos-2 where its package is there."""
    draw = random.Random(9)
    for name in ("train", "other"):
        rows = []
        for _ in range(33):
            pace, height, length = draw.uniform(0.2, 0.9), draw.uniform(1, 9), draw.randint(41, 61)
            wave = [height * math.sin(pace * place) + draw.gauss(0, 0.3) for place in range(length)]
            rows.append({"start": "2020-01-01 00:00:00", "target": wave})
        materials.write(root / "series" / f"{name}.jsonl", rows)
    with contextlib.suppress(ImportError):
        from chronos.chronos2 import Chronos2CoreConfig, Chronos2Model

        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
        config = Chronos2CoreConfig(**sizes, initializer_factor=0.5)
        config.chronos_config = {
            "context_length": 24,
            "output_patch_size": 4,
            "input_patch_size": 4,
            "input_patch_stride": 4,
            "quantiles": [0.1, 0.5, 0.9],
            "use_reg_token": True,
            "use_arcsinh": True,
            "max_output_patches": 2,
        }
        config.chronos_pipeline_class = "Chronos2Pipeline"
        config.architectures = ["Chronos2Model"]
        media.saved(media.seeded(Chronos2Model, config), f"{root}/chronos-2")


def marked_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return the tests' tokenizer with the tokens that stand for pictures."""
    tokenizer = materials.tokenizer("plain")
    tokenizer.add_tokens(MARKS, special_tokens=True)
    return tokenizer


def write_qwen2_vl(root: str) -> None:
    """Save a Qwen2-VL without a head, as ColQwen2 loads it."""
    from transformers.models import qwen2_vl

    tokenizer = marked_tokenizer()
    image, video, start, end, *_ = tokenizer.convert_tokens_to_ids(MARKS)
    config = qwen2_vl.Qwen2VLConfig(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 8,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    pictures = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    processor = qwen2_vl.Qwen2VLProcessor(
        image_processor=qwen2_vl.Qwen2VLImageProcessor(**pictures),
        tokenizer=tokenizer,
        video_processor=qwen2_vl.Qwen2VLVideoProcessor(**pictures),
        chat_template="{{ messages[0]['content'] }}",
    )
    media.saved(media.seeded(qwen2_vl.Qwen2VLModel, config), f"{root}/qwen2_vl", processor)
    processor.chat_template = processor.tokenizer.chat_template = CHAT
    media.saved(media.seeded(qwen2_vl.Qwen2VLForConditionalGeneration, config), f"{root}/qwen2_vl_chat", processor)


def write_token_summaries(root: Path) -> None:
    """Save posts with a summary each, and with two that people have compared, as tokens that a number out of the

    vocabulary pads: posts on the left, summaries on the right.
    """
    draw, padding, ended = random.Random(7), materials.VOCABULARY, materials.TOKENS["eos_token_id"]

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(7, materials.VOCABULARY) for _ in range(draw.randint(least, most))]

    def row(index: int) -> dict:
        post, found = tokens(4, 9), {}
        found["query_token"] = [padding] * (9 - len(post)) + post
        for name, query in {"reference_response": "reference", "chosen": "chosen", "rejected": "rejected"}.items():
            summary = [*tokens(2, 6), ended]
            found[f"{name}_token"] = summary + [padding] * (7 - len(summary))
            whole = post + summary + [padding] * (16 - len(post) - len(summary))
            key = f"query_{name}_token"
            labels = [padding] * len(post) + whole[len(post) :]
            found |= {key: whole, f"{key}_response_label": labels}
            found["policies"] = found[f"{query}_policy"] = f"policy {index % 3}"
        texts = {"batch": f"batch {index % 2}", "split": "valid"}
        return {**found, **texts, "choice": index % 2, "extra": {"confidence": index % 5}}

    counts = {"train": 32, "validation": 16, "test": 16, "validation_cnndm": 16}
    splits = {split: Dataset.from_list([row(index) for index in range(count)]) for split, count in counts.items()}
    DatasetDict(splits).save_to_disk(root / "token-summaries")


def write_judged_answers(root: Path) -> None:
    """Write questions as tokens with four answers each, of which people liked one best."""
    draw, rows = random.Random(11), []
    for _ in range(40):
        row = {"query": [draw.randrange(7, materials.VOCABULARY) for _ in range(12)], "best": draw.randrange(4)}
        for number in range(4):
            row[f"sample{number}"] = [draw.randrange(7, materials.VOCABULARY) for _ in range(5)]
        rows.append(row)
    materials.write(root / "judged" / "train.jsonl", rows)
    state = transformers.AutoModelForCausalLM.from_pretrained(root / "gpt2").state_dict()
    state = {f"lm_backbone.{name}": value for name, value in state.items()}
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    state |= {"scalar_head.weight": head, "scalar_head.bias": torch.zeros(1)}
    torch.save(
        {**state, "reward_gain": torch.tensor(1.5), "reward_bias": torch.tensor(0.5)}, root / "judged" / "rewards.pt"
    )
