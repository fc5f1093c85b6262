"""Blocks are found by structure, for every family, and no parameter is lost or counted twice."""

import copy
import doctest
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from memscale.profiler import blocks as blocks_module
from memscale.profiler.blocks import Block, find_blocks, stacks
from support.families import FAMILIES
from support.families import Block as Layer


def described(model: nn.Module) -> list[str]:
    return [f"{block.role} {block.name}" for block in find_blocks(model)]


def names(model: nn.Module, role: str) -> list[str]:
    return [block.name for block in find_blocks(model) if block.role == role]


def lines(text: str) -> list[str]:
    """`role name name ...` on each line, to one `role name` each; `a.[0-2]` stands for a.0, a.1, a.2."""
    expected = []
    for line in text.strip().splitlines():
        role, *written = line.split()
        for name in written:
            stem, _, span = name.removesuffix("]").partition(".[")
            first, _, last = span.partition("-")
            expanded = [f"{stem}.{i}" for i in range(int(first), int(last) + 1)] if span else [name]
            expected += [f"{role} {each}" for each in expanded]
    return expected


GPT2 = """
    embedding transformer.wte transformer.wpe
    repeated transformer.h.[0-2]
    other transformer.ln_f
    head lm_head
"""
LLAMA = """
    embedding model.embed_tokens
    repeated model.layers.[0-2]
    other model.norm
    head lm_head
"""
EXPECTED = {
    "gpt2": GPT2,
    "frozen_embeddings": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "lora": LLAMA,
    "bert": """
        embedding bert.embeddings
        repeated bert.encoder.layer.[0-2]
        head cls
    """,
    "t5": """
        embedding shared encoder.embed_tokens
        repeated encoder.block.[0-2]
        other encoder.final_layer_norm
        embedding decoder.embed_tokens
        repeated decoder.block.[0-2]
        other decoder.final_layer_norm
        head lm_head
    """,
    "vit": """
        other vit.embeddings
        repeated vit.layers.[0-2]
        other vit.layernorm
        head classifier
    """,
    "whisper": """
        other model.encoder.conv1 model.encoder.conv2
        embedding model.encoder.embed_positions
        repeated model.encoder.layers.[0-2]
        other model.encoder.layer_norm
        embedding model.decoder.embed_tokens model.decoder.embed_positions
        repeated model.decoder.layers.[0-2]
        other model.decoder.layer_norm
        head proj_out
    """,
    "resnet": """
        other resnet.embedder
        repeated resnet.encoder.stages.0.layers.[0-1]
        repeated resnet.encoder.stages.1.layers.[0-2]
        repeated resnet.encoder.stages.2.layers.[0-1]
        head classifier
    """,
    "transformer_encoder": """
        embedding embedding
        repeated encoder.layers.[0-2]
        other encoder.norm
        head head
    """,
    "lstm": """
        embedding embedding
        other lstm
        head head
    """,
    "cnn": """
        repeated [0:3] [3:6] [6:11]
        head 11
    """,
    # The up path is registered before the middle: the order is that of named_modules, not of the calls.
    "unet": """
        other stem
        repeated down.0.[0-1]
        other down.0.2
        repeated down.1.[0-1]
        other down.1.2
        repeated down.2.[0-1]
        other down.2.2
        other up.0.0
        repeated up.0.[1-2]
        other up.1.0
        repeated up.1.[1-2]
        other up.2.0
        repeated up.2.[1-2]
        repeated middle.[0-1]
        head out
    """,
    "tied": """
        embedding tokens
        repeated blocks.[0-2]
        other norm
        head head
    """,
    "kwargs_only": """
        embedding embedding
        repeated layers.[0-2]
        head head
    """,
    "shared_block": """
        embedding embedding
        repeated layers.0
        head head
    """,
}
LEFTOVERS = {"tied": ("positions",)}


def build(name: str) -> nn.Module:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name].build()


