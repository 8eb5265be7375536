# %% [markdown]
# # From floats to integers
#
# This tutorial takes a trained network from 32-bit floats to 8-bit integers, and then to 3 bits.
# You will see what rounding does to the numbers, what it costs, and how to get the accuracy back without any training.
# It takes about a minute on a laptop. You need to know PyTorch; you need not know anything about quantization.

# %%
import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch

import qsdk

# %% [markdown]
# ## A network and its pictures
#
# qsdk brings a small network and some data along, so that you can start at once.
# The network tells ten kinds of clothes apart.

# %%
model = qsdk.demo.network()
data = qsdk.demo.data()
test, labels = torch.from_numpy(data.test_images[:2000]), torch.from_numpy(data.test_labels[:2000])


def accuracy(network):
    with torch.no_grad():
        return float((network(test).argmax(1) == labels).float().mean())


fig, axes = plt.subplots(1, 8, figsize=(9, 1.6))
for axis, image, answer in zip(axes, test, model(test[:8]).argmax(1), strict=False):
    axis.imshow(image[0], cmap="gray")
    axis.set_title(data.class_names[answer], fontsize=8)
    axis.axis("off")
print(f"accuracy in float: {accuracy(model):.3f}")

# %% [markdown]
# ## What rounding does
#
# Here are the weights of one layer. Each is a float, and takes four bytes.
# We lay a *grid* over their range: evenly spaced points, 16 of them for 4 bits. Every weight moves to its nearest point.
# Then it is enough to store the number of the point, which takes half a byte.
# The distance between two points is called the *scale*.

# %%
weights = model.layer2.second[0].weight.detach().flatten().numpy()
scale = np.abs(weights).max() / 8  # 16 points: -8 ... 7
codes = np.clip(np.rint(weights / scale), -8, 7)
rounded = codes * scale

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6))
left.hist(weights, bins=200)
for point in range(-8, 8):
    left.axvline(point * scale, color="tab:red", linewidth=0.5)
left.set(title="weights, and the 16 points of 4 bits", yscale="log", xlabel="value", ylabel="count (logarithmic)")
right.plot(weights[:60], label="float")
right.plot(rounded[:60], drawstyle="steps-mid", label="rounded")
right.set(title="the first 60 weights", xlabel="number of the weight")
right.legend(loc="upper right", fontsize=8)
right.set_ylim(-0.05, 0.08)
plt.tight_layout()
print("six of the weights:", weights[48:54].round(4))
print("their codes:       ", codes[48:54].astype(int))
print("what is computed:  ", rounded[48:54].round(4))

# %% [markdown]
# Most of the weights lie close to 0, and few points lie there. So a single scale for the whole layer rounds coarsely.
# qsdk gives each output channel of a layer its own scale, which is finer and costs next to nothing.
#
# The same is done to *activations*: the values that flow from layer to layer. Their range is not known before the
# network has seen data. That is what calibration is for.
#
# ## Eight bits
#
# `quantize` makes a *sim*: a copy of the network that rounds every tensor as a device would. Your model stays as it is.
# `"w8a8"` means: weights of 8 bits, activations of 8 bits.
# `calibrate` shows the sim some data and chooses the scales. 128 pictures are enough, and they need no labels.

# %%
batches = list(torch.from_numpy(data.calibration_images[:128]).split(64))

sim = qsdk.quantize(model, batches[0], "w8a8")
qsdk.calibrate(sim, batches)
print(f"float {accuracy(model):.3f}, 8 bits {accuracy(sim):.3f}")

# %% [markdown]
# Eight bits cost nothing here. That is so for most networks of this kind.
#
# Each tensor has a name, such as `layer2.second.0:weight`. It is called a *site*. `sim.encodings` holds the scale that was found for each.

# %%
found = sim.encodings["layer2.second.0:weight"]
print(found.dtype.name, "with", found.scale.size, "scales, one for each output channel")
print("the finest:", found.scale.min().round(5), " the coarsest:", found.scale.max().round(5))

# %% [markdown]
# ## Fewer bits
#
# Where does it break? We try smaller and smaller weights, and leave activations at 8 bits.
# `override("*", weight="int3")` is a rule: all layers (`*`) get weights of 3 bits.

# %%
sims = {8: sim}
for bits in (4, 3, 2):
    sims[bits] = qsdk.quantize(model, batches[0], qsdk.w8a8().override("*", weight=f"int{bits}"))
    qsdk.calibrate(sims[bits], batches)
