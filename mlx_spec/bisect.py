"""The command ``python -m mlx_spec.bisect``, see ``mlx_spec.cli.bisect``."""

import sys

from mlx_spec.cli.bisect import main

if __name__ == "__main__":
    sys.exit(main())
