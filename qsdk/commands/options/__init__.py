"""The options of the commands, without what the commands load: `qsdk --help` stays quick."""