def leftover_parameters(model: nn.Module, blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """Name the parameters in no block."""
    owned = {name for block in blocks for name in block.parameter_names}
    return tuple(name for name, _ in model.named_parameters() if name not in owned)


def check_partition(model: nn.Module) -> tuple[Block, ...]:
    """Each parameter in one block or left over; members apart from each other, called, and in order."""
    found = find_blocks(model)
    leftovers = leftover_parameters(model, found)
    owned = [name for block in found for name in block.parameter_names]
    every = [name for name, _ in model.named_parameters()]
    assert sorted([*owned, *leftovers]) == sorted(every)
    assert len(set(every)) == len(every)

    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    members = [member for block in found for member in block.members]
    assert [order[member] for member in members] == sorted({order[member] for member in members})
    for block in found:
        assert all(type(model.get_submodule(m)).forward is not nn.Module.forward for m in block.members)
        assert all(any(not m or n.startswith(f"{m}.") for m in block.members) for n in block.parameter_names)
        assert len(block.members) > 1 or block.name == block.members[0]
        model.get_submodule(block.container)
    paths = set(members)
    for member in members:
        parents = {member.rsplit(".", i)[0] for i in range(1, member.count(".") + 1)} | {""} - {member}
        assert not parents & paths, f"{member} is inside another block"

    in_blocks = {id(part) for member in members for part in model.get_submodule(member).modules()}
    for name in leftovers:
        owner = model.get_submodule(name.rpartition(".")[0])
        never_called = type(owner).forward is nn.Module.forward
        assert never_called or any(id(module) in in_blocks for module in owner.modules()), name
    return found


# Families ----------------------------------------------------------------------------------------


def test_every_family_has_its_expected_blocks_here():
    assert EXPECTED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_family(name):
    model = build(name)
    found = check_partition(model)

    assert described(model) == lines(EXPECTED[name])
    assert leftover_parameters(model, found) == LEFTOVERS.get(name, ())
    assert sum(block.role == "repeated" for block in found) == FAMILIES[name].depth


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", ["transformer.h"]),
        ("t5", ["encoder.block", "decoder.block"]),
        ("unet", ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2", "middle"]),
        ("cnn", [""]),
        ("lstm", []),
    ],
)
def test_stacks(name, expected):
    found = find_blocks(build(name))
    grouped = stacks(found)

    assert [stack[0].container for stack in grouped] == expected
    assert [b for stack in grouped for b in stack] == [b for b in found if b.role == "repeated"]


def test_tied_parameter_belongs_to_the_first_block_that_has_it():
    by_name = {block.name: block for block in find_blocks(build("tied"))}

    assert by_name["tokens"].parameter_names == ("tokens.weight",)
    assert by_name["head"].parameter_names == ()


def test_slice_names_its_members():
    first = find_blocks(build("cnn"))[0]

    assert first == Block("[0:3]", "", ("0", "1", "2"), "repeated", first.signature, ("0.weight", "0.bias"))


@pytest.mark.parametrize(
    ("library", "config", "depth"),
    [
        ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 48),
        (
            "T5ForConditionalGeneration",
            {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
            48,
        ),
        ("ResNetForImageClassification", {"depths": [3, 4, 6, 3], "layer_type": "bottleneck"}, 16),
        ("MixtralForCausalLM", {"num_hidden_layers": 32}, 32),
    ],
)
def test_full_sizes_on_the_meta_device_are_fast(library, config, depth):
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, library)
    with torch.device("meta"):
        model = cls(cls.config_class(**config))
    start = time.process_time()  # of this process alone: the machine may be busy
    found = find_blocks(model)
    seconds = time.process_time() - start

    assert seconds < 1
    assert sum(block.role == "repeated" for block in found) == depth
    assert len({block.signature for block in found if block.role == "repeated"}) <= 8


# Which level is the block ------------------------------------------------------------------------


class Net(nn.Module):
    """Any children and parameters, as keyword arguments; called."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x


class Other(Net):
    """Another class of the same making."""


class Holder(nn.Module):
    """Holds modules for others to call; has no forward of its own."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def mlp(width: int = 4, inner: int = 8) -> Net:
    return Net(up=nn.Linear(width, inner), act=nn.ReLU(), down=nn.Linear(inner, width))


def moe(width: int = 4, experts: int = 4) -> Net:
    return Net(gate=nn.Linear(width, experts), experts=nn.ModuleList(mlp(width) for _ in range(experts)))


def conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU())


def test_experts_in_alike_layers_are_not_blocks():
    model = Net(layers=nn.ModuleList(moe() for _ in range(3)), head=nn.Linear(4, 4))
    assert described(model) == lines("repeated layers.[0-2]\nhead head")


@pytest.mark.parametrize("pattern", ["dmmm", "dmdm", "dm", "ddm", "md"])
def test_dense_and_sparse_layers_mixed(pattern):
    layers = [Net(ffn=mlp() if kind == "d" else moe()) for kind in pattern]
    assert names(Net(layers=nn.ModuleList(layers)), "repeated") == [
        f"layers.{i}" for i in range(len(pattern))
    ]


