"""Names of GPUs: as people write them, as drivers report them, and those that no GPU has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale.errors import ConfigTypeError, HardwareError
from memscale.hardware import find_gpu, list_gpus

AS_PEOPLE_WRITE = {
    "rtx3090": "NVIDIA GeForce RTX 3090",
    "RTX 3090": "NVIDIA GeForce RTX 3090",
    "geforce rtx 3090": "NVIDIA GeForce RTX 3090",
    "rtx_3090": "NVIDIA GeForce RTX 3090",
    "3090": "NVIDIA GeForce RTX 3090",
    "3090 24GB": "NVIDIA GeForce RTX 3090",
    "3090ti": "NVIDIA GeForce RTX 3090 Ti",
    "rtx3090Ti": "NVIDIA GeForce RTX 3090 Ti",
    "2080ti": "NVIDIA GeForce RTX 2080 Ti",
    "gtx1080ti": "NVIDIA GeForce GTX 1080 Ti",
    "4070 ti super": "NVIDIA GeForce RTX 4070 Ti SUPER",
    "rtx4070tisuper": "NVIDIA GeForce RTX 4070 Ti SUPER",
    "4090d": "NVIDIA GeForce RTX 4090 D",
    "4090 laptop": "NVIDIA GeForce RTX 4090 Laptop GPU",
    "4090 mobile": "NVIDIA GeForce RTX 4090 Laptop GPU",
    "RTX 3080 12GB": "NVIDIA GeForce RTX 3080 12GB",
    "4060 ti 16 GB": "NVIDIA GeForce RTX 4060 Ti 16GB",
    "titan v": "NVIDIA TITAN V",
    "TITANRTX": "NVIDIA TITAN RTX",
    "A6000": "NVIDIA RTX A6000",
    "RTX A4000": "NVIDIA RTX A4000",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
    "rtx6000ada": "NVIDIA RTX 6000 Ada Generation",
    "quadro rtx 6000": "NVIDIA Quadro RTX 6000",
    "P100": "NVIDIA Tesla P100 PCIe 12GB",
    "v100 32gb": "NVIDIA Tesla V100 PCIe 32GB",
    "t4": "NVIDIA Tesla T4",
    "a10": "NVIDIA A10",
    "a10g": "NVIDIA A10G",
    "A100-80GB": "NVIDIA A100 PCIe 80GB",
    "A100 80G": "NVIDIA A100 PCIe 80GB",
    "a100 40gb": "NVIDIA A100 PCIe 40GB",
    "L40S": "NVIDIA L40S",
    "h100 sxm": "NVIDIA H100 SXM5 80GB",
    "H100-PCIe": "NVIDIA H100 PCIe 80GB",
    "h200": "NVIDIA H200 SXM5 141GB",
    "b200": "NVIDIA B200",
    "GH200": "NVIDIA GH200 96GB",
    "mi300x": "AMD Instinct MI300X",
    "MI250X": "AMD Instinct MI250X",
    "7900xtx": "AMD Radeon RX 7900 XTX",
    "RX 7900 XT": "AMD Radeon RX 7900 XT",
    "radeon pro w7900": "AMD Radeon PRO W7900",
}

# What torch.cuda.get_device_name answers on real machines.
AS_DRIVERS_REPORT = {
    "GeForce GTX 1080 Ti": "NVIDIA GeForce GTX 1080 Ti",
    "NVIDIA GeForce GTX 1050 Ti": "NVIDIA GeForce GTX 1050 Ti",
    "NVIDIA GeForce GTX 1060 6GB": "NVIDIA GeForce GTX 1060 6GB",
    "NVIDIA GeForce GTX 1660 SUPER": "NVIDIA GeForce GTX 1660 SUPER",
    "GeForce RTX 2080 Ti": "NVIDIA GeForce RTX 2080 Ti",
    "NVIDIA GeForce RTX 2060": "NVIDIA GeForce RTX 2060 6GB",
    "NVIDIA GeForce RTX 2070 with Max-Q Design": "NVIDIA GeForce RTX 2070 with Max-Q Design",
    "NVIDIA GeForce RTX 3060": "NVIDIA GeForce RTX 3060",
    "NVIDIA GeForce RTX 3070 Ti": "NVIDIA GeForce RTX 3070 Ti",
    "NVIDIA GeForce RTX 3080": "NVIDIA GeForce RTX 3080 10GB",
    "NVIDIA GeForce RTX 3090": "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 3050 Ti Laptop GPU": "NVIDIA GeForce RTX 3050 Ti Laptop GPU",
    "NVIDIA GeForce RTX 3080 Laptop GPU": "NVIDIA GeForce RTX 3080 Laptop GPU 8GB",
    "NVIDIA GeForce RTX 4060 Ti": "NVIDIA GeForce RTX 4060 Ti 8GB",
    "NVIDIA GeForce RTX 4080 SUPER": "NVIDIA GeForce RTX 4080 SUPER",
    "NVIDIA GeForce RTX 4090": "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 4090 D": "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5060 Ti": "NVIDIA GeForce RTX 5060 Ti 8GB",
    "NVIDIA GeForce RTX 5070 Ti Laptop GPU": "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
    "NVIDIA GeForce RTX 5090": "NVIDIA GeForce RTX 5090",
    "NVIDIA TITAN V": "NVIDIA TITAN V",
    "TITAN RTX": "NVIDIA TITAN RTX",
    "NVIDIA TITAN Xp": "NVIDIA TITAN Xp",
    "Quadro RTX 8000": "NVIDIA Quadro RTX 8000",
    "NVIDIA RTX A2000 12GB": "NVIDIA RTX A2000 12GB",
    "NVIDIA RTX A5000": "NVIDIA RTX A5000",
    "NVIDIA RTX A6000": "NVIDIA RTX A6000",
    "NVIDIA RTX 4000 SFF Ada Generation": "NVIDIA RTX 4000 SFF Ada Generation",
    "NVIDIA RTX 6000 Ada Generation": "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    ),
    "Tesla P40": "NVIDIA Tesla P40",
    "Tesla P100-PCIE-16GB": "NVIDIA Tesla P100 PCIe 16GB",
    "Tesla P100-SXM2-16GB": "NVIDIA Tesla P100 SXM2 16GB",
    "Tesla V100-SXM2-16GB": "NVIDIA Tesla V100 SXM2 16GB",
    "Tesla V100-SXM2-32GB": "NVIDIA Tesla V100 SXM2 32GB",
    "Tesla V100-SXM3-32GB": "NVIDIA Tesla V100 SXM2 32GB",
    "Tesla V100-PCIE-32GB": "NVIDIA Tesla V100 PCIe 32GB",
    "Tesla V100S-PCIE-32GB": "NVIDIA Tesla V100S PCIe 32GB",
    "Tesla T4": "NVIDIA Tesla T4",
    "NVIDIA A2": "NVIDIA A2",
    "NVIDIA A10": "NVIDIA A10",
    "NVIDIA A10G": "NVIDIA A10G",
    "NVIDIA A30": "NVIDIA A30",
    "NVIDIA A40": "NVIDIA A40",
    "A100-SXM4-40GB": "NVIDIA A100 SXM4 40GB",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100 SXM4 40GB",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100 SXM4 80GB",
    "NVIDIA A100-PCIE-40GB": "NVIDIA A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 PCIe 80GB",
    "NVIDIA A800-SXM4-80GB": "NVIDIA A800 SXM4 80GB",
    "NVIDIA L4": "NVIDIA L4",
    "NVIDIA L40": "NVIDIA L40",
    "NVIDIA L40S": "NVIDIA L40S",
    "NVIDIA H100 PCIe": "NVIDIA H100 PCIe 80GB",
    "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM5 80GB",
    "NVIDIA H100 NVL": "NVIDIA H100 NVL 94GB",
    "NVIDIA H20": "NVIDIA H20",
    "NVIDIA H200": "NVIDIA H200 SXM5 141GB",
    "NVIDIA H200 NVL": "NVIDIA H200 NVL 141GB",
    "NVIDIA GH200 480GB": "NVIDIA GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "NVIDIA GH200 144GB",
    "NVIDIA B200": "NVIDIA B200",
    "NVIDIA GB200": "NVIDIA GB200",
    "AMD Instinct MI100": "AMD Instinct MI100",
    "AMD Instinct MI210": "AMD Instinct MI210",
    "AMD Instinct MI250X / MI250": "AMD Instinct MI250",
    "AMD Instinct MI300X": "AMD Instinct MI300X",
    "AMD Instinct MI325X": "AMD Instinct MI325X",
    "AMD Radeon RX 7900 XTX": "AMD Radeon RX 7900 XTX",
    "Radeon RX 7900 XTX": "AMD Radeon RX 7900 XTX",
    "AMD Radeon RX 6900 XT": "AMD Radeon RX 6900 XT",
    "AMD Radeon PRO W7900": "AMD Radeon PRO W7900",
}


@pytest.mark.parametrize(("written", "canonical"), AS_PEOPLE_WRITE.items())
def test_people_write_names_in_many_ways(written: str, canonical: str) -> None:
    assert find_gpu(written).name == canonical


@pytest.mark.parametrize(("reported", "canonical"), AS_DRIVERS_REPORT.items())
def test_every_name_a_driver_reports_is_found(reported: str, canonical: str) -> None:
    assert find_gpu(reported).name == canonical


@given(
    gpu=st.sampled_from(list_gpus()),
    case=st.sampled_from([str, str.lower, str.upper, str.title]),
    separator=st.sampled_from([" ", "-", "_", "  ", " / "]),
)
def test_the_canonical_name_finds_itself_however_it_is_spelled(gpu, case, separator) -> None:
    assert find_gpu(separator.join(case(gpu.name).split(" "))) is gpu


@given(name=st.text(max_size=40))
def test_any_text_finds_a_gpu_or_is_refused_with_advice(name: str) -> None:
    try:
        answer = find_gpu(name).name
    except HardwareError as error:
        answer = str(error)
    assert answer in {gpu.name for gpu in list_gpus()} or "memscale.hardware.list_gpus()" in answer


@pytest.mark.parametrize(
    ("ambiguous", "cautious"),
    [
        ("A100", "NVIDIA A100 PCIe 40GB"),  # the least memory
        ("V100", "NVIDIA Tesla V100 PCIe 16GB"),  # then the lowest fp16 rate
        ("h100", "NVIDIA H100 PCIe 80GB"),
        ("A100-80GB", "NVIDIA A100 PCIe 80GB"),  # then the lowest bandwidth
        ("RTX 3080", "NVIDIA GeForce RTX 3080 10GB"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_where_several_fit_the_cautious_one_is_taken(ambiguous: str, cautious: str) -> None:
    assert find_gpu(ambiguous).name == cautious


@pytest.mark.parametrize(
    ("name", "gib", "canonical"),
    [
        ("NVIDIA GeForce RTX 3080", 9.8, "NVIDIA GeForce RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 3080", 11.8, "NVIDIA GeForce RTX 3080 12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.7, "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 15.8, "NVIDIA GeForce RTX 3080 Laptop GPU 16GB"),
        ("NVIDIA GeForce RTX 4090", 47.5, "NVIDIA GeForce RTX 4090"),  # a card with more soldered on
    ],
)
def test_the_memory_of_the_device_tells_equal_names_apart(name: str, gib: float, canonical: str) -> None:
    assert find_gpu(name, memory_bytes=int(gib * 2**30)).name == canonical


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rtx 3090", "rtx 3090 ti"),
        ("rtx 4070 ti", "rtx 4070 ti super"),
        ("rtx 4070 super", "rtx 4070 ti super"),
        ("rtx 4090", "rtx 4090 laptop"),
        ("rtx 4090", "rtx 4090 d"),
        ("rtx 2070", "rtx 2070 max-q"),
        ("a10", "a100"),
        ("a10", "a10g"),
        ("l40", "l40s"),
        ("l4", "l40"),
        ("rtx 6000", "rtx 6000 ada"),
        ("rtx 6000 ada", "rtx pro 6000"),
        ("7900 xt", "7900 xtx"),
        ("v100 pcie 32gb", "v100s pcie 32gb"),
        ("h200", "gh200"),
        ("b200", "gb200"),
    ],
)
def test_similar_names_are_never_taken_for_one_another(one: str, other: str) -> None:
    assert find_gpu(one).name != find_gpu(other).name


@pytest.mark.parametrize(
    "unknown",
    [
        "",
        "   ",
        "gpu",
        "nvidia",
        "rtx",
        "24GB",
        "titan",
        "AMD 3090",
        "rtx 1080",
        "RTX 3090 12GB",
        "RTX 4090 Super",
        "RTX 3090 and 3080",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GRID A100-20C",
        "AMD Radeon Graphics",
        "\N{SNOWMAN}",
    ],
)
def test_what_no_gpu_is_called_is_refused(unknown: str) -> None:
    with pytest.raises(HardwareError, match="No GPU is known as"):
        find_gpu(unknown)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("RTX 3099", "NVIDIA GeForce RTX 3090"),
        ("rtx 1080", "NVIDIA GeForce GTX 1080"),
        ("A1000", "NVIDIA A100"),
        ("titan", "NVIDIA TITAN V"),
        ("a6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX 4090 Super", "NVIDIA GeForce RTX 4090,"),
        ("MI300", "AMD Instinct MI300X"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100 SXM4 40GB"),
    ],
)
def test_a_refusal_lists_the_nearest_names(typo: str, meant: str) -> None:
    with pytest.raises(HardwareError) as caught:
        find_gpu(typo)
    assert meant in str(caught.value)


@pytest.mark.parametrize("name", [None, 3090, True, b"RTX 3090", ["RTX 3090"]])
def test_a_name_is_text(name: object) -> None:
    with pytest.raises(ConfigTypeError, match="such as 'RTX 3090'"):
        find_gpu(name)  # type: ignore[arg-type]
