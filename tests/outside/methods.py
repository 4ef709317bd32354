"""Methods of libraries that add to Trainer: an optimizer of blocks, adapters as parametrizations."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "methods.py")


def method(name: str, more: str = "", modules=()) -> Case:
    """A case of one method on the small Llama."""
    words = f"--method {name} --model ROOT/llama --output_dir OUT --sources SOURCES --batch_size ROWS {more}"
    return Case(SCRIPT, words, modules=modules)


#: What Trainer hands on today.
REFT = (
    (
        "pyreft/reft_trainer.py",
        (("        return_outputs=False\n", "        return_outputs=False, num_items_in_batch=None\n"),),
    ),
)


METHODS = {
    "BAdam": method("badam"),
    "BAdam, accumulated": method("badam", "--accumulation 2"),
    "minLoRA": method("minlora"),
    "pyreft": method("reft", modules=REFT),
    "minLoRA, before the layout": method("minlora", "--early"),
}
MASKED = (
    "            attention_mask=attention_mask.view(len(input_ids), 1, *input_ids.shape[1:] * 2).bool(),\n"
    "            token"
)
#: Labels that a configuration had from its encoder, and arguments under their new names.
SPAN_MARKER = (
    (
        "span_marker/configuration.py",
        (
            ("            del self.id2label\n", '            self.id2label = self.encoder["id2label"]\n'),
            ("            del self.label2id\n", '            self.label2id = self.encoder["label2id"]\n'),
        ),
    ),
    ("span_marker/modeling.py", (("            attention_mask=attention_mask,\n            token", MASKED),)),
    (
        "span_marker/trainer.py",
        (
            ("include_inputs_for_metrics=True", "include_for_metrics=['inputs']"),
            ("            tokenizer=", "            processing_class="),
            ("self.tokenizer", "self.processing_class"),
        ),
    ),
)
for kind, more in {"": "", ", accumulated": "--accumulation 2"}.items():
    METHODS[f"SpanMarker{kind}"] = Case(
        str(Path(__file__).parent / "scripts" / "name_entities.py"),
        f"--model ROOT/bert --output_dir OUT --batch_size ROWS {more}",
        modules=SPAN_MARKER,
    )
METHODS["simpletransformers"] = Case(  # its loader is not shared out, so that a batch is that of all data ranks
    str(Path(__file__).parent / "scripts" / "simple_classes.py"),
    "--kind bert --model ROOT/bert --data ROOT/pairs --output_dir OUT --batch_size 8",
)
