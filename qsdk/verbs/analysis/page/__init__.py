"""The page of `qsdk.report`: what is on it, its pictures, and the HTML."""
