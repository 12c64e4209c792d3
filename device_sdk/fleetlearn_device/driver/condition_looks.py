"""When the device looks whether it may work, and how the session is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fleetlearn_device.conditions.watch import ConditionWatch
from fleetlearn_device.driver.connection import Event
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.session.commands import Commands
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Idle, Online

OWN_PAUSE = Pause(("pause",), "its owner paused it")


class ConditionLooks:
    """Looks at a device's conditions, and begins and ends the session's pauses."""

    def __init__(
        self, watch: ConditionWatch, session: Session, post: Callable[[Event], None]
    ) -> None:
        """``post``: takes an event, in the event loop's thread."""
        self._watch, self._session, self._post = watch, session, post
        self._own_pause: Pause | None = None
        """The owner's, beside those of the conditions."""
        self.now = asyncio.Event()
        """Set when the device wakes for something else, or begins to work: it looks at the
        conditions then."""
        self._lock = asyncio.Lock()
        self._may_work = asyncio.Event()
        """Set while all conditions hold, as far as the session was told."""

    def pause(self, *, keeps: bool) -> None:
        """The owner pauses the device. ``keeps``: a task in training is kept for as long as its
        lease lives."""
        self._own_pause = OWN_PAUSE._replace(keeps=keeps)
        self._post(partial(self._tell_session, self._watch.pause))

    def resume(self) -> None:
        """End ``pause``."""
        self._own_pause = None
        self._post(partial(self._tell_session, self._watch.pause))

    async def look(self, *, fresh: bool) -> None:
        """Look at the conditions, and tell the session what was found."""
        watch = self._watch
        if not watch.conditions:
            if self._own_pause is None:
                self._may_work.set()
            return
        async with self._lock:
            if not (fresh or watch.is_due()):
                return
            # In a thread, since an owner's check may take its time.
            pause = await asyncio.to_thread(partial(watch.look, fresh=fresh))
            self._post(partial(self._tell_session, pause))

    def _tell_session(self, pause: Pause | None) -> Commands:
        pause = self._own_pause or pause
        if pause is None:
            self._may_work.set()
            return self._session.end_pause()
        self._may_work.clear()
        return self._session.begin_pause(pause)

    async def run(self) -> None:
        """Look at the conditions while the device runs: often while it works, and when it wakes
        for something else while it waits."""
        while self._watch.conditions:
            session = self._session
            transfers = isinstance(session.link, Online) and not isinstance(session.work, Idle)
            works = transfers or session.running_task_id is not None
            try:
                async with timeout(self._watch.next_look(works=works)):
                    await self.now.wait()
            except TimeoutError:
                pass
            self.now.clear()
            await self.look(fresh=session.pause is not None)

    async def wait_until_all_hold(self) -> None:
        """Return when all conditions hold: before a connection is opened."""
        self._may_work.clear()
        await self.look(fresh=True)
        await self._may_work.wait()
