"""Two LoRA adapters and the base model in one batch: each request gets its own model's text."""

from __future__ import annotations

from engines import GPU, accepted_length, engines, greedy, prompts, tree
from oracle import oracle
from tiny_models import make_adapter
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

TOKENS = 10


def test_two_adapters_and_the_base_in_one_batch(tiny, tmp_path):
    first, second = (
        LoRARequest(name, number, str(make_adapter(tmp_path / name, seed=number)))
        for number, name in enumerate(("first", "second"), start=1)
    )
    (prompt,) = prompts(1, seed=81)
    adapters = [first, None, second, first, second, None]
    sampled = SamplingParams(temperature=0.9, seed=4, max_tokens=TOKENS, ignore_eos=True)
    params = [greedy(TOKENS)] * 4 + [sampled, greedy(TOKENS, frequency_penalty=0.8)]

    def texts(llm):
        inputs = [{"prompt_token_ids": prompt}] * len(adapters)
        outputs = llm.generate(inputs, params, lora_request=adapters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    # A slot more than adapters: vLLM's CPU kernels give requests without one the last slot's.
    settings = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 6}
    if GPU:  # vLLM's LoRA kernels for GPUs take 16-bit types only
        settings["dtype"] = "float16"
    with engines(tiny, tree(24), max_num_batched_tokens=1024, **settings) as (plain, ours):
        expected = texts(plain)
        with oracle([prompt + text for text in expected]):
            assert texts(ours) == expected
        assert accepted_length(ours) > 1.5
    base, one, two = expected[1], expected[0], expected[2]
    assert expected[3] == one
    assert len({tuple(text) for text in (base, one, two)}) == 3
