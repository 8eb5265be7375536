# %% [markdown]
# # Firmware in C
#
# Some chips have no floats, no operating system and a few hundred kilobytes. This tutorial takes a network to such a chip:
# integers only, one C file, no heap. We run it on this computer, and check that it computes every bit as it should.
#
# You need a C compiler (`cc`). The notebook lies in `docs/tutorials` of the repository, and takes the C file from `examples`.

# %%
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch

import qsdk

program = Path("../../examples/firmware/main.c")
print(program.name, "has", len(program.read_text().splitlines()), "lines")

# %% [markdown]
# ## Quantize, as ever

# %%
model, data = qsdk.demo.network(), qsdk.demo.data()
batches = list(torch.from_numpy(data.calibration_images[:128]).split(64))

sim = qsdk.quantize(model, batches[0], "w8a8")
qsdk.calibrate(sim, batches)
written = qsdk.export(sim, "model.onnx")
print(f"{written.summary['bytes']:,} bytes")

# %% [markdown]
# ## Integers, and a C header
#
# `to_integer` replaces every operation by one on integers. With `firmware="network.h"` it also writes the network as a C header:
# constant arrays, and a function for each layer.

# %%
integer = qsdk.to_integer("model.onnx", "integer.onnx", firmware="network.h")
print("float tensors left:", integer.summary["float_tensors"])

header = Path("network.h").read_text()
for line in header.splitlines():
    if line.startswith("#define QSDK_ARENA"):
        print(line)
start = header.index("static void qsdk_run")
for line in header[start:].splitlines()[:8]:
    print(line.split("(const")[0])

# %% [markdown]
# `QSDK_ARENA_BYTES` is all the working memory (RAM) that the network needs. All its tensors share one static array.
#
# How does a layer work without floats? It multiplies 8-bit codes and adds them up in 32 bits. The sum has to become an 8-bit code again.
# In floats this would be a multiplication by `input scale * weight scale / output scale`, say 0.0037. In integers it is a multiplication by a
# large whole number, and then a shift to the right. Here it is, for three sums.

# %%
factor = 0.0037
shift = 38
mantissa = round(factor * 2**shift)
sums = np.array([-20_000, 1_000, 31_337])
print("in floats:  ", np.rint(sums * factor).astype(int))
print("in integers:", (sums * mantissa + 2 ** (shift - 1)) >> shift, f" with {mantissa:,} and a shift by {shift}")

# %% [markdown]
# ## Compile it

# %%
command = ["cc", "-std=c99", "-O3", "-I", ".", str(program), "-o", "network"]
subprocess.run(command, check=True)
print(" ".join(["cc", *command[1:5], program.name, *command[6:]]))

# %% [markdown]
# ## From a picture to codes, and back
#
# The program takes codes, and gives codes. On a chip, the sensor's values become codes once, at the input.
# The scale and the zero point of both ends are in the header, and in `sim.encodings`.

# %%
entry, leave = sim.encodings["images:input"], sim.encodings["head:output"]
print(f"input:  scale {entry.scale.item():.5f}, zero point {entry.zero_point.item()}")
print(f"output: scale {leave.scale.item():.5f}, zero point {leave.zero_point.item()}")

images, labels = data.test_images[:1000], data.test_labels[:1000]
codes = entry.quantize(images).astype(np.uint8)

output = subprocess.run(["./network"], input=codes.tobytes(), capture_output=True, check=True).stdout

answers = np.frombuffer(output, np.uint8).reshape(-1, 10)
logits = leave.dequantize(answers)
print("accuracy in C:", (answers.argmax(1) == labels).mean().round(2))

# %% [markdown]
# The largest code is the answer. So the chip need not turn codes into floats at all.

# %%
fig, axes = plt.subplots(2, 5, figsize=(9, 3), height_ratios=(2, 1))
for number in range(5):
    axes[0, number].imshow(codes[number, 0], cmap="gray")
    axes[0, number].set_title(data.class_names[answers[number].argmax()], fontsize=9)
    axes[0, number].axis("off")
    colors = ["tab:orange" if code == answers[number].max() else "tab:gray" for code in answers[number]]
    axes[1, number].bar(range(10), answers[number], color=colors)
    axes[1, number].set(xticks=[], yticks=[0, 255], xlabel="code of each class")
plt.tight_layout()

# %% [markdown]
# ## Every bit
#
# The integer-only ONNX file says what should come out. It gives floats behind its last step, so we make them codes again.
# The C program must give the same codes. Not nearly: the same.

# %%
session = onnxruntime.InferenceSession("integer.onnx")
(expected,) = session.run(None, {session.get_inputs()[0].name: images})
print("codes that differ:", int((leave.quantize(expected) != answers).sum()), "of", answers.size)
with torch.no_grad():
    floats = model(torch.from_numpy(images)).numpy()
print("accuracy in float:", (floats.argmax(1) == labels).mean().round(2))

# %% [markdown]
# ## What it needs
#
# Constants go to flash. The arena goes to RAM. The rest is the code of the layers.

# %%
arena = int(next(line.split()[-1] for line in header.splitlines() if "QSDK_ARENA_BYTES" in line))
constants = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in onnx.load("integer.onnx").graph.initializer)
weights = sum(4 * parameter.numel() for parameter in model.parameters())

fig, axis = plt.subplots(figsize=(7, 2.2))
sizes = {"float weights": weights, "integer constants (flash)": constants, "arena (RAM)": arena}
axis.bar_label(axis.barh(list(sizes), [size / 1024 for size in sizes.values()]), fmt="%.0f KB")
axis.set(xlim=(0, 560), xlabel="kilobytes")
axis.invert_yaxis()

# %% [markdown]
# The arena holds what a layer reads and what it writes, at the largest layer. Smaller pictures or fewer channels make it smaller.
#
# ## What you have seen
#
# 1. `to_integer(..., firmware="network.h")` writes a network as C: arrays, and a function for each layer.
# 2. It runs without heap and without floats.
# 3. It gives the same bits as the ONNX file, so all measurements on the computer hold on the chip.
#
# Its loops are plain, and a compiler makes them fast. Where your chip's library is faster, replace them one by one, and compare the codes.
# All forms of integers, and what each guarantees: [Integers only](../guides/integer.md).