def test_stages_that_differ_are_opened_and_their_leftovers_kept():
    stages = [Net(layers=nn.ModuleList([mlp(w), mlp(w)]), down=nn.Linear(w, 2 * w)) for w in (4, 8, 16)]
    assert described(Net(stem=nn.Linear(4, 4), stages=nn.ModuleList(stages), head=nn.Linear(32, 2))) == lines(
        """
        other stem
        repeated stages.0.layers.[0-1]
        other stages.0.down
        repeated stages.1.layers.[0-1]
        other stages.1.down
        repeated stages.2.layers.[0-1]
        other stages.2.down
        head head
        """
    )


def test_convolutions_inside_a_layer_are_not_a_stack():
    # As in MobileNet: every layer has its own width, and a run of like convolutions inside.
    layers = [Net(conv=nn.Sequential(conv(w, 2 * w), conv(2 * w, 2 * w))) for w in (2, 4, 8, 16)]
    assert described(Net(features=nn.Sequential(*layers))) == lines("repeated features.[0-3]")


def test_lists_side_by_side_inside_a_layer_are_not_a_stack():
    # As in HiFi-GAN: two lists of three weight-normed convolutions make one residual block.
    def lists(width: int) -> dict[str, nn.ModuleList]:
        return {
            name: nn.ModuleList(weight_norm(nn.Conv1d(width, width, 3)) for _ in range(3))
            for name in ("convs1", "convs2")
        }

    layers = nn.ModuleList(Net(**lists(width)) for width in (2, 4, 6))
    assert described(Net(layers=layers)) == lines("repeated layers.[0-2]")


def test_layers_of_growing_width_are_blocks():
    layers = nn.ModuleList(mlp(4, inner) for inner in (4, 8, 12, 16))
    assert names(Net(layers=layers), "repeated") == [f"layers.{i}" for i in range(4)]


def test_alternating_classes_are_one_stack():
    layers = [cls(a=nn.Linear(4, 4), b=nn.Linear(4, 4)) for _ in range(3) for cls in (Net, Other)]
    found = find_blocks(Net(layers=nn.ModuleList(layers)))
    assert [len(stack) for stack in stacks(found)] == [6]


@pytest.mark.parametrize("row", [nn.ModuleList, lambda parts: nn.ModuleList([nn.ModuleList(parts)])])
def test_lists_in_a_list_repeat_across(row):
    layers = nn.ModuleList(row([nn.LayerNorm(4), mlp(), moe()]) for _ in range(2))  # mlp, moe: one class
    found = find_blocks(Net(embedding=nn.Embedding(9, 4), layers=layers, head=nn.Linear(4, 9)))

    assert [block.role for block in found] == ["embedding", *["repeated"] * 6, "head"]
    assert [len(stack) for stack in stacks(found)] == [6]
    assert stacks(found)[0][0].container == "layers"


@pytest.mark.parametrize("container", [nn.ModuleList, lambda layers: nn.Sequential(*layers)])
def test_one_module_many_times_in_a_list(container):
    model = Net(embedding=nn.Embedding(500, 4), layers=container([mlp()] * 3))
    assert described(model) == lines("embedding embedding\nrepeated layers.0")


def test_list_of_one_must_be_most_of_its_parent():
    small = Net(embedding=nn.Embedding(500, 4), adapters=nn.ModuleList([mlp()]))
    assert described(small) == lines("embedding embedding\nhead adapters.0")
    big = Net(embedding=nn.Embedding(5, 4), layers=nn.ModuleList([mlp()]))
    assert described(big) == lines("embedding embedding\nrepeated layers.0")


def test_module_dict_is_a_list_with_names():
    layers = nn.ModuleDict({"first": mlp(), "second": mlp()})
    assert described(Net(layers=layers)) == ["repeated layers.first", "repeated layers.second"]


