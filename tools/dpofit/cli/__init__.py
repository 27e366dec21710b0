"""The command line: one thin file per subcommand, imported only when asked for."""
