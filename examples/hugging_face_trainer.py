"""Quantization-aware training with the Trainer of Hugging Face, at W4A8.

    pip install ".[examples]"    # in a copy of the repository
    python examples/hugging_face_trainer.py
    python examples/hugging_face_trainer.py --bf16 --folder run              # checkpoints in run/
    python examples/hugging_face_trainer.py --bf16 --folder run --resume     # goes on from the last of them

The Trainer is given `sim.model` and an optimizer whose parameter groups know the learned scales; all else is as on the
float model. The labels, which the example of `qsdk.quantize` does not have, and the loss that the model makes of them
stay float. The task: does a sequence hold more tokens of the first half of the vocabulary than of the second?
"""

import argparse
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


def train(model: nn.Module, groups: Any, folder: Path, epochs: int, *, bf16: bool, resume: bool) -> None:
    """An ordinary training, with a checkpoint after each epoch: the same for the float model and the quantized one."""
    options = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        lr_scheduler_type="constant",
        bf16=bf16,  # autocast; quantizers compute in float32
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    optimizer = torch.optim.AdamW(groups)
    trainer = Trainer(model, options, train_dataset=Majority(512, seed=0), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume and any(folder.glob("checkpoint-*")))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of right answers on sequences that were not trained on."""
    test = Majority(512, seed=1)
    return float((model.eval()(input_ids=test.ids).logits.argmax(-1) == test.labels).float().mean())


def main(
    out: str = "bert.onnx", folder: str = "", *, epochs: int = 3, bf16: bool = False, resume: bool = False
) -> dict[str, float]:
    """Train in float, quantize, train again, export; gives the accuracies.

    The float weights are kept beside the checkpoints: a run that goes on quantizes the same model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        place.mkdir(parents=True, exist_ok=True)
        model, weights = float_model(), place / "float.pt"
        if resume and weights.exists():
            model.load_state_dict(torch.load(weights))
        else:
            groups = [{"params": list(model.parameters()), "lr": 3e-3}]
            train(model, groups, place / "float", epochs=6, bf16=bf16, resume=resume)
            torch.save(model.state_dict(), weights)
        found = {"float": accuracy(model)}

        batches = [{"input_ids": Majority(128, seed=2).ids}]
        sim = qsdk.quantize(model, batches[0], qsdk.w4a8())
        qsdk.calibrate(sim, batches, progress=False)
        found["quantized"] = accuracy(sim.model)

        with sim.training(learn_scales=True) as trained:
            groups = sim.parameter_groups(lr=1e-3, scale_lr=1e-2)
            train(trained, groups, place / "quantized", epochs=epochs, bf16=bf16, resume=resume)
        found["trained"] = accuracy(sim.model)

    qsdk.export(sim, out)
    assert qsdk.check_parity(sim, out, batches, progress=False).to_dict()["summary"]["passed"], Path(out).name
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="quantization-aware training with the Trainer of Hugging Face")
    parser.add_argument("--out", default="bert.onnx", help="the file to write (bert.onnx)")
    parser.add_argument("--folder", default="", help="for checkpoints; without it they are thrown away")
    parser.add_argument("--epochs", type=int, default=3, help="of training the quantized model (3)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    print(main(**vars(parser.parse_args())))