def test_flat_sequentials_side_by_side():
    features = nn.Sequential(*conv(3, 4), *conv(4, 8), nn.MaxPool2d(2), *conv(8, 8))
    classifier = nn.Sequential(
        nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    expected = """
        repeated features[0:3] features[3:7] features[7:10]
        repeated classifier[0:3] classifier[3:5]
        head classifier.5
    """
    assert described(Net(features=features, classifier=classifier)) == lines(expected)


def test_flat_sequentials_in_a_sequential():
    features = nn.Sequential(*conv(3, 4), *conv(4, 4), *conv(4, 4), *conv(4, 4))
    model = nn.Sequential(features, nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert described(model) == lines("repeated 0[0:3] 0[3:6] 0[6:9] 0[9:12]\nhead 1")


def test_sequential_of_layers_and_single_ones():
    model = nn.Sequential(nn.Embedding(9, 4), mlp(), mlp(), nn.LayerNorm(4), nn.Linear(4, 9))
    assert described(model) == lines("embedding 0\nrepeated 1 2\nhead [3:5]")


def test_short_sequential_repeats_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert described(model) == lines("other [0:2]\nhead 2")
    like = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())]
    assert described(nn.Sequential(*like)) == lines("repeated [0:2] [2:4] [4:6]")


def test_sequential_with_a_forward_of_its_own_is_not_sliced():
    class Dense(nn.Sequential):
        def forward(self, x):
            return torch.cat([layer(x) for layer in self])

    assert described(Net(dense=Dense(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))) == lines(
        "repeated dense.0 dense.2"
    )


def test_attributes_in_a_row_are_a_stack():
    downs = {
        f"down{i}": Other(conv=nn.Sequential(*conv(w, 2 * w), *conv(2 * w, 2 * w)))
        for i, w in enumerate((2, 4, 8))
    }
    assert described(Net(**downs, out=nn.Conv2d(16, 3, 1))) == lines("repeated down0 down1 down2\nhead out")


def test_two_towers_are_opened():
    towers = {side: Other(layers=nn.ModuleList(mlp() for _ in range(2))) for side in ("image", "text")}
    assert described(Net(**towers)) == lines("repeated image.layers.[0-1]\nrepeated text.layers.[0-1]")


def test_adapters_of_different_rank_do_not_open_the_layers():
    layers = [
        Net(**{n: Other(base=nn.Linear(4, 4), a=nn.Linear(4, rank), b=nn.Linear(rank, 4)) for n in "qkvo"})
        for rank in (1, 2, 3, 4)
    ]
    assert names(Net(layers=nn.ModuleList(layers)), "repeated") == [f"layers.{i}" for i in range(4)]


def test_drop_rates_that_grow_do_not_make_layers_differ():
    layers = [Net(rate=i / 10, moe=moe()) for i in range(4)]
    found = find_blocks(Net(layers=nn.ModuleList(layers)))
    assert [block.name for block in found] == [f"layers.{i}" for i in range(4)]
    assert len({block.signature for block in found}) == 4


# Odd ones ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.ModuleList([nn.Dropout()]), Net()])
def test_no_parameters_no_blocks(model):
    assert find_blocks(model) == ()
    assert stacks(()) == ()


@pytest.mark.parametrize(
    ("model", "role"),
    [
        (nn.Linear(2, 2), "head"),
        (nn.Embedding(2, 2), "embedding"),
        (nn.LSTM(2, 2), "other"),
        (nn.LayerNorm(2), "other"),
        (nn.MultiheadAttention(4, 2), "other"),
        (nn.TransformerEncoderLayer(4, 2), "other"),
        (nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), "head"),
    ],
)
def test_lone_layer_is_the_one_block(model, role):
    (block,) = check_partition(model)
    assert (block.name, block.members, block.role) == ("", ("",), role)


def test_wrapper_is_opened_with_what_it_wraps():
    inner = Net(embedding=nn.Embedding(9, 4), lstm=nn.LSTM(4, 4), out=nn.Linear(4, 9))
    model = Net(loss=nn.CrossEntropyLoss(), model=Net(net=inner))
    assert described(model) == lines(
        "embedding model.net.embedding\nother model.net.lstm\nhead model.net.out"
    )


def test_embedding_tables_in_a_list():
    model = Net(tables=nn.ModuleList(nn.Embedding(9, 4) for _ in range(3)), top=nn.Linear(4, 1))
    assert described(model) == lines("embedding tables.[0-2]\nhead top")


def test_tied_head_is_a_head_wherever_it_is():
    head = nn.Linear(4, 9, bias=False)
    model = Net(head=head, embedding=nn.Embedding(9, 4), layers=nn.ModuleList([mlp(), mlp()]))
    model.embedding.weight = head.weight
    assert described(model) == lines("head head\nembedding embedding\nrepeated layers.[0-1]")
    assert find_blocks(model)[0].parameter_names == ("head.weight",)


