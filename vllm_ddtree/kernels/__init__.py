"""GPU kernels in Triton; nothing here knows vLLM."""
