# %% [markdown]
# # Reading the report
#
# Your network lost accuracy when it was quantized. Which layers are to blame, and what can be done about them?
# `qsdk.report` writes a page that answers this. This tutorial reads the same numbers step by step, draws them, and
# follows them to a repair. It takes about a minute on a laptop.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import qsdk

model, data = qsdk.demo.network(), qsdk.demo.data()
batches = list(torch.from_numpy(data.calibration_images[:128]).split(64))
test, labels = torch.from_numpy(data.test_images[:2000]), torch.from_numpy(data.test_labels[:2000])


def accuracy(network):
    with torch.no_grad():
        return float((network(test).argmax(1) == labels).float().mean())


# %% [markdown]
# ## A network with a problem
#
# Weights of 3 bits are hard for any network.

# %%
config = qsdk.w4a8().override("*", weight="int3")
sim = qsdk.quantize(model, batches[0], config)
qsdk.calibrate(sim, batches)
print(f"float {accuracy(model):.3f}, weights of 3 bits {accuracy(sim):.3f}")

# %% [markdown]
# ## The page
#
# Open `page.html` in a browser. It is one file, needs no network, and can be sent by mail.

# %%
report = qsdk.report(sim, "page.html", data=batches)
print(report.summary["sentence"])

# %% [markdown]
# This sentence stands at the top of the page. Word by word:
#
# - **W3A8**: weights of 3 bits, activations of 8.
# - **a file 5.6 times smaller than in float32**: codes, scales, what stays float, and the nodes, by `export(..., prefer="size")`.
# - **8.9 dB above their noise** (SQNR): how far the outputs are from the float network. 20 dB means that the error is a tenth of the
#   signal, 40 dB a hundredth. Higher is better. 8.9 dB is about a third, which is a lot.
# - **4 of 29 layers cause 80 %**: the good news. We need not repair everything.
#
# ## Which layers?
#
# The rows of the report are the layers, in the order of the network. `share` is the part of the noise at the *outputs* that a layer causes.
# On the page these are the columns at the top: the taller and redder, the worse.

# %%
rows = [row for row in report.rows if row["share"] is not None]
fig, axis = plt.subplots(figsize=(9, 3))
axis.bar([row["layer"] for row in rows], [100 * row["share"] for row in rows], color="tab:red")
axis.tick_params(axis="x", rotation=90, labelsize=8)
axis.set(ylabel="share of the noise in %", title="who causes the noise at the outputs?")
worst = sorted(rows, key=lambda row: -row["share"])[:3]
for row in worst:
    print(
        f"{row['share']:4.0%} of the noise, {row['bytes'] / report.summary['stored_bytes']:4.0%} of the bytes: {row['layer']}"
    )

# %% [markdown]
# The first layer and the last cause about two thirds of the noise, and hold hardly any of the bytes. That is typical:
# they are small, and everything passes through them. This is the best case, since more bits for them cost nothing.
#
# ## Why this layer?
#
# A click on a layer opens its histograms. Here is that of the worst one, with the points of the grid of one channel.

# %%
name = worst[0]["layer"]
weights = model.get_submodule(name).weight.detach().numpy()
encoding = sim.encodings[f"{name}:weight"]
scales = encoding.scale.ravel()
channel = int(np.argmax(np.abs(weights).reshape(len(weights), -1).max(1)))
values = np.sort(weights[channel].ravel())

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
left.bar(range(len(scales)), scales)
left.set(title=f"{name}: the scale of each channel", xlabel="output channel", ylabel="scale")
right.hlines(np.arange(-4, 4) * scales[channel], 0, len(values), color="tab:red", linewidth=0.7, label="the 8 points")
right.plot(values, "o", markersize=4, label="weights")
right.set(title=f"the {len(values)} weights of channel {channel}, sorted", xlabel="weight", ylabel="value")
right.legend(fontsize=8)
plt.tight_layout()

# %% [markdown]
# Each channel has its own scale, so no channel suffers from another one. But a few large weights decide how far apart the
# 8 points lie. Most of the weights are near 0, and nearly all of them become the same value.
#
# ## Repair the worst layers
#
# Give them 8 bits. `set_precision` changes a sim that is calibrated already.

# %%
better = qsdk.quantize(model, batches[0], config)
qsdk.calibrate(better, batches)
for row in worst[:2]:
    better.set_precision(row["layer"], weight="int8")

after = qsdk.report(better, "both.html", data=batches, against=sim)
print(after.summary["sentence"])
print(f"accuracy {accuracy(sim):.3f} -> {accuracy(better):.3f}")

# %% [markdown]
# `against=sim` puts both on one page, so that you see what changed: `both.html`.
#
# ## Or repair all layers at once
#
# Better ranges and better rounding cost no bits at all. Try this before you spend any.

# %%
improved = qsdk.quantize(model, batches[0], config)
qsdk.calibrate(improved, batches)
qsdk.seq_mse(improved, batches)
qsdk.adaround(improved, batches)

results = {"3 bits": sim, "two layers in 8 bits": better, "seq_mse, adaround": improved}


def sqnr(network):
    """Return signal to noise of the outputs in dB, against the float network."""
    with torch.no_grad():
        wanted = model(test)
        return float(10 * torch.log10(wanted.square().sum() / (network(test) - wanted).square().sum()))


fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
left.bar_label(left.barh(list(results), [sqnr(each) for each in results.values()]), fmt="%.0f")
left.set(title="SQNR of the outputs in dB", xlim=(0, 30))
left.invert_yaxis()
right.bar_label(right.barh(list(results), [accuracy(each) for each in results.values()]), fmt="%.3f")
right.axvline(accuracy(model), color="black", linestyle=":", label="float")
right.set(title="accuracy", xlim=(0.8, 1), yticks=[])
right.legend(fontsize=8, loc="lower right")
right.invert_yaxis()
plt.tight_layout()
for title, each in results.items():
    print(f"{title}: {sqnr(each):.0f} dB, accuracy {accuracy(each):.2f}")

# %% [markdown]
# We measured this SQNR ourselves, against `model`, on the test pictures: so it is near the 8.9 dB of the report, which took the
# pictures of calibration, and not the same. `adaround` writes the rounded weights into the sim, so a report about the
# sim alone no longer knows the weights that you began with.
#
# ## Why is this tensor float?
#
# Not everything is quantized, and everything that is not has a reason. `explain` gives it for one tensor, `coverage` for all.

# %%
print(sim.explain("stem.0:weight"))
print(sim.explain("layer1/add.0:output"))

# %% [markdown]
# The first line names the rule that decided: it is that of our `config`. The second tensor stays float because the sum and the ReLU behind it are
# computed as one step on a device (`Add+Relu`): only what leaves that step is rounded.
#
# ## What you have seen
#
# 1. The sentence: bits, size, noise, and how many layers cause it.
# 2. The columns: who is to blame. Mostly few layers.
# 3. The histograms: why.
# 4. The remedy: more bits for few small layers, better rounding for all.
#
# Every part of the page is explained in [The page of a model](../guides/report.md). To let qsdk choose the bits of each layer:
# [Choosing precision](../guides/precision.md).
