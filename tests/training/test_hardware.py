import pytest

from dsattn.training.hardware import peak_tflops


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H20", "bfloat16", 148.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 311.9),
        ("NVIDIA H200", "float32", None),  # TF32 or not: nobody said
        ("cpu", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
    ],
)
def test_peaks(name, dtype, peak):
    assert peak_tflops(name, dtype) == peak
