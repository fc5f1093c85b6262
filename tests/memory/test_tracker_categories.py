"""What memory is for: exact bytes of small models, computed by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memscale.checkpointing import run_region
from memscale.memory.record import Category, Phase
from memscale.memory.tracker import MemoryTracker

FLOAT = 4
W1, B1, W2, B2 = 16 * 8 * FLOAT, 16 * FLOAT, 4 * 16 * FLOAT, 4 * FLOAT
WEIGHTS = W1 + B1 + W2 + B2
X = 2 * 8 * FLOAT
HIDDEN = 2 * 16 * FLOAT
OUT = 2 * 4 * FLOAT
LOSS = FLOAT
ADAM = 2 * WEIGHTS + 4 * FLOAT  # two moments, and a step count for each of the four parameters


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def x():
    return torch.ones(2, 8)


def categories(snapshot):
    return {category: count for category, count in snapshot.by_category if count}


def test_a_step_to_the_byte(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as tracker:
        assert categories(tracker.now()) == {Category.WEIGHTS: WEIGHTS}

        loss = model(x).square().sum()
        assert categories(tracker.now()) == {
            Category.WEIGHTS: WEIGHTS,
            Category.INPUTS: X,
            # What relu and the square keep, the loss; the first layer's result went when relu was done.
            Category.ACTIVATIONS: HIDDEN + OUT + LOSS,
        }
        loss.backward()
        assert categories(tracker.now()) == {
            Category.WEIGHTS: WEIGHTS,
            Category.INPUTS: X,
            Category.GRADIENTS: WEIGHTS,
            Category.ACTIVATIONS: LOSS,
        }
        optimizer.step()
        optimizer.zero_grad()
        del loss
        assert categories(tracker.now()) == {
            Category.WEIGHTS: WEIGHTS,
            Category.INPUTS: X,
            Category.OPTIMIZER: ADAM,
        }


def test_the_peak_of_the_second_step_by_category(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as tracker:
        for _ in range(2):
            tracker.reset_peak()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = categories(tracker.at_peak())
    temporary = peak.pop(Category.TEMPORARY)
    # One parameter at a time: the largest one's scaled copy and square root.
    assert temporary == 2 * W1
    assert peak == {
        Category.WEIGHTS: WEIGHTS,
        Category.GRADIENTS: WEIGHTS,
        Category.OPTIMIZER: ADAM,
        Category.INPUTS: X,
    }
    assert tracker.at_peak().phase is Phase.OPTIMIZER


def test_buffers(x):
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4))
    with MemoryTracker(model) as tracker:
        model(x).sum().backward()
    assert tracker.now().of(Category.BUFFERS) == 2 * 4 * FLOAT + 8  # mean, variance, count


def test_a_model_and_an_optimizer_made_inside_are_found(x):
    with MemoryTracker() as tracker:
        model = nn.Linear(8, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(x).sum().backward()
        optimizer.step()
    assert categories(tracker.now()) == {
        Category.WEIGHTS: 128,
        Category.GRADIENTS: 128,
        Category.OPTIMIZER: 128,
        Category.INPUTS: X,
    }


def test_an_optimizer_from_before_is_found_when_it_steps(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with MemoryTracker(model) as tracker:
        assert tracker.now().of(Category.OPTIMIZER) == 0
        model(x).sum().backward()
        optimizer.step()
        assert tracker.now().of(Category.OPTIMIZER) == ADAM
    assert MemoryTracker(model, optimizer).now().of(Category.OPTIMIZER) == ADAM


def test_gradients_accumulate_in_place(model, x):
    with MemoryTracker(model) as tracker:
        for _ in range(3):
            model(x).sum().backward()
            assert tracker.now().of(Category.GRADIENTS) == WEIGHTS
    assert tracker.at_peak().of(Category.GRADIENTS) == WEIGHTS


@pytest.mark.parametrize(("set_to_none", "kept"), [(True, 0), (False, WEIGHTS)])
def test_zero_grad_right_after_backward_is_seen_as_what_it_is(model, x, set_to_none, kept):
    """No operation lies between: the gradients must be known before they go."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryTracker(model) as tracker:
        model(x).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert tracker.now().of(Category.GRADIENTS) == kept
    gradients = dict(tracker.timeline().series)[Category.GRADIENTS]
    assert max(gradients) == WEIGHTS


