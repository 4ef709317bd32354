"""Accelerate's examples of inference over processes, read from a checkout."""

from tests.outside.cases import Case

FOLDER = "accelerate/examples/inference"
GENERATED = (
    ('"microsoft/phi-2"', '"ROOT/llama"'),
    ("torch_dtype=torch.float16", "torch_dtype=torch.float32"),
    (
        "distributed_state.print(completions)",
        "if distributed_state.is_main_process: open('OUT/generated.txt', 'w').write(repr(completions))",
    ),
)
INFERRING = {
    "inference phi2": Case(f"{FOLDER}/distributed/phi2.py", "", edits=GENERATED),
    "inference phi2, three batches": Case(
        f"{FOLDER}/distributed/phi2.py", "", edits=(*GENERATED, ("batch_size = 2", "batch_size = 1"))
    ),
}
