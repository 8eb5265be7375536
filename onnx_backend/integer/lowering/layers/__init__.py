"""Layers, products, pools and means as integer products with int32 accumulators."""
