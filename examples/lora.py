"""GraB with PEFT: LoRA adapters of a small Llama, trained on the characters of a module of the standard library.

    python examples/lora.py --out runs/lora
    python examples/lora.py --out runs/lora --epochs 6 --resume
    python examples/lora.py --out runs/lora --head    # by the adapter of the last layer only

Differences from reshuffling are marked (1) to (4). Put a pretrained model in place of the random one.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import ordain

LENGTH, TOKENS = 32, 128


def main() -> None:
    """Train the adapters, save them at the end of each epoch, and print."""
    parser = argparse.ArgumentParser(description="Adapters in GraB's order.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3, help="in all, those before --resume included")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    codes = torch.tensor([min(ord(one), TOKENS - 1) for one in inspect.getsource(argparse)])
    data = TensorDataset(codes[: options.examples * LENGTH].view(-1, LENGTH))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **shape)), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    order = ordain.GraB(model, len(data), params="head" if options.head else None)  # (1) after get_peft_model
    loader = DataLoader(data, batch_size=8, sampler=order.sampler)  # (2) not shuffle=True

    first, file = 0, options.out / "adapters.pt"
    if options.resume:
        saved = ordain.load(file)
        set_peft_model_state_dict(model, saved["adapters"])
        optimizer.load_state_dict(saved["optimizer"])
        order.load_state_dict(saved["order"])
        first = order.resume()  # (3)
    for epoch in range(first, options.epochs):
        total = 0.0
        for (ids,) in loader:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            order.step()  # (4)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(ids)
        print(f"epoch {epoch + 1}: loss {total / len(data):.4f}, by {order.state_dict(vectors=False)['dim']} numbers")
        file.parent.mkdir(parents=True, exist_ok=True)
        ordain.save(file, adapters=get_peft_model_state_dict(model), optimizer=optimizer, order=order)


if __name__ == "__main__":
    main()