def test_gradients_that_a_hook_consumes_in_backward_are_temporary(model, x):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with MemoryTracker(model) as tracker:
        model(x).sum().backward()
        assert tracker.now().of(Category.GRADIENTS) == 0
    assert tracker.at_peak().of(Category.GRADIENTS) == 0


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("made_inside", [False, True])
def test_a_batch_is_input_however_it_is_passed(by_keyword, made_inside):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x, *, labels=None, extra=()):
            loss = functional.cross_entropy(self.layer(x), labels)
            return loss + sum(each.sum() for each in extra)

    def make():
        labels = torch.zeros(2, dtype=torch.int64)
        return torch.ones(2, 8), {"labels": labels, "extra": [torch.ones(3), torch.ones(5)]}

    model = Model()
    x, rest = make()
    with MemoryTracker(model) as tracker:
        if made_inside:
            x, rest = make()
        loss = model(x=x, **rest) if by_keyword else model(x, **rest)
        assert tracker.now().of(Category.INPUTS) == X + 2 * 8 + 8 * FLOAT
        loss.backward()


def test_the_result_of_a_model_is_no_input_of_the_loss(model, x):
    """A loss is a module as well, and its arguments are not all a batch."""
    labels = torch.zeros(2, dtype=torch.int64)
    with MemoryTracker(model) as tracker:
        loss = nn.CrossEntropyLoss()(model(x), labels)
        assert tracker.now().of(Category.INPUTS) == X + labels.nbytes
        loss.backward()
    assert max(dict(tracker.timeline().series)[Category.INPUTS]) == X + labels.nbytes


def test_two_models_in_a_row_keep_their_activations_apart_from_inputs(x):
    encoder, decoder = nn.Linear(8, 16), nn.Linear(16, 4)
    with MemoryTracker(encoder, decoder) as tracker:
        decoder(encoder(x).relu()).sum().backward()
    assert max(dict(tracker.timeline().series)[Category.INPUTS]) == X


def test_evaluation_keeps_nothing_for_backward(model, x):
    with MemoryTracker(model) as tracker:
        with torch.no_grad():
            predictions = model(x)
            assert tracker.phase is Phase.EVALUATION
            assert categories(tracker.now()) == {
                Category.WEIGHTS: WEIGHTS,
                Category.INPUTS: X,
                Category.TEMPORARY: OUT,
            }
        del predictions
        with torch.inference_mode():
            model(x)
        assert tracker.peak_bytes() == WEIGHTS + X + 2 * HIDDEN
        model(x).sum().backward()
    marks = [mark.phase for mark in tracker.timeline().marks]
    assert marks == [Phase.EVALUATION, Phase.FORWARD, Phase.BACKWARD, Phase.SETUP]
    assert tracker.now().of(Category.ACTIVATIONS) == 0


def test_a_custom_function_keeps_activations_although_it_runs_without_gradients(x):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            double = value * 2
            context.save_for_backward(double)
            return value * value

        @staticmethod
        def backward(context, gradient):
            return gradient * context.saved_tensors[0]

    class Model(nn.Module):
        def forward(self, value):
            return Square.apply(value)

    value = x.clone().requires_grad_()
    with MemoryTracker(value) as tracker:
        loss = Model()(value).sum()
        assert tracker.now().of(Category.ACTIVATIONS) == X + LOSS
        loss.backward()


def test_a_checkpointed_layer_keeps_its_input_and_makes_the_rest_again(x):
    layer = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    inner = 2 * 64 * FLOAT

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.last = nn.Linear(8, 1)

        def forward(self, value):
            value = torch.utils.checkpoint.checkpoint(self.layer, value, use_reentrant=False)
            return self.last(value)

    with MemoryTracker(model := Model()) as tracker:
        loss = model(x).sum()
        assert tracker.now().of(Category.ACTIVATIONS) == X + LOSS  # the layer's result, of the input's size
        loss.backward()
        assert categories(tracker.now()).keys() == {
            Category.WEIGHTS,
            Category.GRADIENTS,
            Category.INPUTS,
            Category.ACTIVATIONS,  # the loss
        }
    series = dict(tracker.timeline().series)
    assert max(series[Category.ACTIVATIONS]) < inner
    assert max(series[Category.TEMPORARY]) >= inner


def test_a_gradient_penalty_inside_a_model_is_a_part_of_its_forward(x):
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, value):
            value = value.requires_grad_()
            out = self.layer(value).square().sum()
            (gradient,) = torch.autograd.grad(out, value, create_graph=True)
            return out + gradient.square().sum()

    model = Penalised()
    with MemoryTracker(model) as tracker:
        loss = model(x)
        assert tracker.phase is Phase.FORWARD
        loss.backward()
    phases = [mark.phase for mark in tracker.timeline().marks]
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.SETUP]


