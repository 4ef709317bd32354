"""What is replaced in other libraries by other ways than a `@patch`: each module that does it says so in `REPLACES`.

docs/reference/patches.md lists the rows. A test compares what a layout has changed in those libraries with both lists.
"""

from __future__ import annotations

from typing import NamedTuple


class Replaced(NamedTuple):
    """One thing: `target` as "package.module:Class.attribute", and while what holds it is another."""

    target: str
    why: str
    when: str
