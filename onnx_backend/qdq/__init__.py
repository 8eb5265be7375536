"""QuantizeLinear and DequantizeLinear: from marks to Q/DQ nodes and back."""
