"""Threads that move tensors between memory and disk.

Note [Workers]
~~~~~~~~~~~~~~
The threads are daemons, as the interpreter would wait forever for others at exit; what they still have to do
is finished by a finalizer of the pool, which runs when the pool is dropped and, at the latest, at exit. They
hold the queue and not the pool, or the pool could never be dropped. Errors of a job belong to the job. Should
a thread die of anything else, then everything still to be done fails with that as its cause: nobody waits for
a dead thread. Threads do not survive a fork; a child is told so.

The queue is two deques and a `SimpleQueue` of tokens, one for each job: all of them may be used by a
finalizer that interrupts their own use, which `queue.Queue` and its lock may not.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

from memscale.errors import TierError, TransferError
from memscale.tiers.transfer import Transfer

__all__ = ["Job", "WorkerPool"]

T = TypeVar("T")

_LOOK_SECONDS = 1.0


class Job(Transfer[T]):
    """Work in the queue of a pool."""

    def __init__(self, work: Callable[[], T], state: _State) -> None:
        self._work: Callable[[], T] | None = work
        self._state = state
        self._over = threading.Event()
        self._ended = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._calls: list[tuple[Callable[[], None], Callable[[BaseException], None]]] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        work = self._work
        assert work is not None
        try:
            self._value = work()
        except Exception as error:  # whatever else there is ends the thread, which then fails its job
            self._error = error
        del work
        self._end()

    def fail(self, error: BaseException) -> None:
        """End it without having run it, or without knowing how far it got."""
        if not self._over.is_set():
            self._error = error
            self._end()

    def _end(self) -> None:
        self._work = None  # it holds the tensors it worked on
        with self._lock:
            self._ended = True
            calls, self._calls = self._calls, []
        for done, failed in calls:
            self._tell(done, failed)
        self._over.set()  # last: who waited for it sees what they did

    def done(self) -> bool:
        return self._over.is_set()

    def finish(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if self._state.broken is not None or os.getpid() != self._state.pid:
                self.fail(self._state.problem())

    def wait(self) -> T:
        self.finish()
        if self._error is not None:
            if isinstance(self._error, TransferError):
                # Not itself: what is raised gets a traceback, and the cause of this one may know this job.
                raise TransferError(str(self._error)) from self._error.__cause__
            raise TransferError(f"A transfer in a worker thread failed: {self._error}") from self._error
        return cast(T, self._value)

    def then(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        with self._lock:
            if not self._ended:
                self._calls.append((done, failed))
                return
        self._tell(done, failed)

    def _tell(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        if self._error is None:
            done()
        else:
            failed(self._error)


class _State:
    """What the threads and the pool share."""

    def __init__(self) -> None:
        self.urgent: deque[Job[Any]] = deque()
        self.later: deque[Job[Any]] = deque()
        self.tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.closed = False
        self.broken: TransferError | None = None
        self.pid = os.getpid()

    def put(self, job: Job[Any], urgent: bool) -> None:
        (self.urgent if urgent else self.later).append(job)
        self.tokens.put(None)  # after its job: who has a token finds a job, or someone else took it

    def pop(self) -> Job[Any] | None:
        for jobs in (self.urgent, self.later):
            with contextlib.suppress(IndexError):
                return jobs.popleft()
        return None

    def break_down(self, cause: BaseException) -> None:
        self.broken = TransferError(
            f"A worker thread of the offload engine died ({cause!r}). What was not yet stored is still in "
            "memory: save your model, then detach and wrap it again."
        )
        self.broken.__cause__ = cause

    def problem(self) -> TierError:
        """Why nothing runs here any more."""
        if os.getpid() != self.pid:
            return TierError(
                f"The offload engine's threads are in process {self.pid}, and {os.getpid()} is a fork of it: "
                "make an engine of its own there, or start the process by spawn."
            )
        if self.broken is not None:
            return self.broken
        return TierError("The offload engine is closed: make a new one to offload again.")


class WorkerPool:
    """So many threads, started with the first job. See Note [Workers].

    Example:
        >>> pool = WorkerPool(1)
        >>> pool.submit(lambda: "moved").wait()
        'moved'
        >>> pool.close()
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._state = _State()
        self._start = threading.Lock()
        self._stop = weakref.finalize(self, _stop, self._state)

    def submit(self, work: Callable[[], T], *, urgent: bool = False) -> Job[T]:
        """Have a thread do this; urgent work goes before the rest.

        Raises:
            TierError: The pool is closed, one of its threads has died, or this process is a fork.
        """
        state = self._state
        if state.closed or state.broken is not None or os.getpid() != state.pid:
            # Not itself: what is raised gets a traceback, which the threads that are left would keep alive, with
            # the model in its frames.
            problem = state.problem()
            raise type(problem)(str(problem)) from problem.__cause__
        if not state.threads:
            with self._start:
                self._start_threads()
        job = Job(work, state)
        state.put(job, urgent)
        return job

    def close(self) -> None:
        """Do what is in the queue, then end the threads and wait for them."""
        self._stop()

    def _start_threads(self) -> None:
        for index in range(self._workers - len(self._state.threads)):
            name = f"memscale-offload-{index}"
            thread = threading.Thread(target=_serve, args=(self._state,), name=name, daemon=True)
            thread.start()
            self._state.threads.append(thread)


def _serve(state: _State) -> None:
    """The life of a worker thread."""
    job: Job[Any] | None = None
    try:
        while True:
            state.tokens.get()
            job = state.pop()
            if job is not None:
                job.run()
                job = None  # or its result would live until the next one comes
            elif state.closed:
                return
    except BaseException as error:
        state.break_down(error)
        if job is not None:
            job.fail(state.problem())
        _fail_all(state)


def _fail_all(state: _State) -> None:
    while (job := state.pop()) is not None:
        job.fail(state.problem())


def _stop(state: _State) -> None:
    state.closed = True
    if os.getpid() != state.pid:
        return
    for _ in state.threads:
        state.tokens.put(None)
    for thread in state.threads:
        if thread is not threading.current_thread():  # a pool dropped by its own last job
            thread.join()
    state.threads.clear()
    _fail_all(state)
