"""What a GPU could do at most, for the share of it that a run reaches (model FLOPs utilisation, arXiv 2204.02311)."""

# Dense bf16/fp16 TFLOP/s from the vendors' data sheets, by a part of the name that torch reports. The first match
# counts: the PCIe models of a chip come before its others.
_HALF_PRECISION_PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("A100", 311.9),
    ("A800", 311.9),
    ("L40S", 362.05),
    ("A10G", 70.0),
    ("MI300X", 1307.4),
    ("MI325X", 1307.4),
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """The data sheet's matrix rate of a GPU in `bfloat16` or `float16`; None for other dtypes and cards not listed."""
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for part, peak in _HALF_PRECISION_PEAKS if part in device_name), None)
