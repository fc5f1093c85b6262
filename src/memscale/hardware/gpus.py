"""The table of GPUs with the figures that vendors publish, and the search in it by name.

Every rate is a theoretical peak at the published boost clock, without sparsity. No card sustains it; plans compare
times on one device, where the common shortfall cancels.

- Memory is in GiB. Vendors write "24 GB" and solder 24 x 2**30 bytes; the driver keeps a few hundred MiB of it.
- fp32 is IEEE fp32; on AMD Instinct that of the matrix cores, which compute in IEEE fp32 too.
- fp16 is the tensor-core rate with fp32 accumulation, as torch uses it: half of the advertised rate on GeForce.
  Without tensor cores it is the plain rate, which on Pascal GeForce is 1/64 of fp32.
- bf16 and tf32 are None where the hardware has none.
- Bandwidth is in GB/s (10**9), and so is the link to the host: one direction, before protocol overhead.
- A laptop GPU is listed at the top of its published boost range; the same chip on less power is slower.

Note [How a name is matched]
A name is split into words. Some identify the GPU (its core: 3090, ti, laptop); others are optional (vendor, product
line, memory, form factor). A query matches a GPU if it has all of the core and no word that the GPU does not have:
"3090" is never a 3090 Ti, "AMD 3090" nothing at all, and the slice "A100-SXM4-40GB MIG 1g.5gb" not the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.specs import Rates

Vendor: TypeAlias = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What a vendor publishes about one GPU, in the units above.

    Example:
        >>> gpu = find_gpu("RTX 3090")
        >>> gpu.memory_bytes // 2**30, gpu.compute_capability
        (24, (8, 6))
    """

    name: str  # the canonical name, unique in the table
    vendor: Vendor
    memory_bytes: int
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float
    bf16_tflops: float | None
    memory_bandwidth_gbs: float
    link_gbs: float
    compute_capability: tuple[int, int] | None  # None for AMD
    source: str  # where the figures are from

    @property
    def rates(self) -> Rates:
        bf16, tf32 = (each and each * 1e12 for each in (self.bf16_tflops, self.tf32_tflops))
        return Rates(self.fp32_tflops * 1e12, self.fp16_tflops * 1e12, bf16, tf32)


# name, GiB, fp32, tf32, fp16, bf16, memory GB/s, link GB/s
_Row: TypeAlias = tuple[str, int, float, float | None, float, float | None, float, float]

_GEN3_X16 = 15.75
_GEN4_X16 = 31.5
_GEN4_X8 = 15.75
_GEN5_X16 = 63.0
_GEN5_X8 = 31.5
_NVLINK_C2C = 450.0  # Grace Hopper and Grace Blackwell: 900 GB/s, both directions together


def _group(
    vendor: Vendor, capability: tuple[int, int] | None, source: str, *rows: _Row
) -> tuple[GpuSpec, ...]:
    return tuple(
        GpuSpec(name, vendor, gib * 2**30, fp32, tf32, fp16, bf16, bandwidth, link, capability, source)
        for name, gib, fp32, tf32, fp16, bf16, bandwidth, link in rows
    )


