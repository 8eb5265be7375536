"""What the command line runs, one file per group of commands; `qsdk.cli` loads them on use."""
