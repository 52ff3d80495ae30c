"""The thread that computes: it alone touches the scheduler. Requests reach it by a queue, their text leaves by the loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from mla_cli.errors import internal_error
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.request import Completion, Failure, Text
from mla_cli.runtime.request import Event as Given
from mla_cli.runtime.scheduler import Scheduler
from mla_cli.server.errors import ApiError
from mla_cli.server.job import Choice, Event, Failed, Gone, Job

_ADD, _CANCEL, _STOP = "add", "cancel", "stop"
LONGEST_WAIT_S = 60  # that a client is told to wait before it asks again


class Worker:
    """Answers jobs with one generator. All but the thread itself belongs to the event loop's thread.

    Args:
        queue: most answers that wait beside those that run.
        log: is told of faults, a line each.

    Attributes:
        held: answers that run or wait; most: of them. broken: the thread has ended by a fault.
    """

    def __init__(
        self, generator: Generator, loop: asyncio.AbstractEventLoop, *, queue: int, log: Callable[[str], None]
    ) -> None:
        self.generator, self.held, self.broken = generator, 0, False
        self.most = generator.max_batch + queue
        self._loop, self._log = loop, log
        self._jobs: set[Job] = set()
        self._usual_s = 1.0  # what a request takes lately
        self._numbers = itertools.count()
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._choices: dict[int, Choice] = {}  # of the thread
        self._open: dict[Job, int] = {}  # of the thread: choices that have not ended
        self._news: dict[Job, list[Event]] = {}  # of the thread
        self._thread = threading.Thread(target=self._run, name="mla-worker", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; jobs that it has are cancelled."""
        self._inbox.put((_STOP, None))
        self._thread.join(timeout=10)

    def number(self) -> int:
        """A number for a sequence that nobody has; any thread may ask."""
        return next(self._numbers)

    def check_room(self, answers: int = 1) -> None:
        """Refuse what there is no room for.

        Raises:
            ApiError: the queue is full (429), or the thread is broken (503).
        """
        if self.broken:
            raise ApiError(503, "the server is broken and must be started again", code="broken")
        if self.held + answers > self.most:
            wait = min(LONGEST_WAIT_S, max(1, round(self._usual_s * self.held / self.generator.max_batch)))
            raise ApiError(
                429,
                f"{self.held} answers run or wait, at most {self.most} may: try again later",
                code="queue_full",
                headers={"retry-after": str(wait)},
            )

    def submit(self, job: Job) -> None:
        """Begin to answer a job.

        Raises:
            ApiError: see `check_room`.
        """
        self.check_room(len(job.sequences))
        self.held += len(job.sequences)
        self._jobs.add(job)
        self._inbox.put((_ADD, job))

    def cancel(self, job: Job) -> None:
        """Forget a job, and give back what it holds; one that has ended already is none of ours."""
        if job in self._jobs:
            self._inbox.put((_CANCEL, job))

    def fail_all(self, reason: Failed) -> None:
        """Cancel all jobs, and tell their clients why."""
        for job in list(self._jobs):
            job.put([reason])
            self.cancel(job)

    def _deliver(self, news: dict[Job, list[Event]]) -> None:
        for job, events in news.items():
            if any(isinstance(event, Gone) for event in events) and job in self._jobs:
                self._jobs.discard(job)
                self.held -= len(job.sequences)
                self._usual_s += 0.1 * (self._loop.time() - job.started - self._usual_s)
            job.put(events)
            if job.overflowed:
                self.cancel(job)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            scheduler = self.generator.scheduler()
            while True:
                for command, job in self._commands(wait=not scheduler.busy):
                    if command == _STOP:
                        scheduler.close()
                        return
                    assert job is not None
                    (self._add if command == _ADD else self._forget)(scheduler, job)
                try:
                    for event in scheduler.turn():
                        self._take(event)
                except Exception as failure:
                    self._fault(scheduler, failure)
                    scheduler = self.generator.scheduler()
                self._send()
        except BaseException as failure:
            self.broken = True
            self._log(f"the server is broken and must be started again: {internal_error(_exception(failure))}")
            for job in list(self._open):
                self._end(job, Failed(503, "the server is broken and must be started again", "broken"))
            self._send()

    def _commands(self, *, wait: bool) -> Iterator[tuple[str, Job | None]]:
        """All that has been asked for since; with `wait` at least one."""
        if wait:
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _add(self, scheduler: Scheduler, job: Job) -> None:
        self._open[job] = len(job.sequences)
        for number, sequence in enumerate(job.sequences):
            self._choices[sequence.index] = Choice(job, number, sequence)
            scheduler.add(sequence)

    def _forget(self, scheduler: Scheduler, job: Job) -> None:
        if job in self._open:
            for sequence in job.sequences:
                scheduler.cancel(sequence)
            self._end(job)

    def _take(self, event: Given) -> None:
        choice = self._choices.get(event.index)
        if choice is None:  # its job has failed by another choice
            return
        if isinstance(event, Text):
            self._tell(choice.job, choice.part(event.piece))
        elif isinstance(event, Completion):
            self._tell(choice.job, choice.part("", event))
            del self._choices[event.index]
            self._open[choice.job] -= 1
            if not self._open[choice.job]:
                self._end(choice.job)
        elif isinstance(event, Failure):
            self._log(f"request {choice.job.name}: {event.error}")
            self._inbox.put((_CANCEL, choice.job))  # what is left of it, after this turn
            self._tell(choice.job, Failed(500, f"the model failed: {event.error.what}", "model_failure"))

    def _end(self, job: Job, *reasons: Failed) -> None:
        self._open.pop(job, None)
        for sequence in job.sequences:
            self._choices.pop(sequence.index, None)
        self._tell(job, *reasons, Gone())

    def _fault(self, scheduler: Scheduler, failure: Exception) -> None:
        """A turn has failed as nobody foresaw: who is in it cannot be told apart, so all are told."""
        error = internal_error(failure)
        self._log(f"requests {', '.join(job.name for job in self._open)} failed: {error}")
        scheduler.close()
        for job in list(self._open):
            self._end(job, Failed(500, "internal error", "internal_error"))

    def _tell(self, job: Job, *events: Event) -> None:
        self._news.setdefault(job, []).extend(events)

    def _send(self) -> None:
        """Hand out to the loop what came in a turn, all at once."""
        if not self._news:
            return
        news, self._news = self._news, {}
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:  # the loop has ended: nobody listens
            self._inbox.put((_STOP, None))


def _exception(failure: BaseException) -> Exception:
    return failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
