"""The command ``python -m mlx_spec.serve``, see ``mlx_spec.cli.serve``."""

import sys

from mlx_spec.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
