# %% [markdown]
# # A language model
#
# Language models are transformers that write one token after the other. This tutorial quantizes one to 8 bits,
# meets the problem that most of them have (outliers), repairs it with a rotation, and lets the exported file write text.
#
# The model is a Llama from `transformers`, tiny, so that everything runs in about a minute without a download.
# A real checkpoint goes the same way: only `model` and the token ids change.

# %%
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import qsdk

# %% [markdown]
# ## A model that sorts
#
# A model with random weights would write nonsense, quantized or not. So we teach ours something: to sort six digits.
# A text is `4 1 3 0 9 1 = 0 1 1 3 4 9`. Tokens 0 to 9 are the digits, token 10 is the `=`, and token 11 stands for nothing (`generate` wants such a token).

# %%
torch.manual_seed(0)
EQUALS, PAD, COUNT = 10, 11, 6


def texts(number):
    digits = torch.randint(10, (number, COUNT))
    return torch.cat([digits, torch.full((number, 1), EQUALS), digits.sort(1).values], 1)


def readable(ids):
    return " ".join("=" if token == EQUALS else str(int(token)) for token in ids)


config = LlamaConfig(
    vocab_size=12,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=300)
for _ in range(300):
    ids = texts(64)
    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, COUNT:-1].flatten(0, 1), ids[:, COUNT + 1 :].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model = model.eval()

test = texts(500)
prompts = test[:, : COUNT + 1]


def accuracy(network):
    written = network.generate(prompts, max_new_tokens=COUNT, do_sample=False, pad_token_id=PAD)
    return float((written == test).all(1).float().mean())


print(readable(model.generate(prompts[1:2], max_new_tokens=COUNT, do_sample=False, pad_token_id=PAD)[0]))
print(f"sorted rightly: {accuracy(model):.2f} of 500 lists")

# %% [markdown]
# ## Outliers
#
# In large trained language models a few channels are 20 to 100 times larger than all others. A channel is one of the
# 64 numbers of each token here, one of 4,096 in a model of 7 billion weights.
# Our model is too small to have grown such channels. So we give it three, and they change nothing:
# behind a norm, a channel is made 60 times larger, and the weights that read this channel 60 times smaller.

# %%
before = model(input_ids=test).logits
with torch.no_grad():
    for layer in model.model.layers:
        readers = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        for norm, reading in (
            (layer.input_layernorm, readers),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ):
            norm.weight[[5, 23, 40]] *= 60
            for linear in reading:
                linear.weight[:, [5, 23, 40]] /= 60
after = model(input_ids=test).logits
print(f"largest change of a logit: {float((after - before).detach().abs().max()):.5f}")


def channels(network):
    """Return the largest value of each channel behind the first norm."""
    found = []
    handle = network.model.layers[0].input_layernorm.register_forward_hook(lambda m, i, out: found.append(out))
    with torch.no_grad():
        network(input_ids=test)
    handle.remove()
    return found[0].abs().amax((0, 1)).numpy()


largest = {"with outliers": channels(model)}

# %% [markdown]
# ## Eight bits
#
# The inputs of a transformer have names, so an example is a mapping, as a tokenizer gives it.

# %%
batches = [{"input_ids": texts(64)} for _ in range(4)]
accuracies = {"float": accuracy(model)}

sim = qsdk.quantize(model, batches[0], "w8a8")
qsdk.calibrate(sim, batches)
accuracies["w8a8"] = accuracy(sim.model)
lost = accuracies["float"] - accuracies["w8a8"]
print("8 bits: more than 3 of 100 lists are lost:", lost > 0.03)

# %% [markdown]
# That is much worse, though 8 bits cost nothing in [the first tutorial](integers.ipynb). One scale serves all channels of
# an activation. It has to reach the outliers, so only a few of its 256 steps are left for all other channels.
#
# Which layers suffer? `sensitivity` quantizes one layer at a time and measures the noise at the outputs, in decibels.
# 20 dB means that the noise is a tenth of the signal, and 40 dB a hundredth. Lower is worse.

# %%
worst = qsdk.sensitivity(sim, batches).rows[:4]
print("the worst is below 25 dB:", worst[0]["sqnr_db"] < 25)
print(*sorted(f"{row['layer']}, {row['kind']}" for row in worst), sep="\n")

