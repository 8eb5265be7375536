# %% [markdown]
# # Training at 4 bits
#
# With 4 bits for weights *and* activations, every tensor has 16 different values. Rounding that coarse costs accuracy.
# Training gets it back: the network sees its own rounding in every step, and learns weights that survive it.
# This is called *quantization-aware training* (QAT).
#
# You should have read [From floats to integers](integers.ipynb). This tutorial takes about a minute on a laptop.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

import qsdk

torch.manual_seed(0)
model = qsdk.demo.network()
data = qsdk.demo.data()
images, labels = torch.from_numpy(data.calibration_images), torch.from_numpy(data.calibration_labels)
test, answers = torch.from_numpy(data.test_images[:2000]), torch.from_numpy(data.test_labels[:2000])


def accuracy(network):
    with torch.no_grad():
        return float((network(test).argmax(1) == answers).float().mean())


accuracies = {"float": accuracy(model)}
print(f"{len(images)} pictures to train on, accuracy in float {accuracies['float']:.2f}")

# %% [markdown]
# ## The start
#
# There is no preset for 4-bit activations, so we change one: `w4a8` with activations `"uint4"`.
# They are unsigned, because most activations come out of a ReLU and are never negative.
#
# With 16 points, the range of a tensor matters. `min_max` takes the smallest and the largest value as the ends.
# One large value then makes all steps wide. `tf_enhanced` cuts such values off where that makes the total error smaller.

# %%
config = qsdk.w4a8().override("*", activation="uint4")
batches = list(images[:256].split(64))

sim = qsdk.quantize(model, images[:2], config)
for method in ("min_max", "tf_enhanced"):
    qsdk.calibrate(sim, batches, method=method)
    accuracies[method] = accuracy(sim)
    print(f"{method}: {accuracies[method]:.2f}")

# %% [markdown]
# A better start is free, and training then has less to do. Here are the values of one activation, with both ranges.

# %%
site = "widen.2:output"
with torch.no_grad():
    values = model.widen(model.stem(images[:256])).flatten().numpy()
narrow = sim.encodings[site].high.item()

fig, axis = plt.subplots(figsize=(7, 2.6))
axis.hist(values, bins=200, log=True)
axis.axvline(values.max(), color="tab:gray", linestyle=":", label="the largest value: min_max ends here")
axis.axvline(narrow, color="tab:red", label="tf_enhanced ends here")
axis.set(title=f"the values of {site}", xlabel="value", ylabel="count (logarithmic)")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## The loop
#
# `sim.training()` opens the sim for training. Inside the block, `trained` is an ordinary module. Your loop needs no change.
#
# - `learn_scales=True` also trains the scales: the network decides itself how wide its grids are.
# - `sim.parameter_groups` gives the optimizer the weights and the scales, each at its own rate.
# - `distill_loss` compares the outputs with those of the float network. This *teacher* tells more than a label does,
#   and helps against overfitting: 1,024 pictures are few.
#
# The gradient of rounding is 0 nearly everywhere, so nothing could be learned. QAT pretends that it is 1 inside the
# range and 0 outside. This is known as the *straight-through* estimator.

# %%
epochs, batch_size = 3, 64
steps = epochs * len(images) // batch_size
losses, scales = [], []

with sim.training(learn_scales=True) as trained:
    optimizer = torch.optim.Adam(sim.parameter_groups(lr=5e-4, scale_lr=2.5e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(batch_size):
            found = qsdk.distill_loss(sim, model, images[chosen], temperature=2.0)
            loss = found.loss + F.cross_entropy(found.outputs, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            scales.append([float(encoding.scale.mean()) for encoding in sim.encodings.values()])

accuracies["trained"] = accuracy(sim)
print(f"trained: {accuracies['trained']:.2f}")

# %% [markdown]
# After the block the sim is in eval mode and its scales are fixed.
#
# The left plot shows the loss. In the right plot every line is the scale of one tensor, relative to where it began.
# Some grids became finer, some wider: this is what `learn_scales` does.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
left.plot(losses, color="lightgray")
left.plot(np.convolve(losses, np.ones(8) / 8, mode="valid"))
left.set(title="loss, and its mean over 8 steps", xlabel="step", ylim=(0, None))
right.plot(np.array(scales) / np.array(scales[0]), linewidth=0.7)
right.set(title="scales, relative to their start", xlabel="step")
plt.tight_layout()

# %% [markdown]
# ## What it brought

# %%
fig, axis = plt.subplots(figsize=(6, 2.8))
bars = axis.bar(accuracies.keys(), accuracies.values(), color=["black", "tab:gray", "tab:gray", "tab:orange"])
axis.bar_label(bars, fmt="%.3f")
axis.set(ylim=(0.8, 0.97), ylabel="accuracy (the axis begins at 0.8)", title="weights and activations of 4 bits")
plt.show()

# %% [markdown]
# Be careful with small differences: with 2,000 pictures an accuracy is known to about 0.6 points. Most of the way was the better
# start. The 48 steps of training, a minute, added little to it. A real training has 1,000 steps and more, and loses
# less than a point to the float network: [the recipes](../guides/qat.md#recipes-by-bit-width) say what each bit width needs.
#
# ## A checkpoint
#
# A checkpoint is an ordinary one. The scales are buffers of the model, so they are in its `state_dict`.

# %%
torch.save(sim.model.state_dict(), "checkpoint.pt")

again = qsdk.quantize(model, images[:2], config)
again.model.load_state_dict(torch.load("checkpoint.pt"))
print("the same outputs:", torch.equal(again(test[:64]), sim(test[:64])))

# %% [markdown]
# ## The file
#
# Exporting is the same as without training. With `prefer="size"` two weights of 4 bits share a byte. Without it each has a byte
# of its own, which ONNX Runtime computes faster.

# %%
written = qsdk.export(sim, "trained.onnx", prefer="size")
parity = qsdk.check_parity(sim, "trained.onnx", batches[:1])
print(f"the file has {written.summary['ratio']:.0%} of the bytes of the float weights")
print("passed:", parity.summary["passed"])

# %% [markdown]
# ## What you have seen
#
# 1. A good calibration comes first. It costs seconds.
# 2. `with sim.training(learn_scales=True)` makes the sim an ordinary module to train.
# 3. Small learning rates, a few epochs, and the float network as a teacher.
# 4. Checkpoints and export work as ever.
#
# Your own loop is in Lightning or in the Trainer of Hugging Face? `examples/` has a program for each.
# All options are in [Quantization-aware training](../guides/qat.md).
