# Sourced by the other scripts after setup.sh: the environment vLLM needs on this machine.
venv=${DDTREE_VENV:-$PWD/.venv}
PATH=$venv/bin:$PATH
export PATH HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
if [ "$(cat "$venv/.ddtree-kind")" = cpu ]; then
  # Model Runner V2 through Triton's interpreter (docs/how-it-works.md, "Without a GPU").
  export TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_CPU_KVCACHE_SPACE=1
fi
