"""A sim scored by the tasks of EleutherAI's lm-evaluation-harness: ARC, HellaSwag, WikiText and the rest.

    pip install . lm-eval transformers    # in a copy of the repository
    python examples/lm_eval_harness.py ./my-model --tasks hellaswag,wikitext --limit 100

`Adapter` has the three methods of `lm_eval.api.model.LM`; the harness is needed by `main` alone.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import qsdk


class Adapter:
    """A language model as the harness sees it: log-likelihoods of texts, and texts.

    Attributes:
        model: a module, or a sim of one: called with ids [1, length], it gives `.logits` or logits.
        encode: ids of a string, without special tokens.
        decode: a string of ids.
        start: the id before the first token of a text.
        longest: tokens that the model reads at once.
        rank, world_size: the harness asks for them; this is one process.
    """

    rank, world_size = 0, 1

    def __init__(
        self,
        model: Any,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        *,
        start: int,
        longest: int = 2048,
    ) -> None:
        super().__init__()  # of lm_eval's LM, where that is a base as well
        self.model, self.encode, self.decode, self.start, self.longest = model, encode, decode, start, longest

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, for each (context, continuation), log p(continuation | context), and whether it is the greedy one."""
        return [self._scored(*self._pair(*request.args)) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each text; every token is scored once, in windows that follow one another."""
        totals = []
        for request in requests:
            ids = [self.start, *self.encode(request.args[0])]
            step = self.longest - 1  # the last token of a window is the first of the next one
            windows = [ids[at : at + self.longest] for at in range(0, len(ids) - 1, step)]
            totals.append(sum(self._scored(window[:1], window[1:])[0] for window in windows))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context, up to the first of the texts in `until`."""
        return [self._generated(*request.args) for request in requests]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both; a space between them belongs to the continuation, as tokenizers expect."""
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        whole, before = self.encode(context + continuation), self.encode(context)
        return ([self.start], whole) if not before else (before, whole[len(before) :])

    def _scored(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([(before + after)[-self.longest - 1 :]])
        count = min(len(after), ids.shape[1] - 1)
        found = self._logits(ids[:, :-1])[-count:].log_softmax(-1)
        wanted = ids[0, -count:]
        return float(found.gather(1, wanted[:, None]).sum()), bool((found.argmax(-1) == wanted).all())

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        ids = self.encode(context) or [self.start]
        made: list[int] = []
        text = ""
        while len(made) < int(options.get("max_gen_toks", 256)):
            made.append(int(self._logits(torch.tensor([(ids + made)[-self.longest :]]))[-1].argmax()))
            text = self.decode(made)
            ends = [text.index(end) for end in until if end and end in text]
            if ends:
                return text[: min(ends)]
        return text

    @torch.no_grad()
    def _logits(self, ids: Tensor) -> Tensor:
        result = self.model(ids)
        return getattr(result, "logits", result)[0].float()


def main(folder: str, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Quantize the model in a folder to W4A16, and return its scores beside those of the float model."""
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install lm-eval") from error
    from lm_eval.api.model import LM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Harness(Adapter, LM):
        """The adapter, which the harness accepts as one of its own."""

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    example = torch.tensor([tokenizer.encode("A short text that the model is traced with.")])
    sim = qsdk.quantize(model, {"input_ids": example}, qsdk.weight_only("int4", block_size=32))
    qsdk.calibrate(sim, [{"input_ids": example}])

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    scores = {}
    for name, one in (("float", model), ("quantized", sim)):
        adapter = Harness(one, encode, tokenizer.decode, start=start)
        scores[name] = lm_eval.simple_evaluate(model=adapter, tasks=list(tasks), limit=limit)["results"]
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--tasks", default="hellaswag")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    print(main(options.folder, options.tasks.split(","), options.limit))
