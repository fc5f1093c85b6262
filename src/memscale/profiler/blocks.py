"""Find the blocks of a model, the repeated layers and the others, by structure alone.

A block is what a technique is attached to: one module that is called as a whole, or a few neighbours in an
`nn.Sequential`. No class of any model library is known here; only the nesting of modules counts.

Note [Which level is the block]
    Runs of like modules nest: experts in a layer, layers in a stage, stages in a network.
    - Members that are alike are blocks, whatever repeats inside them (Mixtral: the layer, not the expert).
    - Members that differ and hold stacks of their own are stages; their inner layers are the blocks (ResNet, U-Net).
    - The inside of a layer may look like a run (two convolutions, three linears). A stack is two members with two or
      more weight matrices each, or four members of any kind.
    - A module without a forward (ModuleList) is never called, so it is never a block; its children may be.
    - A scripted module (torch.jit) takes neither hooks nor another forward, so it is never a block.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from memscale._torch import is_traceable_wrapper_subclass

Role = Literal["repeated", "embedding", "head", "other"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_Children = list[tuple[str, nn.Module]]
_OVERRIDE = "_memscale_forward"  # the attribute under which a module has the override of a technique
# Numbers that tell a layer its place; two layers that differ in nothing else are the same layer.
_PLACE_NAMES = ("idx", "index", "layer_id", "layer_num", "layer_number")


@dataclass(frozen=True)
class Block:
    """One unit of a model that techniques are attached to."""

    name: str  # dotted path; of neighbours in an `nn.Sequential` a slice, "features[0:3]"; of the model itself ""
    container: str  # path of the list that holds it, or of the parent module
    members: tuple[str, ...]  # dotted paths of its modules, in call order: one, or several for a slice
    role: Role
    signature: str  # equal for blocks equal in classes, shapes, dtypes, training and settings
    parameter_names: tuple[str, ...]  # of the model; a tied parameter belongs to the first block that has it


def find_blocks(model: nn.Module) -> tuple[Block, ...]:
    """Find the blocks of a model, in the order of `named_modules()`.

    Reads shapes only: parameters may be on the meta device, fake or not yet initialised. Blocks share no parameter; a
    module in no block is a container of blocks, has no parameters, is scripted, or is never called.

    Example:
        >>> from torch import nn
        >>> layers = [nn.TransformerEncoderLayer(8, 2) for _ in range(2)]
        >>> model = nn.Sequential(nn.Embedding(10, 8), *layers, nn.Linear(8, 10))
        >>> [(block.name, block.role) for block in find_blocks(model)]
        [('0', 'embedding'), ('1', 'repeated'), ('2', 'repeated'), ('3', 'head')]
    """
    found = _with_roles(_first_of_each(_open("", model)))

    names: dict[str, list[str]] = {path: [] for item in found for path in item.paths}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in names:
            owner = owner.rpartition(".")[0]
        if owner in names:
            names[owner].append(name)

    return tuple(
        Block(
            name=item.name,
            container=item.container,
            members=item.paths,
            role=item.role,
            # A block in another mode than its model (a frozen part, batch norm in eval) keeps other tensors.
            signature=_hash(
                f"{each.training == model.training} {_digest(each, settings=True)}" for each in item.modules
            ),
            parameter_names=tuple(name for path in item.paths for name in names[path]),
        )
        for item in found
    )


def stacks(blocks: Iterable[Block]) -> tuple[tuple[Block, ...], ...]:
    """Group neighbouring repeated blocks of one container: the stacks of the model, in order."""
    runs = groupby(blocks, key=lambda block: (block.role == "repeated", block.container))
    return tuple(tuple(run) for (repeated, _), run in runs if repeated)


def find_head(model: nn.Module) -> tuple[str, nn.Linear | None, str]:
    """Find the linear layer that computes the logits: its name, the layer, or None and the reason why not.

    It is the model's own `get_output_embeddings()` (Hugging Face), or else a linear layer outside of the repeated
    blocks: the last one with an output for each row of an embedding, or the one with the most outputs.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 16), nn.Linear(16, 100))
        >>> find_head(model)[0]
        '2'
    """
    names = {id(module): name for name, module in model.named_modules()}
    output_embeddings = getattr(model, "get_output_embeddings", None)
    head = output_embeddings() if callable(output_embeddings) else None
    if head is None or id(head) not in names:
        layers = [block for block in find_blocks(model) if block.role == "repeated"]
        inside = tuple(f"{member}." for block in layers for member in block.members)
        modules = [module for name, module in model.named_modules() if not name.startswith(inside)]
        linear = [module for module in reversed(modules) if isinstance(module, nn.Linear)]
        rows = {table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)}
        widest = max(linear, key=lambda module: module.out_features, default=None)
        head = next((module for module in linear if module.out_features in rows), widest)
    if head is None:
        return "", None, f"{type(model).__name__} has no linear layer for a head"
    name = names[id(head)]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return name, None, f"{name} is a {type(head).__name__}, which computes in a way of its own"
    weight = head._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or is_traceable_wrapper_subclass(weight):
        return name, None, f"{name} has a weight that is not an ordinary parameter"
    forward = vars(head).get("forward")
    if forward is not None and forward is not vars(head).get(_OVERRIDE):
        return name, None, f"{name} has a forward of its own ({type(forward).__name__}), put there by others"
    return name, head, ""


@dataclass(frozen=True)
class _Found:
    """A block before it has its signature and its parameters."""

    name: str
    container: str
    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    role: Role = "other"
    sliced: bool = False  # one of several slices of a Sequential
    guessed: bool = False  # repeated, but only as attributes side by side: see _group_attributes

    @property
    def opens(self) -> bool:
        """Whether the module around it is a mere container because of this."""
        return self.role == "repeated" or self.sliced


def _single(path: str, module: nn.Module) -> _Found:
    return _Found(path, path.rpartition(".")[0], (path,), (module,))


def _open(path: str, module: nn.Module) -> list[_Found]:
    """Find the blocks of the model, which is a block itself only if it contains none."""
    found = _split(path, module, _size(module))
    if any(item.opens for item in found):
        return found
    # A layer that torch brings calls its own children as it likes, or reads their weights only.
    of_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
    if not found or of_torch:
        return [_single(path, module)] if _has_parameters(module) and _is_called(module) else []
    # A model that merely wraps another, such as a training harness, is opened with it.
    inner = found[0]
    if len(found) == len(inner.modules) == 1 and _size(inner.modules[0]) == _size(module):
        return _open(inner.name, inner.modules[0])
    return found


def _walk(path: str, module: nn.Module, around: int) -> list[_Found]:
    """Find the blocks in a part of the model, inside a module of size `around`; a part without any is one block."""
    if not _has_parameters(module) or isinstance(module, torch.jit.ScriptModule):
        return []
    found = _split(path, module, around)
    if _is_called(module) and not any(item.opens for item in found):
        return [_single(path, module)]
    return found


def _split(path: str, module: nn.Module, around: int) -> list[_Found]:
    """Find the blocks among the children of a module. See Note [Which level is the block]."""
    children = [(_join(path, name), child) for name, child in _children(module)]
    in_order = _class_forward(module) is nn.Sequential.forward and "forward" not in vars(module)
    simple = [in_order and _is_simple(child) for _, child in children]

    size = _size(module)
    # A list of one is a layer that is called many times, if the module around it is mostly that.
    alone = len(children) == 1 and 2 * size > around
    results: dict[str, list[_Found]] = {}
    groups: dict[str, _Children] = {}
    for (child_path, child), is_simple in zip(children, simple, strict=True):
        if not is_simple:
            results[child_path] = _walk(child_path, child, size)
            if _has_parameters(child) and not isinstance(child, torch.jit.ScriptModule):
                groups.setdefault(_class_name(child), []).append((child_path, child))
    for group in groups.values():
        if not isinstance(module, _CONTAINERS):
            _group_attributes(group, results)
        elif not _is_called(group[0][1]):
            _align(path, group, results)
        elif _are_blocks(group, results, alone):
            for child_path, child in group:
                results[child_path] = [replace(_single(child_path, child), role="repeated")]

    found: list[_Found] = []
    for is_simple, run in groupby(range(len(children)), key=simple.__getitem__):
        if is_simple:
            found += _slices(path, children, list(run))
        else:
            found += (item for index in run for item in results[children[index][0]])
    return found


def _are_blocks(group: _Children, results: dict[str, list[_Found]], alone: bool) -> bool:
    """Return whether members of one class in a list are blocks, rather than what was found inside them."""
    modules = [module for _, module in group]
    nested = [_has_stack(results[path]) for path, _ in group]
    if len(group) == 1:
        return alone and not nested[0]
    if _are_alike(modules):
        return True
    if type(modules[0]) is nn.Sequential:
        return not any(nested)  # the class does not say that they are of a kind
    return 2 * sum(nested) <= len(nested)


def _group_attributes(group: _Children, results: dict[str, list[_Found]]) -> None:
    """Treat attributes such as down1, down2, down3 as blocks.

    That is a guess (q, k and v with adapters look like it too), so it takes three, each with two weights or more,
    gives way to any stack inside, and is no stack to the module around.
    """
    if len(group) < 3 or not _is_called(group[0][1]) or type(group[0][1]) is nn.Sequential:
        return
    if all(_matrices(module) >= 2 and not _has_stack(results[path]) for path, module in group):
        for path, module in group:
            results[path] = [replace(_single(path, module), role="repeated", guessed=True)]


def _align(container: str, rows: _Children, results: dict[str, list[_Found]]) -> None:
    """Find what repeats across lists in a list: `[[attention, mlp], [attention, mlp], ...]`."""
    stacked = any(item.role == "repeated" and item.container == p for p, _ in rows for item in results[p])
    if stacked and not _are_alike([row for _, row in rows]):
        return  # each list is a stage with a stack of its own
    columns: dict[tuple[str, str], _Children] = {}
    inner: dict[str, list[_Found]] = {}
    for path, row in rows:
        for name, child in _children(row):
            child_path = _join(path, name)
            inner[child_path] = [
                item for item in results[path] if f"{item.paths[0]}.".startswith(f"{child_path}.")
            ]
            if inner[child_path]:
                columns.setdefault((name, _class_name(child)), []).append((child_path, child))
    for column in columns.values():
        if not _is_called(column[0][1]):
            _align(container, column, inner)
        elif _are_blocks(column, inner, alone=False):
            for path, module in column:
                inner[path] = [replace(_single(path, module), role="repeated", container=container)]
    for path, row in rows:
        results[path] = [item for name, _ in _children(row) for item in inner[_join(path, name)]]


def _slices(path: str, children: _Children, run: list[int]) -> list[_Found]:
    """Split neighbouring simple layers of a Sequential before each weight layer except the first."""
    heavy = [index for index in run if _matrices(children[index][1])]
    if not heavy:
        return [_single(*children[index]) for index in run if _has_parameters(children[index][1])]
    if len(heavy) == 1 and len(run) == len(children):
        return []  # nothing to cut: the Sequential is the block
    kinds = Counter(_class_name(children[index][1]) for index in heavy)
    found = []
    for first, start, stop in zip(heavy, [run[0], *heavy[1:]], [*heavy[1:], run[-1] + 1], strict=True):
        item = _single(*children[first])
        if stop - start > 1:
            paths, modules = zip(*children[start:stop], strict=True)
            item = _Found(f"{path}[{start}:{stop}]", path, paths, modules)
        repeated = kinds[_class_name(children[first][1])] > 1
        found.append(replace(item, role="repeated" if repeated else "other", sliced=len(heavy) > 1))
    return found


def _first_of_each(found: list[_Found]) -> list[_Found]:
    """Drop what is only another name for modules of earlier blocks."""
    seen: set[int] = set()
    first = []
    for item in found:
        owners = {id(module) for module, _ in _owned(item)}
        if not owners <= seen:
            first.append(item)
        seen |= owners
    return first


def _with_roles(found: list[_Found]) -> list[_Found]:
    """Set the roles of the embeddings and the head."""
    found = [replace(item, role="embedding") if _mostly(item, _is_table) else item for item in found]
    tables = {id(p) for item in found if item.role == "embedding" for _, p in _owned(item)}
    for index, item in enumerate(found):
        is_last = index == len(found) - 1 and (item.role == "other" or _breaks_pattern(found))
        is_tied = item.role == "other" and any(id(p) in tables for _, p in _owned(item))
        # Of few weights, or it would be a layer.
        if (is_last or is_tied) and sum(map(_matrices, item.modules)) <= 3 and _mostly(item, _is_projection):
            found[index] = replace(item, role="head")
    # A slice whose only like has become the head repeats nothing.
    repeated = Counter(item.container for item in found if item.role == "repeated")
    for index, item in enumerate(found):
        if item.sliced and item.role == "repeated" and repeated[item.container] == 1:
            found[index] = replace(item, role="other")
    return found


def _breaks_pattern(found: list[_Found]) -> bool:
    """Return whether the last block is a slice unlike the one before: a last Linear without activation."""
    kinds = [[type(module) for module in item.modules] for item in found[-2:]]
    return found[-1].sliced and len(kinds) == 2 and kinds[0] != kinds[1]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _class_name(value: object) -> str:
    # By name: parametrized modules have a class of their own each, all of one name.
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _class_forward(module: nn.Module) -> object:
    return getattr(type(module), "forward", None)  # that of a scripted module is on the instance only


def _is_called(module: nn.Module) -> bool:
    return _class_forward(module) is not nn.Module.forward or "forward" in vars(module)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return named children, a shared one under each of its names; parametrizations are part of the module."""
    hidden = "parametrizations" if is_parametrized(module) else None
    return [(name, m) for name, m in module._modules.items() if m is not None and name != hidden]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_simple(module: nn.Module) -> bool:
    is_leaf = not (_children(module) and _has_parameters(module))
    return is_leaf and _is_called(module) and not isinstance(module, torch.jit.ScriptModule)


