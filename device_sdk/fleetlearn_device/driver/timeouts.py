"""``asyncio.timeout``, also where Python is 3.10, which does not have it."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    import asyncio
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def timeout(seconds: float | None) -> AsyncIterator[None]:
        """Cancel what the block waits for after ``seconds``, and raise TimeoutError then. None:
        never."""
        if seconds is None:
            yield
            return
        task, over = asyncio.current_task(), False
        assert task is not None

        def cancel() -> None:
            nonlocal over
            over = True
            task.cancel()

        handle = asyncio.get_running_loop().call_later(max(0.0, seconds), cancel)
        try:
            yield
        except asyncio.CancelledError:
            if over:
                raise TimeoutError from None
            raise
        finally:
            handle.cancel()
