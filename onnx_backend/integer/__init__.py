"""Convert a Q/DQ model to a graph of integers. Import the files.

`files` writes the result of `convert`. `decompose` writes composite operators as simpler ones; `lowering` finds the
integer form of every node, in terms of `ir` (values and operations) and, between quantizers, of `fixed_point`;
`codegen` writes the operations for a target. `verify` checks and measures the result, `reference` executes it without
ONNX Runtime, `firmware` turns it into a program for chips.
"""
