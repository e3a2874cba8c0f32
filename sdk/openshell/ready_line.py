"""How a supervisor says that it is ready, for a driver that would else have to ask it again and again.

The contract's way is a health command (compute-driver contract 5.7), which an engine starts as a process of its own in
the container: that costs as much of the processor as a quarter of a container's start. A supervisor whose image bears
`READY_LABEL` with `READY_LABEL_VALUE` also writes `READY_LINE` on its standard error as soon as that command would
succeed; its driver reads the log instead. The command works all the same. Standard library only.
"""

from __future__ import annotations

from typing import Final

READY_LABEL: Final = "openshell.ai/ready-line"
"""Label of a supervisor image whose supervisor writes the line."""

READY_LABEL_VALUE: Final = "1"
"""Its value: the version of the line."""

READY_LINE: Final = '{"openshell_ready":1}'
"""The line, without its end. It says nothing else, so that nothing has to be parsed."""
