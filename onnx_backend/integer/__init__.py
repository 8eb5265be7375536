"""Integer-only: from a Q/DQ model to a graph of integers. Import the files.

`files` writes what `convert` makes. `preparing` writes composed operators out in simpler ones; `lowering` finds the
form of every node, in the words of `recording` (values and operations) and, where no quantizer stands, of
`fixed_point`; `writing` puts the operations down as a target has them. `proof` checks and measures the result,
`reference` executes it without ONNX Runtime, `firmware` turns it into a program for chips.
"""
