"""The models of published results and the readers of their files, which lie beside the benchmarks that use them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "lib"))
try:
    import pipedream as pipedream
    import vtrain as vtrain
    from published.fit import fitted as fitted
    from published.mesh import Mesh as Mesh
    from published.transformer import Transformer as Transformer
finally:
    sys.path.pop()
