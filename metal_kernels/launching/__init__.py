"""How a kernel's text becomes a launch: on Apple GPUs, on NVIDIA GPUs, and which implementation runs where."""
