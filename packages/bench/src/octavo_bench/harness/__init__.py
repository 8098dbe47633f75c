"""What every benchmark shares: options, engines, clocks, problems, goals, tables and result files."""
