"""A recipe into a repository of the Hub: the file, and a section of its model card that says how to run it.

The section stands between two markers, so that a second push replaces it and leaves the rest of the card alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.recipes.recipe import Recipe
from hf_parallel.recipes.table import markdown
from hf_parallel.spec import HUB_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_BEGIN, _END = "<!-- hf-parallel-recipe:{file}:begin -->", "<!-- hf-parallel-recipe:{file}:end -->"
_CARD = "README.md"


def push(
    recipe: Recipe, repo: str, file: str = HUB_FILE, private: bool | None = None, api: HfApi | None = None
) -> str:
    """Upload file and card in one commit and return its address.

    Args:
        api: a `HfApi`; default: one with the token of this machine.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    card = with_section(_card_there(api, repo), section(recipe, repo, file), file)
    operations = [
        CommitOperationAdd(file, Path(recipe.path).read_bytes()),
        CommitOperationAdd(_CARD, card.encode("utf-8")),
    ]
    return str(api.create_commit(repo, operations, commit_message=f"Add the recipe {file}").commit_url)


def _card_there(api: HfApi, repo: str) -> str | None:
    if not api.file_exists(repo, _CARD):
        return None
    return Path(api.hf_hub_download(repo, _CARD)).read_text(encoding="utf-8")


def section(recipe: Recipe, repo: str, file: str = HUB_FILE) -> str:
    """What the card says."""
    source = repo if file == HUB_FILE else f"{repo}:{file}"
    script = "" if recipe.script else " train.py"
    return f"""## Recipe: {recipe.about}

```
pip install "hf-parallel[trl,lora]"
hf-parallel recipe check {source}
hf-parallel recipe run {source}{script} --output_dir out
```

{markdown([recipe])}
Memory by the planner and by a dry run, speed by the planner, unless a number says that it was measured.
[{file}]({file}) is plain YAML; nothing of it is run as code.
"""


def with_section(card: str | None, text: str, file: str) -> str:
    """The card with this section, in place of the one it had."""
    begin, end = _BEGIN.format(file=file), _END.format(file=file)
    marked = f"{begin}\n{text}{end}\n"
    if card is None:
        return f"---\ntags:\n- hf-parallel\n- recipe\n---\n\n{marked}"
    before, found, rest = card.partition(begin)
    if not found:
        return f"{card.rstrip()}\n\n{marked}"
    return before + marked + rest.partition(end)[2].removeprefix("\n")
