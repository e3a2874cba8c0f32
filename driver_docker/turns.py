"""Turns: who may act on a sandbox, and when. Every verb, launch and look follows this one rule.

* **A turn holds the lock of the sandbox's id.** Each verb takes one, from its first check to its answer, and so does
  whatever finishes what a launch, an outage or the end of a container left to be done. The lock belongs to the id and
  not to the entry: it also keeps a create apart from the deletion of leftovers, and a failed sandbox from the one that
  takes its id. Who waited for a turn looks again whether the entry is still in the table, and in which phase it is.
* **A launch is the one thing that acts without the lock**, since it may take minutes: the task that carries out a
  create or a start. It begins within a turn, which lasts from the reservation until `launch_task` is set. A later turn
  joins it (a start that is asked for twice) or ends it *before* it does anything itself: `end_launch` cancels the task
  and awaits it, within the turn. So no verb acts beside a launch, and no launch begins behind a verb's back.
* **A launch takes no turn**, or whoever ends it within one would wait for ever. What is to be done after one that
  failed (removing, ending its containers) is a task of its own that takes a turn, begun whether or not the launch is
  being ended: it finds done what a verb was faster with.
* **An ended launch leaves nothing under way and nothing half told.** Calls that change the engine or the disk are
  awaited to their end, however often the task is cancelled (`WorkerPool.run`), and so is the conclusion, which goes
  from the decision that a launch came through or failed to the record and the news of it (`uninterrupted`).
* **A look never waits for a turn**: where the lock is held, somebody is at it. Otherwise it begins a launch that is not
  under way, or a task that takes a turn.
* **Observing is no change.** Events, answers of the engine and the failure of a container that ended are noted between
  two steps of the loop, for a sandbox that is `ACTIVE` alone; a verb that follows decides over them.
* **Records and files are written for entries in the table alone** (`Services`). An entry leaves the table in the turn
  that removes its folder, as a deletion or for the next sandbox of its id.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from driver_docker.sandbox_record import RecordPhase

if TYPE_CHECKING:
    from driver_docker.sandboxes import Sandbox

LAUNCHING: Final = frozenset({RecordPhase.PROVISIONING, RecordPhase.STARTING})
"""Phases of a sandbox whose launch is under way, or goes on when the engine answers again."""


def has_launch(sandbox: Sandbox) -> bool:
    """Whether the task of a launch runs, if only to conclude it."""
    return sandbox.launch_task is not None and not sandbox.launch_task.done()


async def end_launch(sandbox: Sandbox) -> None:
    """Cancel the launch, where one runs, and wait until it has ended. The caller holds the lock.

    The phase may be another one afterwards: a launch that was about to come through or to fail has done so.
    """
    task = sandbox.launch_task
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task])
