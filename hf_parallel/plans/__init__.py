"""Plans: what a spec would do to a model, and what stops it, without processes and without weights.

    report = examine(build_on_meta("folder"), ParallelConfig.parse("tp=2,pp=2"))
    print(render(report))

Both come from the plan that `parallelize` applies (`resolve.py`), and from arithmetic: the slice of a tensor that a
rank keeps.
"""

from hf_parallel.plans.examine import Report, build_source_on_meta, examine, render_examination

__all__ = ["Report", "build_source_on_meta", "examine", "render_examination"]
