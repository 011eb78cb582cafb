"""Tree-shaped speculative decoding for vLLM: lossless, on the stock wheel.

Importing this package needs neither vLLM nor torch nor the compiled extension, and never fails for
their lack: what is missing is said once, in one warning each. The engine integration is reached
through the plugin entry points only.
"""

from __future__ import annotations

import logging

from vllm_ddtree.status import missing

__version__ = "0.1.0"
__all__ = ["__version__"]

for _line in missing():
    logging.getLogger("vllm_ddtree").warning(_line)
