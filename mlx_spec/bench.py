"""The command ``python -m mlx_spec.bench``, see ``mlx_spec.cli.bench``."""

import sys

from mlx_spec.cli.bench import main

if __name__ == "__main__":
    sys.exit(main())
