"""Draw scripts and layouts at random, and compare each with one process.

    python -m tests.drawn KIND [--first 0] [--count 50] [--worlds 2 4] [--simplify]
    python -m tests.drawn trainers --run "model='gpt2' ; optim='adamw_torch'" --spec tp=2     # one of them again

A script is a set of choices. Number N draws the same script and layout everywhere. With `--simplify` a script that
differs is made simpler, choice by choice, for as long as it differs.
"""

import argparse
import traceback

from tests.drawn import actions, embed, generations, loops, losses, moves, online, seq2seq, trainers, trl_scripts
from tests.drawn.bench import Bench, draw_layout

KINDS = {
    "actions": actions.KIND,
    "trainers": trainers.KIND,
    "loops": loops.KIND,
    "losses": losses.KIND,
    "generations": generations.KIND,
    "moves": moves.KIND,
    "seq2seq": seq2seq.KIND,
    "embed": embed.KIND,
    **online.KINDS,
    **trl_scripts.KINDS,
}


def main() -> None:
    """Print a line per script: how it ended, and the arguments that run it again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 2, 2, 4])
    parser.add_argument("--run")
    parser.add_argument("--spec")
    parser.add_argument("--simplify", action="store_true")
    given = parser.parse_args()
    kind = KINDS[given.kind]
    bench, counts = Bench(kind), {}
    try:
        for seed in [0] if given.run is not None else range(given.first, given.first + given.count):
            chosen = kind.draw(seed) if given.run is None else kind.read(given.run)
            spec = given.spec or draw_layout(seed, chosen, tuple(given.worlds), kind.left_out)
            try:
                ended, words = bench.try_script(chosen, spec)
                if given.simplify and ended in ("differs", "fails"):
                    chosen, spec = bench.simplify(chosen, spec, ended)
                    ended, words = bench.try_script(chosen, spec)
            except Exception:  # of this tool itself: the others are still worth their time
                ended, words = "broken", [traceback.format_exc()]
            counts[ended] = counts.get(ended, 0) + 1
            print(f'{seed} {ended}: {given.kind} --spec {spec} --run "{kind.show(chosen)}"', flush=True)
            lines = "\n".join(words).splitlines() if ended != "equal" else []
            lines = lines[:12] if ended == "differs" else lines[-12:]
            print("".join(f"    {line[:300]}\n" for line in lines), end="", flush=True)
        print(counts)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
