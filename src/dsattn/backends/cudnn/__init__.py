"""cuDNN frontend: the DSA kernels of NVIDIA (wheel `nvidia-cudnn-frontend`, namespace `cudnn.DSA`)."""


def prepare() -> None:
    """Import what the adapters call, while no frame holds a tensor: see `frontend.entries`."""
    from dsattn.backends.cudnn import frontend

    frontend.entries()
