"""The answer to one job as it is read by its client: within its time, and only as long as somebody reads."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from mla_cli.server.answers import ChoiceText
from mla_cli.server.errors import ApiError
from mla_cli.server.job import Failed, Gone, Job, Part
from mla_cli.server.limits import Limits
from mla_cli.server.worker import Worker


class Answer:
    """What comes of a job.

    Attributes:
        choices: as far as they have come. done: whether all is there.
        headers: of the response.
    """

    def __init__(self, job: Job, worker: Worker, limits: Limits) -> None:
        self.job, self.done = job, False
        self.choices = [ChoiceText() for _ in job.sequences]
        self.headers = {"x-request-id": job.name}
        self._worker, self._limits = worker, limits

    def cancel(self) -> None:
        """Stop it, unless it has ended."""
        self._worker.cancel(self.job)

    async def next(self, patience: float | None = None) -> list[Part]:
        """What has come since the last call, as soon as there is something; nothing after `patience` seconds without.

        Raises:
            ApiError: the job has failed, its time is over, or its client was too slow.
        """
        left = self.job.started + self._limits.seconds - asyncio.get_running_loop().time()
        wait = left if patience is None else min(left, patience)
        try:
            events = await asyncio.wait_for(self.job.take(), max(wait, 0.0))
        except asyncio.TimeoutError as error:
            if wait < left:
                return []
            message = f"the answer took longer than the {self._limits.seconds:g} seconds that a request may take"
            raise ApiError(504, message, code="timeout") from error
        if self.job.overflowed:
            raise ApiError(408, f"the client has left {self._limits.pending} pieces unread", code="client_too_slow")
        parts = []
        for event in events:
            if isinstance(event, Failed):
                # What is wrong inside is in the log, under this name.
                raise ApiError(
                    event.status, f"{event.reason} (request {self.job.name})", code=event.code, headers=self.headers
                )
            if isinstance(event, Part):
                self.choices[event.choice].add(event)
                parts.append(event)
            self.done = self.done or isinstance(event, Gone)
        return parts

    async def collect(self) -> list[ChoiceText]:
        """All choices, whole.

        Raises:
            ApiError: see `next`.
        """
        while not self.done:
            await self.next()
        return self.choices


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left; what it still sends is not read."""
    while (await receive())["type"] != "http.disconnect":
        pass
