"""``python -m megatron_augtree``: the command line, see `tools/cli`."""

import sys

from megatron_augtree.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
