"""Around an optimizer's arithmetic: after its step hooks have begun, before they end.

Note [Around the arithmetic]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch wraps the ``step`` of every optimizer class once, when the first instance is built
(``Optimizer.profile_hook_step``). The wrapper runs the pre-hooks, all instances' and this one's, calls the
class's own step, which it holds in a closure as ``func``, and runs the post-hooks. A step that is run in
buckets has to happen exactly where ``func`` is:

- in a pre-hook would be too early: the user's own pre-hooks (which may clip gradients) come later, and the
  user's post-hooks would find the groups as the last bucket left them;
- there is no hook that runs when the step raises, and an error must find the groups whole again;
- replacing ``optimizer.step`` would be too late for a scheduler, which keeps the function it found.

So the content of that one closure cell is exchanged for a :class:`Dispatcher` while someone wants to be
around the arithmetic, and put back afterwards. Hooks, schedulers, ``GradScaler``, profiler ranges and
counters of calls are all outside, and see one step.

Private in torch: the name ``func`` in ``Optimizer.profile_hook_step`` (tried on 2.13; the same since 2.0).
Without it :meth:`Surroundings.install` says False and optimizers are left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any, TypeVar

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

__all__ = ["Surroundings", "outside_compiler"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Called as `around(step, optimizer, *args, **kwargs)`; `step(optimizer, *args, **kwargs)` is the arithmetic.
Around = Callable[..., Any]


def outside_compiler(function: Function) -> Function:
    """For what runs inside a step that the user may have compiled: the compiler leaves it alone."""
    return _disable_dynamo(function)  # type: ignore[return-value]  # it has the same signature


class Dispatcher:
    """Stands where an optimizer class's own step was, and goes through everyone around it."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.around: list[Around] = []

    def __repr__(self) -> str:
        return repr(self.step)  # torch's messages about hooks name the function

    @outside_compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.step
        for around in self.around:
            step = functools.partial(around, step)
        return step(*args, **kwargs)


class Surroundings:
    """Puts one function around the steps of optimizer classes, and takes it away again.

    Example:
        >>> import torch
        >>> def twice(step, optimizer):
        ...     step(optimizer)
        ...     return step(optimizer)
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> weight.grad = torch.tensor(0.25)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> surroundings = Surroundings(twice)
        >>> surroundings.install(torch.optim.SGD)
        True
        >>> optimizer.step()
        >>> surroundings.remove()
        >>> weight.item()
        0.5
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._cells: list[CellType] = []

    def install(self, kind: type[Optimizer]) -> bool:
        """Be around the steps of this class from now on; False where torch's wrapper is not found."""
        cell = _cell_of_step(kind)
        if cell is None:
            return False
        dispatcher = cell.cell_contents
        if not isinstance(dispatcher, Dispatcher):
            dispatcher = cell.cell_contents = Dispatcher(dispatcher)
        if self._around not in dispatcher.around:
            dispatcher.around.append(self._around)
            self._cells.append(cell)
        return True

    def remove(self) -> None:
        """Everything as it was, except for others who are around the same steps."""
        for cell in self._cells:
            dispatcher: Dispatcher = cell.cell_contents
            dispatcher.around.remove(self._around)
            if not dispatcher.around:
                cell.cell_contents = dispatcher.step
        self._cells.clear()


def _cell_of_step(kind: type[Optimizer]) -> CellType | None:
    """Where the wrapper that a call of ``step`` meets first keeps the class's own step.

    A class may override a step that is wrapped already and call it: the outer one is a whole step.
    """
    for each in kind.__mro__:
        for function in _layers(vars(each).get("step")):
            code = getattr(function, "__code__", None)
            wraps = getattr(code, "co_qualname", "profile_hook_step")  # the name is there from Python 3.11 on
            if code is None or "profile_hook_step" not in wraps:
                continue
            if code.co_freevars == ("func",):
                cell: CellType = function.__closure__[0]
                return cell
    return None


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps: the compiler, for one, wraps the steps that it must not look into."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