# %% [markdown]
# The outputs of the four norms are the worst, as was to be expected.
#
# ## A rotation
#
# `rotate` multiplies every vector that flows through the model by one orthogonal matrix. It spreads each large channel over all channels.
# The weights before and behind take up the matrix, so the float model computes the same, at the same cost.
# It must come before `calibrate`, because it changes weights and ranges.

# %%
sim = qsdk.quantize(model, batches[0], "w8a8")
rotation = qsdk.rotate(sim)
qsdk.calibrate(sim, batches)
accuracies["rotated w8a8"] = accuracy(sim.model)
largest["rotated"] = channels(sim.unwrap())
regained = accuracies["rotated w8a8"] - accuracies["w8a8"]
print(f"rotated: {accuracies['rotated w8a8']:.2f}; most of the lost lists are right again:", regained > lost / 2)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), width_ratios=(3, 2))
for name, values in largest.items():
    left.plot(values, label=name, drawstyle="steps-mid")
left.set(yscale="log", title="behind the first norm", xlabel="channel", ylabel="largest value")
left.legend(fontsize=8)
right.bar_label(
    right.bar(accuracies.keys(), accuracies.values(), color=["black", "tab:gray", "tab:orange"]), fmt="%.2f"
)
right.set(ylim=(0, 1.15), title="lists sorted rightly")
plt.tight_layout()

# %% [markdown]
# Where `rotate` is not enough, `smooth_quant`, scales per channel and activations of 16 bits go further:
# [Transformers at 8 bits](../guides/ptq.md#transformers-at-8-bits).
#
# ## A quantized cache
#
# A model that writes keeps the *keys* and *values* of all earlier tokens, so that it need not compute them again. With long texts
# this cache is larger than the model. `kv_cache="int8"` stores it in 8 bits.
# The exported file then takes the cache as an input and returns it as an output.

# %%
sim = qsdk.quantize(model, batches[0], qsdk.w8a8(kv_cache="int8"))
qsdk.rotate(sim)
qsdk.calibrate(sim, batches)
print(f"with a cache of 8 bits: {accuracy(sim.model):.2f}")

written = qsdk.export(sim, "sorter.onnx")
print(f"the file has {written.summary['ratio']:.0%} of the bytes of the float weights")
print("passed:", qsdk.check_parity(sim, "sorter.onnx", batches[:1]).summary["passed"])

# %% [markdown]
# Of a model as small as this one, more than half of the file is the description of its operations.
#
# ## Writing with ONNX Runtime alone
#
# The file needs neither PyTorch nor qsdk. The first run takes the whole prompt and an empty cache. Every later run takes one token
# and the cache of the run before. `examples/generate_text.py` is a program that does this.

# %%
session = onnxruntime.InferenceSession("sorter.onnx")
outputs = [output.name for output in session.get_outputs()]
print([one.name for one in session.get_inputs()])


def write(prompt):
    past = [one for one in session.get_inputs() if "past" in one.name]
    cache = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in past}
    tokens = step = prompt[None]
    for _ in range(COUNT):
        positions = np.arange(tokens.shape[1] - step.shape[1], tokens.shape[1])[None]
        feeds = {"input_ids": step, "attention_mask": np.ones_like(tokens), "position_ids": positions, **cache}
        results = dict(zip(outputs, session.run(None, feeds), strict=True))
        cache = {name: results[name.replace("past_key_values", "present")] for name in cache}
        step = results["logits"][:, -1:].argmax(-1)
        tokens = np.concatenate([tokens, step], 1)
    return tokens[0]


for prompt in prompts[1:3].numpy():
    print(readable(write(prompt)))
simulated = sim.model.generate(prompts[:50], max_new_tokens=COUNT, do_sample=False, pad_token_id=PAD).numpy()
same = np.mean(
    [(write(prompt) == wanted).all() for prompt, wanted in zip(prompts[:50].numpy(), simulated, strict=True)]
)
print(f"texts that are the simulation's, token by token: {same:.0%}")

# %% [markdown]
# ## What you have seen
#
# 1. A transformer is quantized like any module. Inputs with names are a mapping.
# 2. `sensitivity` shows where it hurts. In language models it is mostly outliers.
# 3. `rotate` spreads them out, before `calibrate`.
# 4. `kv_cache="int8"` makes the cache small, and the exported file writes text on its own.
#
# Next: [Transformers](../guides/transformers.md) has weights of 4 bits in blocks, and open lengths.
