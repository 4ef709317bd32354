"""What training says about itself beside its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse, spell

if TYPE_CHECKING:
    from hf_parallel.config import ParallelConfig


@dataclass(frozen=True)
class MonitorKeys(Keys):
    monitor: str = key(
        "basic", "`perf/` keys in every log: speed, waits, memory; `full` parts them by axis", ("off", "basic", "full")
    )
    profile_steps: tuple[int, ...] | None = key(
        None,
        "for example `[5,6]`: a trace and a picture of all ranks in these steps of a Trainer, "
        "`OUTPUT_DIR/profile_step_5.json.gz` and `.svg`",
    )


class Monitoring(Axis[None, None]):
    """Read by the hooks when training begins; see docs/monitoring.md."""

    name = "monitoring"
    alone = True

    def check(self, config: ParallelConfig) -> None:
        """Steps that there are."""
        if config.profile_steps is not None and min(config.profile_steps) < 1:
            refuse(f"profile_steps={spell(config.profile_steps)}", "steps count from 1", "profile_steps=[5,6]")


MONITORING = MonitorKeys.axis = Monitoring()
