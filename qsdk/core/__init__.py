"""The neutral heart of qsdk: NumPy, ml_dtypes and the standard library only. Import the defining files."""
