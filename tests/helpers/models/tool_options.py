"""Options of onnxruntime.quantization, by which its files differ."""

from onnxruntime.quantization import QuantType

U8, S8, U16, S16, U4, S4 = (
    getattr(QuantType, f"Q{name}") for name in ("UInt8", "Int8", "UInt16", "Int16", "UInt4", "Int4")
)


def of_tool(activation, weight, per_channel=False, **extra):
    return {"activation_type": activation, "weight_type": weight, "per_channel": per_channel, "extra_options": extra}


#: net, opset and options of onnxruntime.quantization
TOOL = {
    "plain": ("convnet", 21, of_tool(U8, S8)),
    "per channel": ("mlp", 21, of_tool(U8, S8, True)),
    "signed": ("convnet", 21, of_tool(S8, S8, ActivationSymmetric=True)),
    "asymmetric weights": ("mlp", 21, of_tool(U8, U8, True)),
    "runtime's domain": ("convnet", 13, of_tool(U16, S4)),
    "16 and 4 bits": ("mlp", 21, of_tool(S16, U4, True)),
    "8 bits of that domain": ("mlp", 13, of_tool(U8, S8, True, UseQDQContribOps=True)),
    "float weights": ("mlp", 21, of_tool(U8, S8, True, AddQDQPairToWeight=True)),
    "a pair per reader": ("convnet", 21, of_tool(U8, S8, DedicatedQDQPair=True)),
    "activations kept": ("convnet", 21, of_tool(U8, S8, QDQKeepRemovableActivations=True)),
    "float bias": ("convnet", 21, of_tool(U8, S8, QuantizeBias=False)),
}
