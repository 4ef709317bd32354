"""Pages with a question each, and models that read both, for scripts that train retrieval of documents."""

import random
from pathlib import Path

import transformers
from datasets import Dataset, DatasetDict, Features, Image, List, Value

from tests.outside import materials, media

#: Rows per split. 22 and 11 leave ragged last batches of 8.
COUNTS = {"train": 22, "test": 11}
MARKS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>", "<image>"]
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
    write_qwen2_vl(root)


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