def test_input_projection_before_the_stack_is_no_head():
    model = Net(project=nn.Linear(2, 4), layers=nn.ModuleList([mlp(), mlp()]))
    assert described(model) == lines("other project\nrepeated layers.[0-1]")


def test_modules_that_are_never_called_are_no_blocks():
    prompts = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    model = Net(
        prompts=prompts,
        scales=nn.ParameterDict({"a": torch.zeros(1)}),
        bank=Holder(norm=nn.LayerNorm(4), bias=nn.Parameter(torch.zeros(3))),
        head=nn.Linear(4, 4),
    )
    found = check_partition(model)
    assert [block.name for block in found] == ["bank.norm", "head"]
    assert leftover_parameters(model, found) == ("prompts.0", "prompts.1", "scales.a", "bank.bias")


def test_parameter_list_inside_a_layer_belongs_to_the_layer():
    model = Net(layers=nn.ModuleList(Net(a=nn.ParameterList([torch.zeros(2, 2)]), b=mlp()) for _ in range(2)))
    found = check_partition(model)
    assert [block.name for block in found] == ["layers.0", "layers.1"]
    assert "layers.0.a.0" in found[0].parameter_names


def test_lazy_modules():
    model = nn.Sequential(
        nn.LazyConv2d(4, 3),
        nn.LazyBatchNorm2d(),
        nn.ReLU(),
        nn.LazyConv2d(4, 3),
        nn.Flatten(),
        nn.LazyLinear(2),
    )
    assert described(model) == lines("repeated [0:3] [3:5]\nhead 5")
    check_partition(model)


def test_parametrized_layers():
    model = Net(
        layers=nn.ModuleList(Net(a=weight_norm(nn.Linear(4, 4)), b=mlp()) for _ in range(2)),
        flat=nn.Sequential(*(weight_norm(nn.Conv1d(4, 4, 1)) for _ in range(2)), nn.ReLU()),
    )
    assert [block.name for block in check_partition(model)] == ["layers.0", "layers.1", "flat.0", "flat[1:3]"]


def test_shared_module_is_found_once():
    shared = nn.Embedding(9, 4)
    stack = nn.ModuleList([mlp(), mlp()])
    model = Net(shared=shared, encoder=Net(embed=shared, layers=stack), alias=stack, head=nn.Linear(4, 9))
    assert described(model) == lines("embedding shared\nrepeated encoder.layers.[0-1]\nhead head")
    check_partition(model)


# Signatures --------------------------------------------------------------------------------------


def signature(module: nn.Module) -> str:
    return find_blocks(nn.ModuleList([module, copy.deepcopy(module)]))[0].signature


def test_layers_of_one_stack_share_a_signature():
    (stack,) = stacks(find_blocks(build("gpt2")))
    assert len({block.signature for block in stack}) == 1


def test_layer_that_differs_has_a_signature_of_its_own():
    encoder, decoder = stacks(find_blocks(build("t5")))
    for stack in (encoder, decoder):  # the first layer holds the table of relative positions
        assert [block.signature == stack[1].signature for block in stack] == [False, True, True]
    assert encoder[1].signature != decoder[1].signature


