"""A model's own initialisation, module by module, for one that was built on the meta device.

Note [Own initialisation]
~~~~~~~~~~~~~~~~~~~~~~~~~
A constructor draws a module's numbers when the module is made: children first, then what the module has itself. That is
repeated here in the same order, so that after the same ``torch.manual_seed`` the numbers are those of a model that was
built plainly:

- a module of torch has ``reset_parameters()``, and its constructor has called just that; a module of the user's may
  have it too, or ``init_weights()``, or ``_init_weights(module)`` to be applied to all modules inside;
- a model of transformers is drawn twice: by the constructors of its modules, and then by ``_init_weights`` when the
  model is complete, and so is each model inside of it. The first drawing is rehearsed on memory that is dropped at
  once, so that the second finds the random numbers where it would have found them;
- a tied parameter is drawn for each module that has it, and the first one's numbers stay (or those of the one that
  transformers' table of tied weights calls the source); the others are drawn on stand-ins.

What can't be repeated is what a constructor does beyond these methods: numbers that it draws itself
(``nn.Parameter(torch.randn(...))``), layers that it makes by ``deepcopy`` (``nn.TransformerEncoder``: they are drawn
one by one here) or in another order than it registers them, a loop over ``self.modules()``. Then numbers are others
than those of the plain model, of the distributions that the methods above draw from. A tensor that none of them
writes to is an error, never garbage: a dispatch mode sees every write. The same mode turns away writes to what had
values before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memscale.errors import WrapError
from memscale.offload.initialisers import (
    constructor_of,
    initialiser_of_modules,
    is_pretrained,
    method_without_arguments,
)
from memscale.offload.materialised import HOST, Materialised, is_on_meta, own_tensors, tied_names
from memscale.offload.writes import Writes

__all__ = ["MemoryOf", "OwnInitialisation", "Settle"]

Settle = Callable[[nn.Parameter], None]
"""Takes a parameter that has its values to its place; called again when they were changed there."""

MemoryOf = Callable[[torch.Tensor], torch.Tensor]
"""Memory without values for a tensor that is on the meta device."""

_HF_FLAG = "_is_hf_initialized"


class OwnInitialisation:
    """Gives the tensors of a model that are on the meta device memory and first values. See Note [Own initialisation].

    Args:
        model: The model. Tensors that have values keep them.
        made: Notes what was given memory, so that it can be undone.
        settle: Takes parameters to their places as soon as their layer is done.
        layers: Modules that are initialised as a whole before they are settled.
        device: Where they get memory; on the meta device all is done but for the values, as a rehearsal.
        memory_of: What memory a tensor gets there; its own if it is not given.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> OwnInitialisation(model, Materialised(model), lambda parameter: None).run()
        >>> model(torch.ones(2, 2)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        made: Materialised,
        settle: Settle,
        layers: Sequence[nn.Module] = (),
        device: torch.device = HOST,
        memory_of: MemoryOf | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._memory_of = memory_of or self._new_memory
        self._given: set[int] = set()
        self._made = made
        self._settle = settle
        self._names = {id(module): name for name, module in model.named_modules()}
        self._layers = {id(layer) for layer in layers if layer is not model}
        self._inside = {
            id(inner)
            for layer in layers
            if layer is not model
            for inner in layer.modules()
            if inner is not layer
        }
        tensors = {id(each): [*each.parameters(), *each.buffers()] for each in model.modules()}
        self._concerned = {module for module, own in tensors.items() if any(map(is_on_meta, own))}
        self._has_values = {module for module, own in tensors.items() if own} - self._concerned
        self._owner_of = self._choose_owners()
        self._unwritten: dict[str, torch.Tensor] = {}  # by their names in the model
        self._constructed: set[int] = set()
        self._initialised: set[int] = set()
        self._before_constructor: dict[int, torch.Tensor] = {}  # the random state, by the module
        self._is_rehearsal = device.type == "meta"
        self._writes = Writes(
            (each for each in (*model.parameters(), *model.buffers()) if not is_on_meta(each)),
            rehearses=self._is_rehearsal,
        )

    def run(self) -> None:
        """Do it.

        Raises:
            WrapError: A tensor is left for which the model has no initialisation, by name. Some are known before
                anything is done.
        """
        self._refuse_the_hopeless(self._model, helped=False)
        # Not under a device that the caller has set: that may be the meta device.
        with torch.no_grad(), self._device, self._writes:
            self._construct(self._model, None)
        self._note_writes()
        if self._unwritten:
            raise WrapError(_no_way(self._model, next(iter(self._unwritten)), len(self._unwritten)))

    # ------------------------------------------------------------------ in a constructor's order

    def _construct(self, module: nn.Module, owner: Any) -> None:
        if id(module) in self._constructed:
            return
        self._constructed.add(id(module))
        owner = module if is_pretrained(module) else owner
        for child in module.children():
            self._construct(child, owner)
        if id(module) not in self._concerned:
            return
        if owner is None:
            self._initialise_plainly(module)
        else:
            self._rehearse(module)
        if owner is module:
            self._initialise_pretrained(module, module)

    def _initialise_plainly(self, module: nn.Module) -> None:
        reset = constructor_of(module) or method_without_arguments(module, "init_weights")
        with self._turn(module):
            if reset is not None:
                reset()
        self._leave(module)
        for_each = initialiser_of_modules(module)
        if for_each is not None:

            def initialise(inner: nn.Module) -> None:
                for_each(inner)
                self._leave(inner)

            module.apply(initialise)

    def _rehearse(self, module: nn.Module) -> None:
        """Draw what the constructor of a module of transformers would have drawn, and drop it."""
        constructor = constructor_of(module)
        if constructor is not None:
            self._before_constructor[id(module)] = torch.get_rng_state()
            if self._is_rehearsal:
                return  # there are no numbers to be drawn
            with self._turn(module, takes=()):
                constructor()

    def _initialise_pretrained(self, module: nn.Module, owner: Any) -> None:
        """What ``PreTrainedModel.initialize_weights`` does, in its order."""
        for child in module.children():
            self._initialise_pretrained(child, child if is_pretrained(child) else owner)
        if id(module) in self._initialised or id(module) in self._has_values:
            return
        self._initialised.add(id(module))
        vars(module).pop(
            _HF_FLAG, None
        )  # accelerate's init_empty_weights "initialises" what is on the meta device
        with self._turn(module):
            owner._initialize_weights(module)
        self._complete(module)
        self._leave(module)

    def _complete(self, module: nn.Module) -> None:
        """What transformers has left as the module's constructor made it."""
        constructor, state = constructor_of(module), self._before_constructor.pop(id(module), None)
        self._note_writes()
        left = [name for name, _ in own_tensors(module) if self._name_of(module, name) in self._unwritten]
        if constructor is None or state is None or not left:
            return
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        with self._turn(module, takes=left):
            constructor()
        torch.set_rng_state(now)

    # ------------------------------------------------------------------ memory

    @contextlib.contextmanager
    def _turn(self, module: nn.Module, takes: Sequence[str] | None = None) -> Iterator[None]:
        """A module's own tensors have memory inside the block; those that are not its to write to are stand-ins.

        Args:
            module: The module.
            takes: Names of the tensors that are its to write to; by default those that it owns.
        """
        replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for name, tensor in list(own_tensors(module)):
            key = self._name_of(module, name)
            owner = self._owner_of.get(id(tensor))
            if owner is None:
                continue  # it had values
            if owner == key and (takes is None or name in takes):
                if id(tensor) not in self._given:
                    self._give(key, tensor)
                continue
            tensors: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            replaced.append((tensors, name, tensor))
            tensors[name] = self._stand_in(tensor)
        try:
            yield
        finally:
            for tensors, name, tensor in replaced:
                tensors[name] = tensor

    def _give(self, key: str, tensor: torch.Tensor) -> None:
        given = self._made.give(tensor, self._memory_of(tensor))
        self._given.add(id(given))
        vars(given).pop(_HF_FLAG, None)  # or transformers would leave it as it is
        self._owner_of[id(given)] = key
        self._unwritten[key] = given
        self._writes.forget(given)

    def _new_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._device, requires_grad=False)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._new_memory(tensor)
        return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory

    def _note_writes(self) -> None:
        written = [name for name, tensor in self._unwritten.items() if self._writes.saw(tensor)]
        for name in written:
            del self._unwritten[name]

    def _leave(self, module: nn.Module) -> None:
        """A module has had its turn: what was written to goes to its place, unless its layer goes as a whole."""
        self._note_writes()
        if id(module) in self._inside:
            return
        for parameter in module.parameters():
            if id(parameter) in self._owner_of and self._writes.saw_lately(parameter):
                self._settle(parameter)
        self._writes.begin()

    def _choose_owners(self) -> dict[int, str]:
        """Which module's numbers a tensor gets, by its name there: the first one's, if it is not a tied copy."""
        tied = tied_names(self._model)
        chosen: dict[int, str] = {}
        for module in self._model.modules():
            for name, tensor in own_tensors(module):
                key = self._name_of(module, name)
                if is_on_meta(tensor) and (id(tensor) not in chosen or chosen[id(tensor)] in tied):
                    chosen[id(tensor)] = key
        return chosen

    def _name_of(self, module: nn.Module, name: str) -> str:
        return f"{self._names[id(module)]}.{name}".lstrip(".")

    def _refuse_the_hopeless(self, module: nn.Module, *, helped: bool) -> None:
        """Raise for a parameter that nothing will write to, before any work is done."""
        helped = (
            helped
            or is_pretrained(module)
            or initialiser_of_modules(module) is not None
            or method_without_arguments(module, "init_weights") is not None
        )
        for attribute in getattr(module, "adapter_layer_names", ()):  # of peft
            if any(is_on_meta(each) for each in _parameters_in(getattr(module, attribute, None))):
                raise WrapError(
                    f"{self._name_of(module, attribute)} is an adapter on the meta device, and its initialisation is "
                    "peft's own. Add adapters to the wrapped model instead, or give it adapters that have values."
                )
        for name, tensor in own_tensors(module):
            key = self._name_of(module, name)
            if not is_on_meta(tensor) or self._owner_of[id(tensor)] != key:
                continue
            if getattr(getattr(module, "_hf_hook", None), "offload", False):
                raise WrapError(
                    f"{key} is on the meta device because accelerate has offloaded it, and brings it itself when "
                    "the model is called. Build the model on the meta device instead (with torch.device('meta'): "
                    "...from_config(config)), give it its files by memscale.load_safetensors(model, directory), "
                    "and wrap it then."
                )
            if not helped and constructor_of(module) is None:
                raise WrapError(_no_way(self._model, key, 1))
        for child in module.children():
            self._refuse_the_hopeless(child, helped=helped or constructor_of(module) is not None)


def _parameters_in(adapters: object) -> Iterator[torch.Tensor]:
    if isinstance(adapters, nn.Module):  # a dict of layers, or of parameters
        yield from adapters.parameters()


def _no_way(model: nn.Module, key: str, count: int) -> str:
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    kind = "parameter" if name in module._parameters else "buffer"
    others = f" ({count} such tensors in all)" if count > 1 else ""
    where = f"the {type(module).__name__} {path!r}" if path else f"the {type(module).__name__} itself"
    return (
        f"The {kind} {key!r} is on the meta device, and {where} has no initialisation that could be repeated: no "
        f"reset_parameters() that sets it{others}. Give the class one; or give the model its weights with "
        f"memscale.load_safetensors(model, path) before memscale.wrap; or set this tensor yourself before that, for "
        f"example with model.get_submodule({path!r}).to_empty(device='cpu', recurse=False) and your own values. The "
        "model is as it was."
    )
