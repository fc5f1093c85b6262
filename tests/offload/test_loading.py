"""`load_safetensors`: weights from files, tensor by tensor, before `wrap` and after it."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import MemoryTracker
from memscale.errors import WeightsError, WrapTypeError
from memscale.execution_plan import Plan
from memscale.executor import Executor
from memscale.tiers.disk import PAGE
from support.disk import QUIET, assert_same, disk_plan, on_disk, resident_bytes, train
from support.families import FAMILIES, Family
from support.wrapping import Stack, call

pytestmark = pytest.mark.cpu_only

safetensors = pytest.importorskip("safetensors.torch")

NAMES = [
    "gpt2",
    "llama",
    "bert",
    "t5",
    "vit",
    "whisper",
    "mixtral",
    "resnet",
    "unet",
    "tied",
    "transformer_encoder",
]


def family_of(name: str) -> Family:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name]


def on_meta(family: Family) -> nn.Module:
    with torch.device("meta"):
        return family.make(family.scale).train()


def saved(model: nn.Module, path: Path) -> Path:
    """The model's weights in one file, tied ones once, as `safetensors` has it."""
    safetensors.save_model(model, str(path))
    return path


def stack(width: int = 64, *, on_meta: bool = False) -> Stack:
    with torch.device("meta" if on_meta else "cpu"):
        return Stack(3, width)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(7)
    return saved(stack(), tmp_path / "model.safetensors")


def is_stored(model: nn.Module, file: Path) -> bool:
    state = model.state_dict()
    return all(torch.equal(value, state[key]) for key, value in safetensors.load_file(file).items())


# ---------------------------------------------------------------------- before wrap


@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_the_meta_device_is_the_saved_one(name: str, tmp_path: Path) -> None:
    family = family_of(name)
    plain = family.build()
    path = saved(plain, tmp_path / "model.safetensors")
    model = on_meta(family)
    assert memscale.load_safetensors(model, path) == ([], [])
    assert all(each.is_meta for each in model.parameters())  # until there is a home for them
    with on_disk(model) as executor:
        assert executor.placement.on_disk
        assert "_memscale_weights" not in vars(model), "the files are forgotten"
        for one, other in ((plain.state_dict(), model.state_dict()), (buffers(plain), buffers(model))):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert_same(train(family, model), train(family, plain))


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


def test_forward_equals_that_of_the_saved_model(tmp_path: Path) -> None:
    family = family_of("llama")
    plain, batch = family.build().eval(), family.batch()
    model = on_meta(family).eval()
    memscale.load_safetensors(model, saved(plain, tmp_path / "model.safetensors"))
    memscale.wrap(model, QUIET, batch)
    assert torch.equal(call(model, batch).logits, call(plain, batch).logits)
    memscale.detach(model)
    assert torch.equal(call(model, batch).logits, call(plain, batch).logits)


def test_a_tensor_is_in_memory_at_a_time(file: Path) -> None:
    model = stack(on_meta=True)
    memscale.load_safetensors(model, file)
    tracker = MemoryTracker(model)
    with tracker, on_disk(model):
        small = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.nbytes < PAGE)
        largest = max(parameter.nbytes for parameter in model.parameters())
        assert largest <= tracker.peak_bytes("cpu") <= largest + small
        assert is_stored(model, file)


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_directories_of_transformers(name: str, shards: int, tmp_path: Path) -> None:
    family = family_of(name)
    plain = family.build()
    size = sum(parameter.nbytes for parameter in plain.parameters())
    plain.save_pretrained(tmp_path, max_shard_size=size if shards == 1 else size // shards)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)
    for path in [tmp_path, *tmp_path.glob("*.index.json")]:
        model = on_meta(family)
        memscale.load_safetensors(model, path)
        with on_disk(model):
            assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_the_inner_model_and_the_whole_read_each_others_files(tmp_path: Path) -> None:
    family = family_of("gpt2")
    whole = family.build()
    inner_file = saved(whole.transformer, tmp_path / "inner.safetensors")  # type: ignore[arg-type]
    whole.save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    model = on_meta(family)
    assert memscale.load_safetensors(model, inner_file) == ([], [])
    Executor(model, Plan(()), QUIET).attach()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))
    inner = on_meta(family).transformer
    assert memscale.load_safetensors(inner, tmp_path / "whole") == ([], [])  # type: ignore[arg-type]


def test_what_no_file_has_is_initialised(file: Path) -> None:
    state = {
        key: value for key, value in safetensors.load_file(file).items() if not key.startswith("layers.1.up")
    }
    safetensors.save_file(state, file)
    model = stack(on_meta=True)
    keys = memscale.load_safetensors(model, file, strict=False)
    assert keys.missing_keys == ["layers.1.up.weight", "layers.1.up.bias"]
    Executor(model, Plan(()), QUIET).attach()
    assert is_stored(model, file)
    bound = 1 / 64**0.5  # of torch's own initialisation
    assert bound / 2 < float(model.layers[1].up.weight.detach().abs().max()) <= bound


def test_values_are_converted_to_the_type_of_the_parameter(file: Path) -> None:
    model = stack(on_meta=True).to(torch.bfloat16)
    memscale.load_safetensors(model, file)
    with on_disk(model):
        for key, value in safetensors.load_file(file).items():
            assert torch.equal(model.state_dict()[key], value.to(torch.bfloat16))