CHANGES = {
    "dropout": lambda layer: setattr(layer.mlp[3], "p", 0.2),
    "eps": lambda layer: setattr(layer.norm1, "eps", 1e-3),
    "heads": lambda layer: setattr(layer, "heads", 2),
    "function": lambda layer: setattr(layer, "act", torch.relu),
    "frozen": lambda layer: layer.qkv.requires_grad_(False),
    "dtype": lambda layer: layer.proj.to(torch.bfloat16),
    "shape": lambda layer: setattr(layer, "proj", nn.Linear(32, 64)),
    "class": lambda layer: layer.mlp.__setitem__(1, nn.ReLU()),
    "child": lambda layer: setattr(layer, "extra", nn.Identity()),
    "buffer": lambda layer: layer.register_buffer("mask", torch.zeros(2)),
    "mode of a part": lambda layer: layer.norm1.eval(),
    "setting in a dict": lambda layer: setattr(layer, "options", {"a": (1, [2])}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_signature_sees(change):
    layer = Layer()
    CHANGES[change](layer)
    assert signature(layer) != signature(Layer())


IGNORED = {
    "values": lambda layer: nn.init.zeros_(layer.proj.weight),
    "place": lambda layer: setattr(layer, "layer_idx", 3),
    "device": lambda layer: layer.to("meta"),
    "hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "private": lambda layer: setattr(layer, "_note", 3),
    "gradient": lambda layer: layer(torch.randn(1, 2, 32)).sum().backward(),
    "mode of the model": lambda layer: layer.eval(),
}


@pytest.mark.parametrize("change", IGNORED)
def test_signature_does_not_see(change):
    plain, layer = nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())
    for each in layer if change != "mode of the model" else [layer]:
        IGNORED[change](each)
    assert [b.signature for b in find_blocks(layer)] == [b.signature for b in find_blocks(plain)]


def test_signature_sees_a_block_in_another_mode_than_its_model():
    model = nn.Sequential(Layer(), Layer())
    model[0].eval()
    first, second = find_blocks(model)
    assert first.signature != second.signature


@pytest.mark.slow
def test_blocks_are_the_same_in_a_process_with_another_hash_seed():
    chosen = ("gpt2", "transformer_encoder", "unet", "cnn", "kwargs_only", "lstm")
    here = [find_blocks(build(name)) for name in chosen]
    code = (
        "from support.families import FAMILIES\n"
        "from memscale.profiler.blocks import find_blocks\n"
        f"print([find_blocks(FAMILIES[name].build()) for name in {chosen}])\n"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    assert there.stdout.strip() == repr(here)


# Any nesting -------------------------------------------------------------------------------------

LEAVES = {
    "linear": lambda: nn.Linear(2, 3),
    "wide": lambda: nn.Linear(4, 4, bias=False),
    "conv": lambda: nn.Conv1d(2, 2, 1),
    "norm": lambda: nn.LayerNorm(2),
    "batch_norm": lambda: nn.BatchNorm1d(2),
    "relu": nn.ReLU,
    "embedding": lambda: nn.Embedding(3, 2),
    "lstm": lambda: nn.LSTM(2, 2),
    "attention": lambda: nn.MultiheadAttention(2, 1),
    "lazy": lambda: nn.LazyLinear(2),
    "parameters": lambda: nn.ParameterList([torch.zeros(2)]),
    "weight_norm": lambda: weight_norm(nn.Linear(2, 2)),
}
NODES = ("sequential", "list", "dict", "net", "other", "holder")

recipes = st.recursive(
    st.sampled_from(sorted(LEAVES)) | st.tuples(st.just("again"), st.integers(0, 20)),
    lambda inner: st.tuples(st.sampled_from(NODES), st.lists(inner, max_size=4), st.booleans()),
    max_leaves=16,
)


def assemble(recipe, done: list[nn.Module]) -> nn.Module:
    """Builds a module from a recipe; "again" puts in a module that was built before."""
    if isinstance(recipe, str):
        module = LEAVES[recipe]()
    elif recipe[0] == "again":
        return done[recipe[1] % len(done)] if done else nn.ReLU()
    else:
        kind, inner, parameter = recipe
        parts = [assemble(each, done) for each in inner]
        module = {
            "sequential": lambda: nn.Sequential(*parts),
            "list": lambda: nn.ModuleList(parts),
            "dict": lambda: nn.ModuleDict({f"k{i}": part for i, part in enumerate(parts)}),
            "net": lambda: Net(**{f"m{i}": part for i, part in enumerate(parts)}),
            "other": lambda: Other(**{f"m{i}": part for i, part in enumerate(parts)}),
            "holder": lambda: Holder(**{f"m{i}": part for i, part in enumerate(parts)}),
        }[kind]()
        if parameter:
            module.register_parameter("own", nn.Parameter(torch.zeros(2, 2)))
    done.append(module)
    return module


@given(recipes)
@settings(max_examples=150)
def test_any_nesting_is_partitioned(recipe):
    model = assemble(recipe, [])
    found = check_partition(model)

    assert find_blocks(copy.deepcopy(model)) == found
    with torch.device("meta"):
        assert find_blocks(assemble(recipe, [])) == found


@given(recipes, st.integers(2, 4))
@settings(max_examples=50)
def test_copies_in_a_list_are_blocks_or_hold_equal_ones(recipe, count):
    module = assemble(recipe, [])
    model = nn.ModuleList(copy.deepcopy(module) for _ in range(count))
    found = check_partition(model)

    by_copy = [[b.signature for b in found if b.members[0].split(".")[0] == str(i)] for i in range(count)]
    assert all(signatures == by_copy[0] for signatures in by_copy)


def test_examples_in_the_docstrings():
    assert doctest.testmod(blocks_module).failed == 0
