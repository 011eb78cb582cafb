"""The only folder that touches vLLM's internals."""
