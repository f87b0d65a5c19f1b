"""The command ``python -m mlx_spec.quantize_drafter``, see ``mlx_spec.cli.quantize_drafter``."""

import sys

from mlx_spec.cli.quantize_drafter import main

if __name__ == "__main__":
    sys.exit(main())
