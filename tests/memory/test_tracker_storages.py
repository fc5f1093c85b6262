"""The tracker follows memory, not tensors: views, aliases, resizing, cycles, any program."""

import copy
import gc
import io
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from memscale.memory.allocator import ExactAllocator
from memscale.memory.record import Category
from memscale.memory.tracker import MemoryTracker

FLOAT = 4


def storages(tensors):
    """Bytes of the distinct storages of tensors: what the tracker should find by itself."""
    found = {}
    for tensor in tensors:
        for part in (tensor, tensor.grad, tensor._base):  # a view holds on to what it is a view of
            if part is not None and part.layout is torch.strided:
                found[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(found.values())


def test_every_new_storage_counts_once_and_goes_when_it_dies():
    with MemoryTracker() as tracker:
        x = torch.zeros(10)
        y = x + 1
        assert tracker.live_bytes() == 2 * 10 * FLOAT
        del x
        assert tracker.live_bytes() == 10 * FLOAT
        del y
        assert tracker.live_bytes() == 0
    assert tracker.peak_bytes() == 2 * 10 * FLOAT


@pytest.mark.parametrize(
    "alias",
    [
        lambda x: x.view(2, 5),
        lambda x: x.view(5, 2).t(),
        lambda x: x[3:],
        lambda x: x.expand(7, 10),
        lambda x: x.unfold(0, 3, 1),
        lambda x: x.as_strided((3,), (2,)),
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_complex(x.view(5, 2)),
        lambda x: x.chunk(3),
        lambda x: torch.split(x, 4),
        lambda x: torch.tensor([]).set_(x),
        lambda x: torch.tensor([]).set_(x.untyped_storage()),
        lambda x: x.add_(1),
        lambda x: x.relu_(),
        lambda x: x.zero_(),
        lambda x: torch.add(x, 1, out=x),
        lambda x: nn.Parameter(x),
    ],
)
def test_a_view_an_alias_or_an_operation_in_place_takes_no_memory(alias):
    with MemoryTracker() as tracker:
        x = torch.zeros(10)
        before = tracker.peak_bytes()
        y = alias(x)
        assert (tracker.live_bytes(), tracker.peak_bytes()) == (40, before)
        del x
        gc.collect()
        assert tracker.live_bytes() == 40, "the alias keeps the memory"
        del y
        assert tracker.live_bytes() == 0


def test_exchanging_the_data_of_a_parameter_frees_the_old_memory():
    with MemoryTracker() as tracker:
        parameter = nn.Parameter(torch.zeros(10))
        parameter.data = torch.zeros(3)
        assert tracker.live_bytes() == 3 * FLOAT
        parameter.data = parameter.data.half()
        assert tracker.live_bytes() == 3 * 2


def test_a_tensor_that_only_autograd_holds_is_alive():
    with MemoryTracker() as tracker:
        x = torch.ones(10, requires_grad=True)
        y = x.exp().sum()
        assert tracker.live_bytes() == 40 + 40 + 4  # exp keeps its result for backward
        y.backward()
        assert tracker.live_bytes() == 40 + 4 + 40  # now the gradient is there instead
        del y
        x.grad = None
        assert tracker.live_bytes() == 40


def test_tied_weights_count_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    tied = nn.Sequential(first, second)
    with MemoryTracker(tied) as tracker:
        assert tracker.live_bytes() == 8 * 8 * FLOAT
        tied(torch.ones(1, 8)).sum().backward()
        assert tracker.now().of(Category.WEIGHTS) == 8 * 8 * FLOAT
        assert tracker.now().of(Category.GRADIENTS) == 8 * 8 * FLOAT


def test_weights_tied_through_their_storage_count_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight.data = first.weight.data
    assert MemoryTracker(nn.Sequential(first, second)).live_bytes() == 8 * 8 * FLOAT


@pytest.mark.parametrize("form", ["storage", "tensor", "out"])
def test_growing_shrinking_and_emptying_a_storage(form):
    def resize(tensor, elements):
        if form == "storage":
            tensor.untyped_storage().resize_(elements * FLOAT)
        elif form == "tensor":
            tensor.resize_(elements)
        else:
            torch.zeros(elements, out=tensor.resize_(0))

    with MemoryTracker() as tracker:
        x = torch.zeros(10)
        resize(x, 25)
        assert tracker.live_bytes() == 100
        if form == "storage":  # a tensor that shrinks keeps its memory
            resize(x, 0)
            assert tracker.live_bytes() == 0
            resize(x, 10)
            assert tracker.live_bytes() == 40
        del x
        assert tracker.live_bytes() == 0


def test_resizing_holds_old_and_new_memory_for_a_moment():
    with MemoryTracker() as tracker:
        x = torch.zeros(10)
        x.untyped_storage().resize_(100)
        assert (tracker.live_bytes(), tracker.peak_bytes()) == (100, 140)
        x.untyped_storage().resize_(100)
        assert (tracker.live_bytes(), tracker.peak_bytes()) == (100, 140), "the same size is no change"


def test_a_resized_storage_keeps_its_purpose():
    layer = nn.Linear(8, 4, bias=False)
    with MemoryTracker(layer) as tracker:
        layer.weight.untyped_storage().resize_(0)
        assert tracker.now().by_category == ((Category.WEIGHTS, 0),)
        layer.weight.untyped_storage().resize_(128)
        assert tracker.now().by_category == ((Category.WEIGHTS, 128),)
        assert tracker.timeline().totals()[-2:] == (0, 128)


def test_resizing_a_storage_that_nobody_follows_is_nobodys_business():
    x = torch.zeros(10)
    with MemoryTracker() as tracker:
        x.untyped_storage().resize_(400)
    assert tracker.peak_bytes() == 0


def test_out_of_memory_at_a_resize_leaves_everything_as_it_was():
    with MemoryTracker(allocators={"cpu": lambda: ExactAllocator(100)}) as tracker:
        x = torch.zeros(10)
        with pytest.raises(torch.OutOfMemoryError, match="to resize a storage"):
            x.untyped_storage().resize_(80)
        assert x.untyped_storage().nbytes() == 40
        assert tracker.live_bytes() == 40
        x.untyped_storage().resize_(60)
        assert tracker.live_bytes() == 60


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: torch.eye(4).to_sparse(), lambda t: (t._indices(), t._values())),
        (lambda: torch.eye(4).to_sparse_csr(), lambda t: (t.crow_indices(), t.col_indices(), t.values())),
        (lambda: torch.eye(4).to_sparse_csc(), lambda t: (t.ccol_indices(), t.row_indices(), t.values())),
        (
            lambda: torch.eye(4).to_sparse_bsr((2, 2)),
            lambda t: (t.crow_indices(), t.col_indices(), t.values()),
        ),
    ],
    ids=["coo", "csr", "csc", "bsr"],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_is_its_parts(make, parts):
    with MemoryTracker() as tracker:
        sparse = make()
        seen = tracker.live_bytes()
    assert seen == storages(parts(sparse)) >= 4 * FLOAT
    del sparse
    assert tracker.live_bytes() == 0


