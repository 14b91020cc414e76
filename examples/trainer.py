"""GraB with transformers' Trainer: a small GPT-2 on the characters of a module of the standard library.

    python examples/trainer.py --out runs/trainer
    python examples/trainer.py --out runs/trainer --resume    # from the last checkpoint, in mid-epoch too
    torchrun --nproc-per-node 2 examples/trainer.py --out runs/trainer

Differences from reshuffling are marked (1) and (2).
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ordain import GraB
from ordain.integrations.transformers import OrderedTrainer  # (1) in place of transformers.Trainer

LENGTH, TOKENS = 32, 128


class Characters(Dataset[dict[str, Tensor]]):
    """Pieces of a text, as codes of characters."""

    def __init__(self, text: str, n: int) -> None:
        codes = torch.tensor([min(ord(one), TOKENS - 1) for one in text])
        self.pieces = codes[: n * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description="A small language model in GraB's order.")
    parser.add_argument("--out", required=True)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    config.tie_word_embeddings = False  # a head of its own, to order by
    trainer = OrderedTrainer(
        model=GPT2LMHeadModel(config),
        train_dataset=Characters(inspect.getsource(argparse), options.examples),
        order=lambda model, n: GraB(model, n, params="head"),  # (2)
        args=TrainingArguments(
            output_dir=options.out,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_strategy="epoch",
            save_steps=20,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps, {trainer.order}, in epoch {trainer.order.epoch}")


if __name__ == "__main__":
    main()
