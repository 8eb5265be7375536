"""LiteRT (TensorFlow Lite): a Q/DQ model as a `.tflite` file, what its reference kernels compute, and its proof."""
