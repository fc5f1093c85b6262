"""Copies of tensors on disk that are begun before anyone needs them.

Note [Early copies]
~~~~~~~~~~~~~~~~~~~
To take a large model's weights to disk is most of the time that `wrap` takes. Long before it has a plan it is known
which of them are likely to go there; what follows, the frontier and the simulation, keeps one core busy with Python and
leaves the disk alone. So copies are begun then, by threads that need the GIL for a moment per write, and by direct I/O:
that needs no memory of the page cache, and on a virtual machine new memory may cost several times what it costs to
write to it. (6 GB to new pages went at 0.3 GB/s, and past them at 1.7 to 2.4.) In the first step the weights are read
from the disk, instead of from the page cache; a layer ahead, as always.

A copy is only that: the tensor stays as it is until someone takes the copy in its place. If the tensor has been changed
by then it is copied again, and if a worker has failed, whoever takes the copy writes it. What nobody takes is dropped.

One whose turn has not come yet is written by whoever takes it, to the page cache, while the workers go on: with a slow
disk and plenty of memory that is much faster. Where it is slower it would only be in their way (on the same machine 8
to 10 s instead of 7 for GPT-2 XL), so that after the first slow one the workers are waited for.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from memscale.tiers.mapped import MappedArena
from memscale.tiers.space import round_up

__all__ = ["EarlyCopies"]

logger = logging.getLogger("memscale")

WORKERS = 2  # one fills its buffer, or waits for the GIL, while the disk has the other's
AT_ONCE = 2**26  # bytes of one write: large, since the GIL is waited for after each


@dataclass(eq=False)
class _Copy:
    """A tensor, and its copy to be.

    Attributes:
        source: The tensor's memory, contiguous; it is kept alive by this.
        address: Where that is.
        home: The same in the file.
        offset: Where in the file.
        version: How often the tensor had been changed in place when the copy was asked for.
        begun: Whether someone has made it his to write.
        over: Set when a worker does nothing with it any more.
        good: Whether all of it is written.
    """

    source: torch.Tensor
    address: int
    home: torch.Tensor
    offset: int
    version: int
    begun: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    good: bool = False

    def is_of(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self.address and tensor._version == self.version


class EarlyCopies:
    """Copies that workers make, for `take` to find. See Note [Early copies].

    Args:
        arena: Where they are made.

    Raises:
        OSError: The file system has no direct I/O.

    Example:
        >>> from memscale.tiers.space import DiskSpace
        >>> x = torch.arange(1024.0)
        >>> with DiskSpace(capacity=2**20) as space:
        ...     copies = EarlyCopies(MappedArena(space))
        ...     _ = copies.add(x, x)
        ...     copies.start()
        ...     home = copies.take(x)
        ...     copies.end()
        ...     torch.equal(home, x), copies.take(x)
        (True, None)
    """

    def __init__(self, arena: MappedArena) -> None:
        self._arena = arena
        self._fd = arena.space.open_direct()
        self._copies: dict[int, _Copy] = {}  # by the tensor's id
        self._waiting: deque[_Copy] = deque()
        self._lock = threading.Lock()
        self._workers: list[threading.Thread] = []
        self._helps = True  # whether who takes a copy writes it, if it is not begun
        self._bytes, self._seconds = 0, 0.0  # of the workers, all together

    def add(self, tensor: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Ask for a copy of a tensor, before the start.

        Args:
            tensor: The tensor.
            dense: A contiguous view of all of it.

        Returns:
            What :meth:`take` will return, without its values.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full.
            TierError: The file can't be made or mapped.
        """
        home = self._arena.empty(dense.shape, dense.dtype)
        offset = self._arena.offset_of(home)
        copy = _Copy(dense.detach(), dense.data_ptr(), home, offset, tensor._version)
        self._copies[id(tensor)] = copy
        self._waiting.append(copy)
        return home

    def start(self) -> None:
        """Let the workers begin, with what was asked for first.

        Raises:
            OSError: There is no memory for them.
        """
        for number in range(WORKERS):
            work = functools.partial(self._work, mmap.mmap(-1, AT_ONCE))
            worker = threading.Thread(target=work, name=f"memscale-copies-{number}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a tensor as it is now, contiguous, to be the caller's; None if there is none.

        Raises:
            OSError: It can't be written.
        """
        copy = self._copies.pop(id(tensor), None)
        if copy is None:
            return None
        if self._helps and self._claim(copy):
            self._write_here(copy)
        else:
            copy.over.wait()  # also if it is of no use any more: its room may be given away when it is dropped
        if not copy.is_of(tensor):
            return None
        if not copy.good:
            self._arena.write(copy.home, copy.source)
        return copy.home

    def end(self) -> None:
        """Have the workers stop after what they are at, and drop what nobody took."""
        self._waiting.clear()
        for worker in self._workers:
            worker.join()
        self._copies.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _claim(self, copy: _Copy) -> bool:
        with self._lock:
            mine, copy.begun = not copy.begun, True
            return mine

    def _write_here(self, copy: _Copy) -> None:
        begin = time.perf_counter()
        self._arena.write(copy.home, copy.source)
        seconds = time.perf_counter() - begin
        copy.good = True
        # Bytes of all workers in the seconds of one of them.
        self._helps = copy.source.nbytes * self._seconds >= self._bytes * WORKERS * seconds

    def _work(self, buffer: mmap.mmap) -> None:
        """In a thread of its own, without torch: who simulates meanwhile counts what torch is asked for."""
        while (copy := self._next()) is not None:
            begin = time.perf_counter()
            try:
                self._write(copy, buffer)
                copy.good = True
            except OSError as error:  # whoever takes it writes it himself, and hears what is wrong
                logger.debug("A copy could not be made early: %s", error)
            finally:
                with self._lock:
                    self._bytes += copy.source.nbytes if copy.good else 0
                    self._seconds += time.perf_counter() - begin
                copy.over.set()

    def _next(self) -> _Copy | None:
        while True:
            try:
                copy = self._waiting.popleft()
            except IndexError:
                return None
            if self._claim(copy):
                return copy

    def _write(self, copy: _Copy, buffer: mmap.mmap) -> None:
        """Whole pages, from memory that starts at one: direct I/O asks for both. What is behind the end is nobody's."""
        view = memoryview(buffer)
        there = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for start in range(0, copy.home.nbytes, AT_ONCE):
            length = min(AT_ONCE, copy.home.nbytes - start)
            ctypes.memmove(there, copy.address + start, length)
            done, whole = 0, round_up(length)
            while done < whole:
                done += os.pwrite(self._fd, view[done:whole], copy.offset + start + done)
