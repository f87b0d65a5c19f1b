"""Where this package keeps files that it can create again: beside those of its kernels."""

from metal_kernels.launching.cache_folder import cache_folder as cache_folder
