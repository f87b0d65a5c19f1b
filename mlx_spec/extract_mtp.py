"""The command ``python -m mlx_spec.extract_mtp``, see ``mlx_spec.cli.extract_mtp``."""

import sys

from mlx_spec.cli.extract_mtp import main

if __name__ == "__main__":
    sys.exit(main())
