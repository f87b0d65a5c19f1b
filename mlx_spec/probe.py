"""The command ``python -m mlx_spec.probe``, see ``mlx_spec.cli.probe``."""

import sys

from mlx_spec.cli.probe import main

if __name__ == "__main__":
    sys.exit(main())
