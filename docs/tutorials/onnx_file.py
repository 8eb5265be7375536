# %% [markdown]
# # An ONNX file and a folder of pictures
#
# Somebody gave you an ONNX file and some pictures. You have neither the Python code of the network nor its training data.
# This tutorial quantizes the file, measures it, falls into the most common trap, and finds out where the numbers go wrong.
# It takes about a minute on a laptop.

# %%
import logging
import warnings
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch
from PIL import Image

import qsdk

# %% [markdown]
# ## What you are given
#
# This cell makes the two things, so that the tutorial can begin: `float.onnx`, and a folder `pictures` with a folder for each class.
# It is the only cell that uses PyTorch. Skip it if you have a file of your own.

# %%
warnings.simplefilter("ignore")  # torch's exporter has much to say about itself
logging.getLogger("torch.onnx").setLevel(logging.ERROR)

data = qsdk.demo.data()
batch = torch.export.Dim("batch")
torch.onnx.export(
    qsdk.demo.network(),
    (torch.from_numpy(data.test_images[:2]),),
    "float.onnx",
    dynamic_shapes=({0: batch},),
    dynamo=True,
    verbose=False,
)
for number, (image, label) in enumerate(zip(data.test_images[:1000], data.test_labels[:1000], strict=True)):
    folder = Path("pictures", f"{label} {data.class_names[label].split('/')[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (image[0] * 0.353 + 0.286) * 255
    Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(folder / f"{number:04}.png")

# %% [markdown]
# ## Look into the file
#
# First, look at what the file takes and gives, and at its operations.

# %%
graph = onnx.load("float.onnx").graph
for kind, values in (("input", graph.input), ("output", graph.output)):
    for value in values:
        shape = [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        print(kind, value.name, shape)
print(dict(Counter(node.op_type for node in graph.node)))

# %% [markdown]
# ## Pictures become arrays
#
# The network was trained on pictures prepared in a certain way: here, divided by 255, less 0.286, divided by 0.353.
# The file does not say so. Ask whoever trained the network.

# %%
paths = sorted(Path("pictures").rglob("*.png"))
labels = np.array([int(path.parent.name.split()[0]) for path in paths])


def arrays(chosen):
    pixels = np.stack([np.asarray(Image.open(path), np.float32) for path in chosen])
    return (pixels[:, None] / 255 - 0.286) / 0.353


images = arrays(paths)
few = np.random.default_rng(0).permutation(len(paths))[:128]  # pictures of all classes
batches = [images[few[:64]], images[few[64:]]]
print(images.shape, images.dtype, f"from {images.min():.2f} to {images.max():.2f}")

# %% [markdown]
# ## Quantize
#
# `quantize` takes the path in place of a module. No example is needed: the file says what it takes.
# `sim.run` gives the outputs as a list, in the order of the file.

# %%
sim = qsdk.quantize("float.onnx", None, "w8a8")
qsdk.calibrate(sim, batches)


def accuracy(outputs):
    return (outputs.argmax(1) == labels).mean()


session = onnxruntime.InferenceSession("float.onnx")
(in_float,) = session.run(None, {session.get_inputs()[0].name: images})
quantized = sim.run(images)[0]
print(f"float {accuracy(in_float):.3f}, quantized {accuracy(quantized):.3f}")

# %% [markdown]
# ## The pictures that changed
#
# A few pictures get another answer. Look at them before you worry about a tenth of a point.

# %%
changed = np.flatnonzero(in_float.argmax(1) != quantized.argmax(1))
print(f"{len(changed)} of {len(images)} answers changed")
fig, axes = plt.subplots(1, 6, figsize=(10, 2.2))
for axis in axes:
    axis.axis("off")
for axis, which in zip(axes, changed, strict=False):
    before, after = (data.class_names[scores[which].argmax()] for scores in (in_float, quantized))
    axis.imshow(images[which, 0], cmap="gray")
    axis.set_title(f"{before}\n-> {after}\n({data.class_names[labels[which]]})", fontsize=8)
plt.tight_layout()

# %% [markdown]
# In brackets stands the right class. These are pictures about which the float network was not sure either.
#
# ## The trap: other numbers than in training
#
# Suppose we forget the preparation, and calibrate with the raw pixels from 0 to 255. Nothing fails, and nothing warns.

# %%
raw = [batch * 0.353 + 0.286 for batch in batches]
wrong = qsdk.quantize("float.onnx", None, "w8a8")
qsdk.calibrate(wrong, [batch * 255 for batch in raw])
print(f"calibrated on raw pixels: {accuracy(wrong.run(images)[0]):.3f}")

# %% [markdown]
# How would you find out? `compare` runs two models on the same data, and names the first tensor that is off.

# %%
found = qsdk.compare("float.onnx", wrong, batches)
print(found.summary["first_off"], "-", found.summary["why"])
print(qsdk.compare("float.onnx", sim, batches).summary["first_off"], "for the right one")

# %% [markdown]
# The very first tensor is off, the input itself. So the data of the calibration is to blame, and not a layer.
# A plot of all tensors shows the same: the ratio of signal to noise, from the input to the output. A higher line is better.

# %%
fig, axis = plt.subplots(figsize=(8, 3))
for name, each in (("calibrated on prepared pictures", sim), ("calibrated on raw pixels", wrong)):
    rows = qsdk.compare("float.onnx", each, batches).rows
    axis.plot([row["sqnr_db"] for row in rows], marker=".", label=name)
axis.set(xlabel="tensor, in the order of the network", ylabel="signal to noise in dB", title="how far from float?")
axis.legend()
plt.show()

# %% [markdown]
# ## The file
#
# `export` writes the quantized file. Inputs and outputs keep their names, so it takes the place of the old one.

# %%
written = qsdk.export(sim, "model.onnx")
parity = qsdk.check_parity(sim, "model.onnx", batches[:1])
sizes = {name: Path(name).stat().st_size for name in ("float.onnx", "model.onnx")}
weights_beside = Path("float.onnx.data")  # where torch keeps the weights
sizes["float.onnx"] += weights_beside.stat().st_size if weights_beside.exists() else 0
print(f"{sizes['float.onnx']:,} bytes -> {sizes['model.onnx']:,} bytes, passed: {parity.summary['passed']}")

# %% [markdown]
# ## The same without Python
#
# The command line does all of this in one line, and reads the folder of pictures itself:
#
#     qsdk quantize float.onnx model.onnx --data pictures --max-samples 128 --mean 0.286 --std 0.353
#     qsdk evaluate model.onnx --data pictures --labels folder-names --mean 0.286 --std 0.353 --against float.onnx
#
# ## What you have seen
#
# 1. An ONNX file is quantized by the same functions as a module.
# 2. Calibrate with data that is prepared as in training. This is the first thing to check when accuracy is gone.
# 3. `compare` names the first tensor that is off.
#
# Next: [ONNX files](../guides/onnx.md), [The command line](../guides/command_line.md), [Runtimes](../guides/runtimes.md).
