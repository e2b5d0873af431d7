"""The command line: verbs, keys, help, completion, sweeps, and errors that become exit codes."""
