"""A tiny GPT-2 learns to add, its steps recorded by a callback of Hugging Face's Trainer, and the landscape.

    pip install 'sgd-landscape[huggingface]'
    python examples/huggingface.py [FOLDER]

Nothing is downloaded: the network is made from a configuration, and the sums are text like "12+07=19".
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import landscape
from landscape.integrations.huggingface import LandscapeCallback

SYMBOLS = "0123456789+="


def sums(numbers: int = 20) -> list[dict[str, torch.Tensor]]:
    texts = [f"{a:02}+{b:02}={a + b:02}" for a in range(numbers) for b in range(numbers)]
    rows = torch.tensor([[SYMBOLS.index(letter) for letter in text] for text in texts])
    labels = rows.masked_fill(torch.arange(rows.shape[1]) < 6, -100)  # only the result counts
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(SYMBOLS), "n_positions": 8, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def main(folder: str = "runs/gpt2", steps: int = 200) -> None:
    network, data = model(), sums()
    callback = LandscapeCallback(folder, every=20)
    arguments = TrainingArguments(
        f"{folder}/trainer", max_steps=steps, per_device_train_batch_size=64, learning_rate=3e-3,
        logging_steps=100, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(network, arguments, train_dataset=data, callbacks=[callback]).train()

    run = landscape.load(f"{folder}/last.h5")
    problem = landscape.Problem(
        network, None, {key: torch.stack([row[key] for row in data]) for key in data[0]}
    )
    plane = landscape.random_plane(problem, norm="filter")
    landscape.contour(problem, plane, grid=11, span=0.5).plot(path=f"{folder}/contour.png")
    sharpest = landscape.extreme_eigenvalues(problem).max
    print(f"{folder}: loss {run.history['train_loss'][-1]:.3f}, λ_max {sharpest:.3g}, contour.png")


if __name__ == "__main__":
    main(*sys.argv[1:2])
