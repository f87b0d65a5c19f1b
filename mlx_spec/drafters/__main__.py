"""The command ``python -m mlx_spec.drafters``, see ``mlx_spec.cli.drafters``."""

import sys

from mlx_spec.cli.drafters import main

if __name__ == "__main__":
    sys.exit(main())
