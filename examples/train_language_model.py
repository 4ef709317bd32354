"""Train a small Llama on the text that Python carries, with Transformers' Trainer.

    python examples/train_language_model.py --output_dir outputs/model --max_steps 40

Every argument of `TrainingArguments` may follow. Nothing is downloaded: see `tiny_text.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

from tiny_text import build_model, read_documents, train_and_eval_blocks, train_tokenizer


@dataclass
class TextArguments:
    """What is trained on."""

    vocab_size: int = field(default=4096, metadata={"help": "Tokens in the vocabulary trained from the text."})
    block_size: int = field(default=128, metadata={"help": "Tokens per training example."})


def main() -> None:
    text_args, training_args = HfArgumentParser((TextArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    documents = read_documents()
    tokenizer = train_tokenizer(documents, text_args.vocab_size)
    train_dataset, eval_dataset = train_and_eval_blocks(tokenizer, documents, text_args.block_size)

    trainer = Trainer(
        model=build_model(tokenizer),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
