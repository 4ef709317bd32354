"""What training says about itself beside its loss."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.axes.axis import Axis, Keys, key


@dataclass(frozen=True)
class MonitorKeys(Keys):
    monitor: str = key(
        "basic", "`perf/` keys in every log: speed, waits, memory; `full` parts them by axis", ("off", "basic", "full")
    )


class Monitoring(Axis[None, None]):
    """Read by the hooks when training begins; see docs/monitoring.md."""

    name = "monitoring"


MONITORING = MonitorKeys.axis = Monitoring()