def test_dimensions_keep_their_order_in_memory(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Conv2d(16, 32, 3))
    path = saved(plain, tmp_path / "model.safetensors")
    model = copy.deepcopy(plain).to("meta").to(memory_format=torch.channels_last)
    memscale.load_safetensors(model, path)
    with on_disk(model, checkpointing=False):
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(model[0].weight, plain[0].weight)


def test_it_can_be_copied_before_it_is_wrapped(file: Path) -> None:
    model = stack(on_meta=True)
    memscale.load_safetensors(model, file)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        Executor(twin, Plan(()), QUIET).attach()
        assert is_stored(twin, file)


def test_a_file_that_is_gone_leaves_the_model_on_the_meta_device(file: Path) -> None:
    model = stack(on_meta=True)
    memscale.load_safetensors(model, file)
    moved = file.rename(file.with_name("elsewhere"))
    with pytest.raises(WeightsError, match="No such file"):
        Executor(model, disk_plan(model), QUIET).attach()
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    moved.rename(file)
    with on_disk(model):
        assert is_stored(model, file)


# ---------------------------------------------------------------------- with memory


def test_a_wrapped_model_gets_them_at_home(file: Path) -> None:
    model = stack()
    with on_disk(model) as executor:
        assert memscale.load_safetensors(model, file) == ([], [])
        assert is_stored(model, file)
        for parameter in model.parameters():
            assert executor.placement.store.holds(parameter) == (parameter.nbytes >= PAGE)
    assert is_stored(model, file)


def test_pages_are_given_back(tmp_path: Path) -> None:
    path = saved(stack(256), tmp_path / "model.safetensors")
    model = stack(256)
    with on_disk(model):
        memscale.load_safetensors(model, path)
        assert resident_bytes(*(each for each in model.parameters() if each.nbytes >= PAGE)) <= 4 * 16 * PAGE


def test_a_plain_model_gets_them_in_place(file: Path) -> None:
    model = stack()
    parameters = {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    memscale.load_safetensors(model, file)
    assert is_stored(model, file)
    assert parameters == {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    assert set(vars(model)) == set(vars(stack()))


# ---------------------------------------------------------------------- what does not fit


def change(file: Path, **changes: torch.Tensor | None) -> None:
    state = {key.replace(".", "__"): value for key, value in safetensors.load_file(file).items()}
    state.update(changes)  # type: ignore[arg-type]
    safetensors.save_file(
        {key.replace("__", "."): value for key, value in state.items() if value is not None}, file
    )


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head__bias": None}, r"Missing in the files: 'head\.bias'\..*strict=False"),
        ({"tail": torch.ones(2)}, r"Unexpected in the files: 'tail'\..*strict=False"),
        ({"head__bias": torch.ones(5)}, r"'head\.bias' has the shape \(4,\), in the file \(5,\)"),
    ],
)
def test_what_does_not_fit_is_named(file: Path, device: str, changes: Any, message: str) -> None:
    change(file, **changes)
    model = stack(on_meta=device == "meta")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=message):
        memscale.load_safetensors(model, file)
    assert set(vars(model)) == set(vars(stack()))
    if device == "cpu":
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_wrong_shape_is_refused_without_strict_too(file: Path) -> None:
    change(file, head__bias=torch.ones(5))
    with pytest.raises(WeightsError, match="shape"):
        memscale.load_safetensors(stack(), file, strict=False)


def test_long_lists_are_cut(file: Path) -> None:
    change(file, **{f"extra{i}": torch.ones(1) for i in range(20)})
    with pytest.raises(WeightsError, match="and 12 more"):
        memscale.load_safetensors(stack(), file)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    torch.save(stack().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"no \.safetensors file.*Pickled"):
        memscale.load_safetensors(stack(), tmp_path)
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        memscale.load_safetensors(stack(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="There is no"):
        memscale.load_safetensors(stack(), tmp_path / "nothing.safetensors")


def test_something_else_than_a_model(file: Path) -> None:
    with pytest.raises(WrapTypeError, match=r"nn\.Module"):
        memscale.load_safetensors({}, file)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        b'{"x": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_broken_files(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WeightsError, match=r"x\.safetensors"):
        memscale.load_safetensors(stack(), path)


def test_a_cut_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        memscale.load_safetensors(stack(), file)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "../model.safetensors"}}, "not beside it"),
        ({"weight_map": {"x": "gone.safetensors"}}, "which is not there"),
        ({"weights": {}}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_broken_indices(index: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        memscale.load_safetensors(stack(), path)


def test_the_same_tensor_in_two_files(file: Path) -> None:
    saved(stack(), file.with_name("other.safetensors"))
    file.rename(file.with_name("one.safetensors"))
    with pytest.raises(WeightsError, match=r"is in one\.safetensors and in other\.safetensors"):
        memscale.load_safetensors(stack(), file.parent)


def test_every_type_of_the_format(tmp_path: Path) -> None:
    dtypes = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    model = nn.Module()
    for index, dtype in enumerate(dtypes):
        model.register_buffer(f"b{index}", torch.arange(6).reshape(2, 3).to(dtype))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("scalar", torch.tensor(2.5))
    path = tmp_path / "all.safetensors"
    safetensors.save_file(model.state_dict(), path)
    twin = copy.deepcopy(model)
    for buffer in twin.buffers():
        buffer.zero_()
    memscale.load_safetensors(twin, path)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def test_without_the_package_the_error_says_how_to_install_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match="pip install safetensors"):
        memscale.load_safetensors(stack(), file)
