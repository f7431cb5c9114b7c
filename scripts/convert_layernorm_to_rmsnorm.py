"""Convert a LayerNorm checkpoint into one whose norms may run as RMSNorm: ``hf-rmsnorm
convert`` from a clone.

python scripts/convert_layernorm_to_rmsnorm.py SRC DST
python scripts/convert_layernorm_to_rmsnorm.py SRC --plan
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_rmsnorm.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
