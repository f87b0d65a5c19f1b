"""The command ``python -m mlx_spec.check``, see ``mlx_spec.cli.check``."""

import sys

from mlx_spec.cli.check import main

if __name__ == "__main__":
    sys.exit(main())
