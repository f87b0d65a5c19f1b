"""The command ``python -m mlx_spec.chat``, see ``mlx_spec.cli.chat``."""

import sys

from mlx_spec.cli.chat import main

if __name__ == "__main__":
    sys.exit(main())
