"""Around an optimizer's step, or around torch's own arithmetic in it.

Note [Around the arithmetic]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch wraps the ``step`` of every optimizer class once, when the first instance is built
(``Optimizer.profile_hook_step``). The wrapper runs the pre-hooks, those of all optimizers and those of this
one, calls the class's own step, which it holds in a closure as ``func``, and runs the post-hooks. The step of a
class of torch.optim itself is wrapped once more, in what turns gradients off (``_use_grad_for_differentiable``,
``torch.no_grad``), which has it as ``func``, too. Whatever happens around a step has to happen exactly there:

- in a pre-hook would be too early: the user's own pre-hooks (which may clip gradients) come later, and the
  user's post-hooks would find the groups as the last bucket left them;
- there is no hook that runs when the step raises, and an error must find the groups whole again;
- replacing ``optimizer.step`` would be too late for a scheduler, which keeps the function it found.

So the content of such a cell is exchanged for a :class:`Dispatcher` while someone wants to be around the step,
and put back afterwards. Which one depends on what is wanted:

- Buckets are made around torch's own arithmetic, the inner cell. A step that a user's class has in its place and
  from which it calls ``super().step()`` is outside, as hooks, schedulers, ``GradScaler`` and counters of calls are:
  all of them see one step.
- Whether a step is made at all is decided around the whole of it, the outer cell.

Private in torch: the name ``func`` in these wrappers (tried on 2.13). Without it :meth:`Surroundings.install` says
False and optimizers are left as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import CellType, CodeType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memscale._torch import outside_compiler
from memscale.optimizer.kinds import arithmetic_of

__all__ = ["Surroundings"]

# Called as `around(step, optimizer, *args, **kwargs)`; `step(optimizer, *args, **kwargs)` is the arithmetic.
Around = Callable[..., Any]


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

    Args:
        around: is called instead of a step, with the step as its first argument.
        meet: is called before every step of any optimizer, the first time early enough to :meth:`install`.
        after: is called after every step of any optimizer that did not raise.
        whole: be around all of a step, whoever wrote it, instead of around torch's own arithmetic.

    Example:
        >>> import torch
        >>> def twice(step, optimizer):
        ...     step(optimizer)
        ...     return step(optimizer)
        >>> weight = torch.nn.Parameter(torch.tensor(1.0))
        >>> weight.grad = torch.tensor(0.25)
        >>> surroundings = Surroundings(twice, lambda optimizer: surroundings.install(type(optimizer)))
        >>> surroundings.attach()
        >>> torch.optim.SGD([weight], lr=1.0).step()
        >>> surroundings.remove()
        >>> weight.item()
        0.5
    """

    def __init__(
        self,
        around: Around,
        meet: Callable[[Optimizer], object],
        *,
        after: Callable[[Optimizer], object] | None = None,
        whole: bool = False,
    ) -> None:
        self._around = around
        self._meet = meet
        self._after = after
        self._cell_of = _cell_of_step if whole else _cell_of_arithmetic
        self._cells: list[CellType] = []
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Meet optimizers from now on."""
        while _abandoned:
            _abandoned.pop().remove()
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            if self._after is not None:
                self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def install(self, kind: type[Optimizer]) -> bool:
        """Be around the steps of this class from now on; False where torch's wrapper is not found."""
        cell = self._cell_of(kind)
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
        while self._handles:
            self._handles.pop().remove()
        for cell in self._cells:
            dispatcher: Dispatcher = cell.cell_contents
            dispatcher.around.remove(self._around)
            if not dispatcher.around:
                cell.cell_contents = dispatcher.step
        self._cells.clear()

    def remove_with(self, owner: object) -> None:
        """Be removed some time after the owner has been collected, if that did not happen before.

        Not at once: the collector may run while torch goes through the hooks, which must not change then.
        """
        weakref.finalize(owner, _abandoned.append, self).atexit = False

    @outside_compiler
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._meet(optimizer)

    @outside_compiler
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._after is not None:
            self._after(optimizer)


_abandoned: list[Surroundings] = []


def _cell_of_step(kind: type[Optimizer]) -> CellType | None:
    """Where the wrapper that a call of ``step`` meets first keeps the class's own step.

    A class may override a step that is wrapped already and call it: the outer one is a whole step.
    """
    # By the code of torch's wrapper, which all steps that were wrapped have in common.
    inside = getattr(Optimizer.profile_hook_step, "__code__", None)
    wrappers = [each for each in getattr(inside, "co_consts", ()) if isinstance(each, CodeType)]
    for each in kind.__mro__:
        for function in _layers(vars(each).get("step")):
            code = getattr(function, "__code__", None)
            if (
                code is not None
                and any(code is wrapper for wrapper in wrappers)
                and "func" in code.co_freevars
            ):
                cell: CellType = function.__closure__[code.co_freevars.index("func")]
                return cell
    return None


def _cell_of_arithmetic(kind: type[Optimizer]) -> CellType | None:
    """Where the innermost wrapper of torch's own step keeps it; None for a class that has none."""
    owner = arithmetic_of(kind)
    if owner is None:
        return None
    layers = list(_layers(vars(owner)["step"]))
    innermost = layers[-2] if len(layers) > 1 else None
    code = getattr(innermost, "__code__", None)
    if innermost is None or code is None or "func" not in code.co_freevars:
        return None
    cell: CellType = innermost.__closure__[code.co_freevars.index("func")]
    return cell


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps: the compiler, for one, wraps the steps that it must not look into."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