def test_sparse_gradients():
    embedding = nn.Embedding(100, 4, sparse=True)
    with MemoryTracker(embedding) as tracker:
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        assert tracker.now().of(Category.GRADIENTS) == 3 * 8 + 3 * 4 * FLOAT
        optimizer = torch.optim.SparseAdam(embedding.parameters())
        optimizer.step()
        optimizer.zero_grad()
        state = tracker.now()
        assert state.of(Category.GRADIENTS) == 0
        assert state.of(Category.OPTIMIZER) == 2 * 100 * 4 * FLOAT


class Wrapped(torch.Tensor):
    """A tensor made of two others, as quantised and distributed tensors are."""

    @staticmethod
    def __new__(cls, first, second):
        return torch.Tensor._make_wrapper_subclass(cls, first.size(), dtype=first.dtype)

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __tensor_flatten__(self):
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Wrapped(parts["first"], parts["second"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        values = [value.first if isinstance(value, Wrapped) else value for value in args]
        result = func(*values, **(kwargs or {}))
        return Wrapped(result, torch.zeros(5)) if isinstance(result, torch.Tensor) else result


def test_a_wrapper_tensor_is_what_it_wraps():
    wrapped = Wrapped(torch.zeros(10), torch.zeros(2))
    with MemoryTracker(wrapped) as tracker:
        assert tracker.live_bytes() == 48
        result = wrapped + 1
        assert tracker.live_bytes() == 48 + 40 + 20
        del result
        assert tracker.live_bytes() == 48


def test_meta_tensors_have_no_memory():
    with MemoryTracker() as tracker:
        x = torch.zeros(10, device="meta") + 1
    assert x.shape == (10,)
    assert tracker.devices == ()


def test_what_existed_before_counts_from_its_first_use():
    x, unused = torch.zeros(10), torch.zeros(1000)
    with MemoryTracker() as tracker:
        y = x + 1
        assert tracker.live_bytes() == 80
        assert tracker.now().of(Category.INPUTS) == 40
    assert (y.shape, unused.shape) == ((10,), (1000,))


def test_watching_counts_from_the_start_and_watching_twice_counts_once():
    x, model = torch.zeros(10), nn.Linear(2, 2, bias=False)
    tracker = MemoryTracker(x, model)
    tracker.watch(x)
    tracker.watch(model)
    assert tracker.live_bytes() == 40 + 16


@pytest.mark.parametrize("thing", [None, "model", 3, [torch.zeros(1)], nn.Linear])
def test_watching_something_else_says_what_is_taken(thing):
    with pytest.raises(TypeError, match="watches modules, optimizers and tensors, got"):
        MemoryTracker(thing)


def test_memory_that_comes_without_an_operation():
    numpy = pytest.importorskip("numpy")
    file = io.BytesIO()
    torch.save(torch.zeros(10), file)
    file.seek(0)
    with MemoryTracker() as tracker:
        loaded = torch.load(file)
        shared = torch.from_numpy(numpy.zeros(5, dtype="float32"))
        copied = copy.deepcopy(loaded)
        total = loaded.sum() + shared.sum() + copied.sum()
        assert tracker.live_bytes() == 40 + 20 + 40 + total.nbytes


def test_a_cycle_is_counted_until_the_garbage_collector_finds_it():
    class Node:
        pass

    gc.collect()
    gc.disable()
    try:
        with MemoryTracker() as tracker:
            node = Node()
            node.me, node.tensor = node, torch.zeros(10)
            del node
            assert tracker.live_bytes() == 40
            gc.collect()
            assert tracker.live_bytes() == 0
    finally:
        gc.enable()


def test_memory_freed_by_the_garbage_collector_in_the_middle_of_an_allocation():
    """See Note [Finalizers during allocation]: the collector runs between two steps of the allocator's book-keeping."""

    class Collecting(ExactAllocator):
        def allocate(self, nbytes):
            block = super().allocate(nbytes)
            gc.collect()
            return block

    class Node:
        pass

    gc.collect()
    with MemoryTracker(allocators={"cpu": Collecting}) as tracker:
        for _ in range(3):
            node = Node()
            node.me, node.tensor = node, torch.zeros(10)
            del node
            x = torch.zeros(3)
            assert tracker.live_bytes() == 12
        timeline = tracker.timeline()
        assert timeline.totals()[-1] == 12
        assert min(timeline.totals()) >= 0
        del x
    assert tracker.live_bytes() == 0


def test_memory_freed_in_another_thread():
    with MemoryTracker() as tracker:
        box = [torch.zeros(10)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert tracker.live_bytes() == 0


def test_a_compiled_function_runs_inside_and_is_followed():
    @torch.compile(backend="eager")
    def compiled(x):
        return (x + 1).sum()

    with MemoryTracker() as tracker:
        assert compiled(torch.ones(10)).item() == 20
    assert tracker.peak_bytes() >= 80


# ------------------------------------------------------------------ any program


STEPS = st.sampled_from(
    [
        "new",
        "add",
        "view",
        "slice",
        "inplace",
        "detach",
        "drop",
        "clone",
        "cat",
        "data",
        "resize",
        "set",
        "half",
    ]
)


@given(st.lists(st.tuples(STEPS, st.integers(0, 99), st.integers(0, 99)), max_size=40))
def test_live_bytes_are_those_of_the_distinct_storages_that_are_alive(program):
    with MemoryTracker() as tracker, torch.no_grad():
        alive, highest = [torch.zeros(4)], 16
        for step, one, other in program:
            x = alive[one % len(alive)] if alive else torch.zeros(0)
            y = alive[other % len(alive)] if alive else torch.zeros(0)
            if step == "new" or not alive:
                alive.append(torch.zeros(one))
            elif step == "add":
                alive.append(x + 1)
            elif step == "view":
                alive.append(x.view(-1))
            elif step == "slice":
                alive.append(x[: other % 5])
            elif step == "inplace":
                x.mul_(2)
            elif step == "detach":
                alive.append(x.detach())
            elif step == "drop":
                alive.pop(one % len(alive))
            elif step == "clone":
                alive.append(x.clone())
            elif step == "cat":
                alive.append(torch.cat([x.float(), y.float()]))
            elif step == "data":
                x.data = y.clone()
            elif step == "resize":
                size = x.untyped_storage().nbytes()
                x.untyped_storage().resize_(max(size, one * x.element_size()))
            elif step == "set":
                x.set_(y.to(x.dtype, copy=True))
            elif step == "half":
                alive.append(x.half())
            x = y = None
            assert tracker.live_bytes() == storages(alive)
            highest = max(highest, tracker.live_bytes())
        assert tracker.peak_bytes() >= highest
        assert max(tracker.timeline().totals()) == tracker.peak_bytes() == tracker.at_peak().total
        alive.clear()
        assert tracker.live_bytes() == 0


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_after_any_step_what_is_alive_is_what_the_user_holds(widths, keep_loss, steps, set_to_none):
    """Weights, gradients and optimizer state, and nothing of the step itself."""
    layers = [nn.Linear(a, b) for a, b in zip([3, *widths], widths, strict=False)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 3)
    with MemoryTracker(model, x) as tracker:
        losses = []
        for _ in range(steps):
            loss = functional.relu(model(x)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            if keep_loss:
                losses.append(loss.detach())
            del loss
        parameters = sum(p.nbytes for p in model.parameters())
        scalars = FLOAT * len(list(model.parameters()))
        gradients = 0 if set_to_none else parameters
        assert tracker.live_bytes() == 3 * parameters + scalars + gradients + x.nbytes + FLOAT * len(losses)
