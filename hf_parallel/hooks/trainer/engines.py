"""`fsdp` and `deepspeed` of TrainingArguments beside a layout: refused, with the line that prints the spec."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse

if TYPE_CHECKING:
    from transformers import TrainingArguments

#: A longer value is better read from the script that has it.
_LONGEST = 400


def check_engines(args: TrainingArguments) -> None:
    """Refuse another engine beside a layout.

    Raises:
        SpecError: `fsdp` or `deepspeed` is given. It names the command that prints the spec for them.
    """
    if args.fsdp:
        asked = [("fsdp", args.fsdp)]
        asked += [("fsdp_config", args.fsdp_config)] if args.fsdp_config else []
        why = "a second sharding beside --parallel"
    elif args.deepspeed:
        asked, why = [("deepspeed", args.deepspeed)], "a second engine beside --parallel"
    else:
        return
    name, value = asked[0]
    shown = name if isinstance(value, dict) else f"{name}={_format_as_word(value)}"
    # The command that reads these values: a file by its name, others as words.
    if name == "deepspeed" and isinstance(value, str) and os.path.isfile(value):
        line = f"hf-parallel migrate {shlex.quote(value)}"
    else:
        words = [
            f"--{key} {shlex.quote(_format_as_word(given))}" if given is not True else f"--{key}"
            for key, given in asked
        ]
        line, script = f"hf-parallel migrate {' '.join(words)}", sys.argv[0]
        if len(line) > _LONGEST and script.endswith(".py") and os.path.isfile(script):
            line = f"hf-parallel migrate {shlex.quote(os.path.relpath(script))}"
    refuse(shown, why, do=f"leave it out, and `{line}` prints the spec for it")


def _format_as_word(value: object) -> str:
    """Return a value as Trainer's command line takes it."""
    if isinstance(value, dict):
        return json.dumps(value)
    words = value if isinstance(value, list | tuple) else [value]
    return " ".join(str(getattr(word, "value", word)) for word in words)
