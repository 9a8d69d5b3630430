"""The command line: one file per command, no arithmetic. Only here is anything printed and the exit code chosen."""
