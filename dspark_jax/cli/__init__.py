"""The `dspark` command, one file a subcommand."""
