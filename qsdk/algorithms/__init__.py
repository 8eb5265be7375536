"""Range estimators and layer solvers on second moments; they know neither modules nor ONNX."""
