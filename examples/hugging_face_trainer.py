"""Quantization-aware training with the Trainer of Hugging Face, at W4A8.

    pip install "qsdk[examples]"
    python examples/hugging_face_trainer.py

The Trainer is given `sim.model` and an optimizer whose parameter groups know the learned scales; all else is as on the
float model. The labels, which the example of `qsdk.quantize` does not have, and the loss that the model makes of them
stay float. The task: does a sequence hold more tokens of the first half of the vocabulary than of the second?
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import qsdk

VOCABULARY, LENGTH = 20, 9


class Majority(Dataset[dict[str, Tensor]]):
    """Random sequences and which half of the vocabulary has the majority."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        self.labels = (2 * (self.ids < VOCABULARY // 2).sum(1) > LENGTH).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def float_model() -> nn.Module:
    """A BERT that is small enough to be trained in seconds."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def train(model: nn.Module, groups: Any, folder: str, epochs: int) -> None:
    """An ordinary training: the same for the float model and for the quantized one."""
    options = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    optimizer = torch.optim.AdamW(groups)
    data = Majority(512, seed=0)
    Trainer(model, options, train_dataset=data, optimizers=(optimizer, None)).train()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of right answers on sequences that were not trained on."""
    test = Majority(512, seed=1)
    return float((model.eval()(input_ids=test.ids).logits.argmax(-1) == test.labels).float().mean())


def main(out: str = "bert.onnx") -> dict[str, float]:
    """Train in float, quantize, train again, export; gives the accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        model = float_model()
        train(model, [{"params": list(model.parameters()), "lr": 3e-3}], folder, epochs=6)
        found = {"float": accuracy(model)}

        batches = [{"input_ids": Majority(128, seed=2).ids}]
        sim = qsdk.quantize(model, batches[0], qsdk.w4a8())
        qsdk.calibrate(sim, batches, progress=False)
        found["quantized"] = accuracy(sim.model)

        with sim.training(learn_scales=True) as trained:
            train(trained, sim.parameter_groups(lr=1e-3, scale_lr=1e-2), folder, epochs=3)
        found["trained"] = accuracy(sim.model)

    qsdk.export(sim, out)
    assert qsdk.check_parity(sim, out, batches, progress=False).to_dict()["summary"]["passed"], Path(out).name
    return found


if __name__ == "__main__":
    print(main())
