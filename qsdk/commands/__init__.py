"""The commands of the command line, one file per group; `qsdk.cli` loads them on use."""