# fmt: off
GPU_TABLE: tuple[GpuSpec, ...] = (
    *_group("nvidia", (6, 1), "NVIDIA GeForce GTX 10 product pages, Tesla P4 and P40 data sheets; fp16 at 1/64 of fp32",
        ("NVIDIA GeForce GTX 1050 Ti",    4,  2.1, None, 0.033, None, 112.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1060 6GB",   6,  4.4, None, 0.068, None, 192.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1070",       8,  6.5, None, 0.101, None, 256.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1070 Ti",    8,  8.2, None, 0.128, None, 256.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1080",       8,  8.9, None, 0.139, None, 320.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1080 Ti",   11, 11.3, None, 0.177, None, 484.0, _GEN3_X16),
        ("NVIDIA TITAN Xp",              12, 12.1, None, 0.190, None, 547.7, _GEN3_X16),
        ("NVIDIA Tesla P4",               8,  5.5, None, 0.086, None, 192.0, _GEN3_X16),
        ("NVIDIA Tesla P40",             24, 12.0, None, 0.187, None, 346.0, _GEN3_X16),
    ),
    *_group("nvidia", (6, 0), "NVIDIA Tesla P100 data sheet and Pascal GP100 whitepaper v1.2",
        ("NVIDIA Tesla P100 PCIe 12GB",  12,  9.3, None, 18.7, None, 549.0, _GEN3_X16),
        ("NVIDIA Tesla P100 PCIe 16GB",  16,  9.3, None, 18.7, None, 732.0, _GEN3_X16),
        ("NVIDIA Tesla P100 SXM2 16GB",  16, 10.6, None, 21.2, None, 732.0, _GEN3_X16),
    ),
    *_group("nvidia", (7, 0), "NVIDIA V100 data sheet, Volta GV100 whitepaper v1.1, TITAN V product page",
        ("NVIDIA Tesla V100 PCIe 16GB",  16, 14.0, None, 112.0, None,  900.0, _GEN3_X16),
        ("NVIDIA Tesla V100 PCIe 32GB",  32, 14.0, None, 112.0, None,  900.0, _GEN3_X16),
        ("NVIDIA Tesla V100 SXM2 16GB",  16, 15.7, None, 125.0, None,  900.0, _GEN3_X16),
        ("NVIDIA Tesla V100 SXM2 32GB",  32, 15.7, None, 125.0, None,  900.0, _GEN3_X16),
        ("NVIDIA Tesla V100S PCIe 32GB", 32, 16.4, None, 130.0, None, 1134.0, _GEN3_X16),
        ("NVIDIA TITAN V",               12, 14.9, None, 110.0, None,  652.8, _GEN3_X16),
    ),
    *_group("nvidia", (7, 5), "NVIDIA product pages (RTX 20: reference clocks), T4 data sheet, Turing whitepaper",
        ("NVIDIA GeForce GTX 1650",             4,  3.0, None,  6.0, None, 128.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1650 SUPER",       4,  4.4, None,  8.8, None, 192.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1660",             6,  5.0, None, 10.1, None, 192.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1660 SUPER",       6,  5.0, None, 10.1, None, 336.0, _GEN3_X16),
        ("NVIDIA GeForce GTX 1660 Ti",          6,  5.4, None, 10.9, None, 288.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2060 6GB",         6,  6.5, None, 25.8, None, 336.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2060 12GB",       12,  7.2, None, 28.7, None, 336.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2060 SUPER",       8,  7.2, None, 28.7, None, 448.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2070",             8,  7.5, None, 29.9, None, 448.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2070 SUPER",       8,  9.1, None, 36.3, None, 448.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2080",             8, 10.1, None, 40.3, None, 448.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2080 SUPER",       8, 11.2, None, 44.6, None, 496.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2080 Ti",         11, 13.4, None, 53.8, None, 616.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2060 with Max-Q Design", 6, 4.6, None, 18.2, None, 264.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", 8, 5.5, None, 21.8, None, 384.0, _GEN3_X16),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", 8, 6.4, None, 25.8, None, 384.0, _GEN3_X16),
        ("NVIDIA Quadro RTX 4000",              8,  7.1, None,  57.0, None, 416.0, _GEN3_X16),
        ("NVIDIA Quadro RTX 5000",             16, 11.2, None,  89.2, None, 448.0, _GEN3_X16),
        ("NVIDIA Quadro RTX 6000",             24, 16.3, None, 130.5, None, 672.0, _GEN3_X16),
        ("NVIDIA Quadro RTX 8000",             48, 16.3, None, 130.5, None, 672.0, _GEN3_X16),
        ("NVIDIA TITAN RTX",                   24, 16.3, None, 130.5, None, 672.0, _GEN3_X16),
        ("NVIDIA Tesla T4",                    16,  8.1, None,  65.0, None, 320.0, _GEN3_X16),
    ),
    *_group("nvidia", (8, 0), "NVIDIA A100 and A30 data sheets, Ampere GA100 whitepaper v1.0",
        ("NVIDIA A30",                         24, 10.3,  82.0, 165.0, 165.0,  933.0, _GEN4_X16),
        ("NVIDIA A100 PCIe 40GB",              40, 19.5, 156.0, 312.0, 312.0, 1555.0, _GEN4_X16),
        ("NVIDIA A100 SXM4 40GB",              40, 19.5, 156.0, 312.0, 312.0, 1555.0, _GEN4_X16),
        ("NVIDIA A100 PCIe 80GB",              80, 19.5, 156.0, 312.0, 312.0, 1935.0, _GEN4_X16),
        ("NVIDIA A100 SXM4 80GB",              80, 19.5, 156.0, 312.0, 312.0, 2039.0, _GEN4_X16),
        ("NVIDIA A800 PCIe 80GB",              80, 19.5, 156.0, 312.0, 312.0, 1935.0, _GEN4_X16),
        ("NVIDIA A800 SXM4 80GB",              80, 19.5, 156.0, 312.0, 312.0, 2039.0, _GEN4_X16),
    ),
    *_group("nvidia", (8, 6), "NVIDIA data sheets, GeForce RTX 30 product pages, Ampere GA102 whitepaper v2",
        ("NVIDIA A2",                          16,  4.5,   9.0,  18.0,  18.0,  200.0, _GEN4_X8),
        ("NVIDIA A10",                         24, 31.2,  62.5, 125.0, 125.0,  600.0, _GEN4_X16),
        ("NVIDIA A10G",                        24, 35.0,  35.0,  70.0,  70.0,  600.0, _GEN4_X16),
        ("NVIDIA A40",                         48, 37.4,  74.8, 149.7, 149.7,  696.0, _GEN4_X16),
        ("NVIDIA RTX A2000 6GB",                6,  8.0,  16.0,  31.9,  31.9,  288.0, _GEN4_X16),
        ("NVIDIA RTX A2000 12GB",              12,  8.0,  16.0,  31.9,  31.9,  288.0, _GEN4_X16),
        ("NVIDIA RTX A4000",                   16, 19.2,  38.3,  76.7,  76.7,  448.0, _GEN4_X16),
        ("NVIDIA RTX A4500",                   20, 23.7,  47.3,  94.6,  94.6,  640.0, _GEN4_X16),
        ("NVIDIA RTX A5000",                   24, 27.8,  55.6, 111.1, 111.1,  768.0, _GEN4_X16),
        ("NVIDIA RTX A5500",                   24, 34.1,  68.2, 136.4, 136.4,  768.0, _GEN4_X16),
        ("NVIDIA RTX A6000",                   48, 38.7,  77.4, 154.8, 154.8,  768.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3050 6GB",         6,  6.8,  6.8, 13.5, 13.5,  168.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 3050 8GB",         8,  9.1,  9.1, 18.2, 18.2,  224.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 3060",            12, 12.7, 12.7, 25.5, 25.5,  360.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3060 Ti",          8, 16.2, 16.2, 32.4, 32.4,  448.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3070",             8, 20.3, 20.3, 40.6, 40.6,  448.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3070 Ti",          8, 21.7, 21.7, 43.5, 43.5,  608.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3080 10GB",       10, 29.8, 29.8, 59.5, 59.5,  760.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3080 12GB",       12, 30.6, 30.6, 61.3, 61.3,  912.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3080 Ti",         12, 34.1, 34.1, 68.2, 68.2,  912.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3090",            24, 35.6, 35.6, 71.0, 71.0,  936.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3090 Ti",         24, 40.0, 40.0, 80.0, 80.0, 1008.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3050 Laptop GPU",     4,  7.1,  7.1, 14.3, 14.3, 192.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 3050 Ti Laptop GPU",  4,  8.7,  8.7, 17.4, 17.4, 192.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 3060 Laptop GPU",     6, 13.1, 13.1, 26.2, 26.2, 336.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3070 Laptop GPU",     8, 16.6, 16.6, 33.2, 33.2, 448.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3070 Ti Laptop GPU",  8, 17.5, 17.5, 35.0, 35.0, 448.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3080 Laptop GPU 8GB",  8, 21.0, 21.0, 42.0, 42.0, 448.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3080 Laptop GPU 16GB", 16, 21.0, 21.0, 42.0, 42.0, 448.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16, 23.6, 23.6, 47.2, 47.2, 512.0, _GEN4_X16),
    ),
    *_group("nvidia", (8, 9), "NVIDIA GeForce RTX 40 product pages, L4, L40 and RTX Ada data sheets, Ada whitepaper v2",
        ("NVIDIA GeForce RTX 4060",             8, 15.1, 15.1,  30.2,  30.2,  272.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 4060 Ti 8GB",      8, 22.1, 22.1,  44.1,  44.1,  288.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 4060 Ti 16GB",    16, 22.1, 22.1,  44.1,  44.1,  288.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 4070",            12, 29.1, 29.1,  58.3,  58.3,  504.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4070 SUPER",      12, 35.5, 35.5,  71.0,  71.0,  504.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4070 Ti",         12, 40.1, 40.1,  80.2,  80.2,  504.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4070 Ti SUPER",   16, 44.1, 44.1,  88.2,  88.2,  672.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4080",            16, 48.7, 48.7,  97.5,  97.5,  716.8, _GEN4_X16),
        ("NVIDIA GeForce RTX 4080 SUPER",      16, 52.2, 52.2, 104.4, 104.4,  736.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4090 D",          24, 73.5, 73.5, 147.1, 147.1, 1008.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4090",            24, 82.6, 82.6, 165.2, 165.2, 1008.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4050 Laptop GPU",  6, 12.1, 12.1, 24.3, 24.3, 192.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 4060 Laptop GPU",  8, 14.6, 14.6, 29.1, 29.1, 256.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 4070 Laptop GPU",  8, 20.0, 20.0, 40.1, 40.1, 256.0, _GEN4_X8),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", 12, 33.9, 33.9, 67.7, 67.7, 432.0, _GEN4_X16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, 39.7, 39.7, 79.4, 79.4, 576.0, _GEN4_X16),
        # The tensor figure of their data sheets is sparse FP8: 4 x fp16.
        ("NVIDIA RTX 2000 Ada Generation",     16, 12.0,  24.0,  48.0,  48.0, 224.0, _GEN4_X8),
        ("NVIDIA RTX 4000 SFF Ada Generation", 20, 19.2,  38.4,  76.7,  76.7, 280.0, _GEN4_X16),
        ("NVIDIA RTX 4000 Ada Generation",     20, 26.7,  53.5, 106.9, 106.9, 360.0, _GEN4_X16),
        ("NVIDIA RTX 4500 Ada Generation",     24, 39.6,  79.3, 158.5, 158.5, 432.0, _GEN4_X16),
        ("NVIDIA RTX 5000 Ada Generation",     32, 65.3, 130.6, 261.1, 261.1, 576.0, _GEN4_X16),
        ("NVIDIA RTX 6000 Ada Generation",     48, 91.1, 182.1, 364.2, 364.2, 960.0, _GEN4_X16),
        ("NVIDIA L4",                          24, 30.3,  60.0, 121.0, 121.0, 300.0, _GEN4_X16),
        ("NVIDIA L40",                         48, 90.5,  90.5, 181.0, 181.0, 864.0, _GEN4_X16),
        ("NVIDIA L40S",                        48, 91.6, 183.0, 362.0, 362.0, 864.0, _GEN4_X16),
    ),
    *_group("nvidia", (9, 0), "NVIDIA H100, H200, H20 and GH200 data sheets, Hopper whitepaper v1.04",
        ("NVIDIA H20",                         96, 44.0,  74.0, 148.0, 148.0, 4000.0, _GEN5_X16),
        ("NVIDIA H100 PCIe 80GB",              80, 51.2, 378.0, 756.0, 756.0, 2039.0, _GEN5_X16),
        ("NVIDIA H100 SXM5 80GB",              80, 66.9, 494.7, 989.4, 989.4, 3350.0, _GEN5_X16),
        ("NVIDIA H100 NVL 94GB",               94, 60.0, 417.5, 835.5, 835.5, 3938.0, _GEN5_X16),
        ("NVIDIA H800 SXM5 80GB",              80, 66.9, 494.7, 989.4, 989.4, 3350.0, _GEN5_X16),
        ("NVIDIA H200 NVL 141GB",             141, 60.0, 417.5, 835.5, 835.5, 4800.0, _GEN5_X16),
        ("NVIDIA H200 SXM5 141GB",            141, 66.9, 494.7, 989.4, 989.4, 4800.0, _GEN5_X16),
        ("NVIDIA GH200 96GB",                  96, 66.9, 494.7, 989.4, 989.4, 4000.0, _NVLINK_C2C),
        ("NVIDIA GH200 144GB",                144, 66.9, 494.7, 989.4, 989.4, 4900.0, _NVLINK_C2C),
    ),
    *_group("nvidia", (10, 0), "NVIDIA DGX B200 and GB200 NVL72 data sheets, per GPU",
        ("NVIDIA B200",                       180, 75.0, 1125.0, 2250.0, 2250.0, 8000.0, _GEN5_X16),
        ("NVIDIA GB200",                      186, 80.0, 1250.0, 2500.0, 2500.0, 8000.0, _NVLINK_C2C),
    ),
    *_group("nvidia", (12, 0), "NVIDIA GeForce RTX 50 product pages, RTX PRO 6000 data sheets, Blackwell whitepapers",
        ("NVIDIA GeForce RTX 5050",             8, 13.2, 13.2,  26.3,  26.3,  320.0, _GEN5_X8),
        ("NVIDIA GeForce RTX 5060",             8, 19.2, 19.2,  38.4,  38.4,  448.0, _GEN5_X8),
        ("NVIDIA GeForce RTX 5060 Ti 8GB",      8, 23.7, 23.7,  47.4,  47.4,  448.0, _GEN5_X8),
        ("NVIDIA GeForce RTX 5060 Ti 16GB",    16, 23.7, 23.7,  47.4,  47.4,  448.0, _GEN5_X8),
        ("NVIDIA GeForce RTX 5070",            12, 30.9, 30.9,  61.7,  61.7,  672.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5070 Ti",         16, 43.9, 43.9,  87.9,  87.9,  896.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5080",            16, 56.3, 56.3, 112.6, 112.6,  960.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5090",            32, 104.8, 104.8, 209.5, 209.5, 1792.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5090 D",          32, 104.8, 104.8, 209.5, 209.5, 1792.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5060 Laptop GPU",     8, 16.6, 16.6, 33.2, 33.2, 384.0, _GEN5_X8),
        ("NVIDIA GeForce RTX 5070 Laptop GPU",     8, 21.6, 21.6, 43.3, 43.3, 384.0, _GEN5_X8),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12, 26.1, 26.1, 52.3, 52.3, 672.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5080 Laptop GPU",    16, 35.1, 35.1, 70.3, 70.3, 896.0, _GEN5_X16),
        ("NVIDIA GeForce RTX 5090 Laptop GPU",    24, 45.3, 45.3, 90.7, 90.7, 896.0, _GEN5_X16),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
                                               96, 109.7, 219.5, 438.9, 438.9, 1792.0, _GEN5_X16),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition",
                                               96, 120.0, 240.0, 480.0, 480.0, 1597.0, _GEN5_X16),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
                                               96, 126.0, 251.9, 503.8, 503.8, 1792.0, _GEN5_X16),
    ),
    *_group("amd", None, "AMD Instinct MI100, MI210, MI300 and MI350 series data sheets",
        ("AMD Instinct MI100",   32,  46.1,  None,  184.6,   92.3, 1228.8, _GEN4_X16),
        ("AMD Instinct MI210",   64,  45.3,  None,  181.0,  181.0, 1638.4, _GEN4_X16),
        ("AMD Instinct MI300A", 128, 122.6, 490.3,  980.6,  980.6, 5300.0, _GEN5_X16),
        ("AMD Instinct MI300X", 192, 163.4, 653.7, 1307.4, 1307.4, 5300.0, _GEN5_X16),
        ("AMD Instinct MI325X", 256, 163.4, 653.7, 1307.4, 1307.4, 6000.0, _GEN5_X16),
        ("AMD Instinct MI350X", 288, 144.2,  None, 2306.9, 2306.9, 8000.0, _GEN5_X16),
        ("AMD Instinct MI355X", 288, 157.3,  None, 2516.6, 2516.6, 8000.0, _GEN5_X16),
    ),
    # torch sees each of the two dies as a device of its own.
    *_group("amd", None, "AMD Instinct MI250 and MI250X data sheets, halved: one die of the two of a card",
        ("AMD Instinct MI250",   64,  45.2,  None,  181.0,  181.0, 1638.4, _GEN4_X16),
        ("AMD Instinct MI250X",  64,  47.8,  None,  191.5,  191.5, 1638.4, _GEN4_X16),
    ),
    *_group("amd", None, "AMD Radeon RX 6000, RX 7000, PRO W7000 and RX 9000 product pages",
        ("AMD Radeon RX 6700 XT",  12, 13.2, None, 26.4, None, 384.0, _GEN4_X16),
        ("AMD Radeon RX 6800 XT",  16, 20.7, None, 41.5, None, 512.0, _GEN4_X16),
        ("AMD Radeon RX 6900 XT",  16, 23.0, None, 46.1, None, 512.0, _GEN4_X16),
        ("AMD Radeon RX 6950 XT",  16, 23.7, None, 47.3, None, 576.0, _GEN4_X16),
        ("AMD Radeon RX 7600",      8, 21.8, None,  43.5,  43.5, 288.0, _GEN4_X8),
        ("AMD Radeon RX 7600 XT",  16, 22.6, None,  45.1,  45.1, 288.0, _GEN4_X8),
        ("AMD Radeon RX 7700 XT",  12, 35.2, None,  70.3,  70.3, 432.0, _GEN4_X16),
        ("AMD Radeon RX 7800 XT",  16, 37.3, None,  74.6,  74.6, 624.0, _GEN4_X16),
        ("AMD Radeon RX 7900 GRE", 16, 46.0, None,  92.0,  92.0, 576.0, _GEN4_X16),
        ("AMD Radeon RX 7900 XT",  20, 51.6, None, 103.2, 103.2, 800.0, _GEN4_X16),
        ("AMD Radeon RX 7900 XTX", 24, 61.4, None, 122.8, 122.8, 960.0, _GEN4_X16),
        ("AMD Radeon PRO W7800",   32, 45.2, None,  90.5,  90.5, 576.0, _GEN4_X16),
        ("AMD Radeon PRO W7900",   48, 61.3, None, 122.6, 122.6, 864.0, _GEN4_X16),
        ("AMD Radeon RX 9070",     16, 36.1, None, 144.5, 144.5, 640.0, _GEN5_X16),
        ("AMD Radeon RX 9070 XT",  16, 48.7, None, 194.6, 194.6, 640.0, _GEN5_X16),
    ),
)
# fmt: on


_VENDOR_WORDS: dict[Vendor, frozenset[str]] = {
    "nvidia": frozenset({"nvidia", "geforce", "tesla", "quadro"}),
    "amd": frozenset({"amd", "radeon", "instinct", "pro"}),
}
_LINE_WORDS = frozenset({"rtx", "gtx", "rx"})
_DETAIL_WORDS = frozenset({"pcie", "sxm", "blackwell", "workstation", "server", "edition", "generation"})
_FILLERS = frozenset({"gpu", "graphics", "card", "with", "design", "series"})
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop"}

# Words of a driver's name for a GPU that its canonical name does not have.
_DRIVER_WORDS: dict[str, frozenset[str]] = {
    "NVIDIA H100 SXM5 80GB": frozenset({"hbm3"}),  # "NVIDIA H100 80GB HBM3"
    "NVIDIA GH200 96GB": frozenset({"480gb"}),  # "NVIDIA GH200 480GB": the memory of its CPU
    "NVIDIA GH200 144GB": frozenset({"hbm3e"}),  # "NVIDIA GH200 144G HBM3e"
    "AMD Instinct MI250": frozenset({"mi250x"}),  # "AMD Instinct MI250X / MI250", for either
}

_MAX_Q = re.compile(r"max[\s_-]*q")
_MEMORY = re.compile(r"(?<![a-z0-9.])(\d+)\s*g(?:i?b)?(?![a-z0-9])")
_PREFIX = re.compile("nvidia|amd|geforce|radeon|instinct|tesla|quadro|titan|rtx|gtx|rx|pro")
_SUFFIX = re.compile("ti|super|laptop|mobile|maxq|xtx|xt|gre|sff|ada|d|gpu")
_PREFIXES = re.compile(f"(?:{_PREFIX.pattern})*")
_FUSED = re.compile(rf"(\d{{3,4}})((?:{_SUFFIX.pattern})+)")


def find_gpu(name: str, *, memory_bytes: int | None = None) -> GpuSpec:
    """Find a GPU by name; case, spaces, hyphens and the vendor's words do not matter.

    Where several match ("A100" is sold with 40 and with 80 GB), the most cautious one is returned: the least memory,
    then the lowest fp16 rate, then the lowest memory bandwidth.

    Args:
        name: As people write it ("3090", "A100-80GB", "4090 laptop") or as `torch.cuda.get_device_name`
            reports it.
        memory_bytes: The memory of the device, if known: of several matches, the nearest to it is returned.

    Raises:
        HardwareError: No GPU is known by that name; the message lists the nearest.

    Example:
        >>> find_gpu("rtx3090").name
        'NVIDIA GeForce RTX 3090'
        >>> find_gpu("A100").memory_bytes // 2**30
        40
    """
    if not isinstance(name, str):
        raise ConfigTypeError(
            f"A GPU is found by its name, such as 'RTX 3090'; got {shown(name)}, a {type(name).__name__}."
        )
    words = _words(name)
    fits = [entry.gpu for entry in _entries() if entry.core <= words <= entry.allowed]
    if not fits:
        nearest = _nearest(words)
        found = f". The nearest names are {', '.join(nearest)}" if nearest else ", and no name comes near it"
        raise HardwareError(
            f"No GPU is known as {shown(name)}{found}: `memscale gpus` and `memscale.hardware.list_gpus()` list the "
            'names; to plan, a size of device memory such as "24GiB" serves as well.'
        )
    if memory_bytes is not None:
        # A driver reports a little less than the nominal size, so "nearest" and not "equal".
        distance = min(abs(gpu.memory_bytes - memory_bytes) for gpu in fits)
        fits = [gpu for gpu in fits if abs(gpu.memory_bytes - memory_bytes) == distance]
    return min(fits, key=lambda gpu: (gpu.memory_bytes, gpu.fp16_tflops, gpu.memory_bandwidth_gbs))


def list_gpus() -> tuple[GpuSpec, ...]:
    """Return every GPU known by name, oldest architecture first."""
    return GPU_TABLE


class _Entry(NamedTuple):
    """A GPU with the words of its name. See Note [How a name is matched]."""

    gpu: GpuSpec
    core: frozenset[str]
    allowed: frozenset[str]


@cache
def _entries() -> list[_Entry]:
    entries = []
    for gpu in GPU_TABLE:
        words, vendor = _words(gpu.name), _VENDOR_WORDS[gpu.vendor]
        memory = f"{gpu.memory_bytes // 2**30}gb"
        # "TITAN" is several GPUs, which only the product line tells apart.
        line = frozenset[str]() if "titan" in words else _LINE_WORDS
        core = words - vendor - line - _DETAIL_WORDS - {memory}
        allowed = words | vendor | {memory} | _DRIVER_WORDS.get(gpu.name, frozenset())
        entries.append(_Entry(gpu, core, allowed))
    return entries


def _words(name: str) -> frozenset[str]:
    text = _MAX_Q.sub("maxq", name.lower())
    text = _MEMORY.sub(r" \1gb ", text)
    parts = [part for run in re.findall(r"[a-z0-9]+", text) for part in _split(run)]
    # The version of SXM follows from the generation.
    parts = [re.sub(r"^sxm\d$", "sxm", part) for part in parts]
    return frozenset(_SYNONYMS.get(part, part) for part in parts) - _FILLERS


def _split(run: str) -> list[str]:
    """Split words written together: "rtx4070tisuper" is rtx, 4070, ti, super."""
    start = _PREFIXES.match(run)
    end = start.end() if start else 0
    fused = _FUSED.fullmatch(run, end)
    model = [fused[1], *_SUFFIX.findall(fused[2])] if fused else [run[end:]]
    return [*_PREFIX.findall(run[:end]), *filter(None, model)]


def _nearest(words: frozenset[str], count: int = 5) -> list[str]:
    """Return the names most like `words`, those that share words of their core first."""
    known = words - _VENDOR_WORDS["nvidia"] - _VENDOR_WORDS["amd"] - _LINE_WORDS
    plain = "".join(sorted(word for word in known if not _MEMORY.fullmatch(word)))
    scores: dict[str, float] = {}
    for entry in _entries():
        likeness = SequenceMatcher(None, plain, "".join(sorted(entry.core)), autojunk=False).ratio()
        scores[entry.gpu.name] = likeness + len(words & entry.core) / len(entry.core)
    near = [name for name, score in scores.items() if score > 0.5]
    return sorted(near, key=lambda name: -scores[name])[:count]
