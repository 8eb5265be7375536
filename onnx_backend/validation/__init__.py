"""The rules of `validate`, by topic: each looks at one node in its scope and yields findings."""