def _numel(parameter: nn.Parameter) -> int:
    return 1 if is_lazy(parameter) else parameter.numel()


def _size(module: nn.Module) -> int:
    return sum(map(_numel, module.parameters()))


def _own_matrices(module: nn.Module) -> int:
    if hasattr(module, "normalized_shape"):
        return 0  # a norm over several dimensions has a weight of as many
    # Until it has seen a batch, a lazy layer's weight has no dimensions; statistics tell a norm.
    lazy_norm = any(buffer is not None and is_lazy(buffer) for buffer in module._buffers.values())
    count = sum(
        (name == "weight" and not lazy_norm) if is_lazy(parameter) else parameter.ndim >= 2
        for name, parameter in module._parameters.items()
        if parameter is not None
    )
    # The parts of a parametrized weight (direction and length, say) make one weight.
    return min(count, 1) if isinstance(module, ParametrizationList) else count


def _matrices(module: nn.Module) -> int:
    """Count weights of two or more dimensions, which tell a layer that computes from a norm."""
    return sum(map(_own_matrices, module.modules()))


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _is_projection(module: nn.Module) -> bool:
    """Return whether a module is like Linear or Conv: one weight matrix, by that name."""
    return "weight" in module._parameters and _own_matrices(module) == 1 and not _is_table(module)


