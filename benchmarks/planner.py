"""How good are the planner's predictions? Against published layouts, beside a predictor of constant utilisation.

    python benchmarks/planner.py published_layouts.json                  # every figure, 10 s
    python benchmarks/planner.py published_layouts.json --unseen published_layouts_2.csv  # and of a second file
    python benchmarks/planner.py published_layouts.json --leave-one-out  # efficiencies fitted without each series
    python benchmarks/planner.py published_layouts.json --transfer       # each type of GPU as the other
    python benchmarks/planner.py published_layouts.json --fit a100-80gb  # new efficiencies for the catalogue

The file is a list of rows with the names that `benchmarks/published.py` reads. Fitted is one set of efficiencies per
type of GPU, by least squares from the same prior; a series is one publication.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published
from benchmarks.planner_fit import fit, gpu_family, leave_one_out, leave_out_of_mixtures, transfer

NOT_FITTED = ("torchtitan", "megatron_bridge_pretrain", "nemo_2502", "trl_1m")
HALF = ("bf16", "fp16")  # what is fitted; 16-bit formats are equally fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="a JSON file of published layouts")
    parser.add_argument("--unseen", metavar="ROWS", help="a second file, for the errors by series alone")
    parser.add_argument("--leave-one-out", action="store_true", help="fit without each series, test on it")
    parser.add_argument("--transfer", action="store_true", help="test each type with the other type's efficiencies")
    parser.add_argument("--fit", metavar="GPU", help="fit the efficiencies of this type and print them")
    parser.add_argument("--rounds", type=int, default=6, help="of --fit at most (6)")
    args = parser.parse_args()
    rows = published.read(args.rows)
    if args.fit:
        found = fit(args.fit, gpu_family(published.of_time(rows, HALF), args.fit), args.rounds)
        print("\n".join(f"      {name}: {value:.3g}" for name, value in found.items()))
    elif args.transfer:
        transfer(published.of_time(rows, HALF))
    elif args.leave_one_out:
        leave_one_out(published.of_time(rows, HALF))
        if mixtures := published.of_mixtures(rows):
            leave_out_of_mixtures(published.of_time(rows, HALF), mixtures)
    else:
        time_figures(rows)
        if published.of_mixtures(rows):
            mixture_figures(rows)
        ranking_figures(rows)
        memory_figures(rows)
        fitting_figures(rows)
        series_figures(rows, published.read(args.unseen) if args.unseen else [])


def time_figures(rows: list[published.Row]) -> None:
    chosen = published.of_time(rows)
    ours = published.errors(chosen, lambda row: published.call(row).step_time_s, "step_time_s")
    plain = published.errors(chosen, published.constant_utilisation, "step_time_s")
    print(f"step time, {len(chosen)} of {len(rows)} rows: dense, bf16, A100 and H100, all numbers given")
    _compare(ours, plain, "50 % utilisation")


def mixture_figures(rows: list[published.Row]) -> None:
    """Models with experts: no efficiency was fitted on them."""
    chosen = published.of_mixtures(rows)
    distinct = {id(row) for row in published.layouts(chosen)}
    ours = published.errors(chosen, lambda row: published.call(row).step_time_s, "step_time_s")
    plain = published.errors(chosen, published.constant_utilisation_of_mixture, "step_time_s")
    print(f"\nstep time, {len(chosen)} rows of mixtures of experts, any precision")
    _compare(ours, plain, "30 % utilisation")
    s = published.summary([(row, error) for row, error in ours if id(row) in distinct])
    print(f"  {s['rows']} layouts, each once: median {s['median']:.1%}, 90th percentile {s['p90']:.1%}; farthest off:")
    for row, error in sorted(ours, key=lambda one: -abs(one[1]))[:6]:
        layout = " ".join(f"{key}={row[key]}" for key in ("gpus", "tp", "pp", "ep", "zero_stage") if row.get(key))
        print(
            f"    {error:+6.0%}  {row['series']}, {row['model']}, {layout}: {row['step_time_s']:.1f} s; {row['note']}"
        )


def ranking_figures(rows: list[published.Row]) -> None:
    groups = published.groups_of_ranking(rows)
    ours = [published.ranking(group, lambda row: published.call(row).step_time_s) for group in groups]
    plain = [published.ranking(group, published.constant_utilisation) for group in groups]
    print(f"\nranking, {len(groups)} groups of BLOOM's prequel (model, day, GPUs; three layouts or more)")
    for name, found in (("planner", ours), ("50 % utilisation", plain)):
        correlations = [round(correlation, 2) for correlation, _ in found]
        near = sum(place <= 3 for _, place in found)
        median = statistics.median(correlations)
        print(f"  {name:<18}median Spearman {median:.2f}, best in our top 3: {near}/{len(found)}")
        print(f"  {'':<18}{correlations}")


def memory_figures(rows: list[published.Row]) -> None:
    chosen = published.of_memory(rows)
    ours = published.errors(chosen, lambda row: published.call(row).memory_gib, "memory_gib")
    plain = published.errors(chosen, published.textbook_memory, "memory_gib")
    print(f"\nmemory, {len(chosen)} rows; without CPU offload and unstated recomputation")
    _compare(ours, plain, "textbook formula")


def series_figures(rows: list[published.Row], unseen: list[published.Row]) -> None:
    """Print the errors of every series, and of which of its rows an efficiency was fitted on."""
    timed = published.of_time([*rows, *unseen], (*HALF, "fp8"))
    fitted = {id(row) for row in timed if row["series"] not in NOT_FITTED}
    chosen = published.with_step_times([*rows, *unseen])
    print(f"\nstep time by series, GPU and precision, {len(chosen)} rows")
    groups: dict[str, list[tuple[published.Row, float]]] = defaultdict(list)
    for row, error in published.errors(chosen, lambda row: published.call(row).step_time_s, "step_time_s"):
        kind = "fitted" if id(row) in fitted else "not fitted"
        groups[f"{kind:<12}{row['series']}, {row['gpu_type']}, {row['precision']}"].append((row, error))
    for name, found in sorted(groups.items()):
        s, bias = published.summary(found), statistics.median(error for _, error in found)
        print(f"  {name:<66}{len(found):4} rows  median {s['median']:6.1%}, p90 {s['p90']:6.1%}, bias {bias:+.1%}")
    for kind in ("fitted", "not fitted"):
        s = published.summary([pair for name, found in groups.items() if name.startswith(kind) for pair in found])
        print(f"  {kind:<12}{s['rows']} rows: median {s['median']:.1%}, 90th percentile {s['p90']:.1%}")


def fitting_figures(rows: list[published.Row]) -> None:
    chosen = published.of_fitting(rows)
    right = [(row, published.call(row).fits != bool(row.get("oom"))) for row in chosen]
    print(f"\nfits or not, {len(chosen)} rows, {sum(bool(row.get('oom')) for row in chosen)} of them out of memory")
    print(f"  {'all':<28}{sum(ok for _, ok in right) / len(right):.1%} right")
    for name in dict.fromkeys(row["series"] for row in chosen):
        mine = [ok for row, ok in right if row["series"] == name]
        print(f"  {name:<28}{sum(mine) / len(mine):.1%} of {len(mine)}")
    failed = [ok for row, ok in right if row.get("oom")]
    print(f"  out-of-memory rows found: {sum(failed)} of {len(failed)}")


def _compare(ours: list, plain: list, other: str) -> None:
    for name, found in (("planner", ours), (other, plain)):
        s = published.summary(found)
        print(f"  {name:<18}median {s['median']:.1%}, 90th percentile {s['p90']:.1%}")
    theirs = published.by_series(plain)
    for name, found in published.by_series(ours).items():
        size, bias = statistics.median(map(abs, found)), statistics.median(found)
        beside = statistics.median(map(abs, theirs[name]))
        print(f"    {name:<26}{len(found):4} rows  median {size:6.1%} (bias {bias:+.1%}), {other} {beside:.1%}")


if __name__ == "__main__":
    main()
