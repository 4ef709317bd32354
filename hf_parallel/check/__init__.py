"""`hf-parallel check`: what to run first on a new cluster. Does what training needs work here, and how fast?

report = check()                       # on every rank, in a process group or under a launcher's variables
report.verdict, report.failed          # on rank 0; the others get an empty report

run.py     which parts are wanted, and their order
room.py    all ranks through the store; the first that fails or stands still ends all
system.py  versions, devices, what the catalogue says of them
links.py   every group of a layout, every collective and point-to-point on it, with its time
parity.py  layouts against one process
report.py  one table, one line of verdict
"""

from hf_parallel.check.report import Report, Row
from hf_parallel.check.run import Wanted, check

__all__ = ["Report", "Row", "Wanted", "check"]