# ------------------------------------------------------------------ the timeline


def test_the_timeline_adds_up_at_every_tick(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    seen = {}
    with MemoryTracker(model) as tracker:
        for _ in range(2):
            loss = model(x).square().sum()
            seen[tracker.clock] = tracker.live_bytes()
            loss.backward()
            seen[tracker.clock] = tracker.live_bytes()
            optimizer.step()
            seen[tracker.clock] = tracker.live_bytes()
            optimizer.zero_grad()
            seen[tracker.clock] = tracker.live_bytes()
    timeline = tracker.timeline()
    totals = timeline.totals()
    assert list(timeline.ticks) == sorted(timeline.ticks)
    assert all(len(values) == len(timeline.ticks) for _, values in timeline.series)
    assert all(value >= 0 for _, values in timeline.series for value in values)
    assert max(totals) == tracker.peak_bytes()
    for tick, live in seen.items():
        at = max(index for index, each in enumerate(timeline.ticks) if each <= tick)
        assert totals[at] == live
    peak = tracker.at_peak()
    index = timeline.ticks.index(peak.tick)
    assert {category: values[index] for category, values in timeline.series if values[index]} == categories(
        peak
    )


def test_the_phases_of_two_steps(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryTracker(model) as tracker:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    marks = tracker.timeline().marks
    step = [Phase.FORWARD, Phase.BACKWARD, Phase.SETUP, Phase.OPTIMIZER, Phase.SETUP]
    assert [mark.phase for mark in marks] == 2 * step
    assert [mark.tick for mark in marks] == sorted(mark.tick for mark in marks)


# ------------------------------------------------------------------ names


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 512)
        self.down = nn.Linear(512, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_the_top_tensors_name_the_module_that_made_them_in_forward():
    model = Net()
    with MemoryTracker(model) as tracker:
        loss = model(torch.ones(64, 8)).sum()
        top = tracker.now(top=2).top
    assert loss.requires_grad
    assert [(each.nbytes, each.module, each.category) for each in top] == [
        (64 * 512 * FLOAT, "blocks.0", Category.ACTIVATIONS),
        (64 * 512 * FLOAT, "blocks.1", Category.ACTIVATIONS),
    ]
    assert top[0].description == "float32[64, 512] by aten.relu.default in blocks.0 (forward)"


def test_the_top_tensors_name_the_module_that_made_them_in_backward():
    model = Net()
    with MemoryTracker(model) as tracker:
        model(torch.ones(64, 8)).sum().backward()
        gradients = {
            each.module: each for each in tracker.now(top=20).top if each.category is Category.GRADIENTS
        }
        assert gradients.keys() == {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
        assert all("(backward)" in each.description for each in gradients.values())
    at_peak = tracker.at_peak(top=5).top
    assert {each.module for each in at_peak} >= {"blocks.0", "blocks.1"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_names_in_a_recomputed_backward(reentrant):
    model = Net()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            for block in self.net.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    with MemoryTracker(whole := Checkpointed()) as tracker:
        whole(torch.ones(64, 8, requires_grad=True)).sum().backward()
        gradients = [each for each in tracker.now(top=30).top if each.category is Category.GRADIENTS]
    names = {each.module for each in gradients}
    assert names >= {f"net.blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}


def test_weights_and_optimizer_state_are_named_by_their_module():
    with MemoryTracker() as tracker:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        top = tracker.now(top=100).top
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER):
        names = {each.module for each in top if each.category is category}
        assert names == {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}, category


def test_a_part_that_is_called_alone_keeps_its_name_in_the_whole():
    model = Net()
    with MemoryTracker(model) as tracker:
        model(torch.ones(64, 8))
        kept = model.blocks[1](torch.ones(64, 8, requires_grad=True))
        top = [each.module for each in tracker.now(top=10).top if each.category is Category.ACTIVATIONS]
    assert kept.requires_grad
    assert "blocks.1" in top


def test_recomputation_that_stops_early_leaves_the_phases_of_later_steps_alone() -> None:
    """Its modules never return: they must not stay on the stack of those that run."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
    saved = []
    with MemoryTracker(layers) as tracker:
        for _ in range(3):
            x = torch.ones(4, 8)
            for layer in layers:
                x = run_region(layer, (x,), {}, modules=[layer])
            x.sum().backward()
            del x
            activations = dict(tracker.timeline("cpu").series)[Category.ACTIVATIONS]
            saved.append(sum(activations))  # so far
            assert tracker.phase is not Phase.FORWARD
    first, second, third = saved
    assert 0 < first < second < third