def _owned(item: _Found) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield each module in a block with each parameter that it owns directly."""
    for module in (inner for member in item.modules for inner in member.modules()):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield module, parameter


def _mostly(item: _Found, test: Callable[[nn.Module], bool]) -> bool:
    """Return whether most of a block's parameters are in modules that pass a test."""
    sizes = [(test(module), _numel(parameter)) for module, parameter in _owned(item)]
    return 2 * sum(size for passed, size in sizes if passed) > sum(size for _, size in sizes)


def _has_stack(found: list[_Found]) -> bool:
    """Return whether a stack is among these. See Note [Which level is the block]."""
    runs: dict[str, list[bool]] = {}
    for item in found:
        if item.role == "repeated" and not item.guessed:
            runs.setdefault(item.container, []).append(sum(map(_matrices, item.modules)) >= 2)
    return any(len(run) >= 4 or sum(run) >= 2 for run in runs.values())


def _are_alike(modules: list[nn.Module]) -> bool:
    """Return whether modules have the same shapes for the most part; one layer in two may be of another kind."""
    counts = Counter(_digest(module, settings=False) for module in modules)
    return 2 * len(counts) <= len(modules) or 2 * max(counts.values()) > len(modules)


def _hash(lines: Iterable[str]) -> str:
    # Not hash(): that differs from process to process.
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _digest(module: nn.Module, *, settings: bool) -> str:
    """Digest the structure of a module, with or without its plain attributes."""
    lines = [_class_name(module)]
    if settings:
        plain = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and name not in ("training", "forward")
            if not (type(value) is int and name.endswith(_PLACE_NAMES))
        }
        lines += [f"{name} = {_setting(value)}" for name, value in sorted(plain.items())]
    for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        lines += [f"{kind} {name}: {_tensor(t)}" for name, t in tensors.items() if t is not None]
    for name, child in module._modules.items():
        if child is not None:
            same_mode = child.training == module.training
            lines.append(f"child {name}: {same_mode} {_digest(child, settings=settings)}")
    return _hash(lines)


def _tensor(tensor: torch.Tensor) -> str:
    shape = "lazy" if is_lazy(tensor) else tuple(tensor.shape)
    return f"{shape} {tensor.dtype} {tensor.requires_grad}"


def _setting(value: object, depth: int = 3) -> str:
    """Describe an attribute, the same in every process; an unknown object only by its class."""
    if isinstance(value, Enum):
        return f"{_class_name(value)}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, partial):
        return f"partial {_setting((value.func, value.args, value.keywords), depth - 1)}"
    if isinstance(value, tuple | list | set | frozenset | dict) and depth and len(value) <= 64:
        items: Iterable[object] = value.items() if isinstance(value, dict) else value
        texts = [_setting(item, depth - 1) for item in items]
        return f"{_class_name(value)} {texts if isinstance(value, tuple | list) else sorted(texts)}"
    name = getattr(value, "__qualname__", None)  # of functions and classes: activations, mostly
    return f"{getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else _class_name(value)