calibrated = {bits: accuracy(each) for bits, each in sims.items()}
for bits, value in calibrated.items():
    print(f"{bits} bits: {value:.2f}")

# %% [markdown]
# ## Repair it, without training
#
# Rounding every weight to its *nearest* point is the obvious choice, but not the best one. Errors add up in a layer.
# A better way is to choose ranges and directions of rounding such that the *output* of the layer changes least.
#
# - `seq_mse` looks for better ranges of the weights.
# - `adaround` decides for each weight whether it is rounded up or down.
#
# Both work layer by layer, on the data that you calibrated with. They take seconds.

# %%
repaired = {}
for bits, each in sims.items():
    if bits < 8:
        qsdk.seq_mse(each, batches)
        report = qsdk.adaround(each, batches)
    repaired[bits] = accuracy(each)

names = [f"{bits} bits" for bits in sims]
places = np.arange(len(names))
fig, axis = plt.subplots(figsize=(6, 3))
axis.bar(places - 0.2, calibrated.values(), 0.4, label="calibrated")
axis.bar(places + 0.2, repaired.values(), 0.4, label="with seq_mse and adaround")
axis.axhline(accuracy(model), color="black", linestyle=":", label="float")
axis.set_xticks(places, names)
axis.set(ylim=(0, 1.4), ylabel="accuracy", title="weights of fewer bits, activations of 8")
axis.legend(loc="upper right", fontsize=8)
for bits, value in repaired.items():
    print(f"{bits} bits: {calibrated[bits]:.2f} -> {value:.2f}")

# %% [markdown]
# With 2,000 pictures an accuracy is known to about 0.6 points. So 8, 4 and 3 bits are as good as the float network here.
#
# Every function returns a report. `print(report)` shows how much error of each layer's output was left, before and after.
# Its `rows` can be read in a program:

# %%
better = [row for row in report.rows if row["error_after"] < row["error_before"]]
print(f"{len(better)} of {len(report.rows)} layers are closer to the float network than before")

# %% [markdown]
# ## The file
#
# A sim lives in Python. `export` writes it as an ONNX file, which other programs can run. With `prefer="size"` two weights of
# 4 bits share a byte. Without it each has a byte of its own here, which ONNX Runtime computes faster.
# `check_parity` runs that file in ONNX Runtime and compares every tensor with the sim. The unit is one step of the grid (an *LSB*).
# Weights must be the same. Activations may be one step off, since the runtime adds floats in another order.

# %%
sim = sims[3]
written = qsdk.export(sim, "model.onnx", prefer="size")
parity = qsdk.check_parity(sim, "model.onnx", batches[:1])
print(f"the file has {written.summary['ratio']:.0%} of the bytes of the float weights")
print("passed:", parity.summary["passed"])
print("weights off by", parity.summary["weights_max_lsb"], "steps")

# %% [markdown]
# ## Nothing but integers
#
# This file still says "float" in many places: it turns codes into floats in front of each layer, and back behind it.
# A runtime may compute in integers instead, but that is its own decision.
# Some devices have no floats at all. `to_integer` writes a file in which every operation is one on integers.

# %%
integer = qsdk.to_integer("model.onnx", "integer.onnx")
print("float tensors inside:", integer.summary["float_tensors"])

counts = {}
for node in onnx.load("integer.onnx").graph.node:
    counts[node.op_type] = counts.get(node.op_type, 0) + 1
print(sorted(counts.items(), key=lambda item: -item[1])[:8])

session = onnxruntime.InferenceSession("integer.onnx")
(logits,) = session.run(None, {session.get_inputs()[0].name: test.numpy()})
print(f"accuracy in integers: {(logits.argmax(1) == labels.numpy()).mean():.3f}")

# %% [markdown]
# `ConvInteger` is a convolution of integers. The others turn its 32-bit sums into 8-bit codes again, by a multiplication and a shift.
#
# ## What you have seen
#
# 1. `quantize` makes a sim, `calibrate` finds its scales.
# 2. You measure the sim with your own metric, like any network.
# 3. `seq_mse` and `adaround` repair what few bits broke.
# 4. `export` writes the file, and `check_parity` proves it.
# 5. `to_integer` removes every float.
#
# Put your own network in place of `model`, and your own data in place of `batches`.
# If accuracy is still lost: [post-training quantization](../guides/ptq.md) lists all repairs, and
# [training at 4 bits](training.ipynb) is the next tutorial.
