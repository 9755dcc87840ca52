"""cuDNN frontend: the DSA kernels of NVIDIA (wheel `nvidia-cudnn-frontend`, namespace `cudnn.DSA`)."""
