"""What the ops of ONNX do with their inputs: the sets that planning, passes and lowerings build their own from.

An op that is added here is known wherever its fact matters. A file that needs more or less than one of these sets says
so beside it: `VIEWS | {"Cast"}`.
"""

#: read the sizes of a tensor, never its values
SHAPE_OPS = frozenset({"Shape", "Size"})
#: return the same values in the same order, in another shape
RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
#: return each value of their input once
VIEWS = RESHAPES | {"Identity", "Transpose"}
#: return some of the values of their first input
SELECTIONS = frozenset({"Slice", "Split", "Gather", "GatherElements", "GatherND"})
#: return values of their input several times
REPEATS = frozenset({"Expand", "Tile"})
#: move values between channels and positions
BLOCK_MOVES = frozenset({"DepthToSpace", "SpaceToDepth"})
#: return values of their first input and nothing else, whatever the values are
MOVEMENTS = VIEWS | SELECTIONS | REPEATS | BLOCK_MOVES
#: return the largest or smallest of several values
EXTREMES = frozenset({"MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin"})
#: return means of values, which lie between them
AVERAGES = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
#: give the same result whatever the order of their two operands
COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "Sum"})
#: have the same values again after one turn
PERIODIC = frozenset({"Sin", "Cos"})
#: multiply a weight with their input, and are linear in both
LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
#: carry a state from step to step
RECURRENT = frozenset({"LSTM", "GRU", "RNN"})

_STANDARD = """
Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization
Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast CastLike
CausalConvWithState Ceil Celu CenterCropPad Clip Col2Im Compress Concat ConcatFromSequence Constant
ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumProd CumSum DFT DeformConv DepthToSpace
DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU
Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual
GridSample GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageDecoder
InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual LinearAttention Log
LogSoftmax Loop LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxRoiPool MaxUnpool Mean
MeanVarianceNormalization MelWeightMatrix Min Mish Mod Mul Multinomial Neg NegativeLogLikelihoodLoss
NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement OptionalHasElement Or PRelu Pad Pow QLinearConv
QLinearMatMul QuantizeLinear RMSNormalization RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike
Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
ReduceSum ReduceSumSquare RegexFullMatch Relu Reshape Resize ReverseSequence RoiAlign RotaryEmbedding Round STFT
Scan Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct SequenceEmpty SequenceErase
SequenceInsert SequenceLength SequenceMap Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax
SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze StringConcat
StringNormalizer StringSplit Sub Sum SwiGLU Swish Tan Tanh TensorScatter TfIdfVectorizer ThresholdedRelu Tile
TopK Transpose Trilu Unique Unsqueeze Upsample Where Xor
"""
#: every op type of the ONNX standard
ONNX_OPS = frozenset(_STANDARD.split())
