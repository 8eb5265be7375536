"""Layer solvers on second moments; they know neither modules nor ONNX."""
