"""The command ``python -m mlx_spec.generate``, see ``mlx_spec.cli.generate``."""

import sys

from mlx_spec.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
